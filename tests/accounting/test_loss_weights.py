"""I8, I9: with any cut of an optimizer step over ranks and micro-steps, the losses add up to the defined loss; and the
weighted token loss from logits (with the forward of real models: tests/model/test_head.py)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy
from toy import a_micro_batch
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from odb_factory.accounting import TokenLoss, loss_of, weighted_token_loss
from odb_factory.config import LOSS_SCALINGS
from odb_factory.data.samples import MicroBatch, SampleInfo, token_weights
from odb_factory.errors import ConfigError, DataError


@dataclass(frozen=True)
class Row:
    """A sample: its tokens, the losses of its supervised tokens, the labels that stock counts; and the number of the
    step, of the rank and of the micro-batch that stock may take a mean over."""

    tokens: int
    losses: list[float]
    labels: int
    step: int
    rank: int
    micro_batch: int


def random_rows(rng: random.Random) -> list[Row]:
    """Rows in micro-batches of three, which stock deals to two ranks in turn; some have a first label, too."""
    rows = []
    for k in range(rng.randrange(1, 25)):
        losses = [rng.uniform(0.1, 9) for _ in range(rng.randrange(1, 40))]
        rows.append(Row(len(losses) + rng.randrange(1, 30), losses, len(losses) + k % 2, 0, k // 3 % 2, k // 3))
    return rows


def random_cut(rng: random.Random, rows: list[Row]) -> list[list[list[Row]]]:
    """[rank][micro-step], lists of samples; some are empty (idle)."""
    num_micro_steps = rng.randrange(1, 5)
    slots: list[list[list[Row]]] = [[[] for _ in range(num_micro_steps)] for _ in range(rng.randrange(1, 5))]
    for row in rows:
        rng.choice(rng.choice(slots)).append(row)
    return slots


def counted(row: Row, mean: str) -> int:
    """The contribution of the row to the denominator of stock's mean."""
    return len(row.losses) if mean == "micro_batch" else row.labels


def planned(rows: list[Row], slots: list[list[list[Row]]], mean: str) -> list[list[MicroBatch]]:
    """[rank][micro-step], as the loader of each rank returns them."""
    units = Counter[int]()
    for row in rows:
        units[getattr(row, mean)] += counted(row, mean)
    template = a_micro_batch()
    step = replace(
        template.step,
        num_micro_batches=len(slots[0]),
        num_stock_means=len(units),
        samples=len(rows),
        units=sum(len(row.losses) for row in rows),
        tokens=sum(row.tokens for row in rows),
        active_ranks=sum(bool(own) for rank in slots for own in rank),
    )

    def info(row: Row) -> SampleInfo:
        return SampleInfo(rows.index(row), row.tokens, len(row.losses), units[getattr(row, mean)])

    return [
        [replace(template, step=step, index=n, samples=tuple(map(info, own))) for n, own in enumerate(rank)]
        for rank in slots
    ]


def mean_of(rows: Iterable[Row]) -> float:
    return fmean(loss for row in rows for loss in row.losses)


def defined(scaling: str, rows: list[Row], slots: list[list[list[Row]]], mean: str) -> float:
    active = [own for rank in slots for own in rank if own]
    if scaling == "stock":
        groups = [[row for row in rows if getattr(row, mean) == k] for k in {getattr(row, mean) for row in rows}]
        return fmean(
            math.fsum(loss for row in own for loss in row.losses) / sum(counted(row, mean) for row in own)
            for own in groups
        )
    if scaling == "exact":
        return mean_of(rows)
    if scaling == "approx":
        tokens = [sum(row.tokens for row in own) for own in active]
        return math.fsum(n * mean_of(own) for n, own in zip(tokens, active)) / sum(tokens)
    return fmean(map(mean_of, active))


