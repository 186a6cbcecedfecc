"""Plan one round: for every rank the groups it sends out, in the same number of steps for all (DGAP).

A pure function of what the ranks have told each other: the windows of all in integers. Each rank computes it
alone, with the same result (I6): no clock, no communication, no I/O, no sum whose order matters.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.metadata import ROW, BufferMetadata
from odb_factory.planning.per_rank import Steps, plan_per_rank
from odb_factory.planning.pooled import plan_pooled

MAX_REDISTRIBUTED_BYTES = 1 << 28
"""Where a rank holds more than that (256 MiB), samples stay where they are: it could have to hand over all of them."""


@dataclass(frozen=True, slots=True)
class MicroStepTotals:
    """What all ranks together do in one step. Tokens are real; padded_tokens and patches are as collated.

    max_rank_tokens, max_rank_patches, max_rank_attention: the most of any rank, for which all wait: padded tokens,
    patches, and rows x padded row length squared.
    moved, moved_bytes: samples that are handed to another rank for this step.
    """

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    patches: int = 0
    supervised_tokens: int = 0
    active_ranks: int = 0
    max_rank_tokens: int = 0
    max_rank_patches: int = 0
    max_rank_attention: int = 0
    moved: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One round.

    groups: of each rank the group of each step, in batch order; empty on an idle step. Samples are numbered through
    the windows of all ranks: rank r holds those from starts[r] on, up to starts[r + 1].
    final: the epoch ends with this round. exceeds_transfer_limit: samples were to be balanced, and weigh too much.
    """

    groups: list[list[list[int]]]
    starts: list[int]
    totals: list[MicroStepTotals]
    final: bool
    exceeds_transfer_limit: bool = False

    def checksum(self) -> int:
        """The same for equal plans: what ranks compare to be sure that all have computed the same one."""
        sizes = [len(group) for groups in self.groups for group in groups]
        samples = itertools.chain.from_iterable(itertools.chain.from_iterable(self.groups))
        content = np.fromiter(itertools.chain((self.final, len(self.groups)), sizes, samples), dtype="<i8")
        return zlib.crc32(content.tobytes())

    @property
    def moves(self) -> bool:
        """Whether any sample goes out on another rank than the one that holds it."""
        return any(step.moved for step in self.totals)


def plan_buffers(
    windows: Sequence[BufferMetadata],
    budget: Budget,
    *,
    seed: int,
    epoch: int,
    round_index: int,
    accumulation: int = 1,
    join: bool = True,
    balance: bool = False,
    model: CostModel = CostModel(),
) -> Plan:
    """Choose the steps of one round for all ranks.

    windows: one a rank; a rank that is not exhausted holds a sample (`accumulation` samples without join).
    join: once all samplers are exhausted everything goes out, ranks with less taking idle micro-batches (I1, I2).
    Without join the round is whole optimizer steps of `accumulation` micro-steps, and the epoch ends when an exhausted
    rank cannot fill another; no rank idles (I3).
    balance: a rank may be given samples that another holds (with join only), unless they are too heavy.
    model: what makes ranks wait, by which groups that go out in one step are chosen.
    Emits at least one sample on every rank that holds one, but for the end without join; with balance, one on every
    rank if there are so many (I5).
    """
    table, starts, owner_rank = pool(windows)
    exhausted = [window.exhausted for window in windows]
    balance = balance and len(windows) > 1
    exceeds_transfer_limit = balance and exceeds(windows)
    if balance and not exceeds_transfer_limit:
        final = all(exhausted)
        steps = plan_pooled(Rows(table, np.arange(len(table)), budget), owner_rank, len(windows), model, final=final)
    else:
        held = [Rows(table, np.arange(start, end), budget) for start, end in itertools.pairwise(starts)]
        steps, final = plan_per_rank(held, exhausted, model, accumulation=accumulation, join=join)
    steps = list(_shuffled(steps, np.random.default_rng([seed % 2**64, epoch, round_index])))
    return to_plan(steps, table, starts, owner_rank, budget, final, exceeds_transfer_limit)


def pool(buffers: Sequence[BufferMetadata]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """The samples of all ranks as one array of `ROW`, where those of each rank start in it, and the rank of each."""
    sizes = [len(buffer.rows) for buffer in buffers]
    starts = np.cumsum([0, *sizes]).tolist()
    table = np.empty(starts[-1], ROW)  # numpy.concatenate compares the fields of structured arrays, one by one
    for buffer, start, end in zip(buffers, starts, starts[1:]):
        table[start:end] = buffer.rows
    return table, starts, np.repeat(np.arange(len(buffers)), sizes)


def exceeds(buffers: Sequence[BufferMetadata]) -> bool:
    """Whether the samples of any rank are too heavy to travel (bytes)."""
    return max(int(buffer.rows["bytes"].sum(dtype=np.int64)) for buffer in buffers) > MAX_REDISTRIBUTED_BYTES


def to_plan(
    steps: Steps,
    table: np.ndarray,
    starts: list[int],
    owner_rank: np.ndarray,
    budget: Budget,
    final: bool,
    exceeds_transfer_limit: bool,
) -> Plan:
    """The plan of these micro-steps, with the totals of each."""
    groups = [[[] if group is None else group.tolist() for group in rank] for rank in zip(*steps)] or [
        [] for _ in starts[1:]
    ]
    totals = [_totals(table, owner_rank, step, budget) for step in steps]
    return Plan(groups, starts, totals, final, exceeds_transfer_limit)


def _shuffled(steps: Steps, rng: np.random.Generator) -> Iterator[list[np.ndarray | None]]:
    """The steps in another order: long groups shall not always come first.

    Only those with the same number of busy ranks change places: a rank idles behind its last group, never before
    it (I7).
    """
    busy = [sum(group is not None for group in step) for step in steps]
    for count in sorted(set(busy), reverse=True):
        alike = [step for step, ranks in zip(steps, busy) if ranks == count]
        yield from (alike[i] for i in rng.permutation(len(alike)))


def _totals(table: np.ndarray, home: np.ndarray, step: Sequence[np.ndarray | None], budget: Budget) -> MicroStepTotals:
    present = {rank: group for rank, group in enumerate(step) if group is not None}
    if not present:
        return MicroStepTotals()
    busy = list(present)
    chosen = np.concatenate(list(present.values()))
    rows, sizes = table[chosen], np.array([len(group) for group in present.values()])
    starts = np.cumsum(sizes) - sizes
    moved = home[chosen] != np.repeat(busy, sizes)
    has_media = np.logical_or.reduceat(rows["has_media"], starts)
    patches = np.add.reduceat(rows["patches"].astype(np.int64), starts)
    patches += np.where(has_media, 0, budget.collation.dummy_media_patches)
    longest = np.maximum.reduceat(rows["tokens"], starts).tolist()
    first = rows["tokens"][starts].tolist()
    lengths = np.array([budget.collation.length(*shape) for shape in zip(longest, first, has_media.tolist())])
    padded = sizes * lengths
    return MicroStepTotals(
        samples=len(rows),
        tokens=int(rows["tokens"].sum(dtype=np.int64)),
        padded_tokens=int(padded.sum()),
        patches=int(patches.sum()),
        supervised_tokens=int(rows["supervised_tokens"].sum(dtype=np.int64)),
        active_ranks=len(busy),
        max_rank_tokens=int(padded.max()),
        max_rank_patches=int(patches.max()),
        max_rank_attention=int((padded * lengths).max()),
        moved=int(moved.sum()),
        moved_bytes=int(rows["bytes"][moved].sum(dtype=np.int64)),
    )
