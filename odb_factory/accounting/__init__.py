"""Loss weights, checks of micro-batches, figures and audit of a training; for trainers and custom loops."""
