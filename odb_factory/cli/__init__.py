"""The `odb-factory` command."""
