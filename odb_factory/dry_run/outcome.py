"""The figures of simulated optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.accounting.statistics import StepStatistics
from odb_factory.dry_run import efficiency
from odb_factory.planning import Budget, MicroStepTotals

Totals = Sequence[Sequence[MicroStepTotals]]
"""Of each optimizer step its micro-steps."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ratios are 0 to 1, as in the summary of a run.

    name: of what forms the micro-batches. token_budget, max_patches, budget_use, limit: None where there is no budget.
    micro_batches: K, its mean; least_micro_batches, most_micro_batches: of all optimizer steps. limit: the step
    efficiency that no plan exceeds; share_of_limit: of it. speed: predicted, as a multiple of that of fixed batches of
    this YAML's size. overlong: samples that break a budget alone. most_tokens, most_patches: of any rank in a
    micro-step.
    """

    name: str
    layout: str
    token_budget: int | None
    max_patches: int | None
    optimizer_steps: int
    micro_steps: int
    micro_batches: float
    least_micro_batches: int
    most_micro_batches: int
    samples_per_micro_step: float
    padding_ratio: float
    balance: float
    patch_balance: float
    budget_use: float | None
    step_efficiency: float
    limit: float | None
    share_of_limit: float | None
    speed: float
    overlong: int
    most_tokens: int
    most_patches: int


def outcome(
    name: str,
    found: Totals,
    ranks: int,
    budget: Budget | None,
    *,
    limit: float | None,
    stock: Totals,
    overlong: int = 0,
) -> Outcome:
    """found: by optimizer step. stock: those of fixed batches, of about the same samples."""
    totals, of_stock = (list(itertools.chain.from_iterable(steps)) for steps in (found, stock))
    statistics = StepStatistics()
    for one in totals:
        statistics.add(one, ranks)
    counts = [len(step) for step in found] or [0]
    micro_steps = max(len(totals), 1)
    reached, of_fixed = (efficiency.step_efficiency(steps, ranks) for steps in (totals, of_stock))
    return Outcome(
        name=name,
        layout="padded" if budget is None else budget.layout,
        token_budget=None if budget is None else budget.token_budget,
        max_patches=None if budget is None else budget.max_patches,
        optimizer_steps=len(found),
        micro_steps=len(totals),
        micro_batches=len(totals) / len(counts),
        least_micro_batches=min(counts),
        most_micro_batches=max(counts),
        samples_per_micro_step=statistics.samples / micro_steps,
        padding_ratio=statistics.padding_ratio,
        balance=statistics.balance,
        patch_balance=statistics.patch_balance,
        budget_use=None if budget is None else statistics.padded_tokens / (micro_steps * ranks * budget.token_budget),
        step_efficiency=reached,
        limit=limit,
        share_of_limit=None if limit is None else reached / max(limit, 1e-9),
        speed=reached / max(of_fixed, 1e-9),
        overlong=overlong,
        most_tokens=max((one.max_rank_tokens for one in totals), default=0),
        most_patches=max((one.max_rank_patches for one in totals), default=0),
    )
