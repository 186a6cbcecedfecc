"""Processes forked from a server that has done the imports, which take most of the time of a rank in a test.

`start` sends a request to the server, which imports the modules of the request and forks. The child leads a process
group, has the environment of the request, and ends like any Python process, with its atexit functions and threads,
unlike children of `multiprocessing`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
POLL_S = 0.02
SHIM_PREFIX = "ODB_TEST_SHIM_"


class Forked:
    """A child of the server, with the interface of `subprocess.Popen`. ended: the file to which the server
    writes the return code."""

    def __init__(self, pid: int, ended: Path):
        self.pid, self._ended = pid, ended

    @property
    def returncode(self) -> int | None:
        text = self._ended.read_text() if self._ended.exists() else ""
        return int(text) if text else None

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


@functools.cache
def _server(shims: frozenset[str]) -> subprocess.Popen[str]:
    """The server, which ends with this process. shims: variables of the environment that name modules to import first,
    before the modules that they change."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    others = {name: value for name, value in os.environ.items() if not name.startswith(SHIM_PREFIX)}
    env = others | dict.fromkeys(shims, "1") | {"PYTHONPATH": path}
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, start_new_session=True)


def start(function: str, arguments: list[str], *, modules: list[str], env: dict[str, str], log: Path) -> Forked:
    """Run `module:function(*arguments)` in a new process with this log; the server imports `modules` first."""
    ended = log.with_suffix(".ended")
    ended.unlink(missing_ok=True)
    request = {"function": function, "arguments": arguments, "modules": modules, "env": env}
    request |= {"log": str(log), "ended": str(ended), "cwd": os.getcwd()}
    server = _server(frozenset(name for name in env if name.startswith(SHIM_PREFIX)))
    print(json.dumps(request), file=server.stdin, flush=True)
    return Forked(int(server.stdout.readline()), ended)


def serve(answers: int) -> dict[str, Any] | None:
    """Fork for each line of stdin, a request, and write the process id to the file descriptor `answers`.

    Returns the request in the child, and None in the server at the end of stdin.
    """
    alive: dict[int, str] = {}
    while True:
        has_request, *_ = select.select([sys.stdin], [], [], POLL_S if alive else None)
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                Path(alive.pop(pid)).write_text(str(os.waitstatus_to_exitcode(status)))
        if not has_request:
            continue
        line = sys.stdin.readline()
        if not line:
            for pid in alive:
                os.killpg(pid, signal.SIGKILL)
            return None
        request: dict[str, Any] = json.loads(line)
        with contextlib.suppress(Exception):  # the child raises it again
            for name in request["modules"]:
                importlib.import_module(name)
        gc.freeze()  # a collection in the child need not look through the modules
        pid = os.fork()
        if not pid:
            os.close(answers)
            return request
        os.setpgid(pid, pid)
        alive[pid] = request["ended"]
        os.write(answers, f"{pid}\n".encode())


def run(request: dict[str, Any]) -> None:
    """Run a request in the child."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    module, name = request["function"].split(":")
    getattr(importlib.import_module(module), name)(*request["arguments"])


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # its modules are imported as distributed.*
    faulthandler.enable()
    gc.disable()  # the server only imports
    answers = os.dup(1)
    os.dup2(2, 1)  # prints of an import must not be answers
    request = serve(answers)
    if request is None:
        os._exit(0)  # the server holds nothing to clean up
    gc.enable()
    run(request)
