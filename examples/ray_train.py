"""LLaMA-Factory with an `odb:` block in the workers of Ray Train: python ray_train.py MY.yaml STORAGE [WORKERS].

Each worker is a rank, as under torchrun. Checkpoints and the metrics logged before them go to STORAGE. When a worker is
lost, Ray starts as many as it has room for (1 to WORKERS), and they resume the last checkpoint: give the block a number
as `global_batch_size`, and the training is the same on any number of them. Paths in the YAML are absolute;
`overwrite_output_dir: true` lets a restart write where the run before it wrote.
"""

import contextlib
import sys
from typing import Any

import ray.train
import yaml
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.huggingface.transformers import RayTrainReportCallback
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """In each worker."""
    from llamafactory.train.tuner import run_exp

    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else contextlib.nullcontext() as folder:
        resume = {"resume_from_checkpoint": f"{folder}/checkpoint"} if folder else {}
        run_exp(config | resume, callbacks=[RayTrainReportCallback()])


if __name__ == "__main__":
    path, storage, *workers = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=(1, int(*workers or "2")), use_gpu=not config.get("use_cpu")),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit())
