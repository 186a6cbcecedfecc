"""A method of transformers, accelerate or torch that keeps its name and changes its meaning stops the training first.

The real methods are replaced by ones that mean something else; each probe must notice its own, within a second all.
"""

from __future__ import annotations

import time
from typing import Any

import accelerate.data_loader
import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from training.test_enable import BLOCK, make
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from odb_factory import ConfigError, enable_odb
from odb_factory.training import probes

original_step, original_loss, original_batches = Trainer.training_step, Trainer.compute_loss, Trainer.get_batch_samples
original_backward, original_epoch = Accelerator.backward, accelerate.data_loader.SeedableRandomSampler.set_epoch


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


def one_more_result(*args: Any, **kwargs: Any) -> Any:
    return (*original_batches(*args, **kwargs), None)


def other_arguments(trainer: Any, num_batches: int, epoch_iterator: Any, device: Any = None) -> Any:
    return original_batches(trainer, epoch_iterator, num_batches, device)


def copied(*args: Any, **kwargs: Any) -> Any:
    batches, items = original_batches(*args, **kwargs)
    return [dict(batch) for batch in batches], items


def counts_one(trainer: Any, inputs: Any) -> int:
    return 1


def backwards(handler: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    for callback in reversed(handler.callbacks):
        getattr(callback, event)(args, state, control, **kwargs)
    return control


def divided(accelerator: Any, loss: Any, **kwargs: Any) -> None:
    original_backward(accelerator, loss / 2, **kwargs)


def rates_of_its_own(scheduler: Any) -> list[float]:
    return [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def the_same_epoch(sampler: Any, epoch: int) -> None:
    original_epoch(sampler, 0)


CHANGED: list[tuple[Any, str, Any, str]] = [
    (Trainer, "training_step", halved, "Trainer.training_step"),
    (Trainer, "training_step", divides_own_loss, "Trainer.training_step"),
    (Trainer, "compute_loss", counts_nothing, "Trainer.compute_loss"),
    (Trainer, "compute_loss", multiplied, "Trainer"),
    (Trainer, "get_batch_samples", one_more_result, "Trainer.get_batch_samples"),
    (Trainer, "get_batch_samples", other_arguments, "Trainer.get_batch_samples"),
    (Trainer, "get_batch_samples", copied, "Trainer.get_batch_samples"),
    (Trainer, "floating_point_ops", counts_one, "Trainer.floating_point_ops"),
    (
        Accelerator,
        "sync_gradients",
        property(lambda self: True, lambda self, value: None),
        "Accelerator.sync_gradients",
    ),
    (CallbackHandler, "call_event", backwards, "CallbackHandler"),
    (Accelerator, "backward", divided, "Accelerator.backward"),
    (LambdaLR, "get_lr", rates_of_its_own, "LambdaLR.lr_lambdas"),
    (accelerate.data_loader.SeedableRandomSampler, "set_epoch", the_same_epoch, "SeedableRandomSampler"),
]


@pytest.mark.parametrize(
    ("owner", "name", "other", "named"),
    CHANGED,
    ids=[getattr(other, "__name__", name) for _, name, other, _ in CHANGED],
)
def test_another_meaning_is_noticed_before_the_first_step(
    tiny_text, tmp_path, monkeypatch, owner: Any, name: str, other: Any, named: str
) -> None:
    trainer = make(Trainer, tiny_text, tmp_path)
    enable_odb(trainer, **BLOCK)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(ConfigError, match=f"^{named}.* does not do what odb relies on: ") as refused:
        trainer.train()
    assert "\n" not in str(refused.value)
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_probes_change_nothing_and_take_no_time(tiny_text, tmp_path) -> None:
    trainer = make(Trainer, tiny_text, tmp_path, gradient_accumulation_steps=2)
    enable_odb(trainer, **BLOCK)
    state, attributes, args = torch.get_rng_state(), dict(vars(trainer)), trainer.args.to_dict()
    started = time.perf_counter()
    probes.check_seams(trainer)
    assert time.perf_counter() - started < 10  # some milliseconds; a limit for a machine that is busy
    assert torch.equal(state, torch.get_rng_state())
    assert vars(trainer) == attributes
    assert trainer.args.to_dict() == args
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
