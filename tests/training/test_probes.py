"""What odb relies on in transformers, accelerate and torch.

A changed meaning that the gradient depends on stops the training first: the real methods are replaced, and each probe
must notice its own. Other assumptions are tried here alone, with each release of the `versions` job.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from training.toy_training import BLOCK, make
from transformers import Trainer, TrainerCallback

from odb_factory import ConfigError
from odb_factory.data.order import dismantle
from odb_factory.training import probes

original_step, original_loss, original_backward = Trainer.training_step, Trainer.compute_loss, Accelerator.backward


def halved(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    trainer.current_gradient_accumulation_steps = 2
    return original_step(trainer, *args, **kwargs)


def divides_own_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    own, trainer.compute_loss_func = trainer.compute_loss_func, None
    trainer.current_gradient_accumulation_steps = 1 if own is None else 2
    try:
        return original_step(trainer, model, inputs, *args, **kwargs)
    finally:
        trainer.compute_loss_func = own


def counts_nothing(trainer: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    return original_loss(trainer, *args, num_items_in_batch=None, **kwargs)


def multiplied(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return original_loss(trainer, *args, **kwargs) * 2


def divided(accelerator: Any, loss: Any, **kwargs: Any) -> None:
    original_backward(accelerator, loss / 2, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name", "other", "named"),
    [
        (Trainer, "training_step", halved, "Trainer.training_step"),
        (Trainer, "training_step", divides_own_loss, "Trainer.training_step"),
        (Trainer, "compute_loss", counts_nothing, "Trainer.compute_loss"),
        (Trainer, "compute_loss", multiplied, "Trainer"),
        (Accelerator, "backward", divided, "Accelerator.backward"),
    ],
)
def test_another_meaning_is_noticed_before_the_first_step(
    tiny_text, tmp_path, monkeypatch, owner: Any, name: str, other: Any, named: str
) -> None:
    trainer = make(tiny_text, tmp_path, block=BLOCK)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(ConfigError, match=f"^{named}.* does not do what odb relies on: ") as refused:
        trainer.train()
    assert "\n" not in str(refused.value)
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_probes_change_nothing_and_take_no_time(tiny_text, tmp_path) -> None:
    trainer = make(tiny_text, tmp_path, gradient_accumulation_steps=2, block=BLOCK)
    state, attributes, args = torch.get_rng_state(), dict(vars(trainer)), trainer.args.to_dict()
    started = time.perf_counter()
    probes.check_gradient(trainer)
    assert time.perf_counter() - started < 10  # some milliseconds; a limit for a machine that is busy
    assert torch.equal(state, torch.get_rng_state())
    assert vars(trainer) == attributes
    assert trainer.args.to_dict() == args
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


# What is tried with each release only

pytestmark = pytest.mark.versions


@pytest.fixture
def trainer(tiny_text, tmp_path) -> Trainer:
    return make(tiny_text, tmp_path)


def test_batches_are_taken_one_by_one(trainer: Trainer) -> None:
    """`get_batch_samples(epoch_iterator, 1, ...)` returns the next batch as it is, and counts none without labels."""
    names = list(inspect.signature(Trainer.get_batch_samples).parameters)[1:]
    assert names[:2] == ["epoch_iterator", "num_batches"]
    batches = [{"input_ids": torch.empty(8, device="meta")} for _ in range(2)]
    more = [torch.device("cpu")] * (len(names) - 2)
    taken, num_items = Trainer.get_batch_samples(probes.probe_of(trainer), iter(batches), 1, *more)
    assert len(taken) == 1 and taken[0] is batches[0] and num_items is None


def test_inputs_are_counted_by_their_number(trainer: Trainer) -> None:
    """`floating_point_ops` looks at the number of elements of the main input alone."""
    probe = probes.probe_of(trainer)
    probe.model.num_parameters = lambda **kwargs: 1
    one, eight = (Trainer.floating_point_ops(probe, {"input_ids": torch.empty(n, device="meta")}) for n in (1, 8))
    assert eight == 8 * one


def test_synchronisation_can_be_switched(trainer: Trainer) -> None:
    """`Accelerator.sync_gradients` decides for accelerate and the Trainer."""
    trainer.accelerator.sync_gradients = False
    assert trainer.accelerator.gradient_state.sync_gradients is False
    trainer.accelerator.sync_gradients = True
    assert trainer.accelerator.gradient_state.sync_gradients is True


def test_callbacks_run_in_the_order_of_their_list(trainer: Trainer) -> None:
    """`callback_handler.callbacks` is the list that events go through, so that ours comes first."""
    called: list[int] = []

    class Called(TrainerCallback):
        def __init__(self, number: int):
            self.number = number

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            called.append(self.number)

    trainer.callback_handler.callbacks = [Called(2)]
    trainer.callback_handler.callbacks.insert(0, Called(1))
    trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)
    assert called == [1, 2]


def test_lambdas_of_a_schedule_can_be_replaced() -> None:
    """A `LambdaLR` reads its curve from `lr_lambdas` at every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda _step: 1.0)
    scheduler.lr_lambdas = [lambda _step: 0.25]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_a_prepared_loader_can_be_taken_apart() -> None:
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
    assert isinstance(sampler, SeedableRandomSampler) and sorted(sampler) == rows
    orders = []
    for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)):
        again = dismantle(prepared, seed=seed).sampler
        again.set_epoch(epoch)
        orders.append(list(again))
    assert [order != orders[0] for order in orders] == [False, False, True, True]
