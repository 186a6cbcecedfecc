"""What no plan of an optimizer step can undercut: bounds on its cost that know nothing of the planner.

Every rank takes part in every micro-step and waits for the slowest, so an optimizer step of K micro-steps costs
K x `STEP_COST` + the sum over micro-steps of the most tokens of any rank.
"""

from __future__ import annotations

import numpy as np

from odb_factory.planner.cost import STEP_COST


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


def least_wait(sizes: np.ndarray, capacity: int, num_ranks: int) -> int:
    """The sum over micro-steps of the fullest bin is at least this, whatever K is.

    The sums of a rank over all micro-steps are no more than that, so the bounds of scheduling on parallel machines
    hold: the mean, and of the k x ranks + 1 largest samples the smallest k + 1, of which one rank has as many.
    """
    sizes = np.sort(sizes)[::-1]
    before = np.concatenate([[0], np.cumsum(sizes)])
    last = np.arange(0, len(sizes), num_ranks) + 1
    # Beside a sample above the capacity other bins hold no more than the capacity.
    alone = sizes > capacity
    waited = sizes[alone][::num_ranks]
    rest = int(sizes[~alone].sum()) - (len(waited) * num_ranks - int(alone.sum())) * capacity
    return max(
        -(-int(sizes.sum()) // num_ranks),
        int((before[last] - before[last - 1 - np.arange(len(last))]).max()),
        # Two samples of more than half a bin never share one; each micro-step has room for one such sample a rank.
        int(sizes[2 * sizes > capacity][::num_ranks].sum()),
        int(waited.sum()) + max(-(-rest // num_ranks), 0),
    )


def flat_bound(lengths: np.ndarray, token_budget: int, num_ranks: int) -> int:
    """The cost that no flat plan of samples of these lengths over so many ranks undercuts."""
    num_steps = -(-fewest_bins(lengths, token_budget) // num_ranks)
    return num_steps * STEP_COST + least_wait(lengths, token_budget, num_ranks)


def padded_bound(lengths: np.ndarray, token_budget: int, num_ranks: int) -> int:
    """The cost that no padded plan of samples of these lengths over so many ranks undercuts.

    The best cut of all samples for a single rank, its cost shared by all ranks: ranks wait for the costliest group of
    a micro-step, which costs at least what groups cost in the mean.
    """
    lengths = np.sort(lengths)
    best = np.zeros(len(lengths) + 1, dtype=np.int64)
    for end, longest in enumerate(lengths.tolist(), start=1):
        first = end - max(min(token_budget // longest, end), 1)
        count = end - np.arange(first, end)
        best[end] = int((best[first:end] + STEP_COST + longest * count).min())
    return max(-(-int(best[-1]) // num_ranks), STEP_COST + int(lengths[-1]))
