"""Plan one round: what every rank can send out in, the same number of steps for every rank out (DGAP).

Two pure functions. `make_offer` forms the groups of one rank's window; its `Offer` is a few integers a
group. `align` takes the offers of all ranks and is computed by each of them alone, with the same
result: no clock, no communication, no I/O. Alignment is by carry-over: a round emits as many steps
as every rank that still draws samples can fill, and a rank with more groups keeps the surplus in
its window. No group is ever cut down for the sake of another rank.
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
class GroupCost:
    """What the other ranks need to know of a group: its collated shape and the real tokens in it."""

    rows: int
    length: int
    tokens: int
    supervised_tokens: int

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Offer:
    """The groups one rank may send out in a round, those with the longest-waiting samples first.

    dry: the rank's sampler has no further sample, and all it holds is on offer.
    kept_back: samples of part-filled groups that wait for the next window.
    """

    groups: Sequence[GroupCost]
    dry: bool
    kept_back: int = 0


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
    """One round. `groups[rank][step]` is a position in that rank's offer, None on an idle step.

    final: the epoch ends with this round.
    """

    groups: list[list[int | None]]
    totals: list[StepTotals]
    final: bool


def make_offer(
    costs: Sequence[Cost], ages: Sequence[int], dry: bool, budget: Budget, num_groups: int = 1
) -> tuple[list[list[int]], Offer]:
    """Form the groups that a rank may send out from its window. Returns their window positions and the offer.

    costs, ages: one entry a sample; an age counts the rounds a sample has been kept back.
    In each family a part-filled group of the shortest samples waits for the next window, unless the sampler
    is dry, a sample in it has waited `MAX_WAIT_ROUNDS`, or there would be less than `num_groups` without it.
    Where even that is not enough, the largest groups are halved until it is.
    """
    groups: list[list[int]] = []
    rests: list[list[int]] = []
    for family in sorted({cost.family for cost in costs}):
        members = [i for i, cost in enumerate(costs) if cost.family == family]
        full, rest = form_groups([costs[i] for i in members], budget)
        groups += [[members[i] for i in group] for group in full]
        if rest:
            rests.append([members[i] for i in rest])
    kept_back = 0
    for rest in rests:
        if dry or len(groups) < num_groups or max(ages[i] for i in rest) >= MAX_WAIT_ROUNDS:
            groups.append(rest)
        else:
            kept_back += len(rest)
    while len(groups) < num_groups and len(largest := max(groups, key=len, default=[])) > 1:
        groups.remove(largest)
        middle = len(largest) // 2
        for half in (largest[:middle], largest[middle:]):
            # Grouped anew: a half without the media of the whole gets a filler, which may be too much for it.
            full, last = form_groups([costs[i] for i in half], budget)
            groups += [[half[i] for i in group] for group in (*full, last) if group]
    groups.sort(key=lambda group: -max(ages[i] for i in group))
    return groups, Offer([_group_cost([costs[i] for i in group], budget) for group in groups], dry, kept_back)


def align(
    offers: Sequence[Offer],
    *,
    seed: int,
    epoch: int,
    round_index: int,
    steps_before: int = 0,
    accumulation: int = 1,
    join: bool = True,
) -> Plan:
    """Choose the steps of one round for all ranks.

    offers: one a rank; a rank that is not dry offers at least one group (`accumulation` groups
    without join). steps_before: steps of this epoch already planned.
    join: once all samplers are dry everything goes out, ranks with less taking idle steps, and the
    epoch is filled up to a multiple of `accumulation` with them (I1, I2). Without join the epoch
    ends, on a whole optimizer step, when a dry rank has nothing left; there are no idle steps (I3).
    Emits at least one sample on every rank that holds one, but for the end without join (I5).
    """
    counts = [len(offer.groups) for offer in offers]
    if join:
        waiting = [count for count, offer in zip(counts, offers) if not offer.dry]
        num_steps = min(waiting) if waiting else max(counts)
        final = not waiting
        num_groups = [min(count, num_steps) for count in counts]
        if final:
            num_steps += -(steps_before + num_steps) % accumulation
    else:
        num_steps = min(counts) - min(counts) % accumulation
        final = any(offer.dry and count - num_steps < accumulation for count, offer in zip(counts, offers))
        num_groups = [num_steps] * len(offers)

    slots = _slots(num_groups, num_steps, np.random.default_rng([seed % 2**64, epoch, round_index]))
    groups: list[list[int | None]] = []
    for offered, count in zip(offers, num_groups):
        by_cost = sorted(range(count), key=lambda i: -offered.groups[i].padded_tokens)
        steps: list[int | None] = [None] * num_steps
        for slot, i in zip(slots, by_cost):
            steps[slot] = i
        groups.append(steps)
    totals = [_totals(offers, [steps[k] for steps in groups]) for k in range(num_steps)]
    return Plan(groups, totals, final)


def _slots(counts: Sequence[int], num_steps: int, rng: np.random.Generator) -> list[int]:
    """The step at which each rank's k-th largest group goes out: the same on all ranks, so like meets like.

    Shuffled, but only between counts at which a rank runs out of groups: a rank idles behind its
    last group, never before it (I7).
    """
    slots: list[int] = []
    for bound in sorted({*counts, num_steps}):
        slots += (len(slots) + rng.permutation(bound - len(slots))).tolist()
    return slots


def _group_cost(group: Sequence[Cost], budget: Budget) -> GroupCost:
    rows, length, _ = budget.collation.shape(group)
    return GroupCost(
        rows=rows,
        length=length,
        tokens=sum(cost.tokens for cost in group),
        supervised_tokens=sum(cost.supervised_tokens for cost in group),
    )


def _totals(offers: Sequence[Offer], chosen: Sequence[int | None]) -> StepTotals:
    busy = [offer.groups[i] for offer, i in zip(offers, chosen) if i is not None]
    return StepTotals(
        samples=sum(group.rows for group in busy),
        tokens=sum(group.tokens for group in busy),
        padded_tokens=sum(group.padded_tokens for group in busy),
        supervised_tokens=sum(group.supervised_tokens for group in busy),
        busy_ranks=len(busy),
    )
