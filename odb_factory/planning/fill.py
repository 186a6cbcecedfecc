"""Plan one round of `global_batch_size: fill`: micro-batches as full as the budgets allow, from what ranks hold (DGAP).

What fits badly is held back for a later round, for a bounded number of rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.flat import Bins, Samples, make_bins
from odb_factory.planning.flat_search import Filled, fill_bins
from odb_factory.planning.keep import cut_flat, in_order, match_by_cost
from odb_factory.planning.padded import (
    MAX_WAIT_ROUNDS,
    Group,
    PoolGroup,
    Rows,
    assign_to_ranks,
    place,
    split_to_fill_slots,
)
from odb_factory.planning.plan import BufferMetadata, Plan, Steps, exceeds_limit, pool, to_plan

# ----------------------------------------------------------------------------------------------------------------------
# Plan a round in which every rank keeps its samples: all share one cap on padded tokens in each micro-step.
# Ranks wait for the one with the most padded tokens. So a micro-step has a *token cap*, and every rank cuts from its
# buffer the group with the most real tokens among those that pad to no more than this cap. What fits badly stays,
# until enough samples of its length have come together, for a bounded number of rounds. The cap is the one that
# wastes least: real tokens of all ranks for what the costliest group costs, the fixed cost of a micro-step included.

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


# ----------------------------------------------------------------------------------------------------------------------
# Plan a round in which samples may change rank: the buffers of all ranks are cut into groups as one.
# The more samples to choose from, the closer the lengths within a group, and the costs of the groups that run at the
# same time. Groups are cut from the pooled samples by length (next-fit decreasing), and those of like cost share a
# micro-step. What does not fill a micro-step waits for the next round.


def plan_pooled(rows: Rows, owner_rank: np.ndarray, num_ranks: int, model: CostModel, *, final: bool) -> Steps:
    """The micro-steps of one round.

    owner_rank: of each position in the table the rank that holds the sample. final: everything is planned.
    Every rank has a group in every micro-step, unless there are too few samples left for that.
    """
    if not len(rows):
        return []
    groups = rows.next_fit(rows.budget.token_budget)
    overdue = [bool(rows.overdue_before[end] - rows.overdue_before[start]) for start, end in groups]
    if final:
        num_steps = math.ceil(len(groups) / num_ranks)
    else:
        num_steps = max(len(groups) // num_ranks, math.ceil(sum(overdue) / num_ranks), 1)
    slots = num_steps * num_ranks
    if len(groups) < slots:
        groups = _lower_cap_to_fill_slots(rows, groups, slots)
    elif len(groups) > slots:
        # What is overdue goes first, then what is costly; the rest is held back.
        order = sorted(range(len(groups)), key=lambda i: (not overdue[i], -rows.cost(*groups[i], model), i))
        groups = [groups[i] for i in order[:slots]]
    matched = _match_by_cost(rows, groups, num_ranks, model)
    return [assign_to_ranks([rows.group(*group) for group in step], owner_rank, num_ranks) for step in matched]


def _lower_cap_to_fill_slots(rows: Rows, groups: list[Group], slots: int) -> list[Group]:
    """All samples in at most `slots` groups, and as many as there can be, small and even: no rank shall idle.

    groups: fewer than that, as cut at the whole budget.
    """
    low, high = 1, rows.budget.token_budget
    while low < high:
        token_cap = (low + high) // 2
        smaller = rows.next_fit(token_cap)
        if len(smaller) <= slots:
            high, groups = token_cap, smaller
        else:
            low = token_cap + 1
    return split_to_fill_slots(rows, groups, slots)


def _match_by_cost(rows: Rows, groups: list[Group], num_ranks: int, model: CostModel) -> list[list[Group]]:
    """Groups of like cost in one micro-step.

    Where the model does not say what a patch costs, the groups are first divided by patches into as many classes as
    each class then has micro-steps: ranks wait for the vision tower of the one with most.
    """
    cost = {group: (-rows.cost(*group, model), group[0]) for group in groups}
    patches = {group: rows.shape(*group)[2] for group in groups}
    num_steps = math.ceil(len(groups) / num_ranks)
    num_classes = 1
    if not model.patch and len(set(patches.values())) > 1:
        num_classes = round(math.sqrt(num_steps))
        groups = sorted(groups, key=lambda group: (-patches[group], cost[group]))
    size = math.ceil(num_steps / num_classes) * num_ranks
    ordered = [
        group for k in range(0, len(groups), size) for group in sorted(groups[k : k + size], key=cost.__getitem__)
    ]
    return [ordered[k : k + num_ranks] for k in range(0, len(ordered), num_ranks)]


# ----------------------------------------------------------------------------------------------------------------------
# Fill flat micro-batches to the budget from what ranks hold. No sample waits for its like: the oldest go first.

SLACK = 2048
"""Bins shall be full but for one part in so many: that close do exchanges get to what is aimed at."""
FINISHING = 2
"""Once the next oldest sample is too large, so many others of each pool may go before it, to fill what is left."""
MAX_TOPPED_UP = 1024
"""So many samples, of those that would wait, are put where there is room for them after all."""


def fill_flat(
    samples: Samples, exhausted: Sequence[bool], model: CostModel, *, accumulation: int = 1, join: bool = True
) -> tuple[list[list[PoolGroup]], bool]:
    """The groups of each micro-step of one round, and whether the epoch ends with it.

    samples: in the order in which equally old ones shall go. exhausted: of each pool, whether it gets no further ones.
    accumulation, join: as in `fill.plan_buffers`.
    The oldest sample of every pool goes out in any case, so none waits for longer than others are before it.
    """
    if join and all(exhausted):
        return cut_flat(samples, model), True
    done, count = np.array(exhausted), np.bincount(samples.pool, minlength=len(exhausted))
    multiple, required = (1, ~done) if join else (accumulation, np.ones_like(done))
    num_steps = _num_steps(samples, count, required, multiple)
    if not num_steps:
        return [], bool((done & (count < accumulation)).any())
    taken = _oldest(samples, num_steps)
    chosen = samples.of(np.flatnonzero(taken))
    bins = make_bins(chosen, num_steps, chosen.weigh(model))
    bin_of = np.full(len(samples), -1)
    bin_of[taken] = fill_bins(bins)
    _hold_back(samples, bins, bin_of)
    _top_up(samples, bins, bin_of)
    going = np.flatnonzero(bin_of >= 0)
    gone = samples.of(going)
    filled = Filled(gone, gone.weigh(model), bin_of[going], bins.pool, bins.bin_class, bins.step, bins.frozen)
    filled = min(filled, match_by_cost(filled), key=lambda one: one.cost)
    left = count - np.bincount(gone.pool, minlength=len(count))
    return in_order(filled), not join and bool((done & (left < accumulation)).any())


def _room(samples: Samples) -> tuple[int, int | None]:
    """The most real tokens and patches that surely fit in a bin."""
    budget = samples.budget
    dummy_tokens, dummy_patches = budget.collation.dummies(0, 0)
    tokens = budget.token_budget // budget.sizes.multiple * budget.sizes.multiple - dummy_tokens
    if budget.max_patches is None:
        return max(tokens, 1), None
    return max(tokens, 1), max(budget.max_patches - dummy_patches, 1)


def _loads(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and patches that each sample takes from the room of a pool: an overlong one takes a whole bin."""
    tokens, patches = _room(samples)
    by_tokens = np.where(samples.overlong, tokens, np.minimum(samples.tokens, tokens))
    most = patches if patches is not None else int(samples.patches.max(initial=0))
    return by_tokens, np.where(samples.overlong, 0, np.minimum(samples.patches, most))


