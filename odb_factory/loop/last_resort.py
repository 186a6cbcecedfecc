"""End a loader that nobody has closed: when it is garbage-collected, or when the program ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from functools import partial

from odb_factory.data.loader import ODBLoader
from odb_factory.data.passes import ABORT_S
from odb_factory.ending import ending
from odb_factory.errors import one_line


class LastResort:
    """owner: whose end is waited for. It must not be reachable from `loader`."""

    def __init__(self, owner: object, loader: ODBLoader):
        # The exit of the program is another matter: by then it is known whether an error has ended it.
        self._at_exit = partial(_at_exit, weakref.ref(loader), id(_last_error()), os.getpid())
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(owner, _collected, loader, self._at_exit, os.getpid())
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """The loader is closed otherwise."""
        self._finalizer.detach()
        atexit.unregister(self._at_exit)


def _collected(loader: ODBLoader, at_exit: partial[None], pid: int) -> None:
    atexit.unregister(at_exit)
    if os.getpid() == pid and not sys.is_finalizing():
        loader.release()


def _at_exit(loader: weakref.ref[ODBLoader], error_before: int, pid: int) -> None:
    """Tell the other ranks of the error that ends this program; not of one that a notebook's cell has ended with."""
    left, error = loader(), _last_error()
    if left is None or os.getpid() != pid:
        return
    if error is not None and id(error) != error_before:
        left.abort(one_line(ending(error)))
    else:
        left.close(ABORT_S)


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)
