"""For training loops of your own: `ODBDataLoader`, `apply`, the step info."""
