"""For training loops of your own: `ODBDataLoader`, `apply_odb`, the step info."""
