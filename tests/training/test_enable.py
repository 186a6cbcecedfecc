"""`enable_odb` on a Hugging Face Trainer whose dataset yields processed samples: `trainer.train()` just works."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler
from toy import NUM_ROWS, Rows, Stream, item, pad
from training.toy_training import BLOCK, FILL, Rates, Sequential, audit, ids, losses, make, train
from transformers import AutoModelForCausalLM, Trainer, set_seed

from odb_factory import ConfigError, Cost, ODBTrainer, ODBTrainerMixin, enable_odb


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_a_trainer_as_it_is(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """Two epochs with accumulation: every row once an epoch, right figures, evaluations of stock."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    trainer = make(tiny_text, tmp_path, eval_dataset=Rows(num_rows=12), eval_strategy="epoch", **options)
    assert enable_odb(trainer, **block) is trainer
    metrics = trainer.train().metrics
    assert ids(tmp_path) == Counter(dict.fromkeys(range(NUM_ROWS), 2))
    of_steps = Counter(line["optimizer_step"] for line in audit(tmp_path))
    assert trainer.state.global_step == trainer.state.max_steps == max(of_steps)
    assert all(line["micro_batches"] == of_steps[line["optimizer_step"]] for line in audit(tmp_path))
    if block is BLOCK:
        assert max(of_steps) == 2 * math.ceil(NUM_ROWS / 16)
    else:
        assert max(of_steps.values()) == 2  # the last of an epoch may have fewer
    assert trainer.state.epoch == 2.0
    assert [entry["epoch"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1.0, 2.0]
    samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert samples == pytest.approx(2 * NUM_ROWS, rel=0.01)
    assert [len(batch["input_ids"]) for batch in trainer.get_eval_dataloader()] == [8, 4]


@pytest.mark.parametrize("arguments", [(2048,), ({"token_budget": 2048},)])
def test_wrong_arguments_are_refused(tiny_text, tmp_path, arguments: Any) -> None:
    trainer = make(tiny_text, tmp_path)
    with pytest.raises(ConfigError, match="^config: "):
        enable_odb(trainer, *arguments)
    with pytest.raises(ConfigError, match="^enable_odb: "):
        enable_odb(trainer.model, token_budget=2048)


def test_a_trainer_that_is_not_enabled_is_stocks(tiny_text, tmp_path) -> None:
    """Also with the mixin, and with an enabled trainer in the process."""
    make(tiny_text, tmp_path / "other", block=BLOCK)
    kinds = type("Mixed", (ODBTrainerMixin, Trainer), {}), Trainer
    mixed, stock = (losses(train(tiny_text, tmp_path / "out", max_steps=3, trainer_class=kind)) for kind in kinds)
    assert mixed == stock and not (tmp_path / "out" / "odb_summary.json").exists()


def test_custom_trainers(tiny_text, tmp_path) -> None:
    trainer = train(tiny_text, tmp_path, odb=BLOCK, trainer_class=type("Mine", (ODBTrainer,), {}))
    assert ids(tmp_path) == Counter(range(NUM_ROWS))
    with pytest.raises(ConfigError, match="already"):
        enable_odb(trainer, **BLOCK)


def own_dataloader(self: Any) -> DataLoader:
    return DataLoader(self.train_dataset, batch_size=4, sampler=list(range(10, 20)), collate_fn=pad)


def test_a_custom_train_dataloader(tiny_text, tmp_path) -> None:
    """It is used, but refused if it overrides odb's."""
    of_trainer, of_odb = (
        type("Mine", (kind,), {"get_train_dataloader": own_dataloader}) for kind in (Trainer, ODBTrainer)
    )
    train(tiny_text, tmp_path, trainer_class=of_trainer, block=BLOCK)
    assert ids(tmp_path) == Counter(range(10, 20))
    with pytest.raises(ConfigError, match=r"^get_train_dataloader of Mine overrides odb's without calling super"):
        train(tiny_text, tmp_path, trainer_class=of_odb, odb=BLOCK)


class Weighted(Trainer):
    """Has a sampler whose order depends on former orders, and takes a number of each row from the batch."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return WeightedRandomSampler([1.0] * NUM_ROWS, NUM_ROWS, generator=generator)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(inputs.pop("of_row")) == len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


def pad_with_numbers(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with a number of each row, which cannot be laid flat."""
    return pad(items) | {"of_row": torch.tensor([len(item["input_ids"]) for item in items])}


class Own(torch.nn.Module):
    """Wraps a model and has no config."""

    def __init__(self, path: Any):
        super().__init__()
        self.language_model = AutoModelForCausalLM.from_pretrained(path)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.language_model(input_ids=input_ids, labels=labels)


SAME: dict[str, dict[str, Any]] = {
    "as it is": {},
    # Stock's mean counts the first label of a row, though no token predicts it.
    "a cost that names the units": {
        "block": {"cost_fn": lambda row: Cost(len(row["input_ids"]), units=len(row["labels"]) - 1)}
    },
    "an order that is drawn once": {"trainer_class": Weighted, "collate": pad_with_numbers, "num_train_epochs": 2},
    "a module without a config": {"model": Own, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SAME)
def test_losses_are_those_of_stock(tiny_text, tmp_path, name: str) -> None:
    """Also with a seed that a script sets after it has made the trainer, because accelerate's sampler uses it."""
    options = dict(SAME[name])
    more, model = options.pop("block", {}), options.pop("model", lambda path: path)
    stock_and_odb = []
    for block in (None, BLOCK | more):
        trainer = make(model(tiny_text), tmp_path, block=block, **options)
        set_seed(7)
        trainer.train()
        stock_and_odb.append(losses(trainer))
    assert stock_and_odb[1] == pytest.approx(stock_and_odb[0], rel=1e-5)


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_half_an_epoch(tiny_text, tmp_path, block: dict) -> None:
    trainer = train(tiny_text, tmp_path, num_train_epochs=0.5, block=block)
    assert trainer.state.global_step == trainer.state.max_steps
    assert NUM_ROWS / 2 <= sum(ids(tmp_path).values()) < NUM_ROWS


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_a_stream_ends_with_max_steps(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """In its second epoch; the first has every item once."""
    trainer = train(tiny_text, tmp_path, Stream(), max_steps=12, gradient_accumulation_steps=1, block=block)
    assert trainer.state.global_step == 12
    first = [row for line in audit(tmp_path) if line["epoch"] == 0 for row in line["ids"]]
    assert Counter(first) == Counter(range(NUM_ROWS))
    assert any(line["epoch"] == 1 for line in audit(tmp_path))


@pytest.mark.parametrize(("scale", "power", "kind"), [("linear", 1.0, Sequential), ("sqrt", 0.5, Trainer)])
def test_learning_rate_scaled_to_the_batch(tiny_text, tmp_path, scale: str, power: float, kind: type) -> None:
    """By the samples of an optimizer step, once. An order that is not random is possible if the window has all rows."""
    rates = Rates()
    changes = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "callbacks": [rates]}
    block = FILL | {"buffer_size": 1024, "lr_scale": scale}
    train(tiny_text, tmp_path, block=block, trainer_class=kind, **changes)
    samples = NUM_ROWS / max(line["optimizer_step"] for line in audit(tmp_path))
    assert rates.rates == [pytest.approx(1e-3 * (samples / 16) ** power)] * len(rates.rates)


def labelled(k: int) -> dict[str, Any]:
    """Row k of the toy data; two rows have no supervised token."""
    row = item(k)
    return row | {"labels": [-100] * len(row["labels"])} if k in (2, 5) else row


def pad_both(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with labels if the items have labels."""
    batch = pad(items)
    for row, labels in zip(items, batch["labels"]):
        labels[: len(row["input_ids"])] = torch.tensor(row.get("labels", row["input_ids"]))
    return batch if "labels" in items[0] else {"input_ids": batch["input_ids"]}


@pytest.mark.parametrize("has_labels", [True, False])
def test_predictions_by_budget_are_of_every_row(tiny_text, tmp_path, has_labels: bool) -> None:
    """Also of rows without a loss. Without any labels the prediction is stock's."""
    rows = Rows(labelled if has_labels else lambda k: {"input_ids": item(k)["input_ids"]}, 12)
    block = BLOCK | {"eval_token_budget": 128}
    ours, stock = (
        make(tiny_text, tmp_path, collate=pad_both, per_device_eval_batch_size=4, block=odb).predict(rows)
        for odb in (block, None)
    )
    assert len(ours.predictions) == len(stock.predictions) == 12
    for k in range(12):
        tokens = len(item(k)["input_ids"])
        assert ours.predictions[k][:tokens] == pytest.approx(stock.predictions[k][:tokens], abs=1e-4)
    assert ("test_loss" in ours.metrics, "test_loss" in stock.metrics) == (has_labels, has_labels)
    if has_labels:
        assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


def test_a_trial_of_a_search_sets_the_accumulation(tiny_text, tmp_path) -> None:
    """odb reads the accumulation after the Trainer has set the trial's."""

    class Searched(Trainer):
        def _hp_search_setup(self, trial: Any) -> None:
            super()._hp_search_setup(trial)
            self.args.gradient_accumulation_steps = 1

    changes = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2, "trainer_class": Searched}
    trainer = train(tiny_text, tmp_path, block=BLOCK, **changes)
    assert (trainer.state.global_step, trainer.args.gradient_accumulation_steps) == (NUM_ROWS // 2, 1)
