"""What the planner of a training makes of the observed optimizer steps, under one budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.accounting.statistics import StepStatistics
from odb_factory.data.order import OF_MICRO_BATCH, StockSteps, by_weight
from odb_factory.plan.observe import Sample, Step
from odb_factory.planning import (
    ROW,
    Budget,
    BufferMetadata,
    Collation,
    Cost,
    CostModel,
    MicroStepTotals,
    Plan,
    plan_buffers,
    plan_in_groups,
    plan_optimizer_step,
)
from odb_factory.planning.plan import to_plan

# ----------------------------------------------------------------------------------------------------------------------
# How much of the time is spent on real tokens, by the cost model of the planner, and how much could be at most.

FIXED = CostModel().fixed
"""The fixed cost of a micro-step, in tokens: assumed, not measured."""


def time_of(totals: Sequence[MicroStepTotals], fixed: int = FIXED) -> int:
    """Of these micro-steps in tokens: ranks wait for the one with most, and every micro-step costs `fixed` beside."""
    return sum(fixed + one.max_rank_tokens for one in totals)


def step_efficiency(totals: Sequence[MicroStepTotals], ranks: int, fixed: int = FIXED) -> float:
    """Real tokens / (ranks x time), 0 to 1: it counts padding, waiting and the fixed cost of micro-steps."""
    spent = ranks * time_of(totals, fixed)
    return sum(one.tokens for one in totals) / spent if spent else 1.0


def least_time(tokens: np.ndarray, ranks: int, token_budget: int, fixed: int = FIXED) -> float:
    """No cut of these samples into micro-steps takes less, padded or not: a rank has at least the mean load of all, or
    the longest sample, and a micro-step at most the token budget. tokens: of the samples of an optimizer step."""
    load = int(tokens.sum(dtype=np.int64)) / ranks
    within = int(np.minimum(tokens, token_budget).sum(dtype=np.int64)) / ranks  # a longer one goes alone
    return max(load, int(tokens.max())) + fixed * -(-within // token_budget)


# ----------------------------------------------------------------------------------------------------------------------
# The figures of simulated optimizer steps.

Totals = Sequence[Sequence[MicroStepTotals]]
"""The micro-steps of each optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of docs/reference.md, "Plan". Ratios are 0 to 1.

    name: of what forms the micro-batches. token_budget, max_patches, budget_use, limit, share_of_limit: None without a
    budget. micro_batches: K, its mean. limit: the step efficiency that no plan exceeds. speed: predicted, as a multiple
    of that of fixed batches. overlong: samples that break a budget alone. most_tokens, most_patches: of any rank in a
    micro-step.
    """

    name: str
    layout: str = "padded"
    token_budget: int | None = None
    max_patches: int | None = None
    optimizer_steps: int
    micro_steps: int
    micro_batches: float
    least_micro_batches: int
    most_micro_batches: int
    samples_per_micro_step: float
    padding_ratio: float
    balance: float
    patch_balance: float
    budget_use: float | None = None
    step_efficiency: float
    limit: float | None = None
    share_of_limit: float | None = None
    speed: float
    overlong: int = 0
    most_tokens: int
    most_patches: int


def outcome(name: str, found: Totals, ranks: int, stock: Totals) -> Outcome:
    """Without a budget. found: by optimizer step. stock: those of fixed batches, of about the same samples."""
    totals, of_stock = (list(itertools.chain.from_iterable(steps)) for steps in (found, stock))
    statistics = StepStatistics()
    for one in totals:
        statistics.add(one, ranks)
    counts = [len(step) for step in found] or [0]
    reached = step_efficiency(totals, ranks)
    return Outcome(
        name=name,
        optimizer_steps=len(found),
        micro_steps=len(totals),
        micro_batches=len(totals) / len(counts),
        least_micro_batches=min(counts),
        most_micro_batches=max(counts),
        samples_per_micro_step=statistics.samples / max(len(totals), 1),
        padding_ratio=statistics.padding_ratio,
        balance=statistics.balance,
        patch_balance=statistics.patch_balance,
        step_efficiency=reached,
        speed=reached / max(step_efficiency(of_stock, ranks), 1e-9),
        most_tokens=max((one.max_rank_tokens for one in totals), default=0),
        most_patches=max((one.max_rank_patches for one in totals), default=0),
    )


# ----------------------------------------------------------------------------------------------------------------------
# What other ways to form micro-batches do with the same samples: fixed batches, and grouping by length.

MEGA_BATCH = 50
"""Batches of all ranks that the Trainer sorts at a time, where it groups by length."""
NO_LIMIT = 1 << 62


def fixed_batches(samples: np.ndarray, batch_size: int, ranks: int, collation: Collation) -> list[MicroStepTotals]:
    """The micro-steps of batches of `batch_size` rows in the order given: the first for rank 0, the next for rank 1.

    samples: as `ROW`. The last batches may have fewer rows, or be missing.
    """
    groups = [np.arange(k, min(k + batch_size, len(samples))) for k in range(0, len(samples), batch_size)]
    steps: list[list[np.ndarray | None]] = [
        [groups[k + rank] if k + rank < len(groups) else None for rank in range(ranks)]
        for k in range(0, len(groups), ranks)
    ]
    owner = np.zeros(len(samples), dtype=np.int64)
    return to_plan(steps, samples, [0, len(samples)], owner, Budget(NO_LIMIT, None, collation), False, False).totals


def length_grouped(samples: np.ndarray, batch_size: int, ranks: int, collation: Collation) -> list[MicroStepTotals]:
    """The same, sorted by length within mega-batches of 50 batches of all ranks, as the Trainer does.

    All lengths must be known before training, and other samples share an optimizer step.
    """
    mega = MEGA_BATCH * batch_size * ranks
    parts = [samples[start : start + mega] for start in range(0, len(samples), mega)]
    ordered = [part[np.argsort(-part["row_tokens"].astype(np.int64), kind="stable")] for part in parts]
    return fixed_batches(np.concatenate(ordered or [np.zeros(0, ROW)]), batch_size, ranks, collation)


# ----------------------------------------------------------------------------------------------------------------------
# Epochs of `global_batch_size: fill`, round by round, without a training.


@dataclass(frozen=True)
class Round:
    windows: list[BufferMetadata]
    plan: Plan


def rounds(
    samples: Sequence[np.ndarray],
    budget: Budget,
    buffer_size: int,
    *,
    balance: bool = False,
    join: bool = True,
    accumulation: int = 1,
    model: CostModel = CostModel(),
    endless: bool = False,
    seed: int = 0,
) -> Iterator[Round]:
    """One epoch over the samples of each rank (as `ROW`); endless: from the beginning again, without end.

    buffer_size: samples that a rank holds.
    """
    held = [rows[:0] for rows in samples]
    drawn = [0] * len(samples)
    round_index = 0
    final = False
    while not final:
        for rank, rows in enumerate(samples):
            wanted = drawn[rank] + np.arange(buffer_size - len(held[rank]))
            fresh = rows[wanted % len(rows)] if endless else rows[wanted[wanted < len(rows)]]
            drawn[rank] += len(fresh)
            held[rank] = np.concatenate([held[rank], fresh])
        windows = [
            BufferMetadata(rows, not endless and drawn[rank] == len(samples[rank])) for rank, rows in enumerate(held)
        ]
        plan = plan_buffers(
            windows,
            budget,
            seed=seed,
            epoch=0,
            round_index=round_index,
            accumulation=accumulation,
            join=join,
            balance=balance,
            model=model,
        )
        yield Round(windows, plan)
        gone = np.zeros(sum(map(len, held)), bool)
        for groups in plan.groups:
            for group in groups:
                gone[group] = True
        for rank, (start, end) in enumerate(zip(plan.starts, plan.starts[1:])):
            held[rank] = held[rank][~gone[start:end]]
            held[rank]["age"] = np.minimum(held[rank]["age"], 254) + 1
        round_index, final = round_index + 1, plan.final


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
    steps, ranks = _within(sample.steps, setting, budget), setting.ranks
    table = np.concatenate([step.rows for step in steps] or [np.zeros(0, ROW)])
    totals = _filled(table, sample, setting, budget) if setting.step_size is None else _kept(steps, setting, budget)
    limits = [least_time(step.rows["tokens"], ranks, budget.token_budget) for step in steps]
    tokens = float(table["tokens"].sum(dtype=np.int64))
    if setting.step_size is None:  # whatever N becomes, the load alone bounds it
        within = float(np.minimum(table["tokens"], budget.token_budget).sum(dtype=np.int64)) / ranks
        limits = [tokens / ranks + FIXED * within / budget.token_budget]
    limit = tokens / (ranks * sum(limits)) if limits else None
    found = outcome("odb", totals, ranks, _fixed(steps, setting))
    padded = sum(one.padded_tokens for step in totals for one in step)
    return dataclasses.replace(
        found,
        layout=budget.layout,
        token_budget=budget.token_budget,
        max_patches=budget.max_patches,
        budget_use=padded / (max(found.micro_steps, 1) * ranks * budget.token_budget),
        limit=limit,
        share_of_limit=None if limit is None else found.step_efficiency / max(limit, 1e-9),
        overlong=num_overlong(sample, budget),
    )


def baseline(name: str, sample: Sample, setting: Setting) -> Outcome:
    """name: "fixed" batches of this YAML's size, or such "length-grouped" ones."""
    found = stock = _fixed(sample.steps, setting)
    if name != "fixed":
        table = np.concatenate([step.rows for step in sample.steps])
        together = length_grouped(table, setting.batch_size, setting.ranks, setting.collation)
        found = [together[k : k + setting.accumulation] for k in range(0, len(together), setting.accumulation)]
    return outcome(name, found, setting.ranks, stock)


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
    """An epoch of the samples; of a part of the data set as many rounds as put out that number of samples."""
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
    return [fixed_batches(step.rows, setting.batch_size, setting.ranks, setting.collation) for step in steps]


def num_overlong(sample: Sample, budget: Budget) -> int:
    """Samples that break a budget alone."""
    return sum(int(_overlong(step, budget).sum()) for step in sample.steps)


def _within(steps: Sequence[Step], setting: Setting, budget: Budget) -> list[Step]:
    """Without the samples that the policy `overlong` leaves out."""
    if setting.overlong == "singleton":
        return list(steps)
    kept = [dataclasses.replace(step, rows=step.rows[~_overlong(step, budget)]) for step in steps]
    return [step for step in kept if len(step.rows)]


def _overlong(step: Step, budget: Budget) -> np.ndarray:
    """bool[samples]"""
    names = ("tokens", "patches", "units", "has_media", "modality", "leading_label", "has_audio")
    columns = zip(*(step.rows[name].tolist() for name in names))
    return np.array([budget.overlong(Cost(*values)) for values in columns], dtype=bool)
