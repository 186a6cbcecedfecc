"""Plan one round: every rank's window in, the same number of groups for every rank out (DGAP).

A pure function of integers that all ranks know, so each rank computes the whole plan alone and
all agree: no clock, no communication, no I/O. Alignment by carry-over: a round emits as many steps
as every rank that still draws samples can fill; a rank with more groups keeps the surplus in its
window. Only when every sampler is dry are the counts evened out, with idle steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.batching.cost import Budget, Cost
from odb_factory.batching.grouping import form_groups

MAX_WAIT_ROUNDS = 4
"""A sample is kept back in a part-filled group for at most this many rounds in a row."""


@dataclass(frozen=True, slots=True)
class Window:
    """The samples one rank may group in this round.

    costs, ages: one entry a sample; an age counts the rounds the sample has been kept back.
    dry: the rank's sampler has no further sample.
    """

    costs: Sequence[Cost]
    ages: Sequence[int]
    dry: bool


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks together do in one step. Tokens are real, padded_tokens as collated."""

    samples: int
    tokens: int
    padded_tokens: int
    supervised_tokens: int
    busy_ranks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One round. `groups[rank][step]` lists window positions, empty on an idle step.

    final: no sample is left on any rank after this round.
    """

    groups: list[list[list[int]]]
    totals: list[StepTotals]
    final: bool


def plan_round(
    windows: Sequence[Window],
    budget: Budget,
    *,
    seed: int,
    epoch: int,
    round_index: int,
    steps_before: int = 0,
    accumulation: int = 1,
) -> Plan:
    """Plan the groups of one round for all ranks (`join: true`).

    windows: one a rank; a rank that is not dry holds at least one sample.
    steps_before: steps of this epoch already planned; the epoch's total is filled up to a multiple
        of `accumulation` with idle steps (I1).
    Emits at least one sample on every rank that holds one (I5).
    """
    ready = [_ready_groups(window, budget) for window in windows]
    waiting = [len(groups) for groups, window in zip(ready, windows) if not window.dry]
    num_steps = min(waiting) if waiting else max(len(groups) for groups in ready)
    ready = [groups[:num_steps] for groups in ready]
    final = not waiting
    if final:
        num_steps += -(steps_before + num_steps) % accumulation

    rng = np.random.default_rng([seed, epoch, round_index])
    slots = _slots([len(groups) for groups in ready], num_steps, rng)
    placed: list[list[list[int]]] = []
    for groups, window in zip(ready, windows):
        steps: list[list[int]] = [[] for _ in range(num_steps)]
        by_cost = sorted(groups, key=lambda group: -_padded_tokens(window, group, budget))
        for slot, group in zip(slots, by_cost):
            steps[slot] = group
        placed.append(steps)
    totals = [_totals(windows, [steps[k] for steps in placed], budget) for k in range(num_steps)]
    return Plan(placed, totals, final)


def _ready_groups(window: Window, budget: Budget) -> list[list[int]]:
    """The groups a rank may emit now, those with the longest-waiting samples first."""
    full, rest = form_groups(window.costs, budget)
    if rest and (window.dry or not full or max(window.ages[i] for i in rest) >= MAX_WAIT_ROUNDS):
        full.append(rest)
    return sorted(full, key=lambda group: -max(window.ages[i] for i in group))


def _slots(counts: Sequence[int], num_steps: int, rng: np.random.Generator) -> list[int]:
    """The step at which each rank's k-th largest group goes out: the same on all ranks, so like meets like.

    Shuffled, but only between counts at which a rank runs out of groups: a rank idles behind its
    last group, never before it (I7).
    """
    slots: list[int] = []
    for bound in sorted({*counts, num_steps}):
        slots += (len(slots) + rng.permutation(bound - len(slots))).tolist()
    return slots


def _padded_tokens(window: Window, group: Sequence[int], budget: Budget) -> int:
    rows, length, _ = budget.collation.shape([window.costs[i] for i in group])
    return rows * length


def _totals(windows: Sequence[Window], groups: Sequence[Sequence[int]], budget: Budget) -> StepTotals:
    busy = [(window, group) for window, group in zip(windows, groups) if group]
    costs = [window.costs[i] for window, group in busy for i in group]
    return StepTotals(
        samples=len(costs),
        tokens=sum(cost.tokens for cost in costs),
        padded_tokens=sum(_padded_tokens(window, group, budget) for window, group in busy),
        supervised_tokens=sum(cost.supervised_tokens for cost in costs),
        busy_ranks=len(busy),
    )
