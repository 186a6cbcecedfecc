"""Plan one kept optimizer step: cut all its samples, on all ranks, into K micro-steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from odb_factory.planner.cost import Budget, by_number
from odb_factory.planner.flat import best_bins, put_into_bins
from odb_factory.planner.padded import Pools, best_cut, cut_by_one_cap
from odb_factory.planner.plan import ROW, BufferMetadata, Plan, Samples, Step, to_plan


def plan_optimizer_step(buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool) -> Plan:
    """Cut the samples of one optimizer step into K micro-steps, the same K on all ranks.

    buffers: for each rank the samples of this optimizer step that it holds.
    balance: a sample may move to another rank, unless the samples are too heavy to travel.

    K and the cut minimise the sum over micro-steps of the cost of the costliest rank. Every sample is in exactly one
    micro-batch, and every micro-batch of two or more samples is within both budgets. A rank idles in the last
    micro-steps only, and only if a modality has too few samples. The costliest micro-step comes first, so that the peak
    of memory shows at once.

        buffers = [make_metadata([Cost(8), Cost(3)], [0, 0], exhausted=False)]
        plan = plan_optimizer_step(buffers, Budget(16), balance=True)
        plan.groups  # [[[1, 0]]]: the samples of each micro-step on rank 0
    """
    samples = Samples.held_by(buffers, budget, balance=balance)
    plan = to_plan(cut(samples), samples, final=all(buffer.exhausted for buffer in buffers))
    # Micro-steps with most busy ranks come first, because a rank idles after its last micro-batch; then the costliest.
    keys = [(-step.active_ranks, -step.max_rank_tokens, -step.max_rank_patches) for step in plan.totals]
    return plan.of(sorted(range(len(keys)), key=keys.__getitem__))


def cut(samples: Samples) -> list[Step]:
    """The groups of each micro-step, in the layout of the budget. Each modality is cut separately."""
    steps: list[Step] = []
    modality = samples.rows["modality"]
    modalities = np.unique(modality)
    for number in modalities.tolist():
        of_modality = samples.of(modality == number)
        is_flat = samples.budget.layout == "flat"
        steps += best_bins(of_modality).steps() if is_flat else best_cut(Pools(of_modality))
    # Join the micro-steps in which ranks idle: ranks that are idle in one modality compute another one meanwhile.
    full = samples.slots * len(np.unique(samples.pool))
    by_pool: dict[int, Step] = {}
    for number, group in (pair for step in steps if len(step) < full for pair in step):
        by_pool.setdefault(number, []).append((number, group))
    if len(modalities) < 2 or not by_pool:
        return steps
    num_joined = -(-max(map(len, by_pool.values())) // samples.slots)
    parts = [slice(k * samples.slots, (k + 1) * samples.slots) for k in range(num_joined)]
    joined = [[pair for groups in by_pool.values() for pair in groups[part]] for part in parts]
    return [step for step in steps if len(step) == full] + joined


def cut_into(num_steps: int, samples: Samples) -> list[Step]:
    """The groups of exactly `num_steps` micro-steps. Each pool has samples of one modality, about as many as fit; flat
    bins that break a budget leave their shortest samples out."""
    if not len(samples):
        return []
    if samples.budget.layout == "flat":
        return put_into_bins(samples, num_steps).without_excess().steps()
    return cut_by_one_cap(Pools(samples), num_steps)[1]


# The planner as a function: lengths in, micro-batches of every rank out.

MOST_OF_A_SAMPLE = 1 << 24
"""Largest length of a sample: sums of squared lengths then stay within 64 bits."""
LOAD_BITS = 24
"""Precision of the load of a group of samples, as a share of the total load."""

Integers = Sequence[int] | np.ndarray


def plan_micro_batches(
    lengths: Integers,
    *,
    token_budget: int,
    ranks: int = 1,
    patches: Integers | None = None,
    max_patches: int | None = None,
    groups: Sequence[Hashable] | np.ndarray | None = None,
    owners: Integers | None = None,
    layout: Literal["flat", "padded"] = "flat",
    overlong: Literal["error", "singleton"] = "error",
) -> list[list[list[int]]]:
    """Cut the samples of one optimizer step into micro-batches under a token budget, balanced over ranks.

    A pure function of integers: all ranks that call it with the same arguments get the same plan, so they exchange the
    lengths and nothing else. No torch, no communication, no random numbers. The loader plans by the same function
    (`odb_factory.planner.keep.plan_optimizer_step`, which names the algorithms).

    lengths (integers [n], tokens): length of each sample, prompt and answer together, >= 1.
    token_budget (tokens): maximum of a micro-batch: flat, the sum of its lengths; padded, samples x longest.
    ranks: number of data-parallel ranks.
    patches (integers [n]), max_patches: vision-tower input patches of each sample, and the maximum of a micro-batch.
    groups ([n]): an id for each sample, such as its prompt. One rank computes all samples of a group, not always in one
        micro-batch.
    owners (integers [n]): the rank that each sample must stay on, if samples cannot move. Not with `groups`.
    layout: `flat` (samples one after the other in a row, no padding) or `padded`.
    overlong: what happens to a sample that breaks a budget alone: `error`, or `singleton`, a separate micro-batch.

    Returns micro_batches[rank][micro_step], a list of sample indices. All ranks have the same number of micro-steps.
    An empty list is an idle rank, in the last micro-steps only, and only if there are too few samples: if the other
    ranks wait for it, it runs a forward and backward of any sample, times 0.
    Raises ValueError, in one line, for arguments that contradict each other or have a wrong length.

        micro_batches = plan_micro_batches([700, 300, 500, 200, 100], token_budget=1000, ranks=2)
        micro_batches  # [[[1, 2, 4]], [[0, 3]]]: one micro-step; rank 1 computes samples 0 and 3
    """
    # The samples as a table, within the budgets or refused.
    tokens = _integers("lengths", lengths, None, floor=1)
    table = np.zeros(len(tokens), ROW)
    table["tokens"] = table["row_tokens"] = tokens
    if patches is not None:
        table["patches"] = _integers("patches", patches, len(tokens))
        table["has_media"] = table["patches"] > 0
    elif max_patches is not None:
        raise ValueError("max_patches needs patches: the number of patches of each sample")
    patch_limit = MOST_OF_A_SAMPLE if max_patches is None else max_patches
    for name, value in (("token_budget", token_budget), ("ranks", ranks), ("max_patches", patch_limit)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if layout not in ("flat", "padded") or overlong not in ("error", "singleton"):
        raise ValueError(f"layout {layout!r} is not flat or padded, or overlong {overlong!r} not error or singleton")
    over = (tokens > token_budget) | (table["patches"] > patch_limit)
    if overlong == "error" and over.any():
        first = int(over.argmax())
        raise ValueError(
            f"sample {first} has {tokens[first]:,} tokens and {table['patches'][first]:,} patches, more than a "
            f"micro-batch may have (token_budget {token_budget:,}, max_patches {max_patches}): raise the budget, "
            "truncate the sample, or pass overlong='singleton'"
        )
    # Where each sample is: balance may move it unless its place is fixed.
    if groups is not None:
        if owners is not None:
            raise ValueError("owners already places the samples: leave groups out")
        owners = _ranks_of_groups(groups, tokens, ranks)
    if owners is None:
        owner = np.arange(len(tokens)) * ranks // len(tokens)
    elif (owner := _integers("owners", owners, len(tokens))).max() >= ranks:
        raise ValueError(f"owners has rank {owner.max()}, but there are {ranks} ranks, from 0 on")
    held_by_rank = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    buffers = [BufferMetadata(table[samples], exhausted=False) for samples in held_by_rank]
    # The plan of an optimizer step, with samples numbered as in `lengths`.
    budget = Budget(token_budget, max_patches, layout=layout)
    plan = plan_optimizer_step(buffers, budget, balance=owners is None)
    index = np.concatenate(held_by_rank)
    return [[index[group].tolist() for group in rank_groups] for rank_groups in plan.groups]


def _ranks_of_groups(groups: Sequence[Hashable] | np.ndarray, tokens: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each sample [n]. Groups stay whole and ranks have about equal tokens: groups are planned like samples
    of one micro-step without a budget."""
    if len(groups) != len(tokens):
        raise ValueError(f"groups has {len(groups)} entries, lengths has {len(tokens)}")
    numbers: dict[Hashable, int] = {}  # in the order in which groups first occur
    try:
        ids = groups.tolist() if isinstance(groups, np.ndarray) else groups
        group = np.array([numbers.setdefault(name, len(numbers)) for name in ids])
    except TypeError as error:
        raise ValueError(f"groups must have an id for each sample, such as an integer or a string: {error}") from None
    loads = by_number(group, tokens, len(numbers))
    lengths = np.maximum((loads.astype(object) << LOAD_BITS) // int(loads.sum()), 1).astype(np.int64)
    rank = np.zeros_like(lengths)
    for number, micro_steps in enumerate(plan_micro_batches(lengths, token_budget=int(lengths.sum()), ranks=ranks)):
        rank[micro_steps[0]] = number
    of_sample: np.ndarray = rank[group]
    return of_sample


def _integers(name: str, values: Integers, count: int | None, floor: int = 0) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a sequence of one or more integers, got {np.shape(array)} of {array.dtype}")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} has {len(array)} entries, lengths has {count}")
    if array.min() < floor or array.max() > MOST_OF_A_SAMPLE:
        raise ValueError(f"{name} must be between {floor} and {MOST_OF_A_SAMPLE:,}, got {array.min()} to {array.max()}")
    return array.astype(np.int64)
