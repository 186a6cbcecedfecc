"""Fit a cost model to measured times of micro-steps."""

from __future__ import annotations

import numpy as np

from odb_factory.planning.cost import CostModel

FEWEST_STEPS = 32
"""From fewer micro-steps nothing is fitted."""
OUTLIER = 3.0
"""A micro-step that takes so many times what the model says (an evaluation, a checkpoint) is left out of the fit."""
PICOSECONDS = 1e12
"""A fitted model counts in these, as whole numbers."""


def fit_cost_model(measured: np.ndarray) -> tuple[CostModel | None, float] | None:
    """Fit seconds = a + b tokens + c patches + d attention by least squares, none negative.

    measured: [micro-steps, 4], the most padded tokens, patches and attention (rows x padded row length squared) of
    any rank, and seconds. Returns the model in picoseconds (None if nothing but a fixed time was found) and R2, how
    much of the differences in time it explains, at most 1; None while there are fewer than `FEWEST_STEPS`.

        model, r2 = fit_cost_model(np.array([[16384, 0, 16384 * 2048, 0.41], ...]))

    Non-negative least squares by Lawson and Hanson (1974), in scipy; once more without outliers.
    """
    if len(measured) < FEWEST_STEPS:
        return None
    from scipy.optimize import nnls  # not at start-up: few runs ask for it

    steps = np.column_stack([np.ones(len(measured)), measured]).astype(np.float64)
    for _ in range(2):
        features, seconds = steps[:, :4], steps[:, 4]
        scale = np.maximum(features.max(axis=0), 1.0)
        weights, _ = nnls(features / scale, seconds)
        predicted = features / scale @ weights
        is_ordinary = seconds <= OUTLIER * np.maximum(predicted, np.median(seconds) / OUTLIER)
        unexplained, variation = ((seconds - other) ** 2 for other in (predicted, seconds.mean()))
        r2 = float(1 - unexplained.sum() / max(variation.sum(), 1e-12))
        if is_ordinary.all() or is_ordinary.sum() < FEWEST_STEPS:
            break
        steps = steps[is_ordinary]
    model = CostModel(*(int(weight * PICOSECONDS) for weight in weights / scale))
    return model if model.token or model.patch or model.square else None, r2
