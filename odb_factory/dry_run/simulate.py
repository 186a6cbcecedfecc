"""What the planner of a training makes of the observed optimizer steps, under one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.data.stock_steps import OF_MICRO_BATCH, StockSteps, by_weight
from odb_factory.dry_run import baselines, efficiency
from odb_factory.dry_run.observe import Sample, Step
from odb_factory.dry_run.outcome import Outcome, outcome
from odb_factory.dry_run.rounds import rounds
from odb_factory.planning import (
    ROW,
    Budget,
    BufferMetadata,
    Collation,
    Cost,
    MicroStepTotals,
    plan_in_groups,
    plan_optimizer_step,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan depends on beside the budget. step_size: samples of an optimizer step; None: filled ones.

    balance, join, overlong: keys of the block; group_size: `balance_group_size`. equal_weights:
    of the stage.
    """

    ranks: int
    step_size: int | None
    batch_size: int
    accumulation: int
    balance: bool
    join: bool
    overlong: str
    group_size: int
    buffer_size: int
    seed: int
    equal_weights: bool
    collation: Collation


def planned(sample: Sample, setting: Setting, budget: Budget) -> Outcome:
    """With odb, under this budget and in its layout."""
    steps = _within(sample.steps, setting, budget)
    table = np.concatenate([step.rows for step in steps] or [np.zeros(0, ROW)])
    totals = _filled(table, sample, setting, budget) if setting.step_size is None else _kept(steps, setting, budget)
    limits = [efficiency.least_time(step.rows["tokens"], setting.ranks, budget.token_budget) for step in steps]
    if setting.step_size is None:  # whatever becomes of N: the load alone bounds it
        load = float(table["tokens"].sum(dtype=np.int64)) / setting.ranks
        within = float(np.minimum(table["tokens"], budget.token_budget).sum(dtype=np.int64)) / setting.ranks
        limits = [load + efficiency.FIXED * within / budget.token_budget]
    tokens = float(table["tokens"].sum(dtype=np.int64))
    return outcome(
        "odb",
        totals,
        setting.ranks,
        budget,
        limit=tokens / (setting.ranks * sum(limits)) if limits else None,
        stock=_fixed(steps, setting),
        overlong=num_overlong(sample, budget),
    )


def baseline(name: str, sample: Sample, setting: Setting) -> Outcome:
    """name: "fixed" batches of this YAML's size, or such "length-grouped" ones. They know no budget."""
    stock = _fixed(sample.steps, setting)
    found = stock
    if name != "fixed":
        table = np.concatenate([step.rows for step in sample.steps])
        together = baselines.length_grouped(table, setting.batch_size, setting.ranks, setting.collation)
        found = [together[k : k + setting.accumulation] for k in range(0, len(together), setting.accumulation)]
    return outcome(name, found, setting.ranks, None, limit=None, stock=stock)


def _kept(steps: Sequence[Step], setting: Setting, budget: Budget) -> list[list[MicroStepTotals]]:
    found = []
    assert setting.step_size is not None
    stock = StockSteps(
        global_batch_size=setting.step_size,
        batch_size=setting.batch_size,
        world_size=setting.ranks,
        num_samples=None,
        mean=OF_MICRO_BATCH,
        equal_weights=setting.equal_weights,
    )
    in_groups = setting.balance and budget.layout == "flat" and setting.ranks > setting.group_size
    for step in steps:
        rank = (step.start + step.rows["position"]) % setting.ranks
        buffers = [BufferMetadata(step.rows[rank == one], exhausted=False) for one in range(setting.ranks)]
        if setting.equal_weights:
            buffers = by_weight(buffers, stock)
        if in_groups:
            plan = plan_in_groups(buffers, budget, setting.group_size)
        else:
            plan = plan_optimizer_step(buffers, budget, balance=setting.balance)
        found.append(plan.totals)
    return found


def _filled(table: np.ndarray, sample: Sample, setting: Setting, budget: Budget) -> list[list[MicroStepTotals]]:
    """An epoch of the samples; of a part of the data set so many rounds that as many samples go out."""
    shares = [table[rank :: setting.ranks] for rank in range(setting.ranks)]
    totals: list[MicroStepTotals] = []
    for one in rounds(
        shares,
        budget,
        setting.buffer_size,
        balance=setting.balance,
        join=setting.join,
        accumulation=setting.accumulation,
        endless=not sample.is_whole and min(map(len, shares)) > 0,
        seed=setting.seed,
    ):
        totals += one.plan.totals
        if sum(step.samples for step in totals) >= len(table):
            break
    return [totals[k : k + setting.accumulation] for k in range(0, len(totals), setting.accumulation)]


def _fixed(steps: Sequence[Step], setting: Setting) -> list[list[MicroStepTotals]]:
    return [baselines.fixed_batches(step.rows, setting.batch_size, setting.ranks, setting.collation) for step in steps]


def num_overlong(sample: Sample, budget: Budget) -> int:
    """Samples that break a budget alone."""
    return sum(int(_overlong(step, budget).sum()) for step in sample.steps)


def _within(steps: Sequence[Step], setting: Setting, budget: Budget) -> list[Step]:
    """Without the samples that the policy `overlong` leaves out."""
    if setting.overlong == "singleton":
        return list(steps)
    kept = [dataclasses.replace(step, rows=step.rows[~_overlong(step, budget)]) for step in steps]
    return [step for step in kept if len(step.rows)]


def _costs(samples: np.ndarray) -> list[Cost]:
    """Of samples as `ROW`."""
    names = ("tokens", "patches", "units", "has_media", "modality", "leading_label", "has_audio")
    return [Cost(*values) for values in zip(*(samples[name].tolist() for name in names))]


def _overlong(step: Step, budget: Budget) -> np.ndarray:
    """bool[samples]"""
    return np.array([budget.overlong(cost) for cost in _costs(step.rows)], dtype=bool)
