"""The fitted cost model: it finds what made the times, and serves the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from odb_factory.data.step_times import WARM_UP_STEPS, StepTimes
from odb_factory.planning import CostModel, MicroStepTotals
from odb_factory.planning.cost import FEWEST_STEPS

FIXED, TOKEN, PATCH, SQUARE = 0.05, 2e-5, 1e-5, 3e-9


def steps(count: int, seed: int = 0) -> list[tuple[MicroStepTotals, float]]:
    """Steps of some size, and what they take (seconds)."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length, rows, patches = int(rng.integers(50, 4000)), int(rng.integers(1, 9)), int(rng.integers(0, 20_000))
        totals = MicroStepTotals(
            max_rank_tokens=rows * length, max_rank_patches=patches, max_rank_attention=rows * length * length
        )
        seconds = FIXED + TOKEN * rows * length + PATCH * patches + SQUARE * rows * length**2
        made.append((totals, seconds * rng.normal(1, 0.02)))
    return made


def fitted(measured: list[tuple[MicroStepTotals, float]]) -> StepTimes:
    times = StepTimes()
    for totals, seconds in [*measured[:1] * WARM_UP_STEPS, *measured]:
        times.add(totals, seconds)
    times.fit()
    return times


def test_the_model_is_that_of_the_times() -> None:
    times = fitted(steps(400))
    model = times.model
    expected = [value * 1e12 for value in (FIXED, TOKEN, PATCH, SQUARE)]
    assert [model.fixed, model.token, model.patch, model.square] == pytest.approx(expected, rel=0.1)
    assert all(isinstance(value, int) for value in (model.fixed, model.token, model.patch, model.square))
    assert times.r2 > 0.97 and "R2 1.00" in str(times)


def test_an_evaluation_between_steps_is_not_learnt_from() -> None:
    measured = steps(400)
    for k in range(0, 400, 40):
        measured[k] = (measured[k][0], measured[k][1] + 60)
    assert fitted(measured).model.token == pytest.approx(TOKEN * 1e12, rel=0.1)


def test_few_steps_are_no_model() -> None:
    times = fitted(steps(FEWEST_STEPS - 1))
    assert times.model == CostModel() and times.r2 is None and "no cost model yet" in str(times)


def test_steps_that_all_take_as_long_leave_the_model_alone() -> None:
    """Nothing can be learnt of what tokens cost; the groups go on meeting by tokens."""
    times = fitted([(MicroStepTotals(max_rank_tokens=100 + k % 2, max_rank_attention=1), 0.5) for k in range(100)])
    assert times.model.token > 0 or times.model == CostModel()


def test_time_spent_waiting_for_data_is_no_part_of_a_step() -> None:
    times = StepTimes()
    for totals, _ in steps(WARM_UP_STEPS + 3):
        times.begin(totals)
        times.wait(1000.0)
    assert all(seconds < 0 for *_, seconds in times._steps)


@pytest.mark.parametrize("is_fitted", [True, False])
def test_a_step_is_timed_to_the_end_of_its_kernels_where_times_are_learnt_from(monkeypatch, is_fitted: bool) -> None:
    """Elsewhere the training is not made to wait for its kernels."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    times = StepTimes()
    if is_fitted:
        times.fitting()
    times.begin(MicroStepTotals())
    times.begin(MicroStepTotals())
    assert len(waited) == (2 if is_fitted else 0)
