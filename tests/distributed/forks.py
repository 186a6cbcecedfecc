"""Processes that are forked from one that has imported what they need: for a rank of a test an import takes most time.

`start` asks a server for one, which imports the modules that it is told of, if it has not yet, and forks. The child
leads a process group, has the environment that is asked for, and ends as any Python process does: atexit and threads
included, which children of `multiprocessing` leave out.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
POLL_S = 0.02
SHIM_PREFIX = "ODB_TEST_SHIM_"


class Forked:
    """A child of the server, with what `subprocess.Popen` has for one's own."""

    def __init__(self, server: _Server, pid: int):
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        return self._server.ended.get(self.pid)

    def poll(self) -> int | None:
        self._server.read(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.returncode is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._server.read(POLL_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Server:
    """This process's end of the server. ended: return codes by process id."""

    def __init__(self, shims: frozenset[str]) -> None:
        self.ended: dict[int, int] = {}
        own, other = socket.socketpair()
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
        others = {name: value for name, value in os.environ.items() if not name.startswith(SHIM_PREFIX)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=others | dict.fromkeys(shims, "1") | {"PYTHONPATH": path},
            start_new_session=True,
        )
        other.close()
        self._connection, self._pids = Connection(own.detach()), list[int]()
        atexit.register(self.close)

    def start(self, request: dict[str, Any]) -> Forked:
        self._connection.send(request)
        while not self._pids:
            self.read(None)
        return Forked(self, self._pids.pop())

    def close(self) -> None:
        """The server ends when nobody can ask any more."""
        self._connection.close()
        self.process.wait(10)

    def read(self, timeout_s: float | None) -> None:
        """What comes from the server within so many seconds (None: wait for it)."""
        while self._connection.poll(timeout_s):
            pid, code = self._connection.recv()
            timeout_s = 0
            if code is None:
                self._pids.append(pid)
            else:
                self.ended[pid] = code


@functools.cache
def _server(shims: frozenset[str]) -> _Server:
    """shims: variables of the environment that name modules to import first of all, before what they change."""
    return _Server(shims)


def start(function: str, arguments: list[str], *, modules: list[str], env: dict[str, str], log: Path) -> Forked:
    """Run `module:function(*arguments)` in a new process, which writes to `log`; the server imports `modules` first."""
    request = {"function": function, "arguments": arguments, "modules": modules, "env": env}
    request |= {"log": str(log), "cwd": os.getcwd()}
    return _server(frozenset(name for name in env if name.startswith(SHIM_PREFIX))).start(request)


def serve(asked: Connection) -> dict[str, Any] | None:
    """Fork for each request; returns the request in the child, and None in the server when nobody asks any more."""
    alive: set[int] = set()
    while True:
        has_asked = asked.poll(POLL_S if alive else None)
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                asked.send((pid, os.waitstatus_to_exitcode(status)))
        if not has_asked:
            continue
        try:
            request: dict[str, Any] = asked.recv()
        except EOFError:
            for pid in alive:
                os.killpg(pid, signal.SIGKILL)
            return None
        with contextlib.suppress(Exception):  # the child meets it again, and tells
            for name in request["modules"]:
                importlib.import_module(name)
        gc.freeze()  # a collection in the child need not look through the modules
        pid = os.fork()
        if not pid:
            asked.close()
            return request
        os.setpgid(pid, pid)
        alive.add(pid)
        asked.send((pid, None))


def run(request: dict[str, Any]) -> None:
    """In the child."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for one, other in ((null, 0), (log, 1), (log, 2)):
        os.dup2(one, other)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    module, name = request["function"].split(":")
    getattr(importlib.import_module(module), name)(*request["arguments"])


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # its modules are known as distributed.*
    faulthandler.enable()
    gc.disable()  # it imports, and nothing else
    found = serve(Connection(int(sys.argv[1])))
    if found is None:
        os._exit(0)  # it holds nothing that would have to be put in order
    gc.enable()
    run(found)
