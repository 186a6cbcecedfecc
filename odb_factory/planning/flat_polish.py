"""The exact cost of bins in micro-steps, and exchanges that lower it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odb_factory.planning.cost import CostModel
from odb_factory.planning.flat_samples import Samples

MAX_TRIED = 1 << 16
"""So many exchanges are tried at most."""
FEW_BROKEN, MAX_REPAIRED = 8, 1 << 19
"""The number tried where no more bins than that break a budget: else the whole plan would be lost."""
CLOSE_ENOUGH = 1024
"""Nothing is tried where at most one part in so many could be saved."""
FAR_OVER = 1 << 40


@dataclass(eq=False)
class Filled:
    """Samples in bins in micro-steps. Ranks wait for the most tokens, the most patches and the most squares of each.

    bin_of: of each sample [n]. pool, bin_class, step: of each bin [bins]. frozen: it holds an overlong sample [bins].
    """

    samples: Samples
    model: CostModel
    bin_of: np.ndarray
    pool: np.ndarray
    bin_class: np.ndarray
    step: np.ndarray
    frozen: np.ndarray

    def __post_init__(self) -> None:
        self.num_steps = int(self.step.max(initial=-1)) + 1
        self.weights = np.array([self.model.token, self.model.patch, self.model.square], dtype=np.int64)
        self.sums = self.samples.sums(self.bin_of, len(self.step))

    def shapes(self, sums: np.ndarray) -> np.ndarray:
        """Tokens, patches and squares of bins with these sums, as collated [..., 3]."""
        return np.stack(self.samples.budget.flat_shapes(*np.moveaxis(sums, -1, 0)), axis=-1)

    def maxima(self) -> np.ndarray:
        """Of each micro-step [micro-steps, 3]."""
        most = np.zeros((self.num_steps, 3), dtype=np.int64)
        np.maximum.at(most, self.step, self.shapes(self.sums))
        return most

    def step_costs(self) -> np.ndarray:
        """What ranks wait for in each micro-step [micro-steps]."""
        costs: np.ndarray = self.model.fixed + self.maxima() @ self.weights
        return costs

    @property
    def cost(self) -> int:
        return int(self.step_costs().sum())

    def excess(self, sums: np.ndarray) -> np.ndarray:
        """By how much bins with these sums break the budgets (tokens and patches) [...]."""
        budget, shapes = self.samples.budget, self.shapes(sums)
        over: np.ndarray = np.maximum(shapes[..., 0] - budget.token_budget, 0)
        if budget.max_patches is not None:
            over = over + np.maximum(shapes[..., 1] - budget.max_patches, 0)
        return over

    @property
    def within(self) -> bool:
        """Whether all bins but those of overlong samples are within the budgets."""
        return not self.excess(self.sums[~self.frozen]).any()


def polish(filled: Filled, bound: int) -> None:
    """Exchange samples of the bins that all wait for, or that break a budget, with those of any other bin.

    An exchange of two samples, or a move of one, is made if less of the budgets is broken afterwards, or as much and
    the cost is lower. Done when the cost is close to `bound`, when nothing helps, or after a bounded number of trials.
    """
    num_broken = np.count_nonzero(filled.excess(filled.sums)[~filled.frozen])
    left = MAX_REPAIRED if 0 < num_broken <= FEW_BROKEN else MAX_TRIED
    while not (filled.within and filled.cost - bound <= bound // CLOSE_ENOUGH):
        for critical in _critical(filled):
            own = np.flatnonzero(filled.bin_of == critical)
            left -= (len(own) + 1) * (len(filled.samples) + len(filled.step))
            if left < 0:
                return
            if _improve(filled, critical, own):
                break
        else:
            return


def _critical(filled: Filled) -> list[int]:
    """Bins that break a budget, the worst first, or else those that have the most of their micro-step in anything."""
    over = np.where(filled.frozen, 0, filled.excess(filled.sums))
    if over.any():
        critical = np.argsort(-over, kind="stable")[: np.count_nonzero(over)]
    else:
        at_most = (filled.shapes(filled.sums) == filled.maxima()[filled.step]) & (filled.weights > 0)
        critical = np.flatnonzero(at_most.any(axis=1) & ~filled.frozen)
    return [int(i) for i in critical]


def _improve(filled: Filled, critical: int, own: np.ndarray) -> bool:
    """Make the best exchange of a sample of one bin with any of its class; whether there is one that helps."""
    samples = filled.samples
    others = np.flatnonzero((filled.bin_class == filled.bin_class[critical]) & ~filled.frozen)
    others = others[others != critical]
    if not len(others):
        return False
    theirs = np.flatnonzero(np.isin(filled.bin_of, others))
    nobody = len(samples)
    measures = np.concatenate([samples.measures, np.zeros_like(samples.measures[:1])])
    given = np.append(own, nobody)
    taken = np.concatenate([theirs, np.full(len(others), nobody)])
    partner = np.concatenate([filled.bin_of[theirs], others])
    moved = measures[given][:, None] - measures[taken][None]
    after, after_partner = filled.sums[critical] - moved, filled.sums[partner] + moved
    over = filled.excess(after) + filled.excess(after_partner)
    over -= (filled.excess(filled.sums[critical]) + filled.excess(filled.sums[partner]))[None]
    cost = _cost_after(filled, critical, partner, filled.shapes(after), filled.shapes(after_partner))
    cost -= filled.cost
    count = np.bincount(filled.bin_of, minlength=len(filled.step))
    empties = (given != nobody)[:, None] & (taken == nobody) & (count[critical] == 1)
    empties |= (given == nobody)[:, None] & (taken != nobody) & (count[partner] == 1)
    over[empties] = FAR_OVER
    least = int(over.min())
    chosen = int(np.where(over == least, cost, np.iinfo(np.int64).max).argmin())
    if least > 0 or (least == 0 and cost.flat[chosen] >= 0):
        return False
    i, j = divmod(chosen, len(taken))
    if given[i] != nobody:
        filled.bin_of[given[i]] = partner[j]
    if taken[j] != nobody:
        filled.bin_of[taken[j]] = critical
    filled.sums[critical], filled.sums[partner[j]] = after[i, j], after_partner[i, j]
    return True


def _cost_after(
    filled: Filled, critical: int, partner: np.ndarray, after: np.ndarray, after_partner: np.ndarray
) -> np.ndarray:
    """The cost of all once two bins have changed: `critical` and, of each column, `partner`."""
    shapes, step, own_step = filled.shapes(filled.sums), filled.step, filled.step[critical]
    shapes[critical] = 0
    without = np.zeros((filled.num_steps, 3), dtype=np.int64)
    np.maximum.at(without, step, shapes)
    # The most of a micro-step without a bin is the second most, where only that bin has the most.
    is_most = shapes == without[step]
    num_most = np.zeros_like(without)
    np.add.at(num_most, step, is_most)
    second = np.zeros_like(without)
    np.maximum.at(second, step, np.where(is_most, 0, shapes))
    rest = np.where(is_most & (num_most[step] == 1), second[step], without[step])[partner]
    shares_step = (step[partner] == own_step)[None, :, None]
    theirs = np.maximum(rest[None], after_partner)
    mine = np.maximum(np.where(shares_step, theirs, without[own_step]), after)
    changed = mine + np.where(shares_step, 0, theirs)
    total = without.sum(axis=0) - without[own_step]
    total = total[None] - np.where(shares_step[0], 0, without[step[partner]])
    cost: np.ndarray = (total[None] + changed) @ filled.weights + filled.model.fixed * filled.num_steps
    return cost
