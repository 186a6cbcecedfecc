"""Training arguments that have other values while odb trains.

The Trainer's accumulation is 1, so that it counts optimizer steps, and it skips no batches after a resume, because the
loader starts at the right place. It makes no pass over all data beforehand to count tokens.
Checkpoints and experiment trackers are shown the user's arguments, and DeepSpeed's engine is made for an accumulation
of 1 as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
RUNNING = {
    GAS: 1,
    "ignore_data_skip": True,
    "include_tokens_per_second": False,  # `ODBTrainerMixin.log` gives the figure
}


@contextlib.contextmanager
def replaced(owner: Any, /, **attributes: Any) -> Iterator[None]:
    """Within it an object has these attributes of its own; afterwards it has what it had."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


class RunArguments(TrainerCallback):
    """Training arguments, switched between the user's values (`show`) and those of a run (`hide`). The last callback:
    when training begins the others have seen the user's arguments.

    accumulation, counts_tokens, restarts_epoch: the user's `gradient_accumulation_steps`, `include_tokens_per_second`
    and `ignore_data_skip`."""

    def __init__(self, trainer: Any):
        self._args, self._world_size = trainer.args, trainer.args.world_size
        self._running: dict[str, Any] = {name: value for name, value in RUNNING.items() if hasattr(trainer.args, name)}
        self._engine_configs = _deepspeed_configs(trainer)
        self._keep()

    def _keep(self) -> None:
        self._user_values = {name: getattr(self._args, name) for name in self._running}
        self.accumulation: int = self._user_values[GAS]
        self.counts_tokens = bool(self._user_values.get("include_tokens_per_second"))
        self.restarts_epoch = bool(self._user_values.get("ignore_data_skip"))

    @contextlib.contextmanager
    def set_by_trial(self) -> Iterator[None]:
        """Within it a trial of a search sets them: these are the user's from then on."""
        with self.shown():
            yield
            self._keep()

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Within it they are as a run needs them, for the Trainer and for DeepSpeed."""
        before = [{key: config[key] for key in (GAS, TRAIN_BATCH) if key in config} for config in self._engine_configs]
        for config in self._engine_configs:
            config[GAS] = 1
            if isinstance(config.get(MICRO_BATCH), int):
                config[TRAIN_BATCH] = config[MICRO_BATCH] * self._world_size
        self.hide()
        try:
            yield
        finally:
            self.show()
            for config, values in zip(self._engine_configs, before):
                for key in (GAS, TRAIN_BATCH):
                    config.pop(key, None)
                config.update(values)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Within it they are as the user gave them."""
        return replaced(self._args, **self._user_values)

    def show(self) -> None:
        vars(self._args).update(self._user_values)

    def hide(self) -> None:
        vars(self._args).update(self._running)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hide()


def _deepspeed_configs(trainer: Any) -> list[dict[str, Any]]:
    """The configurations that an engine is made from: that of the arguments, and accelerate's, if it is another."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    candidates = [
        getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None),
        getattr(plugin, "deepspeed_config", None),
        getattr(getattr(plugin, "hf_ds_config", None), "config", None),
    ]
    configs = [config for config in candidates if isinstance(config, dict)]
    return list({id(config): config for config in configs}.values())
