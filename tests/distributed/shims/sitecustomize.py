"""Runs first in every process that a test starts: imports the shims named in the environment, and delays the exit.

ODB_TEST_SHIM_START_METHOD=1 imports `start_method`, and so on.
"""

import atexit
import gc
import importlib
import os
import sys
import time

from after_import import AfterImport

PREFIX = "ODB_TEST_SHIM_"
# Commands that train with LLaMA-Factory, and the scripts that they pass to torchrun.
TRAINS = {"llamafactory-cli", "launcher.py", "odb-factory", "run.py", "gpu.py", "v1_trainings.py"}


def collect_again(module):
    gc.freeze()
    gc.enable()


for name in sorted(os.environ):
    if name.startswith(PREFIX):
        importlib.import_module(name.removeprefix(PREFIX).lower())
if TRAINS & {os.path.basename(word) for word in sys.orig_argv}:
    # Collections while modules are imported, and later collections that scan them, take a third of a short training.
    gc.disable()
    for name in ("llamafactory.train.tuner", "llamafactory.v1.core.base_trainer"):
        sys.meta_path.insert(0, AfterImport(name, collect_again))
if "RANK" in os.environ:
    # Like `odb_factory.data.ranks.Ring.close`, for stock trainings, which also abort once in a while.
    atexit.register(time.sleep, 0.2)
