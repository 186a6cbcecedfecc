"""What was trained on: loss weights, checks, figures, audit. Trainers and loops of your own use the same."""
