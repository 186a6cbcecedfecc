"""What was trained on: loss weights, checks, figures, audit. Trainers and custom loops use the same."""
