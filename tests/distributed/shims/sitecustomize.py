"""Runs first in every process that a test starts: modules beside this that its environment names, and a late end.

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
# Commands that train with LLaMA-Factory, and what they give to torchrun.
TRAINS = {"llamafactory-cli", "launcher.py", "odb-factory", "run.py", "gpu.py", "v1_trainings.py"}


def collect_again(module):
    gc.freeze()
    gc.enable()


for name in sorted(os.environ):
    if name.startswith(PREFIX):
        importlib.import_module(name.removeprefix(PREFIX).lower())
if TRAINS & {os.path.basename(word) for word in sys.orig_argv}:
    # Collections while modules are imported, and later ones that look through them, take a third of a short training.
    gc.disable()
    for name in ("llamafactory.train.tuner", "llamafactory.v1.core.base_trainer"):
        sys.meta_path.insert(0, AfterImport(name, collect_again))
if "RANK" in os.environ:
    # As `odb_factory.data.ranks.Ring.close`, for stock trainings: these, too, abort once in a while.
    atexit.register(time.sleep, 0.2)
