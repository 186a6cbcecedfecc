"""How much memory a micro-batch takes: measured, modelled, estimated without an accelerator."""
