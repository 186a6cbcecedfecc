"""I9, I13: odb trains the loss of any Trainer as stock does, on the installed releases.

transformers' own Trainer and odb train the same tiny model: losses of every step and the final weights are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from toy import Rows
from training import toy_training
from training.flat_models import COMMON, HEAD
from training.toy_training import collate, losses
from training.trainings import divides, means
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from odb_factory import ConfigError

pytestmark = pytest.mark.stock

BUDGET = 256
CONFIG = COMMON | HEAD | {"vocab_size": 500}
LONG = [5 + number * 7 % 80 for number in range(24)]
SHORT = [2 + number % 5 for number in range(24)]
OF_ONE_TOKEN = [1 + number % 5 for number in range(24)]

# Collators


def collate_with_names(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Adds a value of each row for a loss."""
    return collate(rows) | {"scale": torch.tensor([1.0 + len(row["labels"]) % 3 for row in rows])}


def truncate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return collate([{key: values[:40] for key, values in row.items()} for row in rows])


def attend_pairs(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Has a mask of pairs of tokens: [rows, 1, length, length]."""
    batch = collate_with_names(rows)
    places = torch.arange(batch["input_ids"].shape[1])
    seen = batch["attention_mask"].bool()[:, None, None] & (places[:, None] >= places)
    return batch | {"attention_mask": seen}


def shift_labels(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Adds the labels of the next tokens, as sequence parallelism needs them."""
    batch = collate(rows)
    return batch | {"shift_labels": pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()}


def end_rows(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Adds a supervised token to every row."""
    return collate([{key: [*values, 7] for key, values in row.items()} for row in rows])


# Losses


def of_tokens(outputs: Any, labels: Tensor) -> Tensor:
    return cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def counts(labels: Tensor) -> Tensor:
    return (labels[:, 1:] != -100).sum(1)


def sample_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return (of_tokens(outputs, labels).sum(1) / counts(labels)).mean()


def sample_mean_of_all(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Counts samples without a supervised token."""
    return (of_tokens(outputs, labels).sum(1) / counts(labels).clamp_min(1)).mean()


def sample_mean_of_supervised(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    tokens = counts(labels)
    return (of_tokens(outputs, labels).sum(1) / tokens)[tokens > 0].mean()


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = of_tokens(outputs, labels)[labels[:, 1:] != -100]
    return (((1 - (-losses).exp()) ** 2) * losses).mean()


def in_batch_negatives(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    states = outputs.logits.mean(1)
    return cross_entropy(states @ states.T, torch.arange(len(states)))


def no_scalar(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return of_tokens(outputs, labels).sum(1)


def raises(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    if labels.shape[0] == 1:
        raise ValueError("one sample is too few")
    return means(outputs, labels)


def computes(loss_of: Callable[..., Tensor], *, gives_labels: bool = False) -> type[Trainer]:
    """A trainer with its own `compute_loss`. loss_of: outputs, labels, a value of each row, accumulation -> loss.
    gives_labels: the model gets labels, too, and computes its own loss."""

    class Computes(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            labels, scale = inputs["labels"], inputs.pop("scale", None)
            outputs = model(**{key: value for key, value in inputs.items() if gives_labels or key != "labels"})
            loss = loss_of(outputs, labels, scale, self.args.gradient_accumulation_steps)
            return (loss, outputs) if return_outputs else loss

    return Computes


OfTheModel = computes(lambda outputs, *_: outputs.loss, gives_labels=True)
"""Stock adds up the means of its micro-batches."""


ReadsRows = computes(
    lambda outputs, labels, scale, *_: (of_tokens(outputs, labels).sum(1) / counts(labels) * scale).mean()
)


class Penalizes(Trainer):
    """Adds a term made of weights, which counts once a micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())
        return (loss, outputs) if return_outputs else loss


class MeanOfMicroBatch(OfTheModel):  # type: ignore[valid-type,misc]
    """Declares to transformers (since 5.19) that its loss is the mean of a micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = False


class OwnLoss(Qwen3ForCausalLM):
    """Takes any argument and returns the mean over a micro-batch."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **_: Any
    ) -> CausalLMOutputWithPast:
        body = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        logits = self.lm_head(body.last_hidden_state.view(*input_ids.shape, self.config.hidden_size))
        loss = None if labels is None else means(CausalLMOutputWithPast(logits=logits), labels)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class WithoutHead(Qwen3ForCausalLM):
    """Returns no output embedding."""

    def get_output_embeddings(self) -> None:
        return None


class ReturnsTuple(Qwen3ForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels=labels, **kwargs).to_tuple()


# Trainings


@dataclass(frozen=True)
class Case:
    lengths: list[int] = field(default_factory=lambda: LONG)
    masks_first: bool = True
    has_unsupervised: bool = False
    model: type = Qwen3ForCausalLM
    trainer: type = Trainer
    loss: Callable[..., Tensor] | None = None
    collate: Callable[..., Any] = collate
    arguments: dict[str, Any] = field(default_factory=dict)
    budget: int = BUDGET
    close: float = 1e-5

    @property
    def rows(self) -> list[dict[str, list[int]]]:
        """has_unsupervised: every fifth row has no label with a loss."""
        rows = []
        for number, length in enumerate(self.lengths):
            ids = [20 + (number * 31 + place * 7) % 400 for place in range(length)]
            masked = length if self.has_unsupervised and number % 5 == 3 else int(self.masks_first)
            rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
        return rows


CASES = {
    "plain": Case(),
    "first labels": Case(masks_first=False),
    "rows of one token": Case(OF_ONE_TOKEN, masks_first=False),
    "rows of one token, each alone": Case(OF_ONE_TOKEN, masks_first=False, budget=1),
    "short rows in bf16": Case(SHORT, masks_first=False, arguments={"bf16": True}, close=2e-3),
    "left padding": Case(collate=functools.partial(collate, side="left")),
    "a collator that truncates": Case(masks_first=False, collate=truncate),
    "a collator that adds a token": Case(collate=end_rows),
    "tokens of a rank": Case(masks_first=False, arguments={"average_tokens_across_devices": False}),
    "no accumulation": Case(arguments={"gradient_accumulation_steps": 1}),
    "label smoothing": Case(masks_first=False, arguments={"label_smoothing_factor": 0.1}),
    "sum over tokens, divided": Case(masks_first=False, loss=divides),
    "mean over tokens": Case(loss=means),
    "mean over samples": Case(loss=sample_mean),
    "mean over samples, some without a supervised token": Case(has_unsupervised=True, loss=sample_mean_of_all),
    "mean over samples with a supervised token": Case(has_unsupervised=True, loss=sample_mean_of_supervised),
    "plain, some samples without a supervised token": Case(has_unsupervised=True),
    "mean over samples, left padding of late rows": Case(
        [40] * 16 + SHORT, collate=functools.partial(collate, side="left"), loss=sample_mean
    ),
    "focal": Case(loss=focal),
    "a compute_loss of means": Case(
        trainer=computes(lambda outputs, labels, scale, steps: sample_mean(outputs, labels) / steps)
    ),
    "a compute_loss that reads a value of each row": Case(trainer=ReadsRows, collate=collate_with_names),
    "a compute_loss of the model's": Case(trainer=OfTheModel),
    "a compute_loss that ignores the model's": Case(
        trainer=computes(lambda outputs, labels, *_: means(outputs, labels), gives_labels=True)
    ),
    "loss_is_scaled_for_ga": Case(trainer=MeanOfMicroBatch),
    "a model with a loss of its own": Case(model=OwnLoss),
    "a model that returns a tuple": Case(model=ReturnsTuple),
    "a mask of pairs": Case(trainer=ReadsRows, collate=attend_pairs),
    "labels that are shifted already": Case(masks_first=False, collate=shift_labels),
}
REFUSED = {
    "in-batch negatives": Case(loss=in_batch_negatives),
    "no scalar": Case(loss=no_scalar),
    "one sample raises": Case(loss=raises),
    "a term that is made of weights": Case(trainer=Penalizes),
    "a label is predicted from padding": Case(masks_first=False, collate=functools.partial(collate, side="left")),
}


def train(case: Case, folder: Path, block: dict[str, Any] | None) -> tuple[list[float], Tensor]:
    """The loss of every optimizer step, and all weights at the end."""
    torch.manual_seed(3)
    model = case.model(Qwen3Config(**CONFIG))
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "seed": 1,
        "data_seed": 5,
        "remove_unused_columns": False,
    }
    trainer = toy_training.train(
        model,
        folder,
        Rows(case.rows.__getitem__, len(case.lengths)),
        block=None if block is None else {"token_budget": case.budget, "overlong": "singleton"} | block,
        trainer_class=case.trainer,
        collate=case.collate,
        compute_loss_func=case.loss,
        **arguments | case.arguments,
    )
    weights = torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
    return losses(trainer), weights


def check(name: str, folder: Path) -> None:
    """The losses of all optimizer steps and the norm of all weights differ by less than the case allows (relative)."""
    case = CASES[name]
    stock_losses, stock_weights = train(case, folder, None)
    for layout in ("auto", "padded"):
        losses, weights = train(case, folder, {"layout": layout})
        assert losses == pytest.approx(stock_losses, rel=case.close, abs=0), (name, layout)
        assert (stock_weights - weights).norm() < case.close * stock_weights.norm(), (name, layout)


@pytest.mark.parametrize("name", CASES)
def test_odb_trains_the_loss_of_stock(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def train_on_a_rank(rank: int, names: list[str], output: str) -> None:
    for name in names:
        check(name, Path(output))


def test_two_ranks_train_the_loss_of_stock(tmp_path: Path) -> None:
    names = [name for name in CASES if name not in ("short rows in bf16", "no accumulation", "left padding")]
    arguments = {"names": names, "output": str(tmp_path)}
    run_ranks("training.test_stock_losses:train_on_a_rank", tmp_path, limit_s=240, **arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_fits_no_rule_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fits no rule") as refused:
        train(REFUSED[name], tmp_path, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scaling", ["stock", "exact", "none"])
def test_a_model_without_an_output_embedding_is_refused(scaling: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^model: ") as refused:
        train(Case(model=WithoutHead), tmp_path, {"loss_scaling": scaling})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_measurement_makes_few_logits(side: str, tmp_path: Path) -> None:
    """Logits of whole rows would need gigabytes: 152,000 numbers a token with the vocabulary of Qwen."""
    calls: list[int] = []

    class Counts(Qwen3ForCausalLM):
        def __init__(self, config: Qwen3Config):
            super().__init__(config)
            self.lm_head.register_forward_hook(lambda _, inputs, output: calls.append(output[..., 0].numel()))

    case = Case([100 + 7 * number for number in range(12)], model=Counts, collate=functools.partial(collate, side=side))
    train(case, tmp_path, {"token_budget": 512, "layout": "padded"})
    assert calls and max(calls) <= 64


@pytest.mark.parametrize("last", [20, 21, 22])
def test_an_evaluation_leaves_out_a_batch_without_a_supervised_token(last: int, tmp_path: Path) -> None:
    """Like transformers from 5.24 on (before, its loss is NaN). last: a number of rows that may not fill the rounds."""
    rows = Case().rows[:last]
    for row in (*rows[4:6], *rows[20:]):
        row["labels"] = [-100] * len(row["input_ids"])
    some = {"per_device_eval_batch_size": 2, "collate": collate, "remove_unused_columns": False}

    def evaluated(rows: Any, block: Any) -> float:
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
        return toy_training.make(model, tmp_path, block=block, **some).evaluate(rows)["eval_loss"]

    expected = evaluated(rows[:4] + rows[6:20], None)
    assert evaluated(rows, {"token_budget": BUDGET, "eval_token_budget": 128}) == pytest.approx(expected)
