"""While odb trains, the Trainer's own accumulation is 1: what it counts are optimizer steps.

A checkpoint, an experiment tracker and DeepSpeed's engine take it from the training arguments, so it is put back where
they look at it, and changed in the configuration of the engine before that is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"


class Accumulation:
    """given: `gradient_accumulation_steps` as the user gave it."""

    def __init__(self, trainer: Any):
        self._args, self.given = trainer.args, trainer.args.gradient_accumulation_steps
        self._engine_configs = _deepspeed_configs(trainer)
        self._world_size = trainer.args.world_size

    @contextlib.contextmanager
    def of_one(self) -> Iterator[None]:
        """Within it the Trainer and DeepSpeed accumulate nothing by themselves."""
        before = [{key: config[key] for key in (GAS, TRAIN_BATCH) if key in config} for config in self._engine_configs]
        self.hide()
        for config in self._engine_configs:
            config[GAS] = 1
            if isinstance(config.get(MICRO_BATCH), int):
                config[TRAIN_BATCH] = config[MICRO_BATCH] * self._world_size
        try:
            yield
        finally:
            self.show()
            for config, values in zip(self._engine_configs, before):
                for key in (GAS, TRAIN_BATCH):
                    config.pop(key, None)
                config.update(values)

    def show(self) -> None:
        self._args.gradient_accumulation_steps = self.given

    def hide(self) -> None:
        self._args.gradient_accumulation_steps = 1

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the arguments are as the user gave them."""
        self.show()
        try:
            yield
        finally:
            self.hide()


class HideAccumulation(TrainerCallback):
    """The last callback: the others have seen the arguments as they were given."""

    def __init__(self, accumulation: Accumulation):
        self.accumulation = accumulation

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.accumulation.hide()


def _deepspeed_configs(trainer: Any) -> list[dict[str, Any]]:
    """The configurations that an engine is made from: that of the arguments, and accelerate's, if it is another."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    found = [
        getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None),
        getattr(plugin, "deepspeed_config", None),
        getattr(getattr(plugin, "hf_ds_config", None), "config", None),
    ]
    configs = [config for config in found if isinstance(config, dict)]
    return list({id(config): config for config in configs}.values())
