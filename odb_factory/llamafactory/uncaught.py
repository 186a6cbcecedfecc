"""Report an uncaught error of known cause in one line instead of a traceback.

Under torchrun each rank prints the line and exits with `KNOWN_END`; torchrun prints nothing more if the hooked launcher
started it. Other errors are reported as without odb_factory. This module imports nothing outside odb_factory and the
standard library, because importing torch, as torchrun does, imports this module.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
from types import TracebackType
from typing import Any

from odb_factory.errors import CollectiveError, ODBError, one_line
from odb_factory.llamafactory.activation import LAUNCHED

TRACEBACK = "ODB_FACTORY_TRACEBACK"
KNOWN_END = 75
"""Exit code of a rank that has printed the line of its error."""
TORCHRUN_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")

_before: Any = None
"""The `sys.excepthook` that `install` replaced; None: not installed."""


def shows_tracebacks() -> bool:
    return os.environ.get(TRACEBACK, "").lower() in ("1", "true", "y", "yes")


def install() -> None:
    """Install an excepthook: it prints errors of known cause in one line and reports all errors to the other ranks.

    If `ODB_FACTORY_TRACEBACK` is set, the traceback is printed before the line.
    """
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _excepthook


def uninstall() -> None:
    """Restore the previous excepthook, unless another one has been installed since."""
    global _before
    if sys.excepthook is _excepthook:
        sys.excepthook, _before = _before, None


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    shown: BaseException = error
    if "odb_factory.data.ranks" in sys.modules:  # otherwise torch is not imported, and there are no other ranks
        from odb_factory.data.ranks import end_all
        from odb_factory.ending import lost_rank

        shown = lost_rank(error) or error
        end_all(None if isinstance(shown, CollectiveError) else one_line(shown))
    is_known, prefix = isinstance(shown, ODBError | KeyboardInterrupt), ""
    if is_launched := LAUNCHED in os.environ and is_known:
        # torch's excepthook calls this function and would lose text that is printed before an exit.
        sys.stderr, prefix = sys.__stderr__, f"[rank{os.environ.get('RANK', 0)}]: "
    if shows_tracebacks() or not is_known:
        _before(kind, error, traceback)
    if is_known:
        _close_bars()
        print_last(one_line(shown), prefix)
    if is_launched:
        sys.exit(KNOWN_END)


def _close_bars() -> None:
    """End tqdm's open progress bars: they would be drawn once more, below the error, when the process ends."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(getattr(tqdm, "tqdm", None), "_instances", ())):
        bar.close()


def print_last(line: str, prefix: str = "") -> None:
    # A single write, so that the lines of two ranks do not mix.
    print(f"{prefix}[odb] {' '.join(line.split())}\n", end="", file=sys.stderr, flush=True)


def end_process(failure: str) -> None:
    """Print `failure` and end this process at once, whatever its main thread is doing."""
    print_last(failure)
    sys.stdout.flush()
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)  # os._exit runs no exit handler
    os._exit(KNOWN_END if LAUNCHED in os.environ else 1)


def quiet_torchrun() -> None:
    """Make torchrun's process omit failures that the ranks have printed themselves, and report a signal in one line."""
    if "LOCAL_RANK" in os.environ or shows_tracebacks():
        return
    for name in TORCHRUN_LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if kind.__name__ == "SignalException":
            is_keyboard = getattr(error, "sigval", None) == signal.SIGINT
            print_last(one_line(KeyboardInterrupt()) if is_keyboard else str(error))
            return
        codes = {getattr(failure, "exitcode", None) for failure in getattr(error, "failures", {}).values()}
        if not KNOWN_END in codes <= {KNOWN_END, -signal.SIGTERM}:
            before(kind, error, traceback)

    sys.excepthook = excepthook


def _is_news(record: logging.LogRecord) -> bool:
    """Filter out log records about torchrun ending ranks and about ranks that have printed the line of their error."""
    ends_ranks = any(words in str(record.msg) for words in ("closing signal", "death signal"))
    return not ends_ranks and tuple(record.args or ())[:1] != (KNOWN_END,)
