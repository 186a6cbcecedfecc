"""Peak memory of a training, estimated without an accelerator and without weights."""
