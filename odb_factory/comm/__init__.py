"""How data-parallel ranks agree: metadata, settings and failures; knows bytes and integers, no tensors, no datasets."""
