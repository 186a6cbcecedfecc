"""Trainers in sequence, two at once, one twice, outside of `train()`: all work and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from toy import NUM_ROWS, Rows
from training.toy_training import BLOCK, ids, losses, make, train
from transformers import Trainer, TrainerCallback

from odb_factory import enable_odb


def held() -> tuple[int, int, int, int]:
    """Child processes, threads, open files and process groups of this process."""
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return len(multiprocessing.active_children()), threading.active_count(), len(os.listdir("/proc/self/fd")), groups


def make_odb(model: Path, folder: Path, **changes: Any) -> Trainer:
    return make(model, folder, block=BLOCK, dataloader_num_workers=1, **changes)


@pytest.fixture
def nothing_is_left(tiny_text, tmp_path_factory) -> Any:
    """The first training starts what a process has once (a resource tracker, a pool of autograd)."""
    make_odb(tiny_text, tmp_path_factory.mktemp("first"), max_steps=1).train()
    before = held()
    yield
    until = time.monotonic() + 10  # threads take a moment to end
    while any(now > then for now, then in zip(held(), before)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(now <= then for now, then in zip(held(), before)), (held(), before)


def test_twice_with_an_evaluation_in_between(tiny_text, tmp_path, nothing_is_left) -> None:
    trainer = make_odb(tiny_text, tmp_path, eval_dataset=Rows(num_rows=12))
    first = trainer.train()
    assert ids(tmp_path) == Counter(range(NUM_ROWS))
    assert trainer.evaluate()["eval_loss"] > 0
    again = trainer.train()
    assert ids(tmp_path) == Counter(range(NUM_ROWS))
    assert again.global_step == first.global_step
    assert again.training_loss < first.training_loss


def test_one_inside_the_other(tiny_text, tmp_path, nothing_is_left) -> None:
    """Each has its own rows, weights and figures, while both are in the middle of an epoch."""

    class TrainAnother(TrainerCallback):
        trained = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.trained:
                self.trained = True
                make_odb(tiny_text, tmp_path / "inner").train()

    trainer = make_odb(tiny_text, tmp_path / "outer", callbacks=[TrainAnother()])
    alone = make_odb(tiny_text, tmp_path / "alone")
    trainer.train()
    alone.train()
    for folder in ("outer", "inner", "alone"):
        assert ids(tmp_path / folder) == Counter(range(NUM_ROWS))
    assert losses(trainer) == pytest.approx(losses(alone))


def test_a_micro_batch_is_freed_before_the_next_is_taken(tiny_text, tmp_path) -> None:
    seen: list[weakref.ref[Any]] = []

    class Notes(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(weakref.ref(inputs["input_ids"]))
            return super().training_step(model, inputs, *args, **kwargs)

    class Looks(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            assert all(reference() is None for reference in seen)

        on_step_end = on_substep_end

    trainer = train(tiny_text, tmp_path, block=BLOCK | {"token_budget": 80}, callbacks=[Looks()], trainer_class=Notes)
    assert len(seen) > 2 * trainer.state.global_step


def test_outside_of_train_the_dataloader_is_stocks_and_nothing_is_started(tiny_text, tmp_path, nothing_is_left) -> None:
    trainer, stock = make_odb(tiny_text, tmp_path), make(tiny_text, tmp_path)
    loaders = [each.get_train_dataloader() for each in (trainer, trainer, stock)]
    assert len({(type(loader), len(loader)) for loader in loaders}) == 1
    assert trainer.odb.training is None


def test_a_callback_sees_and_may_iterate_an_ordinary_train_dataloader(tiny_text, tmp_path, nothing_is_left) -> None:
    """Also in the middle of an epoch, without effect on the training."""
    seen: list[int] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
            assert isinstance(train_dataloader, DataLoader)
            assert (train_dataloader.num_workers, train_dataloader.dataset) == (0, trainer.train_dataset)
            assert train_dataloader.sampler is not None
            seen.append(len(next(iter(train_dataloader))["input_ids"]))

    trainer = make(tiny_text, tmp_path, callbacks=[Looks()], block=BLOCK)
    trainer.train()
    assert seen == [trainer.args.per_device_train_batch_size] * trainer.state.global_step
    assert ids(tmp_path) == Counter(range(NUM_ROWS))


def test_the_trainer_keeps_its_dataset_collator_and_arguments(tiny_text, tmp_path) -> None:
    trainer = make(tiny_text, tmp_path)
    before = trainer.train_dataset, trainer.data_collator, trainer.args.to_dict()
    enable_odb(trainer, **BLOCK)
    trainer.train()
    assert (trainer.train_dataset, trainer.data_collator, trainer.args.to_dict()) == before
