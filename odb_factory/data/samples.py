"""What travels through the loader: light samples in, micro-batches of optimizer steps out, rows that are left out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from odb_factory.log import get_logger
from odb_factory.planner import Budget, Cost, Media, MicroStepTotals


@dataclass(slots=True)
class Sample:
    """One observed row: its index in the training dataset, its cost and its light features (see `serialize.pack`)."""

    id: int
    cost: Cost
    features: bytes


@dataclass(slots=True)
class Rejection:
    """A row that is left out when it is read, before any plan. fatal: the training stops with `message`."""

    id: int
    reason: str
    message: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """What is left of the order of an epoch with `fill`: the positions from `first` on, and those held back before it.

    Position p is drawn by rank p % ranks, the held ones first. (Of streams that are split, item n of rank r counts as
    position n * ranks + r.)
    """

    first: int = 0
    held: list[int] = field(default_factory=list)

    def of_ranks(self, world_size: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Of each rank the positions that it holds, and its first one from `first` on."""
        held, ranks = np.array(self.held, dtype=np.int64), np.arange(world_size)
        owners = held % world_size
        ends = np.cumsum(np.bincount(owners, minlength=world_size))
        held_by_rank = np.split(held[np.argsort(owners, kind="stable")], ends[:-1])
        return held_by_rank, self.first + (ranks - self.first) % world_size

    def positions(self, rank: int, world_size: int) -> Iterator[int]:
        """Those that a rank draws, in ascending order, without end."""
        held, firsts = self.of_ranks(world_size)
        return itertools.chain(held[rank].tolist(), itertools.count(int(firsts[rank]), world_size))

    def after(self, drawn: np.ndarray, waiting: np.ndarray) -> Remaining:
        """What is left once each rank has drawn this many of its positions, of which `waiting` are not trained on."""
        world_size = len(drawn)
        held, starts = self.of_ranks(world_size)
        num_beyond = np.maximum(drawn - [len(positions) for positions in held], 0)
        nexts = starts + num_beyond * world_size
        first = max(self.first, int((nexts - world_size + 1)[num_beyond > 0].max(initial=0)))
        # A rank that is slower than others has not drawn all positions before `first`.
        slower = [positions[number:] for positions, number in zip(held, drawn)]
        slower += [np.arange(start, first, world_size) for start in nexts]
        remaining = np.unique(np.concatenate([waiting, *slower]))
        return Remaining(first=first, held=remaining.astype(np.int64).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(MicroStepTotals):
    """One update of the weights, as every rank knows it before its first forward: the totals of its micro-steps, and
    its place in the epoch.

    epoch, index: position; index counts the optimizer steps of the epoch from 0.
    num_micro_batches: K, the micro-batches of each rank. active_ranks: those of all ranks that are not idle.
    num_stock_means: what stock divides the sum of its means by: their number, or what `StockMean` has in its place (0:
        there is no stock step to compare with, as with `fill`).
    stock_input_tokens: padded tokens of the batches that stock would have given this rank (None: as above).
    done: samples of the epoch planned or rejected, on all ranks, once this step is taken.
    progress: of the epoch in stock's micro-steps once this step is taken, 0 to 1; None if that is not known.
    rejected: rows of the epoch rejected on all ranks until this step was planned, by reason.
    overlong: samples of the epoch that break a budget alone, on all ranks, seen until this step was planned.
    remainder: on the last step, rows that the epoch ends without (`join: false`, `drop_last`); 0 before.
    epoch_steps: optimizer steps of the whole epoch: exact with kept steps of a dataset with a length (and in the last
        step), else estimated; 0 if that is not known.
    last: no step follows in this epoch.
    remaining: with `fill`, what is left of the order after it.
    """

    epoch: int
    index: int
    num_micro_batches: int
    num_stock_means: float
    stock_input_tokens: int | None
    done: int
    progress: float | None
    rejected: Counter[str]
    overlong: int
    remainder: int
    epoch_steps: int
    last: bool
    remaining: Remaining | None = None


class SampleInfo(NamedTuple):
    """What is known of a sample of a micro-batch.

    id: its row of the training dataset. tokens: without padding.
    stock_units: what stock divides by to take the mean that the sample is part of; stock_counted: its own share of
    these. stock_batch: the number of stock's micro-batch, counted rank by rank, then micro-step by micro-step. All 0
    with `fill`.
    weight: of each of its units in the loss of its optimizer step (see `token_weights`).
    """

    id: int
    tokens: int
    units: int
    stock_units: int = 0
    stock_counted: int = 0
    stock_batch: int = 0
    weight: float = 0.0

    @classmethod
    def of(cls, sample: Sample, *of_stock: int) -> SampleInfo:
        return cls(sample.id, sample.cost.tokens, sample.cost.units, *of_stock)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward of this rank, and what all ranks know about that micro-step.

    step: the optimizer step that it is a part of. index: its number in it, from 0.
    samples: in batch order; empty on an idle micro-batch.
    totals: the micro-step over all ranks.
    light: what is collated for it: its samples; on an idle one the sample that is run with weight 0. Empty once it is
        collated, unless it may be collated again.
    failed: late rows, which it was planned with, and why they are not in it.
    start: of a part that was cut (`oom: split`), the number of its first sample in the micro-batch as collated before.
    """

    step: OptimizerStep
    index: int
    samples: tuple[SampleInfo, ...]
    totals: MicroStepTotals
    light: Sequence[Sample] = field(default=(), repr=False, compare=False)
    failed: tuple[tuple[SampleInfo, str], ...] = ()
    start: int = 0

    def only(self, numbers: Sequence[int], failed: tuple[tuple[SampleInfo, str], ...] = ()) -> MicroBatch:
        """With these of its samples, which weigh as before; its totals stay."""
        samples, light = tuple(self.samples[i] for i in numbers), [self.light[i] for i in numbers]
        return replace(self, samples=samples, light=light, failed=failed)

    def cut(self, at: int) -> tuple[MicroBatch, MicroBatch]:
        """Two parts, the second from sample number `at` on."""
        first, second = self.only(range(at)), self.only(range(at, len(self.samples)))
        return first, replace(second, start=self.start + at)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(sample.id for sample in self.samples)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(sample.tokens for sample in self.samples)

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(sample.units for sample in self.samples)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(sample.weight for sample in self.samples)

    @property
    def idle(self) -> bool:
        return not self.samples

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_units(self) -> int:
        return sum(self.units)

    @property
    def begins_optimizer_step(self) -> bool:
        return self.index == self.start == 0

    @property
    def ends_optimizer_step(self) -> bool:
        return self.index == self.step.num_micro_batches - 1


# The weight of every unit within its optimizer step (I8, I9).
# With `loss_scaling` one of these, a unit of sample s with n units weighs
#     stock     1 / (num_stock_means x stock_units of s)     as in stock training
#     exact     1 / (units of the step)                       the mean over the units of the step
#     approx    as exact, with the micro-batch's share of the step's input tokens in place of its units
#     none      1 / (micro-batches of all ranks x units of this one)      the mean of micro-batch means
# All sums are known from the plan, so no communication is needed.


def token_weights(micro_batch: MicroBatch, loss_scaling: str, world_size: int) -> tuple[float, ...]:
    """For each sample of a planned micro-batch the weight of each of its units, times `world_size`; () if idle.

    world_size: the data-parallel ranks, over which the engine averages gradients; it sums them over micro-batches.
    """
    samples, step = micro_batch.samples, micro_batch.step
    if not samples:
        return ()
    match loss_scaling:
        case "stock":
            return tuple(world_size / (step.num_stock_means * sample.stock_units or 1) for sample in samples)
        case "exact":
            divisor: float = step.units
        case "approx":
            divisor = step.tokens * micro_batch.num_units / micro_batch.tokens
        case _:
            divisor = step.active_ranks * micro_batch.num_units
    return (world_size / (divisor or 1),) * len(samples)


@dataclass(frozen=True, slots=True)
class Measured:
    """The collated tensors of a micro-batch: rows, padded row length (tokens), media, units (see `Cost`).

    segments: of a flat one, whose rows are 1, the lengths (tokens) of what follows each other in it: the samples, in
        the order of `ids`, then what fills up (dummy media, a multiple); () if it is padded.
    units_by_row: if units are labels that carry loss, those of each row or, of a flat one, of each segment.
    why_padded: why it is not the flat row that was planned; "" if it is, or if a padded one was planned.
    """

    rows: int
    length: int
    media: Media
    units: int
    segments: tuple[int, ...] = ()
    units_by_row: tuple[int, ...] | None = None
    why_padded: str = ""

    @property
    def patches(self) -> int:
        return self.media.patches

    @property
    def num_supervised(self) -> int | None:
        """Tokens with a loss; None if units are something else."""
        return None if self.units_by_row is None else self.units

    def __str__(self) -> str:
        return describe_cost(self.rows * self.length, self.media)

    def is_within(self, budget: Budget) -> bool:
        """As configured: what memory allowed less of was planned before."""
        return not budget.excess(self.rows * self.length, self.patches)


def describe_cost(tokens: int, media: Media) -> str:
    """A sample or a micro-batch as in messages: 900 tokens, 400 image patches, 3000 audio frames."""
    return f"{tokens} tokens, {media}" if any(media) else f"{tokens} tokens"


# The rows that are left out: one way for all reasons. A row is rejected when it is read, before a plan, or it fails: it
# is planned, and then cannot be collated, or memory does not hold it. One that fails after its optimizer step began is
# late: the others keep their weights, and its share of the loss is lost.

MAX_LOGGED, MOST_NAMED = 10, 16
"""Rows that are logged, and that a message names."""
COLLATION, OUT_OF_MEMORY = "collation", "out_of_memory"
"""The reasons of rows that fail: they cannot be collated, or are of a micro-batch that memory does not hold."""
HINTS = {"unsupervised": " (no token carries loss; cutoff_len may cut the answers off, and nothing would be learned)"}

logger = get_logger(__name__)


class LeftOut:
    """Logs the first rows that this rank leaves out; the accounting counts those of all ranks."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def leave_out(self, reason: str, message: str) -> None:
        """Leave a row out. Any thread."""
        number = next(self._numbers)
        if number <= MAX_LOGGED:
            logger.warning("left out (%s): %s", reason, message)
        if number == MAX_LOGGED:
            logger.warning("further rows that are left out are counted and not logged")


def name_rows(ids: Sequence[int]) -> str:
    """Rows as in messages, at most `MOST_NAMED`: `row 3`, `rows 1, 2, ...`."""
    ellipsis = ", ..." if len(ids) > MOST_NAMED else ""
    return f"row{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:MOST_NAMED]))}{ellipsis}"


def no_usable_row(rejected: Mapping[str, int], other_reasons: Sequence[str] = (), empty: str = "it is empty") -> str:
    """Why no row can be trained on. rejected: rows by reason. other_reasons: more. empty: said if there is none."""
    reasons = [f"{count} {reason}{HINTS.get(reason, '')}" for reason, count in rejected.items()]
    named = "; the warnings above name the first of them" if rejected else ""
    return f"no row of the training dataset can be trained on: {', '.join([*reasons, *other_reasons]) or empty}{named}."