@pytest.mark.parametrize(
    ("scaling", "mean"), [("stock", "rank"), ("stock", "micro_batch"), *((name, "step") for name in LOSS_SCALINGS)]
)
def test_any_cut_adds_up_to_the_definition(scaling: str, mean: str) -> None:
    """The engine adds the losses of micro-batches up over micro-steps and averages over ranks.

    A micro-batch whose samples have equal weights keeps the model's own mean.
    """
    for seed in range(40):
        rng = random.Random(seed)
        rows = random_rows(rng)
        slots = random_cut(rng, rows)
        total = 0.0
        for of_rank, batches in zip(slots, planned(rows, slots, mean)):
            for own, micro_batch in zip(of_rank, batches):
                scale, row_weights = loss_of(token_weights(micro_batch, scaling, len(slots)), micro_batch.units)
                if micro_batch.idle:
                    assert (scale, row_weights) == (0.0, None)
                elif row_weights is None:
                    total += scale * mean_of(own)
                else:
                    assert mean in ("rank", "micro_batch")
                    weighed = list(zip(row_weights, own))
                    assert math.fsum(weight * len(row.losses) for weight, row in weighed) == pytest.approx(1)
                    total += scale * math.fsum(weight * math.fsum(row.losses) for weight, row in weighed)
        assert total / len(slots) == pytest.approx(defined(scaling, rows, slots, mean), rel=1e-12), seed


# The weighted token loss from logits

ROW_WEIGHTS = (0.07, 0.3)


def _batch() -> dict[str, Tensor]:
    """Rows of 9 and 6 tokens. The first three tokens of each, and the padding, have no loss."""
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class FusedLoss(nn.Module):
    """A model that computes its loss in another way, like a fused kernel."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        logits = self.model(input_ids=input_ids, **inputs).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["fused", "own function", "not of transformers"])
def test_a_loss_made_elsewhere_is_refused_by_name(tiny_text: Path, kind: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text)
    if kind == "own function":
        model.loss_function = lambda logits, labels, vocab_size, **_: ForCausalLMLoss(logits, labels, vocab_size)
    called: Any = FusedLoss(model) if kind == "fused" else model
    if kind == "not of transformers":
        model, called = nn.Linear(1, 1), lambda **_: None
    with pytest.raises(ConfigError) as refused, TokenLoss(model, "stock").weighing(ROW_WEIGHTS):
        called(**_batch())
    assert str(refused.value).startswith("odb.loss_scaling: 'stock' ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(("shape", "segments"), [((1, 17, 5), (9, 6, 3)), ((2, 9, 5), (9, 6, 3)), ((1, 4, 5), ())])
def test_logits_of_other_rows_are_refused(shape: tuple[int, ...], segments: tuple[int, ...]) -> None:
    with pytest.raises(DataError):
        weighted_token_loss(torch.zeros(shape), torch.zeros(shape[:2]).long(), ROW_WEIGHTS, segments=segments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [(), (9, 6, 3)], ids=["padded", "flat"])
def test_autocast_does_not_round_the_loss(dtype: torch.dtype, segments: tuple[int, ...]) -> None:
    """I8: loss and gradient within autocast are bit for bit those outside."""
    torch.manual_seed(0)
    labels = _batch()["labels"] if not segments else torch.randint(0, 100, (1, 18))
    logits = torch.randn(*labels.shape, 100)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = weighted_token_loss(leaf, labels, ROW_WEIGHTS, segments=segments)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    expected = loss_and_gradient()
    assert not segments or not expected[1][:, 15:].any(), "the filling of a flat row weighs 0"
    with torch.autocast("cpu", dtype):
        loss, gradient = loss_and_gradient()
    assert loss.dtype == torch.float32 and torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_copy_of_the_logits_is_made(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 256, 512, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 512, (2, 256))

    def peak(loss_of: Any) -> int:
        """Peak of live bytes in forward and backward, by torch's own tracker."""
        tracker = MemTracker()
        tracker.track_external(logits, labels)
        logits.grad = None
        with tracker:
            loss_of(logits * 1).backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    own = peak(lambda x: ForCausalLMLoss(x, labels, 512))
    assert own > 3 * logits.numel() * logits.element_size(), "the tracker sees them"
    vector = labels.numel() * 8
    assert peak(lambda x: weighted_token_loss(x, labels, ROW_WEIGHTS)) <= own + vector
    row, segments = labels.view(1, -1), (300, 200, 12)
    assert peak(lambda x: weighted_token_loss(x.view(1, 512, 512), row, ROW_WEIGHTS, segments=segments)) <= own + vector
