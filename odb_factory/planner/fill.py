"""Plan one round of `global_batch_size: fill`: the oldest samples go, as many as fill the budgets of K micro-steps.

1. A pool gives samples of one modality: that of its oldest sample, unless ranks would idle.
2. K is the number of micro-steps that every rank (or all ranks together) can fill.
3. The oldest samples of each pool are chosen until they need all its micro-batches.
4. The chosen samples are cut into exactly K micro-steps, like a kept optimizer step (`keep.cut_into`).
5. The fuller half of padded micro-steps goes, and each micro-step with the oldest sample of a pool: samples of unusual
   lengths wait for similar ones until a rank runs out of samples.

The oldest sample is the sample with the lowest position in the epoch. So the oldest sample of every pool goes in every
round. When the data of all ranks have ended, all samples go.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from odb_factory.planner.cost import Budget
from odb_factory.planner.flat import bins_needed
from odb_factory.planner.keep import cut, cut_into
from odb_factory.planner.padded import Pools
from odb_factory.planner.plan import BufferMetadata, Plan, Samples, Step, to_plan

SLACK = 2048
"""Flat bins are planned to be full except for 1/SLACK: exchanges between bins come that close to their targets."""


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
) -> Plan:
    """Choose the micro-steps of one round for all ranks.

    buffers: one for each rank; a rank that is not exhausted holds a sample (without join: `accumulation` samples).
    join: when all samplers are exhausted all samples go, and ranks with fewer take idle micro-batches (I1, I2).
    Without join the round is whole optimizer steps of `accumulation` micro-steps. The epoch ends when an exhausted rank
    cannot fill another optimizer step; no rank idles (I3).
    balance: a sample may move to another rank (with join only), unless the samples are too heavy to travel.
    At least one sample of every rank that holds one goes, except at the end without join; with balance, every rank
    computes at least one if there are enough (I5).
    """
    samples = Samples.held_by(buffers, budget, balance=balance)
    slots, num_pools = samples.slots, samples.num_pools
    exhausted = np.array([buffer.exhausted for buffer in buffers])
    if slots > 1:
        exhausted = np.array([exhausted.all()])
    count, final = np.bincount(samples.pool, minlength=num_pools), bool(join and exhausted.all())
    samples = samples.of(np.lexsort((samples.rows["position"], samples.pool)))  # the oldest of each pool first
    pools, oldest = np.unique(samples.pool, return_index=True)
    if final:
        steps = cut(samples)
    else:
        modality = samples.rows["modality"]
        modality_of = np.zeros(num_pools, dtype=np.int64)
        modality_of[pools] = modality[oldest]
        usable = samples.of(modality == modality_of[samples.pool])
        required = ~exhausted if join else np.ones_like(exhausted)
        num_usable = np.bincount(usable.pool, minlength=num_pools)[required]
        multiple = 1 if join else accumulation
        # K: as many micro-steps as every required pool can fill, with a sample for each slot; a multiple of `multiple`,
        # and at least one multiple, unless a required pool has too few samples for it.
        max_steps = max(int(num_usable.min()) // slots, min(int(num_usable.min()), 1)) // multiple * multiple
        full = int((_needed(usable)[required] - 1).min()) // slots
        num_steps = min(max(full // multiple, 1) * multiple, max_steps)
        steps = cut_into(num_steps, usable.of(_oldest(usable, num_steps * slots)))
        fewest = slots * multiple
        if (num_usable < fewest).any() and (count[required] >= fewest).all():
            # No rank may idle, and the chosen modality has too few samples: the oldest samples of any go, each alone.
            alone = samples.index[oldest[:, None] + np.arange(fewest)].reshape(len(pools), multiple, slots, 1)
            steps = [[(n, idx) for n, row in zip(pools.tolist(), alone[:, k]) for idx in row] for k in range(multiple)]
    if not join:
        emitted = [samples.owner[group] for step in steps for _, group in step]
        num_left = count - np.bincount(np.concatenate([*emitted, samples.owner[:0]]), minlength=num_pools)
        final = bool((exhausted & (num_left < accumulation)).any())
    # Random order, so that long groups do not always come first. A rank idles after its last group only (I7), so only
    # micro-steps with equally many busy ranks change places.
    rng = np.random.default_rng([seed % 2**64, epoch, round_index])
    shuffled: list[Step] = []
    for num_busy in sorted({len(step) for step in steps}, reverse=True):
        equally_busy = [step for step in steps if len(step) == num_busy]
        shuffled += [equally_busy[k] for k in rng.permutation(len(equally_busy))]
    plan = to_plan(shuffled, samples, final)
    idles = any(step.active_ranks < len(buffers) for step in plan.totals)  # after its last sample (I7)
    if final or not join or idles or budget.layout == "flat":
        return plan
    # Leave out the half of the micro-steps with most padding, except those with the oldest sample of a pool.
    fullness = [step.tokens / step.max_rank_tokens for step in plan.totals]
    median, must_stay = sorted(fullness)[len(fullness) // 2], set(samples.index[oldest].tolist())
    holds_oldest = [not must_stay.isdisjoint(itertools.chain(*groups)) for groups in zip(*plan.groups)]
    return plan.of([k for k, full in enumerate(fullness) if full >= median or holds_oldest[k]])


def _needed(samples: Samples) -> np.ndarray:
    """The least number of micro-batches that the samples of each pool need [pools]."""
    budget = samples.budget
    if budget.layout == "padded":
        pools = Pools(samples)
        return np.array([len(groups) for groups in pools.walks(pools.largest_ends)])
    tokens = budget.token_budget // budget.pad_to_multiple_of * budget.pad_to_multiple_of
    limits = [
        None if limit is None else max(limit - dummy - limit // SLACK, 1)
        for limit, dummy in zip((tokens, budget.max_patches), budget.collation.dummies(0, 0))
    ]
    return bins_needed(samples, limits)


def _oldest(samples: Samples, slots: int) -> np.ndarray:
    """Which samples go [n]: the oldest of each pool, as many as `slots` micro-batches hold.

    samples: sorted by pool, the oldest first. Bisection, to 1 sample in 1,024; the first guess is the share of the
    tokens that fills `slots`.
    """
    pools, before = samples.pool, np.concatenate([[0], np.cumsum(samples.rows["row_tokens"], dtype=np.int64)])
    bounds = np.searchsorted(pools, np.arange(samples.num_pools + 1))
    starts, ends = bounds[:-1], bounds[1:]
    count, place_in_pool = ends - starts, np.arange(len(pools)) - starts[pools]
    low, high = np.minimum(count, slots), count.copy()
    needed = np.maximum(_needed(samples), 1)
    guess = np.searchsorted(before, before[starts] + (before[ends] - before[starts]) * slots // needed, "right")
    guess -= 1 + starts
    while (high - low > count // 1024).any():
        tried = np.clip(guess, np.minimum(low + 1, high), high)
        fits = _needed(samples.of(place_in_pool < tried[pools])) <= slots
        low, high = np.where(fits, tried, low), np.where(fits, high, np.maximum(tried - 1, low))
        width = count // 256 + 1
        guess = np.where(fits, low + width, high - width)
        guess = np.where(high - low <= 2 * width, (low + high + 1) // 2, guess)
    is_chosen: np.ndarray = place_in_pool < low[pools]
    return is_chosen
