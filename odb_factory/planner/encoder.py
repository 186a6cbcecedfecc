"""Which rank encodes which image: spread the work of the vision tower in one micro-step over the ranks.

Micro-batches that are balanced in tokens, or in patches, are not balanced in the vision tower, whose attention costs
the square of an image's patches (OrchMLLM, arXiv 2503.23830). So the images and video frames of a micro-step are
assigned to ranks separately, from integers that all ranks know. Images stay on their ranks as far as that is even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planner.cost import by_number

WORTH = 0.05
"""Least share of the estimated time of a micro-step that moving images must save."""
NEAR = 1.01
"""Loads within 1 % of the least possible are not improved further."""
EXCHANGES = 2
"""Maximum number of moves and swaps for each rank."""
MORE_PATCHES = 1.25
"""Without `max_patches` a rank may encode this multiple of the most patches that any rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCost:
    """The cost of an image or frame of p patches: pair x p^2 + patch x p. token: a token in the language model.

    Integers of one unit (about: multiplications). pair counts the layers whose attention sees the whole image; the cost
    of windowed attention is linear.
    """

    pair: int
    patch: int
    token: int = 0

    def of(self, patches: np.ndarray) -> np.ndarray:
        """int64[images] -> int64[images]"""
        cost: np.ndarray = self.pair * patches * patches + self.patch * patches
        return cost


@dataclass(frozen=True, slots=True, eq=False)
class EncoderPlan:
    """The rank that encodes each image of one micro-step.

    ranks: for each rank, int64[its images], the rank that encodes each image. load, patches: int64[ranks], the cost and
    the patches that each rank encodes. moves: any image is encoded by another rank than the one that holds it.
    """

    ranks: list[np.ndarray]
    load: np.ndarray
    patches: np.ndarray
    moves: bool


def plan_encoders(
    held: Sequence[np.ndarray],
    cost: EncoderCost,
    tokens: Sequence[int] | None = None,
    *,
    max_patches: int | None = None,
) -> EncoderPlan:
    """Assign the images of all ranks. Pure, and the same on every rank.

    held: for each rank, int64[images], the patches of its images. tokens: tokens of the micro-batch of each rank. With
    tokens, images move only if that shortens the micro-step: after an exchange ranks wait for the slowest encoder and
    again for the slowest language model, without it they wait once, for the slowest sum of both. None: images move
    if that lowers the load of the slowest encoder. max_patches: no rank encodes more, unless a rank holds more.

        plan_encoders([np.array([64, 16, 16]), np.array([16])], EncoderCost(pair=1, patch=100)).ranks
        # [array([0, 1, 1]), array([1])]
    """
    # Who holds which image, and how long each rank would encode.
    num_ranks = len(held)
    owner = np.repeat(np.arange(num_ranks), [len(images) for images in held])
    patches = np.concatenate([np.asarray(images, np.int64) for images in held])
    costs = cost.of(patches)
    before = by_number(owner, costs, num_ranks)
    patch_limit = int(by_number(owner, patches, num_ranks).max())
    patch_limit = int(MORE_PATCHES * patch_limit) if max_patches is None else max(patch_limit, max_patches)
    # Images move if the ranks then wait for less.
    target = _assign(owner, costs, patches, num_ranks, patch_limit)
    load = by_number(target, costs, num_ranks)
    waits, waited = int(load.max(initial=0)), int(before.max(initial=0))
    if tokens is not None:
        language = cost.token * np.asarray(tokens, np.int64)
        waits, waited = waits + int(language.max()), int((before + language).max())
    if waits > (1 - WORTH) * waited or not costs.size:
        target, load = owner, before
    ends = np.cumsum([len(images) for images in held])[:-1]
    encoded = by_number(target, patches, num_ranks)
    return EncoderPlan(np.split(target, ends), load, encoded, bool((target != owner).any()))


def _assign(owner: np.ndarray, costs: np.ndarray, patches: np.ndarray, num_ranks: int, limit: int) -> np.ndarray:
    """int64[images]: the rank of each. No rank has more than `limit` patches, because memory grows with patches.

    1. Each rank keeps its largest images up to the mean load (or the largest image). 2. The other images go to the
    emptiest rank, the largest first. 3. Moves and swaps between the fullest and the emptiest rank even out the loads.
    """
    target = owner.copy()
    load, filled = by_number(owner, costs, num_ranks), by_number(owner, patches, num_ranks)
    lowest_load = max(-(-int(costs.sum()) // num_ranks), int(costs.max(initial=0)))
    by_cost = np.argsort(-costs, kind="stable")
    # 1.
    kept_load, pool = np.zeros(num_ranks, np.int64), []
    full = load > lowest_load
    for image in by_cost[full[owner[by_cost]]].tolist():
        rank = owner[image]
        if kept_load[rank] + costs[image] <= lowest_load:
            kept_load[rank] += costs[image]
        else:
            pool.append(image)
            load[rank] -= costs[image]
            filled[rank] -= patches[image]
    # 2.
    for image in pool:
        has_room = filled + patches[image] <= limit
        if not has_room.any():
            return owner
        target[image] = rank = np.where(has_room, load, np.iinfo(np.int64).max).argmin()
        load[rank] += costs[image]
        filled[rank] += patches[image]
    # 3.
    order = np.argsort(target, kind="stable")
    images = np.split(order, np.searchsorted(target[order], np.arange(1, num_ranks)))
    for _ in range(EXCHANGES * num_ranks):
        fullest, rank = int(load.argmax()), int(load.argmin())
        if load[fullest] <= NEAR * lowest_load:
            break
        to_give, to_take = images[fullest], images[rank]
        gap = int(load[fullest] - load[rank])
        # An image moves, or two are swapped; the last column gives nothing back.
        moved = costs[to_give][:, None] - np.append(costs[to_take], 0)
        added = patches[to_give][:, None] - np.append(patches[to_take], 0)
        helps = (moved > 0) & (moved < gap) & (filled[rank] + added <= limit) & (filled[fullest] - added <= limit)
        if not helps.any():
            break
        gap_after = np.where(helps, np.abs(gap - 2 * moved), np.iinfo(np.int64).max)
        sent, back = divmod(int(gap_after.argmin()), gap_after.shape[1])
        images[fullest] = np.append(np.delete(to_give, sent), to_take[back : back + 1])
        images[rank] = np.append(np.delete(to_take, back) if back < len(to_take) else to_take, to_give[sent])
        for sums, change in ((load, moved), (filled, added)):
            sums[fullest] -= change[sent, back]
            sums[rank] += change[sent, back]
    for rank in range(num_ranks):
        target[images[rank]] = rank
    return target
