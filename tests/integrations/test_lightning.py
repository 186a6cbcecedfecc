"""Lightning with `OptimizerSteps` and `OnlineBatching`: the training of a plain loop, on one rank and two, resumed too.

Real `lightning.pytorch` trainings of a tiny Qwen2, with AdamW, clipping and a schedule. A plain loop then takes the
rows of each optimizer step, as the audit names them, as ONE batch.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from support import read_jsonl
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from toy import NUM_ROWS, Rows, item, pad
from transformers import AutoModelForCausalLM

from odb_factory import ConfigError, ODBDataLoader, unpad

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install lightning")
from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402

from odb_factory.integrations.lightning import OnlineBatching, OptimizerSteps  # noqa: E402

pytestmark = pytest.mark.usefixtures("restored_environment")
EPOCHS = 2
SAMPLES = 16
STEPS = EPOCHS * -(-NUM_ROWS // SAMPLES)
CLIP = 0.5
RELATIVE = 1e-5
"""Largest relative difference of weights and losses (float32)."""
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


def optimizer_of(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))


class Module(lightning.LightningModule):
    """A module as written without odb."""

    def __init__(self, path: str):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path).train()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("validated", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_of(self.model)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NumberedModule(Module):
    """Lightning passes the number of the batch by position, whatever its name."""

    def training_step(self, batch: dict[str, torch.Tensor], i: int) -> torch.Tensor:
        self.numbers = [*getattr(self, "numbers", []), i]
        return super().training_step(batch)


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged.append(trainer.callback_metrics["odb/loss"].item())


def train(
    path: str, folder: Path, *, ranks: int = 1, ckpt_path: str | None = None, kind: Any = Module, layout: Any = "padded"
) -> tuple[Any, list[float]]:
    """Returns the trained module and the losses; `folder` gets a checkpoint after every optimizer step."""
    module, losses = kind(path), Losses()
    checkpoints = lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    options = QUIET | {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "max_epochs": EPOCHS}
    trainer = lightning.Trainer(gradient_clip_val=CLIP, callbacks=[checkpoints, OnlineBatching(), losses], **options)
    steps = {"batch_size": 2, "gradient_accumulation_steps": SAMPLES // 2 // ranks, "token_budget": 96}
    with ODBDataLoader(Rows(), shuffle=True, collate_fn=pad, audit_dir=folder, layout=layout, **steps) as loader:
        if layout == "flat":
            unpad(module.model, loader)
        evaluated = DataLoader([item(k) for k in range(4)], batch_size=4, collate_fn=pad)
        trainer.fit(module, OptimizerSteps(loader), evaluated, ckpt_path=ckpt_path, weights_only=True)
        assert trainer.global_step == STEPS and loader.num_optimizer_steps == STEPS // EPOCHS
    assert "validated" in trainer.callback_metrics
    assert "training_step" not in vars(module), "the module is as it was"
    return module, losses.logged


def audit_of(folder: Path, ranks: int) -> list[list[int]]:
    """The rows of each optimizer step on all ranks."""
    steps: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in read_jsonl(folder / f"odb_audit_rank{rank}.jsonl"):
            steps.setdefault(line["optimizer_step"], []).extend(line["ids"])
    return [sorted(steps[number]) for number in sorted(steps)]


def plain_loop(path: str, steps: list[list[int]]) -> tuple[torch.nn.Module, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer, schedule = optimizer_of(model)
    losses = []
    for rows in steps:
        loss = model(**pad([item(k) for k in rows])).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == others.keys()
    squares = sum((weights[name] - others[name]).double().square().sum() for name in weights)
    return (squares / sum(tensor.double().square().sum() for tensor in others.values())).sqrt().item()


def in_a_rank(rank: int, path: str, out: str) -> dict[str, Any]:
    """Train, then train again from a checkpoint in the second epoch."""
    os.environ["LOCAL_RANK"] = str(rank)  # so Lightning starts no process of its own
    module, losses = train(path, Path(out, "whole"), ranks=2)
    rest, later = train(path, Path(out, "rest"), ranks=2, ckpt_path=f"{out}/whole/step=6.ckpt")
    torch.save(module.model.state_dict(), f"{out}/weights{rank}.pt")
    return {"losses": losses, "later": later, "rest": distance(rest.model.state_dict(), module.model.state_dict())}


@pytest.fixture(scope="module")
def alone(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, *train(str(tiny_text), folder)


def test_one_rank_trains_as_a_plain_loop(alone: tuple[Path, Any, list[float]], tiny_text: Path) -> None:
    """I8, I9."""
    folder, module, losses = alone
    steps = audit_of(folder, 1)
    assert [len(rows) for rows in steps] == [16, 16, 16, 12] * EPOCHS
    for epoch in (steps[:4], steps[4:]):
        assert sorted(chain(*epoch)) == list(range(NUM_ROWS)), "I2"
    assert steps[0] != steps[4]
    counts = [line["optimizer_step"] for line in read_jsonl(folder / "odb_audit_rank0.jsonl")]
    assert len({counts.count(number) for number in set(counts)}) > 1, "K differs from step to step"
    model, expected = plain_loop(str(tiny_text), steps)
    assert losses == pytest.approx(expected, rel=RELATIVE)
    assert distance(module.model.state_dict(), model.state_dict()) < RELATIVE


def test_dataloaders_that_lightning_reloads_skip_no_epoch(tiny_text: Path) -> None:
    """Lightning takes two iterators of each dataloader, and trains on the second."""
    epochs: dict[int, list[int]] = {}

    class Steps(OptimizerSteps):
        def trained_on(self, step: Any) -> None:
            super().trained_on(step)
            for _, info in step.micro_batches:
                epochs.setdefault(info.epoch, []).extend(info.ids)

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Steps:
            return Steps(loader)

    with ODBDataLoader(Rows(), batch_size=16, token_budget=96, shuffle=True, collate_fn=pad) as loader:
        options = QUIET | {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, "enable_checkpointing": False}
        trainer = lightning.Trainer(callbacks=[OnlineBatching()], **options)
        trainer.fit(Module(str(tiny_text)), datamodule=Data())
    assert list(epochs) == [0, 1, 2]
    assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in epochs.values()), "I2"


def test_two_ranks_train_as_one(alone: tuple[Path, Any, list[float]], tiny_text: Path, tmp_path: Path) -> None:
    folder, module, losses = alone
    ranks = run_ranks(
        "integrations.test_lightning:in_a_rank", tmp_path, limit_s=150, path=str(tiny_text), out=str(tmp_path)
    )
    assert audit_of(tmp_path / "whole", 2) == audit_of(folder, 1)
    for rank, outcome in enumerate(ranks):
        assert outcome.value["losses"] == pytest.approx(losses, rel=RELATIVE)
        assert outcome.value["later"] == outcome.value["losses"][6:] and outcome.value["rest"] < 1e-7
        assert distance(torch.load(tmp_path / f"weights{rank}.pt"), module.model.state_dict()) < RELATIVE
    rest, later = train(str(tiny_text), tmp_path / "alone", ckpt_path=str(tmp_path / "whole" / "step=3.ckpt"))
    assert later == pytest.approx(losses[3:], rel=RELATIVE), "from a checkpoint of two ranks"
    assert distance(rest.model.state_dict(), module.model.state_dict()) < RELATIVE


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_after_every_step(alone: tuple[Path, Any, list[float]], tiny_text: Path, tmp_path: Path, step) -> None:
    """Also after the last step of an epoch; Lightning prefetches a step, which must not be lost."""
    folder, module, losses = alone
    rest, later = train(str(tiny_text), tmp_path, ckpt_path=str(folder / f"step={step}.ckpt"))
    assert audit_of(tmp_path, 1) == audit_of(folder, 1)[step:]
    assert later == losses[step:]
    assert distance(rest.model.state_dict(), module.model.state_dict()) == 0


def test_flat_micro_batches_are_the_same_training(alone: tuple[Path, Any, list[float]], tiny_text, tmp_path) -> None:
    """I10. Two step infos are removed before the first forward; `training_step` may take the number of the batch."""
    module, losses = train(str(tiny_text), tmp_path, kind=NumberedModule, layout="flat")
    assert sorted(set(module.numbers)) == list(range(STEPS // EPOCHS))
    assert losses == pytest.approx(alone[2], rel=RELATIVE)
    lines = read_jsonl(tmp_path / "odb_audit_rank0.jsonl")
    assert any(len(line["segments"]) > 1 for line in lines)
    assert distance(module.model.state_dict(), alone[1].model.state_dict()) < RELATIVE


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: 2"),
        # the callback sets the value when the training begins
        ({"callbacks": [OnlineBatching(), GradientAccumulationScheduler({0: 2})]}, "accumulate_grad_batches: 2"),
        ({"callbacks": []}, "OnlineBatching"),
        ({"automatic": False}, "automatic_optimization: False"),
        ({"loader": [pad([item(3)])]}, "train_dataloaders: a list"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], key: str, tiny_text: Path) -> None:
    module = Module(str(tiny_text))
    module.automatic_optimization = settings.pop("automatic", True)
    callbacks = settings.pop("callbacks", [OnlineBatching()])
    with ODBDataLoader(Rows(), batch_size=2, token_budget=96, collate_fn=pad) as loader:
        data = settings.pop("loader", OptimizerSteps(loader))
        options = QUIET | {"max_epochs": 1, "enable_checkpointing": False} | settings
        trainer = lightning.Trainer(callbacks=callbacks, **options)
        with pytest.raises(ConfigError, match=key) as raised:
            trainer.fit(module, data)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_shard_are_refused(strategy: type, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator Lightning builds no Trainer with these strategies, so the test sets the strategy later."""
    trainer = lightning.Trainer(**QUIET, enable_checkpointing=False)
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", strategy())
    with pytest.raises(ConfigError, match=f"strategy: {strategy.__name__}") as raised:
        OnlineBatching().setup(trainer, Module(str(tiny_text)), "fit")
    assert "\n" not in str(raised.value)
