"""Training arguments that odb replaces during a training.

The accumulation of the Trainer and of DeepSpeed's engine is 1, because they count optimizer steps. The Trainer skips no
batches after a resume, because the loader starts at the right place.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator, Mapping
from typing import Any

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
RUNNING = {GAS: 1, "ignore_data_skip": True}


def replaced(owner: Any, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Within it `owner` has these instance attributes; afterwards it has its former ones."""
    return _updated(vars(owner), attributes)


@contextlib.contextmanager
def _updated(mapping: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: mapping[name] for name in values if name in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for name in values:
            mapping.pop(name, None)
        mapping.update(before)


@contextlib.contextmanager
def run_arguments(trainer: Any) -> Iterator[dict[str, Any]]:
    """Within it the arguments of the Trainer and of DeepSpeed have the values of a run; yields the user's values of the
    arguments that differ. Trackers and checkpoints, which take them as a dict, as JSON or pickled, get the user's."""
    args, kind, accelerator = trainer.args, type(trainer.args), trainer.accelerator
    user_values = {name: getattr(args, name) for name in RUNNING}

    class Shows(kind):  # type: ignore[misc, valid-type]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return copyreg._reconstructor, (kind, object, None), vars(self) | user_values  # type: ignore[attr-defined]

        def to_dict(self) -> dict[str, Any]:
            with replaced(self, **user_values):
                values: dict[str, Any] = super().to_dict()
            return values

    Shows.__name__, Shows.__qualname__, Shows.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    # An engine is made from the configuration of the arguments and, if it is another object, from accelerate's.
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    configs = [
        getattr(getattr(args, "hf_deepspeed_config", None), "config", None),
        getattr(plugin, "deepspeed_config", None),
        getattr(getattr(plugin, "hf_ds_config", None), "config", None),
    ]
    with contextlib.ExitStack() as restore:
        for config in {id(config): config for config in configs if isinstance(config, dict)}.values():
            values = {GAS: 1}
            if isinstance(config.get(MICRO_BATCH), int):
                values[TRAIN_BATCH] = config[MICRO_BATCH] * args.world_size
            elif TRAIN_BATCH in config:  # the Trainer may fill it in, and the user's value is restored
                values[TRAIN_BATCH] = config[TRAIN_BATCH]
            restore.enter_context(_updated(config, values))
        restore.enter_context(replaced(args, **RUNNING))
        restore.callback(setattr, args, "__class__", kind)
        args.__class__ = Shows
        yield user_values
