"""Logging of odb_factory: plain lines on stderr, unless the logging of the user prints them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from odb_factory.errors import printable


def get_logger(name: str) -> logging.Logger:
    """A child of the `odb_factory` logger. Ranks other than 0 log warnings and above only.

    Records go to the handlers of the root logger. If none of them prints to the console, `[odb]` lines are printed. The
    level is INFO, unless the user has set a level for `odb_factory`.
    """
    package = logging.getLogger("odb_factory")
    if not any(isinstance(handler, _Console) for handler in package.handlers):
        package.addHandler(_Console())
        if package.level == logging.NOTSET:
            package.setLevel(logging.INFO)
    logger = logging.getLogger(name)
    logger.addFilter(_is_for_this_rank)  # the same filter is not added twice
    return logger


class _Console(logging.Handler):
    """Prints to the current `sys.stderr`, unless a handler of the root logger prints to the console."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[odb] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
        if sys.stderr is None or any(stream in (sys.stderr, sys.stdout) for stream in streams if stream):
            return
        try:
            # Above the progress bars of tqdm. In a worker process a thread that no longer exists may hold tqdm's locks.
            tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
            if tqdm is not None and multiprocessing.parent_process() is None:
                tqdm.write(self.format(record), file=sys.stderr)
            else:
                sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Whether this rank logs the record. Replaces control characters of the message, as in a file name, by escapes."""
    record.msg, record.args = printable(record.getMessage()), ()
    # Read for each record: processes that `torch.multiprocessing.spawn` starts know their rank only after the import.
    rank, distributed = int(os.environ.get("RANK") or 0), sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
    return record.levelno >= logging.WARNING or rank == 0
