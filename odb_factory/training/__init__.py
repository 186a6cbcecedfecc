"""What a trainer needs: enable_odb, loss weights, progress, metrics."""
