"""Make each data worker's fifth collation endless, and touch the file `ODB_TEST_COLLATES` when it begins."""

import functools
import multiprocessing
import os
import sys
import time
from pathlib import Path

from after_import import AfterImport

CALL = 5


def change(module):
    stock = module.SFTDataCollatorWith4DAttentionMask.__call__
    calls = []

    @functools.wraps(stock)
    def collate(self, features):
        calls.append(os.getpid())  # those of the trainer are inherited
        if calls.count(os.getpid()) == CALL and multiprocessing.parent_process() is not None:
            Path(os.environ["ODB_TEST_COLLATES"]).touch()
            time.sleep(3600)
        return stock(self, features)

    module.SFTDataCollatorWith4DAttentionMask.__call__ = collate


sys.meta_path.insert(0, AfterImport("llamafactory.data.collator", change))
