"""Runs first in every process that a test starts: modules beside this that its environment names, and a late end.

ODB_TEST_SHIM_FAILING_FORWARD=1 imports `failing_forward`, and so on.
"""

import atexit
import importlib
import os
import time

PREFIX = "ODB_TEST_SHIM_"

for name in sorted(os.environ):
    if name.startswith(PREFIX):
        importlib.import_module(name.removeprefix(PREFIX).lower())
if "RANK" in os.environ:
    # A thread of gloo's that still holds a tensor while the interpreter ends aborts the process (torch 2.12: 3 of 150
    # pairs of ranks that end right behind an all-gather, stock ZeRO-3 does on a busy machine). Give it time.
    atexit.register(time.sleep, 0.2)
