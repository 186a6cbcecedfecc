"""A plan: the groups of samples of every rank, in the same number of micro-steps, and the totals of each micro-step.

Planners are pure functions of integers that the ranks have gathered. Each rank computes the plan alone, with the same
result (I6): no clock, no communication, no I/O, no sum whose order matters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from odb_factory.planner.cost import MEASURES, STEP_COST, Budget, Cost

FIELDS_OF_COST = ("tokens", "patches", "units", "modality", "has_media", "leading_label", "has_audio")
ROW = np.dtype(
    [(name, "<i4") for name in ("tokens", "row_tokens", "patches", "units", "bytes", "position")]
    + [("modality", "u1"), ("has_media", "?"), ("leading_label", "?"), ("has_audio", "?")]
)
"""A sample: its `Cost`, the size of its features (bytes), and its position in the optimizer step (`keep`) or in the
order of the epoch (`fill`)."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferMetadata:
    """The samples that a rank holds, as an array of `ROW`. exhausted: its sampler has no more samples."""

    rows: np.ndarray
    exhausted: bool


def make_metadata(
    costs: Sequence[Cost],
    exhausted: bool,
    sizes: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> BufferMetadata:
    """costs, sizes (bytes; default 0), positions (default: 0, 1, 2, ...): one entry for each sample."""
    rows = np.zeros(len(costs), ROW)
    for name in FIELDS_OF_COST:
        rows[name] = [getattr(cost, name) for cost in costs]
    rows["row_tokens"] = [cost.padded for cost in costs]
    rows["bytes"] = np.minimum(sizes or 0, np.iinfo(np.int32).max)
    rows["position"] = positions or range(len(costs))
    return BufferMetadata(rows, exhausted)


MAX_REDISTRIBUTED_BYTES = 1 << 28
"""Samples stay on their ranks if any rank holds more than this (256 MiB): it might have to send all of them."""


def pool(buffers: Sequence[BufferMetadata]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """The samples of all ranks as one array of `ROW`, the start of each rank in it, and the rank of each sample."""
    sizes = [len(buffer.rows) for buffer in buffers]
    content = bytearray().join(buffer.rows.tobytes() for buffer in buffers)  # numpy.concatenate compares the fields
    table = np.frombuffer(content, ROW)
    return table, np.cumsum([0, *sizes]).tolist(), np.repeat(np.arange(len(buffers)), sizes)


def exceeds_limit(buffers: Sequence[BufferMetadata]) -> bool:
    """Whether the samples of any rank are too heavy to travel; False for a single rank."""
    weights = [int(buffer.rows["bytes"].sum(dtype=np.int64)) for buffer in buffers]
    return len(buffers) > 1 and max(weights) > MAX_REDISTRIBUTED_BYTES


PATCHES_PER_TOKEN = 4
"""Number of patches that cost as much as a token: vision towers merge 2 x 2."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """Samples to cut into groups.

    table: the samples of all ranks, an array of `ROW`. starts: see `Plan`. owner: the rank of each sample of the table.
    index: the samples to cut, as positions in the table [n].
    pool: the pool of each sample to cut [n]: a single one if ranks share their samples, else one for each rank.
    num_pools: includes empty pools. slots: ranks that share a pool = groups of a pool in each micro-step.
    """

    table: np.ndarray
    starts: list[int]
    owner: np.ndarray
    index: np.ndarray
    pool: np.ndarray
    num_pools: int
    slots: int
    budget: Budget

    @classmethod
    def held_by(cls, buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool) -> Samples:
        """All samples of all ranks. balance: ranks share them, unless they are too heavy to travel."""
        table, starts, owner = pool(buffers)
        shares = balance and len(buffers) > 1 and not exceeds_limit(buffers)
        return cls(
            table=table,
            starts=starts,
            owner=owner,
            index=np.arange(len(table)),
            pool=np.zeros_like(owner) if shares else owner,
            num_pools=1 if shares else len(buffers),
            slots=len(buffers) if shares else 1,
            budget=budget,
        )

    def __len__(self) -> int:
        return len(self.index)

    def of(self, chosen: np.ndarray) -> Self:
        """A part of these samples. chosen: positions in these, or a mask."""
        return replace(self, index=self.index[chosen], pool=self.pool[chosen])

    @cached_property
    def rows(self) -> np.ndarray:
        rows: np.ndarray = self.table[self.index]
        return rows

    @cached_property
    def measures(self) -> np.ndarray:
        return measures_of(self.rows)

    # A flat micro-batch is a bin. Its cost and its excess follow from the sums of the measures of its samples.

    @cached_property
    def prices(self) -> np.ndarray:
        """Price of a token and of a patch [2]; that of a patch is 0 if no sample has any."""
        return np.array([PATCHES_PER_TOKEN, 1] if self.measures[:, 1].any() else [1, 0])

    @property
    def step_price(self) -> int:
        """Price of a micro-step."""
        return STEP_COST * int(self.prices[0])

    @cached_property
    def overlong(self) -> np.ndarray:
        """Whether a sample breaks a budget alone, so that it gets a bin alone [n]."""
        alone: np.ndarray = self.excess(self.measures) > 0
        return alone

    def shapes(self, sums: np.ndarray) -> np.ndarray:
        """Collated tokens and patches of bins with these sums of measures [..., 2]."""
        return np.stack(self.budget.collated(sums)[1:], axis=-1)

    def excess(self, sums: np.ndarray) -> np.ndarray:
        """Tokens and patches above the budgets of bins with these sums of measures [...]."""
        excess: np.ndarray = self.budget.excess(*self.budget.collated(sums)[1:])
        return excess


def measures_of(rows: np.ndarray) -> np.ndarray:
    """int64[n, 4]: the `MEASURES` of samples, given as `ROW` [n]."""
    return np.stack([rows[name] for name in MEASURES], axis=1, dtype=np.int64, casting="unsafe")


Step = list[tuple[int, np.ndarray]]
"""The groups of a micro-step: for each the number of its pool and its samples, as positions in the table."""


def to_steps(step: np.ndarray, pool: np.ndarray, groups: Iterable[np.ndarray]) -> list[Step]:
    """step, pool: the number of the micro-step and of the pool of each group [groups]."""
    steps: list[Step] = [[] for _ in range(int(step.max(initial=-1)) + 1)]
    for step_number, pool_number, group in zip(step.tolist(), pool.tolist(), groups):
        steps[step_number].append((pool_number, group))
    return steps


@dataclass(frozen=True, slots=True)
class MicroStepTotals:
    """Totals over all ranks of one micro-step. tokens are real; padded_tokens and patches are collated sizes.

    padded_tokens: rows x row length, dummy media included. max_rank_tokens, max_rank_patches: the largest collated
    sizes of any rank, which all ranks wait for. moved: samples that travel to another rank for this micro-step.
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
    """The totals of several micro-steps together."""
    columns = zip(*map(astuple, totals))
    names = (item.name for item in fields(MicroStepTotals))
    return MicroStepTotals(*(max(ns) if name in MAXIMA else sum(ns) for name, ns in zip(names, columns)))


@dataclass(frozen=True, slots=True)
class Plan:
    """One round (fill) or one optimizer step (keep).

    groups: for each rank the group of each micro-step, in batch order; empty if the rank idles. Samples are numbered
    through the buffers of all ranks: rank r holds the numbers from starts[r] up to starts[r + 1].
    final: the epoch ends with this round.
    """

    groups: list[list[list[int]]]
    starts: list[int]
    totals: list[MicroStepTotals]
    final: bool

    def checksum(self) -> int:
        """Equal for equal plans. The ranks compare checksums to check that all have computed the same plan."""
        return zlib.crc32(repr((self.final, self.groups)).encode())

    @property
    def moves(self) -> bool:
        """Whether any sample moves to another rank."""
        return any(step.moved for step in self.totals)

    def of(self, chosen: Sequence[int]) -> Plan:
        """A part of the micro-steps, or all in another order."""
        groups = [[rank_groups[k] for k in chosen] for rank_groups in self.groups]
        return replace(self, groups=groups, totals=[self.totals[k] for k in chosen])


def to_plan(steps: Sequence[Step], samples: Samples, final: bool) -> Plan:
    """The plan of these micro-steps, with the totals of each.

    A rank takes the group of its own pool. If ranks share a pool, each takes at most one group.
    """
    groups: list[list[list[int]]] = [[[] for _ in steps] for _ in samples.starts[1:]]
    totals = []
    for k, step in enumerate(steps):
        # Which rank takes which group.
        sizes = np.array([len(group) for _, group in step])
        chosen = np.concatenate([group for _, group in step])
        owner = samples.owner[chosen]
        ranks = [number for number, _ in step]
        if samples.slots > 1:
            ranks = _ranks_of(np.repeat(np.arange(len(step)), sizes), owner, len(groups))
        for rank, (_, group) in zip(ranks, step):
            groups[rank][k] = group.tolist()
        # Collated sizes of the groups.
        rows, starts = samples.table[chosen], np.cumsum(sizes) - sizes
        sums, row_tokens = np.add.reduceat(measures_of(rows), starts), rows["row_tokens"].astype(np.int64)
        longest, first = np.maximum.reduceat(row_tokens, starts), row_tokens[starts]
        collated_rows, lengths, patches = samples.budget.collated(sums, sizes, longest, first)
        padded = collated_rows * lengths
        totals.append(
            MicroStepTotals(
                samples=len(rows),
                tokens=int(sums[:, 0].sum()),
                padded_tokens=int(padded.sum()),
                patches=int(patches.sum()),
                units=int(rows["units"].sum(dtype=np.int64)),
                active_ranks=len(step),
                max_rank_tokens=int(padded.max()),
                max_rank_patches=int(patches.max()),
                moved=int((owner != np.repeat(ranks, sizes)).sum()),
            )
        )
    return Plan(groups, samples.starts, totals, final)


def _ranks_of(group: np.ndarray, owner: np.ndarray, num_ranks: int) -> list[int]:
    """The rank that takes each group of a micro-step: the rank that holds most of its samples, if that rank is free.

    group, owner: the group of each sample and the rank that holds it [n].
    """
    pairs, counts = np.unique(group * num_ranks + owner, return_counts=True)
    ranks, free = [-1] * (int(group[-1]) + 1), dict.fromkeys(range(num_ranks))
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        number, rank = divmod(pair, num_ranks)
        if ranks[number] < 0 and rank in free:
            ranks[number] = rank
            del free[rank]
    left = iter(free)
    return [next(left) if rank < 0 else rank for rank in ranks]
