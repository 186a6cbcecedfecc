"""What the runs with several ranks are made from."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
COMPILE_TIMEOUT_S = 270


@pytest.fixture(scope="session")
def deepspeed_op() -> None:
    """DeepSpeed compiles a small CPU operator in its first run, for a minute or two: here, not inside a test."""
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install deepspeed")
    # The same PATH as in a run: another ninja would take the result for out of date, and compile again.
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S, env=env)
