"""What no plan of an optimizer step can undercut: bounds on its cost that know nothing of the planner.

Every rank takes part in every micro-step and waits for the slowest, so an optimizer step of K micro-steps costs
K x fixed + token x (sum over micro-steps of the most tokens of any rank), and the same of patches where layouts are
flat.
"""

from __future__ import annotations

import numpy as np

from odb_factory.planner import ROW, Budget
from odb_factory.planner.cost import STEP_COST
from odb_factory.planner.flat import PATCHES_PER_TOKEN


def fewest_bins(sizes: np.ndarray, capacity: int) -> int:
    """Martello and Toth's L2: no packing of these sizes into bins of this capacity has fewer bins.

    A size above the capacity takes a bin alone.
    """
    alone = int((sizes > capacity).sum())
    sizes = np.sort(sizes[(sizes <= capacity) & (sizes > 0)])[::-1]
    if not len(sizes):
        return alone
    before = np.concatenate([[0], np.cumsum(sizes)])
    descending = -sizes
    num_large = int(np.searchsorted(descending, -(capacity // 2), side="left"))  # of more than half a bin
    # Sizes in [threshold, capacity / 2] may share bins of sizes in (capacity / 2, capacity - threshold] only.
    thresholds = np.unique(np.append(sizes[2 * sizes <= capacity], 0))
    if capacity % 2:
        num_large = int((2 * sizes > capacity).sum())
    num_no_room = np.searchsorted(descending, -(capacity - thresholds), side="left")
    num_no_room = np.minimum(num_no_room, num_large)
    ends = np.searchsorted(descending, -thresholds, side="right")
    room = (num_large - num_no_room) * capacity - (before[num_large] - before[num_no_room])
    small = before[np.maximum(ends, num_large)] - before[num_large]
    return alone + num_large + int(np.maximum(-(-(small - room) // capacity), 0).max())


def least_wait(sizes: np.ndarray, capacity: int | None, num_ranks: int) -> int:
    """The sum over micro-steps of the fullest bin is at least this, whatever K is.

    The sums of a rank over all micro-steps are no more than that, so the bounds of scheduling on parallel machines
    hold: the mean, and of the k x ranks + 1 largest samples the smallest k + 1, of which one rank has as many.
    """
    if not len(sizes):
        return 0
    sizes = np.sort(sizes)[::-1]
    bounds = [-(-int(sizes.sum()) // num_ranks)]
    before = np.concatenate([[0], np.cumsum(sizes)])
    last = np.arange(0, len(sizes), num_ranks) + 1
    bounds.append(int((before[last] - before[last - 1 - np.arange(len(last))]).max()))
    if capacity is not None:
        # Two samples of more than half a bin never share one; each micro-step has room for one such sample a rank.
        bounds.append(int(sizes[2 * sizes > capacity][::num_ranks].sum()))
        # Beside a sample above the capacity other bins hold no more than the capacity.
        alone = sizes > capacity
        waited = sizes[alone][::num_ranks]
        rest = int(sizes[~alone].sum()) - (len(waited) * num_ranks - int(alone.sum())) * capacity
        bounds.append(int(waited.sum()) + max(-(-rest // num_ranks), 0))
    return max(bounds)


def _least_wait_beside_tokens(tokens: np.ndarray, patches: np.ndarray, token_budget: int, num_ranks: int) -> int:
    """The sum of most patches, where tokens limit how many patches the micro-step of the largest sample can take.

    That micro-step waits for the largest sample. All others take what is left when it has taken as many patches as
    fit into its token budgets (a fractional knapsack).
    """
    if not patches.any() or (tokens > token_budget).any():
        return 0
    order = np.argsort(-patches / np.maximum(tokens, 1), kind="stable")
    last = int(np.searchsorted(np.cumsum(tokens[order]), num_ranks * token_budget))
    rest = int(patches.sum()) - int(patches[order[: last + 1]].sum())
    return int(patches.max()) + -(-rest // num_ranks)


def flat_bound(rows: np.ndarray, budget: Budget, num_ranks: int) -> tuple[int, int]:
    """(K, cost) that no flat plan of these samples (array of `ROW`) over so many ranks undercuts.

    Dummy media are counted where no sample has any: every micro-batch then gets them.
    """
    tokens, patches = rows["tokens"].astype(np.int64), rows["patches"].astype(np.int64)
    dummy_tokens, dummy_patches = (0, 0) if rows["has_media"].any() else budget.collation.dummies(0, 1)
    token_budget = budget.token_budget - dummy_tokens
    max_patches = None if budget.max_patches is None else budget.max_patches - dummy_patches
    num_bins = fewest_bins(tokens, token_budget)
    if max_patches is not None:
        num_bins = max(num_bins, fewest_bins(patches, max_patches))
    num_steps = max(-(-num_bins // num_ranks), 1)
    waits = least_wait(tokens, token_budget, num_ranks), least_wait(patches, max_patches, num_ranks)
    waits = waits[0], max(waits[1], _least_wait_beside_tokens(tokens, patches, token_budget, num_ranks))
    cost = num_steps * (PATCHES_PER_TOKEN * (STEP_COST + dummy_tokens) + dummy_patches)
    return num_steps, cost + PATCHES_PER_TOKEN * waits[0] + waits[1]


def padded_bound(rows: np.ndarray, budget: Budget, num_ranks: int) -> int:
    """The cost that no padded plan of these samples over so many ranks undercuts.

    The best cut of all samples for a single rank, its cost shared by all ranks: ranks wait for the costliest group of
    a micro-step, which costs at least what groups cost in the mean.
    """
    lengths = np.sort(rows["tokens"].astype(np.int64))
    best = np.zeros(len(lengths) + 1, dtype=np.int64)
    for end, longest in enumerate(lengths.tolist(), start=1):
        first = end - max(min(budget.token_budget // longest, end), 1)
        count = end - np.arange(first, end)
        best[end] = int((best[first:end] + STEP_COST + longest * count).min())
    return max(-(-int(best[-1]) // num_ranks), STEP_COST + int(lengths[-1]))


def table_of(tokens: np.ndarray, patches: np.ndarray | None = None) -> np.ndarray:
    """Samples as an array of `ROW`; those with patches have media."""
    rows = np.zeros(len(tokens), ROW)
    rows["tokens"], rows["row_tokens"], rows["units"] = tokens, tokens, 1
    if patches is not None:
        rows["patches"], rows["has_media"] = patches, patches > 0
    return rows
