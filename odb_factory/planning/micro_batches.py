"""The planner as a function: lengths in, micro-batches of every rank and the weights of the loss out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.cost import Budget, CostModel, by_number
from odb_factory.planning.keep import cut
from odb_factory.planning.plan import ROW

LAYOUTS = ("flat", "padded")
LOSSES = ("token_mean", "sample_mean", "prompt_mean")
OVERLONG = ("error", "singleton")
MOST_OF_A_SAMPLE = 1 << 24
"""Largest length of a sample: sums of squared lengths then stay within 64 bits."""
MOST = (1 << 31) - 1
LOAD_BITS = 28
"""Precision of the load of a group of samples, as a part of the load of all."""

Integers = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """The micro-batches of one optimizer step and what each sample weighs in its loss.

    micro_batches: micro_batches[rank][micro_step] is a list of sample indices. All ranks have the same number K of
        micro-steps; an empty list is a rank that idles, which happens in the last micro-steps only and where there
        are too few samples.
    rank, micro_step: where each sample is computed (integers [n]).
    sample_weights: what the mean loss of each sample weighs in the loss of the step (float64 [n], sum 1).
    token_weights: what each loss token of a sample weighs: sample_weights / loss tokens, 0 without loss tokens
        (float64 [n]).
    """

    micro_batches: list[list[list[int]]]
    rank: np.ndarray
    micro_step: np.ndarray
    sample_weights: np.ndarray
    token_weights: np.ndarray

    @property
    def num_micro_steps(self) -> int:
        """K, the same on all ranks."""
        return len(self.micro_batches[0])

    @property
    def micro_batch_weights(self) -> list[list[float]]:
        """The sum of `sample_weights` of each micro-batch, [rank][micro_step]; 0 where a rank idles."""
        return [[float(self.sample_weights[group].sum()) for group in own] for own in self.micro_batches]


def plan_micro_batches(
    lengths: Integers,
    *,
    token_budget: int,
    ranks: int = 1,
    patches: Integers | None = None,
    max_patches: int | None = None,
    groups: Sequence[Hashable] | np.ndarray | None = None,
    keep_groups: bool = True,
    owners: Integers | None = None,
    layout: str = "flat",
    loss: str = "token_mean",
    loss_tokens: Integers | None = None,
    overlong: str = "error",
    cost: CostModel = CostModel(),
) -> MicroBatchPlan:
    """Cut the samples of one optimizer step into micro-batches under a token budget, balanced over ranks.

    A pure function of integers: all ranks that call it with the same arguments get the same plan, so they exchange the
    lengths and nothing else. No torch, no communication, no random numbers.

    lengths (integers [n], tokens): of each sample, prompt and answer together, >= 1.
    token_budget (tokens): most tokens that a micro-batch computes: flat, the sum of its lengths; padded, samples x
        longest.
    ranks: data-parallel ranks.
    patches (integers [n], vision-tower input patches), max_patches: of each sample, and most of a micro-batch.
    groups ([n]): an id for each sample, such as its prompt. With `keep_groups` all samples of a group are computed by
        one rank, though not always in one micro-batch.
    owners (integers [n]): the rank that each sample must stay on, where samples cannot travel.
    layout: `flat` (samples one after the other in a row, no padding) or `padded`.
    loss: `token_mean`, the mean over all loss tokens of the step; `sample_mean`, the mean over samples of the mean over
        the tokens of each; `prompt_mean`, the mean over groups of the mean over the tokens of each group.
    loss_tokens (integers [n]): tokens of each sample that carry loss (default: `lengths`). Where no sample has any, all
        weights of `token_mean` are 0.
    overlong: a sample that breaks a budget alone: `error`, or `singleton`, a micro-batch of its own.
    cost: what a micro-batch costs, for balance: `CostModel(fixed, token, patch, square)`, in units of a token.

    Raises ValueError, in one line, for arguments that contradict each other or have a wrong length.

    The loss of the step is the sum over micro-batches, of all ranks, of the mean loss of the micro-batch (over its
    tokens or its samples, as `loss` says) times its weight in `micro_batch_weights`; for `prompt_mean` of the losses of
    its tokens times their `token_weights`. DistributedDataParallel and FSDP take the mean over ranks: multiply by
    `ranks`. A rank that idles runs a forward and backward of any sample times 0 where the others wait for it.

        plan = plan_micro_batches([700, 300, 500, 200, 100], token_budget=1000, ranks=2)
        plan.micro_batches  # [[[0, 3]], [[1, 2, 4]]]: one micro-step; rank 0 computes samples 0 and 3
        plan.micro_batch_weights  # [[0.5], [0.5]]

    Algorithm: as for `global_batch_size: keep` (odb_factory.planning.keep): K from bounds of bin packing; largest
    first (Graham 1969) and pairwise exchanges (Kernighan and Lin 1970) for flat micro-batches, MULTIFIT (Coffman, Garey
    and Johnson 1978) on the sorted lengths for padded ones. Kept groups are dealt to ranks by the same search, as
    samples of one micro-step without a budget.
    """
    tokens = _integers("lengths", lengths, None, least=1)
    of_patches = np.zeros_like(tokens) if patches is None else _integers("patches", patches, len(tokens))
    units = tokens if loss_tokens is None else _integers("loss_tokens", loss_tokens, len(tokens))
    group = None if groups is None else _numbered(groups, len(tokens))
    _check(token_budget, ranks, max_patches, layout, loss, overlong)
    if max_patches is not None and patches is None:
        raise ValueError("max_patches needs patches: the number of patches of each sample")
    if loss == "prompt_mean" and group is None:
        raise ValueError("loss='prompt_mean' needs groups: the prompt of each sample")
    budget = Budget(token_budget, max_patches, layout=layout)
    table = _table(tokens, of_patches)
    over = (tokens > token_budget) | (max_patches is not None and of_patches > (max_patches or 0))
    if overlong == "error" and over.any():
        first = int(over.argmax())
        raise ValueError(
            f"sample {first} has {tokens[first]:,} tokens and {of_patches[first]:,} patches, more than a micro-batch "
            f"may have (token_budget {token_budget:,}, max_patches {max_patches}): raise the budget, truncate the "
            "sample, or pass overlong='singleton'"
        )
    if owners is not None:
        if group is not None and keep_groups:
            raise ValueError("owners already places the samples: leave groups out, or pass keep_groups=False")
        pool_of, slots = _integers("owners", owners, len(tokens)), 1
        if pool_of.max() >= ranks:
            raise ValueError(f"owners has rank {pool_of.max()}, but there are {ranks} ranks, from 0 on")
    elif group is not None and keep_groups:
        pool_of, slots = _ranks_of_groups(group, tokens, of_patches, ranks, cost), 1
    else:
        pool_of, slots = np.zeros_like(tokens), ranks
    steps = cut(table, np.arange(len(tokens)), pool_of, slots, budget, cost)
    micro_batches: list[list[list[int]]] = [[[] for _ in steps] for _ in range(ranks)]
    rank, micro_step, load = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros(ranks, dtype=np.int64)
    for k, step in enumerate(steps):
        # Ranks that share a pool: the largest micro-batch goes to the rank that has computed least so far.
        sizes = [int(tokens[own].sum()) for _, own in step]
        free = np.argsort(load, kind="stable").tolist()
        for place, i in enumerate(sorted(range(len(step)), key=lambda i: -sizes[i])):
            pool, own = step[i]
            of = free[place] if slots > 1 else pool
            micro_batches[of][k] = own.tolist()
            rank[own], micro_step[own] = of, k
            load[of] += sizes[i]
    weights = _sample_weights(loss, units, group)
    token_weights = np.divide(weights, units, out=np.zeros_like(weights), where=units > 0)
    return MicroBatchPlan(micro_batches, rank, micro_step, weights, token_weights)


def _ranks_of_groups(
    group: np.ndarray, tokens: np.ndarray, patches: np.ndarray, ranks: int, cost: CostModel
) -> np.ndarray:
    """The rank of each sample [n], such that groups stay whole and ranks have equal loads."""
    loads = by_number(group, cost.of(tokens, patches, tokens * tokens) - cost.fixed, int(group.max()) + 1)
    total = max(int(loads.sum()), 1)
    loads = np.maximum((loads.astype(object) << LOAD_BITS) // total, 1).astype(np.int64)
    every = np.arange(len(loads))
    whole = Budget(int(loads.sum()), layout="flat")
    (step,) = cut(_table(loads, np.zeros_like(loads)), every, np.zeros_like(every), ranks, whole, CostModel())
    rank = np.zeros_like(every)
    for number, (_, own) in enumerate(step):
        rank[own] = number
    of_sample: np.ndarray = rank[group]
    return of_sample


def _sample_weights(loss: str, units: np.ndarray, group: np.ndarray | None) -> np.ndarray:
    if loss == "sample_mean":
        return np.full(len(units), 1 / len(units))
    if loss == "token_mean":
        return units / max(int(units.sum()), 1)
    assert group is not None
    num_groups = int(group.max()) + 1
    of_group, size = np.bincount(group, units, num_groups)[group], np.bincount(group, minlength=num_groups)[group]
    # A group without loss tokens weighs as much as the others; its samples share that weight.
    share = np.divide(units, of_group, out=1 / size, where=of_group > 0)
    weights: np.ndarray = share / num_groups
    return weights


def _table(tokens: np.ndarray, patches: np.ndarray) -> np.ndarray:
    table = np.zeros(len(tokens), ROW)
    table["tokens"], table["row_tokens"], table["patches"] = tokens, tokens, patches
    table["has_media"] = patches > 0
    return table


def _integers(name: str, values: Integers, count: int | None, least: int = 0) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a sequence of one or more integers, got {np.shape(array)} of {array.dtype}")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} has {len(array)} entries, lengths has {count}")
    if array.min() < least or array.max() > MOST_OF_A_SAMPLE:
        raise ValueError(f"{name} must be between {least} and {MOST_OF_A_SAMPLE:,}, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def _numbered(groups: Sequence[Hashable] | np.ndarray, count: int) -> np.ndarray:
    """The number of the group of each sample [n], in the order in which groups first occur."""
    if len(groups) != count:
        raise ValueError(f"groups has {len(groups)} entries, lengths has {count}")
    ids = groups.tolist() if isinstance(groups, np.ndarray) else groups
    numbers: dict[Hashable, int] = {}
    try:
        return np.array([numbers.setdefault(one, len(numbers)) for one in ids], dtype=np.int64)
    except TypeError as error:
        raise ValueError(f"groups must have an id for each sample, such as an integer or a string: {error}") from None


def _check(token_budget: int, ranks: int, max_patches: int | None, layout: str, loss: str, overlong: str) -> None:
    most_patches = MOST if max_patches is None else max_patches
    for name, value in (("token_budget", token_budget), ("ranks", ranks), ("max_patches", most_patches)):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise ValueError(f"{name} must be an integer between 1 and {MOST:,}, got {value!r}")
    for name, word, words in (("layout", layout, LAYOUTS), ("loss", loss, LOSSES), ("overlong", overlong, OVERLONG)):
        if word not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {word!r}")
