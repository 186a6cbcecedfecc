"""The cost model that measured times are fitted to (tests/data/test_step_times.py fits those of whole runs)."""

from __future__ import annotations

import numpy as np
import pytest

from odb_factory.planning import CostModel
from odb_factory.planning.cost import FEWEST_STEPS, fit_cost_model

TRUE = CostModel(fixed=50_000_000_000, token=20_000_000, patch=10_000_000, square=3000)


def measured(count: int) -> np.ndarray:
    """Micro-steps of some size, and what they take by `TRUE` (seconds)."""
    rng = np.random.default_rng(0)
    rows, lengths, patches = rng.integers(1, 9, count), rng.integers(50, 4000, count), rng.integers(0, 20_000, count)
    tokens, attention = rows * lengths, rows * lengths**2
    return np.column_stack([tokens, patches, attention, TRUE.of(tokens, patches, attention) / 1e12])


def test_the_model_that_made_the_times_is_found() -> None:
    model, r2 = fit_cost_model(measured(200))
    found, true = ([one.fixed, one.token, one.patch, one.square] for one in (model, TRUE))
    assert found == pytest.approx(true, rel=1e-6) and r2 == pytest.approx(1)
    assert all(isinstance(value, int) for value in found)


def test_an_outlier_is_left_out() -> None:
    times = measured(200)
    times[::40, 3] += 60
    assert fit_cost_model(times)[0].token == pytest.approx(TRUE.token, rel=1e-6)


def test_nothing_is_fitted_to_few_micro_steps_or_to_no_difference() -> None:
    assert fit_cost_model(measured(FEWEST_STEPS - 1)) is None
    assert fit_cost_model(np.tile([0, 0, 0, 0.5], (FEWEST_STEPS, 1)))[0] is None
