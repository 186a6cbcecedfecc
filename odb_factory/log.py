"""One logger for odb_factory: plain lines on stderr, beside whatever the framework logs."""

import logging
import os


def get_logger(name: str) -> logging.Logger:
    """A child of the `odb_factory` logger, which prints INFO and above; other ranks than 0 print warnings only."""
    root = logging.getLogger("odb_factory")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[odb] %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name)
