"""The LLaMA-Factory plugin: activation, the odb: block, its datasets and media."""
