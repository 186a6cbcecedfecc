"""Several trainings of LLaMA-Factory, one after the other, in the processes of one launch."""

from __future__ import annotations

import gc
import os
from typing import Any

from distributed.shims.training_record import TrainingRecord
from llamafactory.hparams import get_train_args
from llamafactory.train import callbacks, tuner


def train_stages(rank: int, configs: list[dict[str, Any]]) -> int:
    """Run the workflow of each configuration's stage, as `llamafactory-cli train` does, recorded beside its output."""
    os.environ["LOCAL_RANK"] = str(rank)
    for config in configs:
        model_args, data_args, training_args, finetuning_args, generating_args = get_train_args(dict(config))
        watching = [callbacks.LogCallback(), TrainingRecord(f"{config['output_dir']}_record")]
        run = getattr(tuner, f"run_{finetuning_args.stage}")
        more = (generating_args,) if finetuning_args.stage == "sft" else ()
        run(model_args, data_args, training_args, finetuning_args, *more, watching)
        gc.collect()
    return len(configs)
