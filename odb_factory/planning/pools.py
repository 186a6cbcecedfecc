"""The samples of an optimizer step as pools that groups are cut from, and how large a group can be.

All arithmetic is on integers, so that every rank computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel

NO_CAP = 1 << 62


@dataclass(frozen=True, eq=False)
class Pools:
    """The samples of an optimizer step, in pools: one for all ranks that share their samples, or one for each rank.

    rows: all samples, pool after pool. bounds: where each pool starts in them, and the end [pools + 1].
    slots: groups that a pool gives to each micro-step: the number of ranks that share it.
    """

    rows: Rows
    bounds: np.ndarray
    slots: int
    model: CostModel

    @property
    def starts(self) -> np.ndarray:
        return self.bounds[:-1]

    @property
    def ends(self) -> np.ndarray:
        return self.bounds[1:]

    @cached_property
    def pool_of(self) -> np.ndarray:
        """The pool of each sample [n]."""
        return np.repeat(np.arange(len(self.starts)), np.diff(self.bounds))

    @cached_property
    def single_costs(self) -> np.ndarray:
        """What each sample costs alone [n]."""
        starts = np.arange(len(self.rows))
        costs: np.ndarray = self.rows.costs(starts, starts + 1, self.model)
        return costs

    @cached_property
    def largest_ends(self) -> np.ndarray:
        """The largest ends that the budgets allow [n + 1]."""
        ends: np.ndarray = next_ends(self, np.array([[NO_CAP]]))[0]
        return ends

    @cached_property
    def cap_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each pool the lowest cap at which every sample can go alone, and the highest that any group asks for."""
        low, high = np.zeros((2, len(self.starts)), dtype=np.int64)
        np.maximum.at(low, self.pool_of, self.single_costs)
        largest = self.rows.costs(np.arange(len(self.rows)), self.largest_ends[:-1], self.model)
        np.maximum.at(high, self.pool_of, largest)
        # A sample alone can cost more than one in a group: dummy media are added where there are no others.
        return low, np.maximum(low, high)

    @cached_property
    def load(self) -> tuple[int, int]:
        """What the fullest pool and the longest sample cost where nothing is padded, fixed costs left out."""
        rows, model = self.rows, self.model
        costs = model.of(rows.tokens, np.diff(rows.patches_before), rows.tokens * rows.tokens) - model.fixed
        before = np.concatenate([[0], np.cumsum(costs)])
        return int((before[self.ends] - before[self.starts]).max()), int(costs.max())


def lower_bound(pools: Pools, num_steps: int) -> int:
    """No cut into so many micro-steps is cheaper: the longest sample goes alone, or nothing is padded.

    What can make a group cheaper than the sum of its samples is not counted (dummy media that are not needed).
    """
    load, longest = pools.load
    return num_steps * pools.model.fixed + max(-(-load // pools.slots), longest)


def next_ends(pools: Pools, caps: np.ndarray) -> np.ndarray:
    """The largest end of a group within both budgets and a cap on its cost, for every start; an array [caps, n + 1].

    caps: [caps, 1], or [1, n] for a cap of its own for every start. A sample that breaks a budget goes alone. A start
    whose sample alone costs more than the cap is its own end: nothing can be cut there.
    """
    rows, model = pools.rows, pools.model
    num_rows, budget = len(rows), rows.budget
    starts, unlimited = np.arange(num_rows), np.int64(num_rows)
    variable = caps - model.fixed

    def most_rows(lengths: np.ndarray) -> np.ndarray:
        unit = model.token * lengths + model.square * lengths * lengths
        by_cost = np.where(unit > 0, variable // np.maximum(unit, 1), unlimited)
        most: np.ndarray = budget.token_budget // lengths
        return np.where(by_cost >= most, most, by_cost // budget.row_multiple * budget.row_multiple)

    ends = np.minimum(starts + np.maximum(most_rows(rows.length), 1), rows.max_end)
    starts = np.broadcast_to(starts, ends.shape)
    if model.patch:
        low, high = starts + 1, ends
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = rows.costs(starts, middle, model) <= caps
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        ends = low
    if budget.collation.has_dummies:
        while True:
            collated, lengths, patches = rows.shapes(starts, ends)
            count, padded = ends - starts, collated * lengths
            exceeds = (padded > budget.token_budget) | (model.of(padded, patches, padded * lengths) > caps)
            if budget.max_patches is not None:
                exceeds |= patches > budget.max_patches
            exceeds &= count > 1
            if not exceeds.any():
                break
            fewer = np.maximum(np.minimum(count - 1, most_rows(lengths)), 1)
            ends = np.where(exceeds, starts + fewer, ends)
    ends = np.where(pools.single_costs <= caps, ends, starts)
    return np.concatenate([ends, np.full((len(ends), 1), num_rows)], axis=1)
