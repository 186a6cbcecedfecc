"""What a step takes, learnt from the steps of this run: a cost model fitted to measured times."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from odb_factory.planning import CostModel, MicroStepTotals

STEPS_KEPT, FEWEST_STEPS = 512, 32
WARM_UP_STEPS = 5
OUTLIER = 3.0
"""A step that takes so many times what the model says (an evaluation, a checkpoint) is not learnt from."""
PICOSECONDS = 1e12


class StepTimes:
    """Measured steps of all ranks together, as this rank saw them: ranks wait for each other, so all see the same.

    The training calls `begin` and `wait`, the planning thread calls `fit`, once a round.
    r2: how much of the differences in time the model explains, at most 1; none while it is not fitted.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=STEPS_KEPT)
        self._warm_up = WARM_UP_STEPS
        self._under_way: tuple[MicroStepTotals, float] | None = None
        self._is_fitted = False
        self.model = CostModel()
        self.r2: float | None = None

    def begin(self, totals: MicroStepTotals) -> None:
        """A step begins; the one before it has ended, with all that the training did behind it."""
        if self._is_fitted:
            _synchronize()  # kernels are queued: without it this would be the time that queueing them takes
        now = time.perf_counter()
        if self._under_way is not None:
            self.add(self._under_way[0], now - self._under_way[1])
        self._under_way = (totals, now)

    def wait(self, seconds: float) -> None:
        """So much of the step under way was spent waiting for data."""
        if self._under_way is not None:
            self._under_way = (self._under_way[0], self._under_way[1] + seconds)

    def add(self, totals: MicroStepTotals, seconds: float) -> None:
        if self._warm_up:
            self._warm_up -= 1
        else:
            largest = (totals.max_rank_tokens, totals.max_rank_patches, totals.max_rank_attention)
            self._steps.append((1.0, *map(float, largest), seconds))

    def fitting(self) -> Callable[[], CostModel]:
        """`fit`, to be called in another thread: what it imports is imported here, not while workers are forked."""
        importlib.import_module("scipy.optimize")
        self._is_fitted = True
        return self.fit

    def fit(self) -> CostModel:
        """t = a + b tokens + c patches + d squares by least squares, none negative; by tokens while steps are few."""
        steps = np.array(list(self._steps)).reshape(-1, 5)
        if len(steps) < FEWEST_STEPS:
            return self.model
        from scipy.optimize import nnls  # not at start-up: few runs ask for it

        for _ in range(2):
            features, seconds = steps[:, :4], steps[:, 4]
            scale = np.maximum(features.max(axis=0), 1.0)
            weights, _ = nnls(features / scale, seconds)
            predicted = features / scale @ weights
            ordinary = seconds <= OUTLIER * np.maximum(predicted, np.median(seconds) / OUTLIER)
            unexplained, all_there_is = ((seconds - other) ** 2 for other in (predicted, seconds.mean()))
            self.r2 = float(1 - unexplained.sum() / max(all_there_is.sum(), 1e-12))
            if ordinary.all() or ordinary.sum() < FEWEST_STEPS:
                break
            steps = steps[ordinary]
        model = CostModel(*(int(weight * PICOSECONDS) for weight in weights / scale))
        if model.token or model.patch or model.square:
            self.model = model
        return self.model

    def __str__(self) -> str:
        if self.r2 is None:
            return f"no cost model yet: it is fitted to {FEWEST_STEPS} steps or more"
        model = self.model
        fixed, token, patch, square = (x / PICOSECONDS for x in (model.fixed, model.token, model.patch, model.square))
        return (
            f"cost model: a step takes {1e3 * fixed:.3g} ms + {1e6 * token:.3g} us a token + {1e6 * patch:.3g} us a "
            f"patch + {1e9 * square:.3g} ns a squared row length; R2 {self.r2:.2f}"
        )


def _synchronize() -> None:
    """Wait until the accelerator, if the training uses one, has done what was queued."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif not torch.cuda.is_available():
        accelerator = getattr(torch, "accelerator", None)  # from torch 2.6
        if accelerator is not None and accelerator.is_available():
            accelerator.synchronize()
