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
    # As `odb_factory.comm.gloo.pause_at_exit`, for stock trainings: these, too, abort once in a while.
    atexit.register(time.sleep, 0.2)
