"""What a step takes, learnt from the steps of this run: a cost model fitted to measured times."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from odb_factory.planning import CostModel, MicroStepTotals
from odb_factory.planning.cost import FEWEST_STEPS, PICOSECONDS, fit_cost_model

STEPS_KEPT, WARM_UP_STEPS = 512, 5


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

    def forget(self) -> None:
        """The step under way was not taken as planned."""
        self._under_way = None

    def add(self, totals: MicroStepTotals, seconds: float) -> None:
        if self._warm_up:
            self._warm_up -= 1
        else:
            largest = (totals.max_rank_tokens, totals.max_rank_patches, totals.max_rank_attention)
            self._steps.append((*map(float, largest), seconds))

    def fitting(self) -> Callable[[], CostModel]:
        """`fit`, to be called in another thread: what it imports is imported here, not while workers are forked."""
        importlib.import_module("scipy.optimize")
        self._is_fitted = True
        return self.fit

    def fit(self) -> CostModel:
        """The model fitted to the micro-steps so far; by tokens while they are few."""
        fitted = fit_cost_model(np.array(list(self._steps)).reshape(-1, 4))
        if fitted is not None:
            model, self.r2 = fitted
            self.model = model or self.model
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
