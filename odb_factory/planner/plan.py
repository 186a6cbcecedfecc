"""A plan: for every rank its groups of samples, in the same number of micro-steps for all, and the totals of each.

Planners are pure functions of the integers that the ranks have gathered. Each rank computes the plan alone, with the
same result (I6): no clock, no communication, no I/O, no sum whose order matters.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Self

import numpy as np

from odb_factory.planner.cost import Budget, Cost

# ----------------------------------------------------------------------------------------------------------------------
# The samples that a rank holds, as integers: sent to the other ranks.

ROW = np.dtype(
    [
        ("tokens", "<i4"),
        ("row_tokens", "<i4"),
        ("patches", "<i4"),
        ("units", "<i4"),
        ("bytes", "<i4"),
        ("position", "<i4"),
        ("age", "u1"),
        ("modality", "u1"),
        ("has_media", "?"),
        ("leading_label", "?"),
        ("has_audio", "?"),
    ]
)
"""A sample: its `Cost`, the size of its features (bytes), its position in the optimizer step (if steps are kept),
and its age, the rounds in which it was kept back (255: or more)."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferMetadata:
    """The samples a rank holds, as an array of `ROW`. exhausted: its sampler has no further one."""

    rows: np.ndarray
    exhausted: bool


def make_metadata(
    costs: Sequence[Cost],
    ages: Sequence[int],
    exhausted: bool,
    sizes: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> BufferMetadata:
    """costs, ages, sizes (bytes; default 0), positions (default 0): one entry a sample."""
    zeros = [0] * len(costs)
    rows = [
        (
            cost.tokens,
            cost.padded,
            cost.patches,
            cost.units,
            min(size, np.iinfo(np.int32).max),
            position,
            min(age, 255),
            cost.modality,
            cost.has_media,
            cost.leading_label,
            cost.has_audio,
        )
        for cost, age, size, position in zip(costs, ages, sizes or zeros, positions or zeros)
    ]
    return BufferMetadata(np.array(rows, dtype=ROW), exhausted)


# ----------------------------------------------------------------------------------------------------------------------
# The samples that a plan is made of.

MAX_REDISTRIBUTED_BYTES = 1 << 28
"""If a rank holds more than this (256 MiB), samples stay where they are: it might have to send all of them."""


def pool(buffers: Sequence[BufferMetadata]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """The samples of all ranks as one array of `ROW`, where those of each rank start in it, and the rank of each."""
    sizes = [len(buffer.rows) for buffer in buffers]
    starts = np.cumsum([0, *sizes]).tolist()
    table = np.empty(starts[-1], ROW)  # numpy.concatenate compares the fields of structured arrays, one by one
    for buffer, start, end in zip(buffers, starts, starts[1:]):
        table[start:end] = buffer.rows
    return table, starts, np.repeat(np.arange(len(buffers)), sizes)


def exceeds_limit(buffers: Sequence[BufferMetadata]) -> bool:
    """Whether the samples of any of several ranks are too heavy to travel (bytes)."""
    return (
        len(buffers) > 1
        and max(int(buffer.rows["bytes"].sum(dtype=np.int64)) for buffer in buffers) > MAX_REDISTRIBUTED_BYTES
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """Samples to cut into groups.

    table: of all ranks, an array of `ROW`. starts: as in `Plan`. owner: the rank that holds each sample of the table.
    index: the samples to cut, as positions in the table [n]. pool: of each of them the ranks it may go to: one pool for
    all ranks that share their samples, or one for each rank [n]. slots: ranks that share a pool.
    """

    table: np.ndarray
    starts: list[int]
    owner: np.ndarray
    index: np.ndarray
    pool: np.ndarray
    slots: int
    budget: Budget

    @classmethod
    def held_by(cls, buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool) -> Samples:
        """All of them. balance: ranks share them, unless they are too heavy to travel."""
        table, starts, owner = pool(buffers)
        shares = balance and len(buffers) > 1 and not exceeds_limit(buffers)
        return cls(
            table=table,
            starts=starts,
            owner=owner,
            index=np.arange(len(table)),
            pool=np.zeros_like(owner) if shares else owner,
            slots=len(buffers) if shares else 1,
            budget=budget,
        )

    @property
    def rows(self) -> np.ndarray:
        rows: np.ndarray = self.table[self.index]
        return rows

    def of(self, chosen: np.ndarray) -> Self:
        """Some of them, as positions in these."""
        return replace(self, index=self.index[chosen], pool=self.pool[chosen])


PoolGroup = tuple[int, np.ndarray]
"""A pool and a group of its samples, as positions in the table."""
Steps = list[list[np.ndarray | None]]
"""For each micro-step the group of every rank, as positions in the table; None: the rank idles."""


def to_ranks(steps: Sequence[Sequence[PoolGroup]], samples: Samples) -> Steps:
    """If ranks share a pool any rank takes any group of a micro-step, else that of its own pool."""
    num_ranks = len(samples.starts) - 1
    if samples.slots > 1:
        return [_assigned([group for _, group in step], samples.owner, num_ranks) for step in steps]
    return [[of_pool.get(rank) for rank in range(num_ranks)] for of_pool in map(dict, steps)]


def _assigned(groups: Sequence[np.ndarray], owner: np.ndarray, num_ranks: int) -> list[np.ndarray | None]:
    """Give each group of a micro-step to the rank that already holds most of its samples; at most one to each rank."""
    assigned: list[np.ndarray | None] = [None] * num_ranks
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    pairs, counts = np.unique(group_of * num_ranks + owner[np.concatenate(groups)], return_counts=True)
    unassigned = dict.fromkeys(range(len(groups)))
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        group, rank = divmod(pair, num_ranks)
        if assigned[rank] is None and group in unassigned:
            assigned[rank] = groups[group]
            del unassigned[group]
    free = (rank for rank in range(num_ranks) if assigned[rank] is None)
    for group, rank in zip(unassigned, free):
        assigned[rank] = groups[group]
    return assigned


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroStepTotals:
    """What all ranks together do in one micro-step. Tokens are real; padded_tokens and patches are as collated.

    padded_tokens: rows x padded row length, or, if the layout is flat, tokens, dummy media and what the total is
    rounded up by. max_rank_tokens, max_rank_patches: the most of any rank, for which all wait.
    moved: samples that travel to another rank for this step.
    """

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    patches: int = 0
    units: int = 0
    active_ranks: int = 0
    max_rank_tokens: int = 0
    max_rank_patches: int = 0
    moved: int = 0


MAXIMA = ("max_rank_tokens", "max_rank_patches")


def sum_totals(totals: Sequence[MicroStepTotals]) -> MicroStepTotals:
    """Of several micro-steps."""
    columns = zip(*map(astuple, totals))
    names = (item.name for item in fields(MicroStepTotals))
    return MicroStepTotals(*(max(ns) if name in MAXIMA else sum(ns) for name, ns in zip(names, columns)))


@dataclass(frozen=True, slots=True)
class Plan:
    """One round (fill) or one optimizer step (keep).

    groups: of each rank the group of each micro-step, in batch order; empty if it idles. Samples are numbered
    through the buffers of all ranks: rank r holds those from starts[r] on, up to starts[r + 1].
    final: the epoch ends with this round.
    """

    groups: list[list[list[int]]]
    starts: list[int]
    totals: list[MicroStepTotals]
    final: bool

    def checksum(self) -> int:
        """Equal for equal plans; ranks compare it to check that all have computed the same plan."""
        sizes = [len(group) for groups in self.groups for group in groups]
        samples = itertools.chain.from_iterable(itertools.chain.from_iterable(self.groups))
        content = np.fromiter(itertools.chain((self.final, len(self.groups)), sizes, samples), dtype="<i8")
        return zlib.crc32(content.tobytes())

    @property
    def moves(self) -> bool:
        """Whether any sample goes out on another rank than the one that holds it."""
        return any(step.moved for step in self.totals)


def to_plan(steps: Steps, samples: Samples, final: bool) -> Plan:
    """The plan of these micro-steps, with the totals of each."""
    groups = [[[] if group is None else group.tolist() for group in rank] for rank in zip(*steps)] or [
        [] for _ in samples.starts[1:]
    ]
    return Plan(groups, samples.starts, [_totals(samples, step) for step in steps], final)


def _totals(samples: Samples, step: Sequence[np.ndarray | None]) -> MicroStepTotals:
    present = {rank: group for rank, group in enumerate(step) if group is not None}
    if not present:
        return MicroStepTotals()
    busy = list(present)
    chosen = np.concatenate(list(present.values()))
    rows, sizes = samples.table[chosen], np.array([len(group) for group in present.values()])
    starts = np.cumsum(sizes) - sizes
    moved = samples.owner[chosen] != np.repeat(busy, sizes)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values.astype(np.int64), starts)

    row_tokens = rows["row_tokens"].astype(np.int64)
    collated_rows, lengths, patches = samples.budget.collated(
        count=sizes,
        tokens=sums(rows["tokens"]),
        patches=sums(rows["patches"]),
        media=sums(rows["has_media"]),
        audio=sums(rows["has_audio"]),
        longest=np.maximum.reduceat(row_tokens, starts),
        first=row_tokens[starts],
    )
    collated = collated_rows * lengths
    return MicroStepTotals(
        samples=len(rows),
        tokens=int(rows["tokens"].sum(dtype=np.int64)),
        padded_tokens=int(collated.sum()),
        patches=int(patches.sum()),
        units=int(rows["units"].sum(dtype=np.int64)),
        active_ranks=len(busy),
        max_rank_tokens=int(collated.max()),
        max_rank_patches=int(patches.max()),
        moved=int(moved.sum()),
    )