def _num_steps(samples: Samples, count: np.ndarray, required: np.ndarray, multiple: int) -> int:
    """As many micro-steps as every required pool can fill, and those that what is overdue needs.

    A required pool has a sample for each slot in each of them, unless it has too few for a single micro-step.
    """
    least_count = int(count[required].min())
    most = max(least_count // samples.slots, min(least_count, 1)) // multiple * multiple
    overdue = samples.age >= MAX_WAIT_ROUNDS
    full, needed = np.zeros((2, len(count)), dtype=np.int64)
    for load, room in zip(_loads(samples), _room(samples)):
        if room is not None:
            capacity = room * samples.slots
            sums = np.zeros((2, len(count)), dtype=np.int64)
            np.add.at(sums[0], samples.pool, load)
            np.add.at(sums[1], samples.pool[overdue], load[overdue])
            full, needed = np.maximum(full, sums[0] // capacity), np.maximum(needed, -(-sums[1] // capacity))
    fillable = max(int(full[required].min()) // multiple, 1) * multiple
    return min(max(fillable, -(-int(needed.max()) // multiple) * multiple), most)


def _oldest(samples: Samples, num_steps: int) -> np.ndarray:
    """Which samples to take [n]: of each pool the oldest, until its bins are as good as full, and one a bin."""
    order = np.lexsort((np.arange(len(samples)), -samples.age, samples.pool))
    pool, num_bins = samples.pool[order], num_steps * samples.slots
    first, ends = np.searchsorted(pool, pool), np.searchsorted(pool, pool, side="right")
    takes = np.ones(len(order), dtype=bool)
    loads = [
        (load[order], num_bins * room * (SLACK - 1) // SLACK)
        for load, room in zip(_loads(samples), _room(samples))
        if room is not None
    ]
    for load, most in loads:
        before = np.concatenate([[0], np.cumsum(load)])
        takes &= before[1:] - before[first] <= most
    takes |= np.arange(len(order)) - first < num_bins
    for _ in range(FINISHING):
        # In what is left of a pool goes the largest that fits.
        fits = ~takes
        for load, most in loads:
            before = np.concatenate([[0], np.cumsum(np.where(takes, load, 0))])
            fits &= load <= most - (before[ends] - before[first])
        largest = np.lexsort((np.where(fits, loads[0][0], -1), pool))[ends - 1]
        takes[largest[fits[largest]]] = True
    if samples.num_modalities > 1:
        # Each class and each overlong sample needs a bin; the oldest have them first.
        last = int(samples.sample_class.max()) + 1
        owner = np.where(samples.overlong, last + np.arange(len(samples)), samples.sample_class)[order]
        owner[~takes] = -1
        owners, seen, which = np.unique(owner, return_index=True, return_inverse=True)
        by_seen = np.lexsort((seen, pool[seen], owners < 0))
        turn = np.empty_like(seen)
        turn[by_seen] = np.arange(len(seen)) - np.searchsorted(pool[seen[by_seen]], pool[seen[by_seen]])
        takes &= turn[which] < num_bins
    taken = np.zeros(len(samples), dtype=bool)
    taken[order[takes]] = True
    return taken


def _hold_back(samples: Samples, bins: Bins, bin_of: np.ndarray) -> None:
    """Take the youngest and shortest out of bins that break a budget, never the oldest of a pool. Changes `bin_of`."""
    by_age = np.lexsort((np.arange(len(samples)), -samples.age, samples.pool))
    is_oldest = np.zeros(len(samples), dtype=bool)
    is_oldest[by_age[np.flatnonzero(np.diff(samples.pool[by_age], prepend=-1))]] = True
    taken = np.flatnonzero(bin_of >= 0)
    sums = np.zeros((len(bins), 5), dtype=np.int64)
    np.add.at(sums, bin_of[taken], samples.measures[taken])
    broken = ~samples.budget.holds_flat(sums) & ~bins.frozen
    for i in np.flatnonzero(broken).tolist():
        own = taken[bin_of[taken] == i]
        own = own[np.lexsort((own, samples.tokens[own], samples.age[own], is_oldest[own]))]
        for out in own[:-1].tolist():
            bin_of[out] = -1
            sums[i] -= samples.measures[out]
            if samples.budget.holds_flat(sums[i]):
                break


def _top_up(samples: Samples, bins: Bins, bin_of: np.ndarray) -> None:
    """Put waiting samples, the oldest first, into the fullest bin that has room for them. Changes `bin_of`."""
    taken = np.flatnonzero(bin_of >= 0)
    sums = np.zeros((len(bins), 5), dtype=np.int64)
    np.add.at(sums, bin_of[taken], samples.measures[taken])
    modality = np.empty(len(bins), dtype=np.int64)
    modality[bin_of[taken]] = samples.sample_class[taken]  # as numbered here, where some may be of another modality
    waiting = np.flatnonzero((bin_of < 0) & ~samples.overlong)
    waiting = waiting[np.lexsort((waiting, -samples.age[waiting]))]
    num_classes = int(samples.sample_class.max(initial=-1)) + 1
    for _ in range(MAX_TOPPED_UP):
        room = np.full(num_classes, -1)
        np.maximum.at(room, modality, np.where(bins.frozen, -1, samples.budget.token_budget - sums[:, 0]))
        waiting = waiting[samples.tokens[waiting] <= room[samples.sample_class[waiting]]]
        if not len(waiting):
            break
        chosen, waiting = int(waiting[0]), waiting[1:]
        after = sums + samples.measures[chosen]
        holds = samples.budget.holds_flat(after) & ~bins.frozen
        holds &= modality == samples.sample_class[chosen]
        if holds.any():
            fullest = int(np.where(holds, sums[:, 0], -1).argmax())
            bin_of[chosen] = fullest
            sums[fullest] = after[fullest]


# ----------------------------------------------------------------------------------------------------------------------


def plan_buffers(
    buffers: Sequence[BufferMetadata],
    budget: Budget,
    *,
    seed: int,
    epoch: int,
    round_index: int,
    accumulation: int = 1,
    join: bool = True,
    balance: bool = False,
    model: CostModel = CostModel(),
) -> Plan:
    """Choose the steps of one round for all ranks.

    buffers: one a rank; a rank that is not exhausted holds a sample (`accumulation` samples without join).
    join: once all samplers are exhausted everything goes out, ranks with less taking idle micro-batches (I1, I2).
    Without join the round is whole optimizer steps of `accumulation` micro-steps, and the epoch ends when an exhausted
    rank cannot fill another; no rank idles (I3).
    balance: a rank may be given samples that another holds (with join only), unless they are too heavy.
    model: what makes ranks wait, by which groups that go out in one step are chosen.
    Emits at least one sample on every rank that holds one, but for the end without join; with balance, one on every
    rank if there are so many (I5).
    """
    table, starts, owner_rank = pool(buffers)
    exhausted = [buffer.exhausted for buffer in buffers]
    balance = balance and len(buffers) > 1
    exceeds_transfer_limit = balance and exceeds_limit(buffers)
    balance = balance and not exceeds_transfer_limit
    if budget.layout == "flat":
        # Equally old samples of all ranks take turns.
        index = np.lexsort((owner_rank, np.arange(len(table)) - np.array(starts)[owner_rank]))
        pool_of = np.zeros_like(index) if balance else owner_rank[index]
        samples = Samples(table, index, pool_of, len(buffers) if balance else 1, budget)
        done = [all(exhausted)] if balance else exhausted
        flat, final = fill_flat(samples, done, model, accumulation=accumulation, join=join)
        steps = [place(step, owner_rank, len(buffers), balance=balance) for step in flat]
    elif balance:
        final = all(exhausted)
        steps = plan_pooled(Rows(table, np.arange(len(table)), budget), owner_rank, len(buffers), model, final=final)
    else:
        held = [Rows(table, np.arange(start, end), budget) for start, end in itertools.pairwise(starts)]
        steps, final = plan_per_rank(held, exhausted, model, accumulation=accumulation, join=join)
    steps = list(_shuffled(steps, np.random.default_rng([seed % 2**64, epoch, round_index])))
    return to_plan(steps, table, starts, owner_rank, budget, final, exceeds_transfer_limit)


def _shuffled(steps: Steps, rng: np.random.Generator) -> Iterator[list[np.ndarray | None]]:
    """The steps in another order: long groups shall not always come first.

    Only those with the same number of busy ranks change places: a rank idles behind its last group, never before
    it (I7).
    """
    busy = [sum(group is not None for group in step) for step in steps]
    for count in sorted(set(busy), reverse=True):
        alike = [step for step, ranks in zip(steps, busy) if ranks == count]
        yield from (alike[i] for i in rng.permutation(len(alike)))
