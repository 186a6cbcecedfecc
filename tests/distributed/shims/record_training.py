"""Record the training that LLaMA-Factory runs (see `training_record`) at RECORD_TRAINING."""

import functools
import os
import sys

from after_import import AfterImport


def change(module):
    from training_record import TrainingRecord

    module.run_exp = functools.partial(module.run_exp, callbacks=[TrainingRecord(os.environ["RECORD_TRAINING"])])


sys.meta_path.insert(0, AfterImport("llamafactory.train.tuner", change))
