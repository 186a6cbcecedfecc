"""Probes of the parts of transformers and accelerate that the gradient depends on.

Their methods are called in a small way before training, and the result is compared with what odb relies on: a release
in which the same name means something else is refused, instead of training with a wrong gradient. All probes together
take some milliseconds. Each raises `ConfigError`. Other assumptions about these libraries are tests, marked `versions`.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import Trainer

from odb_factory.errors import ConfigError
from odb_factory.training.arguments import replaced

LOSS = 3.0
NUM_ITEMS = 8


def check_gradient(trainer: Trainer) -> None:
    """Run every probe. trainer: about to train; it is left as it is."""
    loss_goes_to_backward_unchanged(trainer)
    own_loss_is_left_alone(trainer)
    accelerate_does_not_divide(trainer)


def loss_goes_to_backward_unchanged(trainer: Trainer) -> None:
    """`training_step` hands the result of `compute_loss` to accelerate, for one batch an optimizer step."""
    probe = probe_of(trainer, compute_loss_func=None)
    handed = _training_step(probe)
    _expect(handed, LOSS, "Trainer.training_step", "the loss that it hands to backward", transformers)
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Otherwise its engine would divide by the accumulation once more.
        found = probe.handed[0][1].get("scale_wrt_gas")
        _expect(found, False, "Trainer.training_step", "scale_wrt_gas as DeepSpeed is given it", transformers)


def own_loss_is_left_alone(trainer: Trainer) -> None:
    """A `compute_loss_func` is given `num_items_in_batch`; its loss is neither divided nor multiplied."""
    found: list[Any] = []

    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        found.append(num_items_in_batch)
        return outputs["loss"]

    probe = probe_of(trainer, compute_loss_func=own_loss)
    with replaced(probe.args, average_tokens_across_devices=False):
        handed = _training_step(probe)
        loss: Any = Trainer.compute_loss(probe, probe.model, _inputs(), num_items_in_batch=torch.tensor(NUM_ITEMS))
    _expect(handed, LOSS, "Trainer.training_step", "the loss of a compute_loss_func", transformers)
    _expect(loss.item(), LOSS, "Trainer.compute_loss", "the loss of a compute_loss_func", transformers)
    given = float(found[-1]) if len(found) == 2 and found[-1] is not None else None
    _expect(given, NUM_ITEMS, "Trainer.compute_loss", "num_items_in_batch as a compute_loss_func sees it", transformers)


def accelerate_does_not_divide(trainer: Trainer) -> None:
    """`Accelerator.backward` divides by its own accumulation, which is 1 in a Trainer."""
    probe: Any = copy.copy(trainer.accelerator)
    probe.scaler = None
    probe.deepspeed_engine_wrapped = SimpleNamespace(backward=lambda loss, **kwargs: loss.backward())
    parameter = torch.nn.Parameter(torch.ones(()))
    Accelerator.backward(probe, parameter * LOSS)
    found = None if parameter.grad is None else parameter.grad.item()
    _expect(found, LOSS, "Accelerator.backward", "the gradient that it makes", accelerate)


class _OneParameter(torch.nn.Module):
    def __init__(self, device: torch.device):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.tensor(LOSS, device=device))

    def forward(self, **inputs: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.parameter * 1.0}


def probe_of(trainer: Trainer, **changes: Any) -> Any:
    """A Trainer of transformers' own class in the state of `trainer`, with one parameter, that trains nothing."""
    probe: Any = object.__new__(Trainer)
    vars(probe).update(vars(trainer))
    probe.args = copy.copy(trainer.args)
    probe.model = _OneParameter(trainer.args.device)
    probe.optimizer = probe.label_smoother = None
    probe.model_accepts_loss_kwargs = True
    probe.current_gradient_accumulation_steps = 1
    probe.handed = []
    probe.accelerator = SimpleNamespace(
        num_processes=2,
        parallelism_config=None,
        distributed_type=trainer.accelerator.distributed_type,
        unwrap_model=lambda model, **kwargs: model,
        backward=lambda loss, **kwargs: probe.handed.append((loss.item(), kwargs)),
    )
    vars(probe).update(changes)
    return probe


def _training_step(probe: Any) -> float | None:
    """The loss that `Trainer.training_step` hands to backward, if it hands over just one."""
    Trainer.training_step(probe, probe.model, _inputs(), None)
    return probe.handed[0][0] if len(probe.handed) == 1 else None


def _inputs() -> dict[str, torch.Tensor]:
    return {key: torch.zeros(1, 1, dtype=torch.long) for key in ("input_ids", "labels")}


def _expect(found: Any, expected: Any, what: str, meaning: str, library: Any) -> None:
    same = found == expected
    if isinstance(found, float):
        same = abs(found - expected) <= 1e-2 * abs(expected)  # under autocast to bfloat16
    if not same:
        raise ConfigError(
            f"{what} of {library.__name__} {library.__version__} does not do what odb relies on: {meaning} is {found}, "
            f"expected {expected}; install a tested release (`odb-factory doctor` names them), or train without odb."
        )
