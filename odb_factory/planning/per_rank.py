"""Plan a round in which every rank keeps its samples: all share one cap on padded tokens in each micro-step.

Ranks wait for the one with the most padded tokens. So a micro-step has a *token cap*, and every rank cuts from its
buffer the group with the most real tokens among those that pad to no more than this cap. What fits badly stays, until
enough samples of its length have come together, for a bounded number of rounds. The cap is the one that wastes least:
real tokens of all ranks for what the costliest group costs, the fixed cost of a micro-step included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel
from odb_factory.planning.metadata import Steps

NUM_CAPS, LOWEST_CAP = 21, 0.8
"""Candidate caps are parts of the token budget, evenly from the lowest to the whole."""
FLUSH_FRACTION = 4
"""A round plans one part in so many of what the buffers hold: there is always much to choose from."""
CANDIDATES_PER_GROUP, MAX_CANDIDATES = 8, 1024
"""Groups are tried at about so many places in the stretch of one, and at no more places in all."""
NUM_SAMPLED_RANKS = 32
"""The cap is chosen by what it means for so many ranks, spread over all."""


def plan_per_rank(
    ranks: Sequence[Rows], exhausted: Sequence[bool], model: CostModel, *, accumulation: int = 1, join: bool = True
) -> tuple[Steps, bool]:
    """The micro-steps of one round, and whether the epoch ends with it. Removes what it plans from `ranks`.

    ranks: the samples of each rank. exhausted: of each, whether its sampler has no further one.
    join: once all samplers are exhausted everything is planned. Without it the round is a number of whole optimizer
    steps with a group on every rank, and the epoch ends when an exhausted rank cannot fill another.
    """
    if join and all(exhausted):
        return _flush_all(ranks, model), True
    active = [rows for rows, done in zip(ranks, exhausted) if not done]
    multiple, required = (1, active) if join else (accumulation, ranks)
    caps = (np.linspace(LOWEST_CAP, 1, NUM_CAPS) * ranks[0].budget.token_budget).astype(np.int64)
    left = _total_priority(active or ranks) * (FLUSH_FRACTION - 1) // FLUSH_FRACTION
    steps: Steps = []
    while True:
        missing = -len(steps) % multiple
        if not missing:
            if min(map(len, required)) < multiple:
                break
            if steps and _total_priority(active or ranks) <= left and all(rows.most_overdue is None for rows in ranks):
                break
            missing = multiple
        # A rank that must be there for the steps still missing keeps a sample for each.
        steps.append(_step(ranks, caps, model, missing - 1))
    runs_short = any(done and len(rows) < accumulation for rows, done in zip(ranks, exhausted))
    return steps, not join and runs_short


def _flush_all(ranks: Sequence[Rows], model: CostModel) -> Steps:
    """Plan everything: each rank cuts all it holds, and the costliest groups of all ranks run at the same time."""
    cuts = []
    for rows in ranks:
        groups = rows.next_fit(rows.budget.token_budget)
        groups.sort(key=lambda group: -rows.cost(group[0], group[1], model))
        cuts.append([rows.group(*group) for group in groups])
    return [list(step) for step in itertools.zip_longest(*cuts)]


def _total_priority(ranks: Sequence[Rows]) -> int:
    return sum(int(rows.priority_before[-1]) for rows in ranks)


def _step(ranks: Sequence[Rows], caps: np.ndarray, model: CostModel, kept: int) -> list[np.ndarray | None]:
    """Choose a cap and cut the group of each rank; each rank keeps at least `kept` samples."""
    busy = [rank for rank, rows in enumerate(ranks) if len(rows)]
    best = {rank: _best(ranks[rank], caps, kept) for rank in busy[:: -(-len(busy) // NUM_SAMPLED_RANKS)]}
    cost = np.max([_cost(ranks[rank], starts, ends, model) for rank, (starts, ends, _) in best.items()], axis=0)
    priority = np.sum([priority for _, _, priority in best.values()], axis=0)
    chosen = int((cost / priority).argmin())
    groups: list[np.ndarray | None] = [None] * len(ranks)
    for rank in busy:
        rows = ranks[rank]
        found, at = (best[rank], chosen) if rank in best else (_best(rows, caps[[chosen, -1]], kept), 0)
        start, limit, cap = int(found[0][at]), int(found[1][at]), int(caps[chosen])
        if (limit - start) * rows.length[start] > cap:  # no group is within it
            cap = int(caps[-1])
        end = rows.largest_fitting_end(start, limit, cap)
        if rows.most_overdue is not None and end <= rows.most_overdue:  # what the collator adds has left no room for it
            start, end = rows.most_overdue, rows.largest_fitting_end(rows.most_overdue, limit, cap)
        groups[rank] = rows.group(start, end)
        rows.without(start, end)
    return groups


def _cost(rows: Rows, starts: np.ndarray, ends: np.ndarray, model: CostModel) -> np.ndarray:
    """Of groups, without what the collator may add to them."""
    length = rows.length[starts]
    padded = rows.budget.rows_of(ends - starts, length) * length
    return model.of(padded, rows.patches_before[ends] - rows.patches_before[starts], padded * length)


def _best(rows: Rows, caps: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each cap the group of the highest priority: starts, ends, priorities, each of shape [caps].

    Where samples are overdue, only groups with the most overdue one count. Where no group is within a cap, that of
    the last one is taken, which is the whole budget; there a sample that breaks it goes alone.
    """
    whole = caps[-1]
    reach = np.minimum(np.maximum(whole // rows.length, 1), rows.max_end - np.arange(len(rows)))
    # Every start for large samples; for small ones, of which many make a group, some in the stretch of each.
    density = (1 << 20) // np.maximum(reach // CANDIDATES_PER_GROUP, 1)
    starts = np.flatnonzero(np.diff(np.cumsum(density) >> 20, prepend=-1))
    starts = starts[:: -(-len(starts) // MAX_CANDIDATES)]
    if rows.most_overdue is not None:
        starts = np.append(starts[starts < rows.most_overdue], rows.most_overdue)
    counts = caps[:, None] // rows.length[starts]
    counts[-1] = np.maximum(counts[-1], 1)
    counts = np.minimum(counts, len(rows) - kept)
    ends = np.minimum(starts + counts, rows.max_end[starts])
    priority = rows.priority_before[ends] - rows.priority_before[starts]
    if rows.most_overdue is not None:
        priority = np.where(ends > rows.most_overdue, priority, 0)
    which, cap = priority.argmax(axis=1), np.arange(len(caps))
    priority = priority[cap, which]
    none = priority == 0
    which[none], cap[none], priority[none] = which[-1], cap[-1], priority[-1]
    return starts[which], ends[cap, which], np.maximum(priority, 1)
