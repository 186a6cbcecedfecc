"""A worker process that watches the process that started it. No torch here: a planner's process needs none.

A DataLoader worker whose trainer was killed may never end by itself. It fills the pipe of its result queue, nobody
reads, and at its exit Python waits for the thread that feeds the pipe. So every worker of ours has a daemon thread that
ends it hard once its parent is gone, whatever the worker is doing.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

CHECK_S = 1.0
"""How often a worker looks for its parent."""

_watching: int | None = None
"""The process whose parent is watched: a forked child inherits the variable, not the thread."""


def watch_parent(pid: int) -> None:
    """End this worker within about a second of the end of process `pid`, which started it.

    Does nothing in `pid` itself: only a worker may be ended like this.
    """
    global _watching
    if os.getpid() in (pid, _watching):
        return
    _watching = os.getpid()
    threading.Thread(target=_watch, args=(pid,), name="odb-parent-watch", daemon=True).start()


def _watch(pid: int) -> None:
    # Where workers are forked, a later one holds the pipe that tells of the parent, too; but its id changes.
    # With forkserver the system's parent is the server.
    is_child = os.getppid() == pid
    while not (_has_ended(pid) or (is_child and os.getppid() != pid)):
        time.sleep(CHECK_S)
    os._exit(1)


def _has_ended(pid: int) -> bool:
    parent = multiprocessing.parent_process()
    if parent is not None:
        return not parent.is_alive()
    # Its arguments are still being read, so multiprocessing does not know of the parent yet.
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # sends nothing; on Windows it would end the process
    except ProcessLookupError:
        return True
    return False
