"""What others do with the same samples, and the bound of all, counted by hand and against the planner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from odb_factory.plan.simulate import FIXED, fixed_batches, least_time, step_efficiency, time_of
from odb_factory.planning import Budget, BufferMetadata, Collation, Cost, make_metadata, plan_optimizer_step


def samples(*tokens: int) -> np.ndarray:
    return make_metadata([Cost(one, units=1) for one in tokens], [0] * len(tokens), exhausted=False).rows


def test_fixed_batches_are_dealt_to_ranks_in_turn() -> None:
    """Two rows a batch, padded to a multiple of 8; rank 1 has none in the last micro-step."""
    totals = fixed_batches(samples(3, 9, 20, 4, 5), 2, 2, Collation(pad_to_multiple_of=8))
    assert [(one.samples, one.tokens, one.padded_tokens, one.max_rank_tokens) for one in totals] == [
        (4, 36, 2 * 16 + 2 * 24, 48),
        (1, 5, 8, 8),
    ]
    assert [one.active_ranks for one in totals] == [2, 1]
    assert time_of(totals) == 48 + 8 + 2 * FIXED
    assert step_efficiency(totals, 2) == pytest.approx(41 / (2 * (56 + 2 * FIXED)))


def test_dummy_media_widen_batches_of_text() -> None:
    made = Collation(dummy_media_tokens=6, dummy_media_patches=16)
    (one,) = fixed_batches(samples(10, 3), 2, 1, made)
    assert (one.padded_tokens, one.patches) == (2 * 16, 16), "the first row has the dummy behind it"


@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_no_plan_beats_the_bound(layout: str, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for token_budget in (256, 1024, 8192):
        for _ in range(5):
            rows = samples(*rng.lognormal(5, 1, 40).astype(int).clip(4, 2000))
            buffers = [BufferMetadata(rows[rank::ranks], exhausted=False) for rank in range(ranks)]
            plan = plan_optimizer_step(buffers, dataclasses.replace(Budget(token_budget), layout=layout), balance=True)
            assert time_of(plan.totals) >= least_time(rows["tokens"], ranks, token_budget)
