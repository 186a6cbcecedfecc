"""Plan a round in which every rank keeps its samples: all choose one level of cost for each step.

Ranks wait for the one with the most padded tokens. So a step has a *level*, and every rank cuts from its window
the group with the most real tokens among those that pad to no more than this level. What fits badly stays,
until enough of its like has come together, for a bounded number of rounds. The level is the one that wastes
least: real tokens of all ranks for what the costliest group costs, the fixed cost of a step included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel

NUM_CAPS, LOWEST_CAP = 21, 0.8
"""Levels are parts of the token budget, evenly from the lowest to the whole."""
FLUSH_FRACTION = 4
"""A round sends out one part in so many of what the windows hold: there is always much to choose from."""
CANDIDATES_PER_GROUP, MAX_CANDIDATES = 8, 1024
"""Groups are tried at about so many places in the stretch of one, and at no more places in all."""
NUM_SAMPLED_RANKS = 32
"""The level is chosen by what it means for so many ranks, spread over all."""

Steps = list[list[np.ndarray | None]]
"""For each step the group of every rank, as positions in the table; None: the rank holds no sample."""


def plan_per_rank(
    ranks: Sequence[Rows], exhausted: Sequence[bool], model: CostModel, *, accumulation: int = 1, join: bool = True
) -> tuple[Steps, bool]:
    """The steps of one round, and whether the epoch ends with it. Uses up `ranks`.

    join: once all samplers are exhausted everything goes out. Without it the round is a number of whole optimizer
    steps with a group on every rank, and the epoch ends when a exhausted rank cannot fill another.
    """
    if join and all(exhausted):
        return _flush_all(ranks, model), True
    drawing = [rows for rows, is_dry in zip(ranks, exhausted) if not is_dry]
    needed, needy = (1, drawing) if join else (accumulation, ranks)
    levels = (np.linspace(LOWEST_CAP, 1, NUM_CAPS) * ranks[0].budget.token_budget).astype(np.int64)
    left = _worth(drawing or ranks) * (FLUSH_FRACTION - 1) // FLUSH_FRACTION
    steps: Steps = []
    while True:
        missing = -len(steps) % needed
        if not missing:
            if min(map(len, needy)) < needed:
                break
            if steps and _worth(drawing or ranks) <= left and all(rows.most_overdue is None for rows in ranks):
                break
            missing = needed
        # A rank that must be there for the steps still missing keeps a sample for each.
        steps.append(_step(ranks, levels, model, missing - 1))
    return steps, not join and any(is_dry and len(rows) < accumulation for rows, is_dry in zip(ranks, exhausted))


def _flush_all(ranks: Sequence[Rows], model: CostModel) -> Steps:
    """Everything goes out: each rank cuts all it holds, and the costliest groups of all go together."""
    cuts = []
    for rows in ranks:
        groups = rows.next_fit(rows.budget.token_budget)
        groups.sort(key=lambda group: -rows.cost(group[0], group[1], model))
        cuts.append([rows.group(*group) for group in groups])
    return [list(step) for step in itertools.zip_longest(*cuts)]


def _worth(ranks: Sequence[Rows]) -> int:
    return sum(int(rows.priority_before[-1]) for rows in ranks)


def _step(ranks: Sequence[Rows], levels: np.ndarray, model: CostModel, kept: int) -> list[np.ndarray | None]:
    """Choose a level, cut the group of each rank, of which each keeps so many samples."""
    busy = [rank for rank, rows in enumerate(ranks) if len(rows)]
    best = {rank: _best(ranks[rank], levels, kept) for rank in busy[:: -(-len(busy) // NUM_SAMPLED_RANKS)]}
    cost = np.max([_cost(ranks[rank], starts, ends, model) for rank, (starts, ends, _) in best.items()], axis=0)
    worth = np.sum([worth for _, _, worth in best.values()], axis=0)
    chosen = int((cost / worth).argmin())
    groups: list[np.ndarray | None] = [None] * len(ranks)
    for rank in busy:
        rows = ranks[rank]
        found, at = (best[rank], chosen) if rank in best else (_best(rows, levels[[chosen, -1]], kept), 0)
        start, limit, level = int(found[0][at]), int(found[1][at]), int(levels[chosen])
        if (limit - start) * rows.length[start] > level:  # no group is within it
            level = int(levels[-1])
        end = rows.largest_fitting_end(start, limit, level)
        if rows.most_overdue is not None and end <= rows.most_overdue:  # what the collator adds has left no room for it
            start, end = rows.most_overdue, rows.largest_fitting_end(rows.most_overdue, limit, level)
        groups[rank] = rows.group(start, end)
        rows.without(start, end)
    return groups


def _cost(rows: Rows, starts: np.ndarray, ends: np.ndarray, model: CostModel) -> np.ndarray:
    """Of groups, without what the collator may add to them."""
    length = rows.length[starts]
    padded = (ends - starts) * length
    return model.of(padded, rows.patches_before[ends] - rows.patches_before[starts], padded * length)


def _best(rows: Rows, levels: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each level the group that is worth most: starts, ends, worth.

    Where samples are overdue, only groups with the oldest count. Where no group is within a level, that of the
    last level is taken, which is the whole budget; there a sample that breaks it goes alone.
    """
    whole = levels[-1]
    reach = np.minimum(np.maximum(whole // rows.length, 1), rows.max_end - np.arange(len(rows)))
    # Every start for large samples; for small ones, of which many make a group, some in the stretch of each.
    density = (1 << 20) // np.maximum(reach // CANDIDATES_PER_GROUP, 1)
    starts = np.flatnonzero(np.diff(np.cumsum(density) >> 20, prepend=-1))
    starts = starts[:: -(-len(starts) // MAX_CANDIDATES)]
    if rows.most_overdue is not None:
        starts = np.append(starts[starts < rows.most_overdue], rows.most_overdue)
    counts = levels[:, None] // rows.length[starts]
    counts[-1] = np.maximum(counts[-1], 1)
    counts = np.minimum(counts, len(rows) - kept)
    ends = np.minimum(starts + counts, rows.max_end[starts])
    worth = rows.priority_before[ends] - rows.priority_before[starts]
    if rows.most_overdue is not None:
        worth = np.where(ends > rows.most_overdue, worth, 0)
    which, level = worth.argmax(axis=1), np.arange(len(levels))
    worth = worth[level, which]
    none = worth == 0
    which[none], level[none], worth[none] = which[-1], level[-1], worth[-1]
    return starts[which], ends[level, which], np.maximum(worth, 1)
