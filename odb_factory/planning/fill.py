"""Plan one round of `global_batch_size: fill`: micro-batches as full as the budgets allow, from what ranks hold (DGAP).

What fits badly is held back for a later round, for a bounded number of rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.flat_fill import fill_flat
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import place
from odb_factory.planning.metadata import BufferMetadata, Steps
from odb_factory.planning.per_rank import plan_per_rank
from odb_factory.planning.plan import Plan, exceeds_limit, pool, to_plan
from odb_factory.planning.pooled import plan_pooled


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
