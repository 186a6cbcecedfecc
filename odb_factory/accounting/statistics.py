"""Sums over what was trained on, and the figures that are made of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from odb_factory.data.samples import OptimizerStep
from odb_factory.data.step_agreement import LateRow
from odb_factory.planning import MicroStepTotals


@dataclass
class StepStatistics:
    """Sums over micro-steps, all ranks together; tokens are real, padded_tokens and patches as collated.

    awaited_tokens, awaited_patches: what there would be if every rank had as many as the one with most in the
    micro-step. squared_units: of optimizer steps, all ranks together. oom_cuts: how often memory did not hold a
    micro-batch, or a part of one, and it was cut in two. lost_weight: the loss of rows that were lost after their
    optimizer step had begun, in shares of the loss of an optimizer step.
    """

    micro_steps: int = 0
    optimizer_steps: int = 0
    idle_micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    units: int = 0
    squared_units: int = 0
    patches: int = 0
    awaited_tokens: int = 0
    awaited_patches: int = 0
    moved: int = 0
    moved_bytes: int = 0
    oom_cuts: int = 0
    lost_weight: float = 0.0
    data_wait_s: float = 0.0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, totals: MicroStepTotals, world_size: int) -> None:
        """Count a micro-step over all ranks."""
        self.micro_steps += 1
        self.idle_micro_batches += world_size - totals.active_ranks
        self.samples += totals.samples
        self.tokens += totals.tokens
        self.padded_tokens += totals.padded_tokens
        self.units += totals.units
        self.patches += totals.patches
        self.awaited_tokens += world_size * totals.max_rank_tokens
        self.awaited_patches += world_size * totals.max_rank_patches
        self.moved += totals.moved
        self.moved_bytes += totals.moved_bytes

    def add_optimizer_step(self, step: OptimizerStep) -> None:
        """Count an optimizer step whose micro-steps have all been added."""
        self.optimizer_steps += 1
        self.squared_units += step.units**2

    def lose(self, rows: Sequence[LateRow]) -> None:
        """Take rows out that were counted and not trained on."""
        self.samples -= len(rows)
        self.tokens -= sum(row.tokens for row in rows)
        self.units -= sum(row.units for row in rows)
        self.lost_weight += sum(row.share for row in rows)
        self.idle_micro_batches += sum(row.empties for row in rows)

    def wait(self, seconds: float) -> None:
        """Count time spent waiting for data. What comes before the first micro-step is when the sums begin."""
        if not self.micro_steps and not self.data_wait_s:
            self.started = time.perf_counter() - seconds
        self.data_wait_s += seconds

    @property
    def padding_ratio(self) -> float:
        """Share of the collated tokens that is padding (or dummy media), 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def balance(self) -> float:
        """Padded tokens of all ranks as a share of what they wait for, 0 to 1: 1 where no rank waits for another."""
        return self.padded_tokens / self.awaited_tokens if self.awaited_tokens else 1.0

    @property
    def patch_balance(self) -> float:
        """The same of vision patches."""
        return self.patches / self.awaited_patches if self.awaited_patches else 1.0

    @property
    def units_cv(self) -> float:
        """How much optimizer steps differ in units: standard deviation over mean, 0 where all are alike."""
        if not self.units or not self.optimizer_steps:
            return 0.0
        mean = self.units / self.optimizer_steps
        return math.sqrt(max(self.squared_units / self.optimizer_steps - mean**2, 0.0)) / mean

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """What a `StepStatistics` is made from that goes on with these sums."""
        return {**self.sums(), "seconds_before": self.seconds}

    def sums(self) -> dict[str, float]:
        """The sums alone, without the clock."""
        clock = ("started", "seconds_before")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in clock}

    def summary(self) -> dict[str, float]:
        """The entries of `odb_summary.json` that are sums over the run, or made of such. These names are public."""
        return {
            "samples": self.samples,
            "micro_steps": self.micro_steps,
            "idle_micro_batches": self.idle_micro_batches,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "units": self.units,
            "units_cv": self.units_cv,
            "padding_ratio": self.padding_ratio,
            "balance": self.balance,
            "patch_balance": self.patch_balance,
            "moved": self.moved,
            "moved_bytes": self.moved_bytes,
            "oom_cuts": self.oom_cuts,
            "lost_weight": self.lost_weight,
            "data_wait_s": self.data_wait_s,
            "seconds": self.seconds,
        }

    def metrics(self, token_budget: int, world_size: int) -> dict[str, float]:
        """The `odb/...` entries of a log line. These names are public.

        odb/micro_batches: micro-batches of an optimizer step on each rank; odb/units_per_step: of an optimizer step
        on all ranks, and odb/units_cv their standard deviation over their mean.
        """
        micro_steps, optimizer_steps = max(self.micro_steps, 1), max(self.optimizer_steps, 1)
        return {
            "odb/micro_batches": round(self.micro_steps / optimizer_steps, 2),
            "odb/samples_per_micro_step": round(self.samples / micro_steps, 2),
            "odb/tokens_per_micro_step": round(self.tokens / micro_steps, 1),
            "odb/units_per_step": round(self.units / optimizer_steps, 1),
            "odb/units_cv": round(self.units_cv, 4),
            "odb/padding_ratio": round(self.padding_ratio, 4),
            "odb/budget_use": round(self.padded_tokens / (micro_steps * world_size * token_budget), 4),
            "odb/balance": round(self.balance, 4),
            "odb/patch_balance": round(self.patch_balance, 4),
            "odb/samples_per_second": round(self.samples / self.seconds, 3),
            "odb/data_wait_s": round(self.data_wait_s, 4),
        }
