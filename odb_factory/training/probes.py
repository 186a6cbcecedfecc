"""Probes of what odb takes for granted inside transformers, accelerate and torch.

Their methods are called in a small way before training, and what they do is compared with what the code here assumes:
a release that means something else by the same name is refused, instead of training on a wrong gradient. All probes
together take some milliseconds. Each raises `ConfigError`.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from odb_factory.data.dataloader_parts import dismantle
from odb_factory.errors import ConfigError
from odb_factory.training.trainer_loss import without_average_tokens

LOSS = 3.0
NUM_ITEMS = 8


def check_seams(trainer: Trainer) -> None:
    """Run every probe. trainer: about to train; it is left as it is."""
    loss_goes_to_backward_as_it_is(trainer)
    own_loss_is_left_alone(trainer)
    batches_are_taken_one_by_one(trainer)
    inputs_are_counted_by_their_number(trainer)
    synchronisation_can_be_switched(trainer)
    callbacks_run_in_the_order_of_their_list(trainer)
    accelerate_does_not_divide(trainer)
    lambdas_of_a_schedule_can_be_replaced()
    prepared_loader_can_be_taken_apart()


def loss_goes_to_backward_as_it_is(trainer: Trainer) -> None:
    """`training_step` hands accelerate what `compute_loss` returns, for one batch an optimizer step."""
    probe = _probe(trainer, compute_loss_func=None)
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

    probe = _probe(trainer, compute_loss_func=own_loss)
    with without_average_tokens(probe.args):
        handed = _training_step(probe)
        loss: Any = Trainer.compute_loss(probe, probe.model, _inputs(), num_items_in_batch=torch.tensor(NUM_ITEMS))
    _expect(handed, LOSS, "Trainer.training_step", "the loss of a compute_loss_func", transformers)
    _expect(loss.item(), LOSS, "Trainer.compute_loss", "the loss of a compute_loss_func", transformers)
    given = float(found[-1]) if len(found) == 2 and found[-1] is not None else None
    _expect(given, NUM_ITEMS, "Trainer.compute_loss", "num_items_in_batch as a compute_loss_func sees it", transformers)


def batches_are_taken_one_by_one(trainer: Trainer) -> None:
    """`get_batch_samples(epoch_iterator, 1, ...)` returns the next batch as it is, and counts none without labels."""
    names = list(inspect.signature(Trainer.get_batch_samples).parameters)[1:]
    _expect(names[:2], ["epoch_iterator", "num_batches"], "Trainer.get_batch_samples", "its arguments", transformers)
    batches = [{"input_ids": torch.empty(NUM_ITEMS, device="meta")} for _ in range(2)]
    probe = _probe(trainer)
    result = Trainer.get_batch_samples(probe, iter(batches), 1, *[torch.device("cpu")] * (len(names) - 2))
    found = isinstance(result, tuple) and len(result) == 2 and len(result[0]) == 1 and result[0][0] is batches[0]
    _expect(found and result[1] is None, True, "Trainer.get_batch_samples", "(the next batch, no items)", transformers)


def inputs_are_counted_by_their_number(trainer: Trainer) -> None:
    """`floating_point_ops` looks at the number of elements of the main input alone."""
    probe = _probe(trainer)
    probe.model.num_parameters = lambda **kwargs: 1
    found = [Trainer.floating_point_ops(probe, {"input_ids": torch.empty(n, device="meta")}) for n in (1, NUM_ITEMS)]
    _expect(found[1], NUM_ITEMS * found[0], "Trainer.floating_point_ops", "by the number of tokens", transformers)


def synchronisation_can_be_switched(trainer: Trainer) -> None:
    """`Accelerator.sync_gradients` is what accelerate and the Trainer go by."""
    state, before = trainer.accelerator.gradient_state, trainer.accelerator.sync_gradients
    trainer.accelerator.sync_gradients = False
    found = state.sync_gradients
    trainer.accelerator.sync_gradients = before
    _expect(found, False, "Accelerator.sync_gradients", "whether gradients are synchronised", accelerate)


def callbacks_run_in_the_order_of_their_list(trainer: Trainer) -> None:
    """`callback_handler.callbacks` is the list that events go through, so that ours comes first."""
    called: list[int] = []
    handler = copy.copy(trainer.callback_handler)
    handler.callbacks = [_Called(called, 2)]
    handler.callbacks.insert(0, _Called(called, 1))
    handler.on_substep_end(trainer.args, trainer.state, copy.copy(trainer.control))
    _expect(called, [1, 2], "CallbackHandler", "the order of its callbacks", transformers)


def accelerate_does_not_divide(trainer: Trainer) -> None:
    """`Accelerator.backward` divides by its own accumulation, which is 1 in a Trainer."""
    probe: Any = copy.copy(trainer.accelerator)
    probe.scaler = None
    probe.deepspeed_engine_wrapped = SimpleNamespace(backward=lambda loss, **kwargs: loss.backward())
    parameter = torch.nn.Parameter(torch.ones(()))
    Accelerator.backward(probe, parameter * LOSS)
    found = None if parameter.grad is None else parameter.grad.item()
    _expect(found, LOSS, "Accelerator.backward", "the gradient that it makes", accelerate)


def lambdas_of_a_schedule_can_be_replaced() -> None:
    """A `LambdaLR` reads its curve from `lr_lambdas` at every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda _step: 1.0)
    scheduler.lr_lambdas = [lambda _step: 0.25]
    optimizer.step()
    scheduler.step()
    _expect(scheduler.get_last_lr(), [0.25], "LambdaLR.lr_lambdas", "the learning rate after a step", torch)


def prepared_loader_can_be_taken_apart() -> None:
    """The whole order is found inside a DataLoader that accelerate has cut into shards; seed and epoch decide it."""
    rows = list(range(8))
    prepared = prepare_data_loader(
        DataLoader(rows, batch_size=2, shuffle=True),  # type: ignore[arg-type]
        num_processes=2,
        process_index=1,
        put_on_device=False,
        use_seedable_sampler=True,
    )
    sampler = dismantle(prepared, seed=1).sampler
    found = isinstance(sampler, SeedableRandomSampler) and sorted(sampler) == rows
    _expect(found, True, "a prepared DataLoader", "the order of all ranks inside it", accelerate)
    orders = []
    for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)):
        again = dismantle(prepared, seed=seed).sampler
        again.set_epoch(epoch)
        orders.append(list(again))
    differ = [order != orders[0] for order in orders]
    _expect(differ, [False, False, True, True], "SeedableRandomSampler", "orders by seed and epoch", accelerate)


class _OneParameter(torch.nn.Module):
    def __init__(self, device: torch.device):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.tensor(LOSS, device=device))

    def forward(self, **inputs: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.parameter * 1.0}


class _Called(TrainerCallback):
    def __init__(self, called: list[int], number: int):
        self.called, self.number = called, number

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.called.append(self.number)


def _probe(trainer: Trainer, **changes: Any) -> Any:
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
