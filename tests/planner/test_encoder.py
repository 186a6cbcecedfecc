"""Which rank encodes which image: properties of the assignment, and its balance on many ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.planner import Budget, Cost, EncoderCost, make_metadata, plan_encoders, plan_optimizer_step

COST = EncoderCost(pair=2 * 32 * 1280, patch=32 * (4 * 1280**2 + 2 * 1280 * 3420), token=10**9)
"""About the cost of Qwen2-VL's tower."""
HELD = st.lists(st.lists(st.integers(1, 20_000), max_size=12), min_size=1, max_size=9)


def arrays(held: list[list[int]]) -> list[np.ndarray]:
    return [np.array(patches, np.int64) for patches in held]


def held_load(held: list[np.ndarray]) -> np.ndarray:
    return np.array([int(COST.of(patches).sum()) for patches in held])


@given(HELD, st.sampled_from([None, 1, 30_000]))
def test_every_image_is_encoded_once_and_patches_are_bounded(held: list[list[int]], max_patches: int | None) -> None:
    mine = arrays(held)
    plan = plan_encoders(mine, COST, max_patches=max_patches)
    assert list(map(len, plan.ranks)) == list(map(len, mine))
    target, patches = np.concatenate(plan.ranks), np.concatenate(mine)
    for sums, values in ((plan.load, COST.of(patches)), (plan.patches, patches)):
        assert sums.tolist() == [int(values[target == rank].sum()) for rank in range(len(mine))]
    assert plan.load.max() <= held_load(mine).max()
    most = max(int(images.sum()) for images in mine)
    assert plan.patches.max() <= (1.25 * most if max_patches is None else max(most, max_patches)), "memory"
    owner = np.repeat(np.arange(len(mine)), [len(images) for images in mine])
    assert plan.moves == bool((target != owner).any())


@given(HELD, st.lists(st.integers(0, 100_000), min_size=9, max_size=9))
def test_with_tokens_images_move_only_if_the_micro_step_gets_shorter(held: list[list[int]], tokens: list[int]) -> None:
    mine, tokens = arrays(held), tokens[: len(held)]
    plan = plan_encoders(mine, COST, tokens)
    language = COST.token * np.array(tokens)
    if plan.moves:
        assert plan.load.max() + language.max() < (held_load(mine) + language).max()


def test_ranks_that_wait_for_each_other_anyway_keep_their_images() -> None:
    """Rank 0 has images, rank 1 as much text: an exchange would serialise work that now runs in parallel."""
    held = arrays([[400] * 8, []])
    work = int(COST.of(held[0]).sum()) // COST.token
    assert plan_encoders(held, COST).moves
    assert not plan_encoders(held, COST, [0, work]).moves
    assert plan_encoders(held, COST, [work, work]).moves


def draw(rng: np.random.Generator) -> tuple[int, list[int]]:
    """Tokens of a sample, and the patches of its images or frames: text, one to three images, or a video of 4 to 24."""
    kind, text = rng.integers(3), int(np.exp(rng.uniform(np.log(60), np.log(2000))))
    patches: list[int] = []
    if kind == 1:
        patches = (np.exp(rng.uniform(np.log(64), np.log(4096), rng.integers(1, 4))) // 4 * 4).astype(int).tolist()
    elif kind == 2:
        patches = [int(rng.choice([64, 144, 256, 400]))] * int(rng.integers(4, 25))
    return text + sum(patches) // 4, patches


@pytest.mark.parametrize("ranks", [8, 64, 256, 1024])
def test_three_modalities_on_many_ranks(ranks: int) -> None:
    """An optimizer step of 32 samples on each rank: after planning its patches are even, its encoder loads are not."""
    rng = np.random.default_rng(ranks)
    samples = [draw(rng) for _ in range(32 * ranks)]
    held = [list(range(rank, len(samples), ranks)) for rank in range(ranks)]
    costs = [Cost(tokens, sum(patches), tokens // 3 + 1, bool(patches)) for tokens, patches in samples]
    buffers = [make_metadata([costs[i] for i in numbers], True, positions=numbers) for numbers in held]
    plan = plan_optimizer_step(buffers, Budget(16384, 32768, layout="flat"), balance=True)
    order, before, after, mean = list(itertools.chain(*held)), 0, 0, 0.0
    for groups in zip(*plan.groups):
        images = arrays([[p for row in group for p in samples[order[row]][1]] for group in groups])
        load = plan_encoders(images, COST, max_patches=32768).load
        before, after, mean = before + int(held_load(images).max()), after + int(load.max()), mean + load.mean()
    assert mean / after >= 0.95
    assert ranks < 64 or mean / before < 0.9
