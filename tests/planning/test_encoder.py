"""Who encodes which image: properties of the assignment, and what it reaches on many ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.planning import EncoderCost, plan_encoders

COST = EncoderCost(pair=2 * 32 * 1280, patch=32 * (4 * 1280**2 + 2 * 1280 * 3420), token=10**9)
"""About that of Qwen2-VL's tower."""
HELD = st.lists(st.lists(st.integers(1, 20_000), max_size=12), min_size=1, max_size=9)


def arrays(held: list[list[int]]) -> list[np.ndarray]:
    return [np.array(one, np.int64) for one in held]


@given(HELD)
def test_every_image_is_encoded_once_and_no_rank_has_more_than_the_fullest_had(held: list[list[int]]) -> None:
    mine = arrays(held)
    plan = plan_encoders(mine, COST)
    assert [len(one) for one in plan.ranks] == [len(one) for one in mine]
    target, patches = np.concatenate(plan.ranks), np.concatenate(mine)
    for sums, values in ((plan.load, COST.of(patches)), (plan.patches, patches)):
        assert sums.tolist() == [int(values[target == rank].sum()) for rank in range(len(mine))]
    assert plan.before.tolist() == [int(COST.of(one).sum()) for one in mine]
    assert plan.load.max() <= plan.before.max()
    assert plan.patches.max() <= max(int(one.sum()) for one in mine), "memory grows with patches"
    owner = np.repeat(np.arange(len(mine)), [len(one) for one in mine])
    assert plan.moves == bool((target != owner).any())


@given(HELD, st.lists(st.integers(0, 100_000), min_size=9, max_size=9))
def test_with_tokens_images_move_only_where_the_micro_step_gets_shorter(
    held: list[list[int]], tokens: list[int]
) -> None:
    mine, tokens = arrays(held), tokens[: len(held)]
    plan = plan_encoders(mine, COST, tokens)
    language = COST.token * np.array(tokens)
    if plan.moves:
        assert plan.load.max() + language.max() < (plan.before + language).max()


def test_ranks_that_wait_for_each_other_anyway_keep_their_images() -> None:
    """Rank 0 has the images, rank 1 as much text: together they take one after the other what they did at once."""
    held = arrays([[400] * 8, []])
    work = int(COST.of(held[0]).sum()) // COST.token
    assert plan_encoders(held, COST).moves
    assert not plan_encoders(held, COST, [0, work]).moves
    assert plan_encoders(held, COST, [work, work]).moves


def test_images_stay_where_that_is_even() -> None:
    held = arrays([[64, 256, 1024]] * 4)
    assert not plan_encoders(held, COST).moves
    one_too_many = arrays([[256] * 6, [256] * 4, [256] * 5, [256] * 5])
    plan = plan_encoders(one_too_many, COST)
    assert sum(int((one != rank).sum()) for rank, one in enumerate(plan.ranks)) == 1


def draw(rng: np.random.Generator, ranks: int) -> list[np.ndarray]:
    """A micro-step of text, images and videos, by samples: a third have no image, a sixth are videos of 4 to 24 frames
    of one size; images have 64 to 4,096 patches. Each rank has as many patches as the cap holds, as balanced in tokens
    and patches; a few ranks have text only."""
    held = []
    for _ in range(ranks):
        patches: list[int] = []
        while sum(patches) < 12_000 and rng.random() > 0.03:
            kind = rng.random()
            if kind > 2 / 3:
                patches += [int(rng.choice([64, 144, 256, 400]))] * int(rng.integers(4, 25))
            elif kind > 1 / 3:
                patches += np.exp(rng.uniform(np.log(64), np.log(4096), rng.integers(1, 4))).astype(int).tolist()
        held.append(np.array(patches, np.int64))
    return held


@pytest.mark.parametrize("ranks", [8, 64, 256, 1024])
def test_the_mean_is_near_the_maximum_on_many_ranks(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(3):
        plan = plan_encoders(draw(rng, ranks), COST)
        mean, most = plan.load.mean(), max(plan.load.max(), 1)
        print(f"{ranks} ranks: {plan.before.mean() / plan.before.max():.3f} -> {mean / most:.3f}")
        assert mean / most >= 0.95
