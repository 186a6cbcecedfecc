"""Runs of the installed `odb-factory` command."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import BIN, free_port

TIMEOUT_S = 180


class Command:
    """`odb-factory ARGUMENTS` in its own process group, started at once; `end` waits for it."""

    def __init__(self, *arguments: str, cwd: Path | None = None, **environment: str):
        self.process = subprocess.Popen(
            [str(BIN / "odb-factory"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={"MASTER_PORT": str(free_port()), **os.environ, **environment},
            start_new_session=True,
        )

    def end(self) -> subprocess.CompletedProcess:
        try:
            out, err = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            _, err = self.process.communicate()
            pytest.fail(f"no end within {TIMEOUT_S} s:\n{err[-4000:]}")
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


@pytest.fixture(scope="session")
def odb_factory() -> type[Command]:
    """`odb_factory("doctor", SOME_VARIABLE="1").end()` is the ended process."""
    return Command
