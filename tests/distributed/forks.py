"""Processes that are forked from one that has imported what they need: for a rank of a test an import takes most time.

`start` asks a server for one, which imports the modules that it is told of, if it has not yet, and forks. The child is
a session of its own with the environment that is asked for; it ends as any Python process does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
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
        self._socket, other = socket.socketpair()
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
        others = {name: value for name, value in os.environ.items() if not name.startswith(SHIM_PREFIX)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=others | dict.fromkeys(shims, "1") | {"PYTHONPATH": path},
            start_new_session=True,
        )
        other.close()
        self._rest, self._pids = b"", []
        atexit.register(self.close)

    def start(self, request: dict[str, Any]) -> Forked:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while not self._pids:
            self.read(None)
        return Forked(self, self._pids.pop())

    def close(self) -> None:
        """The server ends when nobody can ask any more."""
        self._socket.close()
        self.process.wait(10)

    def read(self, timeout_s: float | None) -> None:
        """What has come from the server within so many seconds (None: wait for it)."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise RuntimeError("the server of forked processes has ended")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            kind, pid, code = json.loads(line)
            if kind == "started":
                self._pids.append(pid)
            else:
                self.ended[pid] = code


@functools.cache
def _server(shims: frozenset[str]) -> _Server:
    """shims: variables of the environment that name modules to import first of all, before what they change."""
    return _Server(shims)


def start(function: str, arguments: list[str], *, modules: list[str], env: dict[str, str], log: Path) -> Forked:
    """Run `module:function(*arguments)` in a new process, which writes to `log`; the server imports `modules` first."""
    request = {
        "function": function,
        "modules": modules,
        "arguments": arguments,
        "env": env,
        "log": str(log),
        "cwd": os.getcwd(),
    }
    return _server(frozenset(name for name in env if name.startswith(SHIM_PREFIX))).start(request)


def serve(number: int) -> dict[str, Any] | None:
    """Fork for each request; returns the request in the child, and None in the server when nobody asks any more."""
    asked = socket.socket(fileno=number)
    rest, alive = b"", set()
    while True:
        ready, _, _ = select.select([asked], [], [], POLL_S if alive else None)
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.remove(pid)
                asked.sendall(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode() + b"\n")
        if not ready:
            continue
        chunk = asked.recv(1 << 16)
        if not chunk:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return None
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            with contextlib.suppress(Exception):  # the child meets it again, and tells
                for name in request["modules"]:
                    importlib.import_module(name)
            gc.freeze()  # a collection in the child need not look through the modules
            begun, begins = os.pipe()
            pid = os.fork()
            if not pid:
                os.setsid()
                for one in (begun, begins, asked.detach()):
                    os.close(one)
                return request
            os.close(begins)
            os.read(begun, 1)  # ends when the child leads a session
            os.close(begun)
            alive.add(pid)
            asked.sendall(json.dumps(["started", pid, 0]).encode() + b"\n")


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
    found = serve(int(sys.argv[1]))
    if found is None:
        os._exit(0)  # it holds nothing that would have to be put in order
    gc.enable()
    run(found)
