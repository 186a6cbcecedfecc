"""The doors of an unchanged model of transformers. This room imports no other room of the package."""
