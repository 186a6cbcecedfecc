"""Let rank 1 sleep for ODB_TEST_PAUSE_S seconds between two optimizer steps, as a callback of its own would."""

import functools
import os
import sys
import time

from after_import import AfterImport

TRAINER = "transformers.trainer"
STEP = 3


def pause(seconds):
    time.sleep(seconds)


def change(module):
    stock = module.Trainer._maybe_log_save_evaluate

    @functools.wraps(stock)
    def log(self, *args, **kwargs):
        if self.state.global_step == STEP:
            pause(float(os.environ["ODB_TEST_PAUSE_S"]))
        return stock(self, *args, **kwargs)

    module.Trainer._maybe_log_save_evaluate = log


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, AfterImport(TRAINER, change))
