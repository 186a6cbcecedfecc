"""An error whose cause is known and that nobody catches ends its process in one line instead of a traceback.

Under torchrun each rank prints that line, and torchrun and the launcher that called it print nothing more about it.
Such an end is recorded in a file that the launcher makes (`launch.py`) and the environment names: every rank that ends
so adds a byte to it. What else may end a rank is reported as without odb_factory. Standard library only: torchrun
imports torch, and with it this module.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from odb_factory.errors import CollectiveError, ODBError, one_line
from odb_factory.llamafactory.activation import LAUNCH_RECORD

TRACEBACK = "ODB_FACTORY_TRACEBACK"
TORCHRUN_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")

_before: Any = None
"""The `sys.excepthook` that ours stands in front of."""


def shows_tracebacks() -> bool:
    return os.environ.get(TRACEBACK, "").lower() in ("1", "true", "y", "yes")


def install() -> None:
    """From now on an uncaught error whose cause is known ends this process in one line, and any reaches other ranks.

    With its traceback before that line if `ODB_FACTORY_TRACEBACK` is set.
    """
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _excepthook


def uninstall() -> None:
    """Back to what was, where nobody has put another hook in front of ours since."""
    global _before
    if sys.excepthook is _excepthook:
        sys.excepthook, _before = _before, None


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    shown: BaseException = error
    if "odb_factory.data.ranks" in sys.modules:  # else torch has not been imported, and there are no other ranks
        from odb_factory.data.ranks import end_all
        from odb_factory.ending import lost_rank

        shown = lost_rank(error) or error
        end_all(None if isinstance(shown, CollectiveError) else one_line(shown))
    if shows_tracebacks() or not isinstance(shown, ODBError):
        _before(kind, error, traceback)
    if isinstance(shown, ODBError):
        say_last(str(shown))


def say_last(line: str) -> None:
    """The last line of this process, which torchrun need not explain."""
    print(f"[odb] {' '.join(line.split())}", file=sys.stderr, flush=True)
    _count_end()


def end_process(failure: str) -> None:
    """End this process at once, whatever its main thread is doing."""
    say_last(failure)
    sys.stdout.flush()
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # no exit handler does it
    os._exit(1)


def quiet_torchrun() -> None:
    """In torchrun's own process: report nothing of ranks that have ended in their one line."""
    if "LOCAL_RANK" in os.environ or shows_tracebacks():
        return
    for name in TORCHRUN_LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not _is_known(error):
            before(kind, error, traceback)

    sys.excepthook = excepthook


def _is_news(record: logging.LogRecord) -> bool:
    exit_code = record.args[0] if isinstance(record.args, tuple) and "exitcode" in str(record.msg) else 1
    return exit_code != 1 or not _num_ended()


def _is_known(error: BaseException) -> bool:
    """Whether it reports only that ranks ended in their one line, and that the others were ended because of it."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "ChildFailedError" or not isinstance(failures, dict):
        return False
    codes = [getattr(failure, "exitcode", None) for failure in failures.values()]
    return set(codes) <= {1, -signal.SIGTERM} and 0 < codes.count(1) <= _num_ended()


def _num_ended() -> int:
    try:
        return Path(os.environ[LAUNCH_RECORD]).stat().st_size
    except (KeyError, OSError):
        return 0


def _count_end() -> None:
    try:
        record = os.open(os.environ[LAUNCH_RECORD], os.O_WRONLY | os.O_APPEND)
    except (KeyError, OSError):  # no launcher waits for it
        return
    os.write(record, b".")
    os.close(record)
