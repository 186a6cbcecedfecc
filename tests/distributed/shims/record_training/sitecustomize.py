"""Record the training that LLaMA-Factory runs (see `training_record`) at RECORD_TRAINING; put on PYTHONPATH.

ALSO_SHIM names another shim that runs as well: Python looks for one `sitecustomize` only.
"""

import functools
import os
import runpy
import sys

from after_import import AfterImport


def change(module):
    from training_record import TrainingRecord

    module.run_exp = functools.partial(module.run_exp, callbacks=[TrainingRecord(os.environ["RECORD_TRAINING"])])


sys.meta_path.insert(0, AfterImport("llamafactory.train.tuner", change))
if "ALSO_SHIM" in os.environ:
    runpy.run_path(os.environ["ALSO_SHIM"])
