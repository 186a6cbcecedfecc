"""Training arguments that have other values while odb trains.

The Trainer's accumulation is 1, so that it counts optimizer steps, and it skips no batches after a resume, because the
loader starts at the right place. It makes no pass over all data beforehand to count tokens. DeepSpeed's engine is made
for an accumulation of 1 as well.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Iterator, Mapping
from typing import Any

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
RUNNING = {
    GAS: 1,
    "ignore_data_skip": True,
    "include_tokens_per_second": False,  # `ODBTrainerMixin.log` gives the figure
}


def replaced(owner: Any, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Within it an object has these attributes of its own; afterwards it has what it had."""
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


class RunArguments:
    """Training arguments, which have the values of a run from `hide` to `close`. As a dict, as JSON and pickled, which
    trackers and checkpoints take them as, they are the user's.

    user_values: of what is hidden. accumulation: the user's `gradient_accumulation_steps`.
    """

    def __init__(self, trainer: Any):
        self._args, self._engine_configs = trainer.args, _deepspeed_configs(trainer)
        self.user_values: dict[str, Any] = {}
        self._restore = contextlib.ExitStack()

    @property
    def accumulation(self) -> int:
        return self.user_values.get(GAS, getattr(self._args, GAS))

    def hide(self) -> None:
        """From here on they are as a run needs them, for the Trainer and for DeepSpeed."""
        args, kind = self._args, type(self._args)
        self.user_values.update({name: getattr(args, name) for name in RUNNING if hasattr(args, name)})
        for config in self._engine_configs:
            values = {GAS: 1}
            if isinstance(config.get(MICRO_BATCH), int):
                values[TRAIN_BATCH] = config[MICRO_BATCH] * args.world_size
            elif TRAIN_BATCH in config:  # the Trainer may fill it in; as it is now it shall be afterwards
                values[TRAIN_BATCH] = config[TRAIN_BATCH]
            self._restore.enter_context(_updated(config, values))
        self._restore.enter_context(_updated(vars(args), {name: RUNNING[name] for name in self.user_values}))
        self._restore.callback(setattr, args, "__class__", kind)
        args.__class__ = _shows(kind, self.user_values)

    def close(self) -> None:
        self._restore.close()

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Within it they are as the user gave them."""
        return replaced(self._args, **self.user_values)


def _shows(kind: type, user_values: Mapping[str, Any]) -> type:
    """The class of arguments as a subclass whose copies, pickled ones too, and dicts have these values."""

    class Shows(kind):
        def __reduce_ex__(self, protocol: Any) -> Any:
            return copyreg._reconstructor, (kind, object, None), vars(self) | user_values  # type: ignore[attr-defined]

        def to_dict(self) -> dict[str, Any]:
            with replaced(self, **user_values):
                values: dict[str, Any] = super().to_dict()
            return values

    Shows.__name__, Shows.__qualname__, Shows.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Shows


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
