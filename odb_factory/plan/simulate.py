"""Simulate a training of the observed samples: by the planner under a budget, by fixed batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb_factory.accounting.statistics import StepStatistics
from odb_factory.data.order import MEAN_OF_MICRO_BATCH, StockSteps, split_by_weight
from odb_factory.plan.arguments import Asked
from odb_factory.plan.rows import Sample, Step
from odb_factory.planning import (
    ROW,
    Budget,
    BufferMetadata,
    Collation,
    Cost,
    CostModel,
    EncoderCost,
    Media,
    MicroStepTotals,
    Plan,
    plan_buffers,
    plan_encoders,
    plan_optimizer_step,
)
from odb_factory.planning.plan import pool, to_plan

# ----------------------------------------------------------------------------------------------------------------------
# How much of the time is spent on real tokens, by the cost model of the planner, and how much could be at most.

FIXED = CostModel().fixed
"""The fixed cost of a micro-step, in tokens: assumed, not measured."""


def time_of(totals: Sequence[MicroStepTotals]) -> int:
    """Of these micro-steps in tokens: ranks wait for the one with most, and every micro-step costs `FIXED` beside."""
    return sum(FIXED + one.max_rank_tokens for one in totals)


def step_efficiency(totals: Sequence[MicroStepTotals], ranks: int) -> float:
    """Real tokens / (ranks x time), 0 to 1: it counts padding, waiting and the fixed cost of micro-steps."""
    spent = ranks * time_of(totals)
    return sum(one.tokens for one in totals) / spent if spent else 1.0


def least_time(tokens: np.ndarray, ranks: int, token_budget: int) -> float:
    """No cut of these samples into micro-steps takes less, padded or not: a rank has at least the mean load of all, or
    the longest sample, and a micro-step at most the token budget. tokens: of the samples of an optimizer step."""
    load = int(tokens.sum(dtype=np.int64)) / ranks
    within = int(np.minimum(tokens, token_budget).sum(dtype=np.int64)) / ranks  # a longer one goes alone
    return max(load, int(tokens.max())) + FIXED * -(-within // token_budget)


# ----------------------------------------------------------------------------------------------------------------------
# The figures of simulated optimizer steps.

Totals = Sequence[Sequence[MicroStepTotals]]
"""The micro-steps of each optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of docs/commands.md, "Plan". Ratios are 0 to 1.

    name: of what forms the micro-batches. token_budget, max_patches, budget_use, limit,
    share_of_limit: None without a budget. micro_batches: K, its mean. limit: the step efficiency that no plan exceeds.
    speed: predicted, as a multiple of that of fixed batches. overlong: samples that break a budget alone. most_tokens,
    most_patches: of any rank in a micro-step. encoder_patches: vision patches that each rank encodes; encoder_balance:
    their mean over the ranks as a share of the most, for which all wait; None without several ranks and images.
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
    encoder_patches: list[int] | None = None
    encoder_balance: float | None = None


def outcome(name: str, found: Totals, ranks: int, stock: Totals) -> Figures:
    """Without a budget. found: by optimizer step. stock: those of fixed batches, of about the same samples."""
    totals, of_stock = (list(itertools.chain.from_iterable(steps)) for steps in (found, stock))
    statistics = StepStatistics()
    for one in totals:
        statistics.add(one, ranks)
    counts = [len(step) for step in found] or [0]
    reached = step_efficiency(totals, ranks)
    return Figures(
        name=name,
        optimizer_steps=len(found),
        micro_steps=len(totals),
        micro_batches=len(totals) / len(counts),
        least_micro_batches=min(counts),
        most_micro_batches=max(counts),
        samples_per_micro_step=statistics["samples"] / max(len(totals), 1),
        padding_ratio=statistics.padding_ratio,
        balance=statistics.balance,
        patch_balance=statistics.patch_balance,
        step_efficiency=reached,
        speed=reached / max(step_efficiency(of_stock, ranks), 1e-9),
        most_tokens=max((one.max_rank_tokens for one in totals), default=0),
        most_patches=max((one.max_rank_patches for one in totals), default=0),
    )


# ----------------------------------------------------------------------------------------------------------------------
# What fixed batches do with the same samples.

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
    return to_plan(steps, samples, [0, len(samples)], owner, Budget(NO_LIMIT, None, collation), False).totals


# ----------------------------------------------------------------------------------------------------------------------
# Epochs of `global_batch_size: fill`, round by round, without a training.


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
) -> Iterator[Plan]:
    """One epoch over the samples of each rank (as `ROW`); endless: from the beginning again, without end.

    buffer_size: samples that a rank holds.
    """
    held, drawn = [rows[:0] for rows in samples], [0] * len(samples)
    for round_index in itertools.count():
        for rank, rows in enumerate(samples):
            wanted = drawn[rank] + np.arange(buffer_size - len(held[rank]))
            fresh = rows[wanted % len(rows)] if endless else rows[wanted[wanted < len(rows)]]
            drawn[rank] += len(fresh)
            held[rank] = np.concatenate([held[rank], fresh])
        plan = plan_buffers(
            [BufferMetadata(rows, not endless and drawn[rank] == len(samples[rank])) for rank, rows in enumerate(held)],
            budget,
            seed=seed,
            epoch=0,
            round_index=round_index,
            accumulation=accumulation,
            join=join,
            balance=balance,
            model=model,
        )
        yield plan
        if plan.final:
            return
        gone = np.zeros(sum(map(len, held)), bool)
        for groups in plan.groups:
            for group in groups:
                gone[group] = True
        for rank, (start, end) in enumerate(zip(plan.starts, plan.starts[1:])):
            held[rank] = held[rank][~gone[start:end]]
            held[rank]["age"] = np.minimum(held[rank]["age"], 254) + 1


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a training of the YAML does with the observed samples.

    step_size: samples of an optimizer step; None: filled ones. equal_weights: of the stage. collation: of its collator.
    encoder: of `TrainingRows`.
    """

    asked: Asked
    sample: Sample
    step_size: int | None
    equal_weights: bool
    collation: Collation
    encoder: EncoderCost | None = None

    def planned(self, budget: Budget) -> Figures:
        """With odb, under this budget and in its layout."""
        ranks, config, steps = self.asked.ranks, self.asked.config, self.sample.steps
        overlong = [_overlong(step, budget) for step in steps]
        if config.overlong != "singleton":  # such samples are left out
            kept = [dataclasses.replace(step, rows=step.rows[~one]) for step, one in zip(steps, overlong)]
            steps = [step for step in kept if len(step.rows)]
        table = np.concatenate([step.rows for step in steps] or [np.zeros(0, ROW)])
        tokens = float(table["tokens"].sum(dtype=np.int64))
        if self.step_size is None:  # whatever N becomes, the load alone bounds it
            totals, plans = self._filled(table, budget), []
            within = float(np.minimum(table["tokens"], budget.token_budget).sum(dtype=np.int64)) / ranks
            limits = [tokens / ranks + FIXED * within / budget.token_budget]
        else:
            plans = self._kept(steps, budget)
            totals = [plan.totals for plan, _ in plans]
            limits = [least_time(step.rows["tokens"], ranks, budget.token_budget) for step in steps]
        limit = tokens / (ranks * sum(limits)) if limits else None
        found = outcome("odb", totals, ranks, self._fixed(steps))
        padded = sum(one.padded_tokens for step in totals for one in step)
        return dataclasses.replace(
            found,
            layout=budget.layout,
            token_budget=budget.token_budget,
            max_patches=budget.max_patches,
            budget_use=padded / (max(found.micro_steps, 1) * ranks * budget.token_budget),
            limit=limit,
            share_of_limit=None if limit is None else found.step_efficiency / max(limit, 1e-9),
            overlong=sum(int(one.sum()) for one in overlong),
            **self._encoded(plans),
        )

    def fixed(self) -> Figures:
        """Batches of this YAML's size in the order of the samples."""
        found = self._fixed(self.sample.steps)
        return outcome("fixed", found, self.asked.ranks, found)

    def _encoded(self, plans: Sequence[tuple[Plan, np.ndarray]]) -> dict[str, Any]:
        """What the vision towers of the ranks encode, all images of a sample on one rank: those in `Figures`."""
        config, ranks, waited = self.asked.config, self.asked.ranks, 0
        encoded = np.zeros(ranks, np.int64)
        for plan, rows in plans if ranks > 1 else ():
            patches, tokens = (rows["image_patches"] + rows["video_patches"]).astype(np.int64), rows["tokens"]
            for step in zip(*plan.groups):
                held = [patches[group][patches[group] > 0] for group in step]
                found = np.array([one.sum() for one in held])
                if config.balance_encoder and self.encoder is not None and found.any():
                    language = (
                        [int(tokens[group].sum()) for group in step] if config.balance_encoder == "auto" else None
                    )
                    found = plan_encoders(held, self.encoder, language, max_patches=config.max_patches).patches
                encoded += found
                waited += int(found.max())
        balance = float(encoded.mean()) / max(waited, 1)
        return {"encoder_patches": encoded.tolist(), "encoder_balance": balance} if waited else {}

    def _kept(self, steps: Sequence[Step], budget: Budget) -> list[tuple[Plan, np.ndarray]]:
        """Of each optimizer step its plan, and the samples that it numbers."""
        asked, config, found = self.asked, self.asked.config, []
        assert self.step_size is not None
        stock = StockSteps(
            global_batch_size=self.step_size,
            batch_size=asked.batch_size,
            world_size=asked.ranks,
            num_samples=None,
            mean=MEAN_OF_MICRO_BATCH,
            equal_weights=self.equal_weights,
        )
        for step in steps:
            rank = (step.start + step.rows["position"]) % asked.ranks
            buffers = [BufferMetadata(step.rows[rank == one], exhausted=False) for one in range(asked.ranks)]
            if self.equal_weights:
                buffers = split_by_weight(buffers, stock)
            plan = plan_optimizer_step(buffers, budget, balance=bool(config.balance))
            found.append((plan, pool(buffers)[0]))
        return found

    def _filled(self, table: np.ndarray, budget: Budget) -> list[list[MicroStepTotals]]:
        """An epoch of the samples; of a part of the data set as many rounds as put out that number of samples."""
        asked, config = self.asked, self.asked.config
        shares = [table[rank :: asked.ranks] for rank in range(asked.ranks)]
        totals: list[MicroStepTotals] = []
        for plan in rounds(
            shares,
            budget,
            config.buffer_size,
            balance=bool(config.balance),
            join=config.join,
            accumulation=asked.accumulation,
            endless=not self.sample.is_whole and min(map(len, shares)) > 0,
            seed=asked.seed,
        ):
            totals += plan.totals
            if sum(step.samples for step in totals) >= len(table):
                break
        return list(_chunks(totals, asked.accumulation))

    def _fixed(self, steps: Sequence[Step]) -> list[list[MicroStepTotals]]:
        asked = self.asked
        return [fixed_batches(step.rows, asked.batch_size, asked.ranks, self.collation) for step in steps]


def _chunks(totals: list[MicroStepTotals], size: int) -> Iterator[list[MicroStepTotals]]:
    return (totals[start : start + size] for start in range(0, len(totals), size))


def _overlong(step: Step, budget: Budget) -> np.ndarray:
    """bool[samples]: which break the budget alone."""
    names = ("tokens", "patches", "units", "has_media", "modality", "leading_label", "has_audio", "row_tokens")
    media = map(Media, *(step.rows[name].tolist() for name in Media._fields))
    columns = zip(*(step.rows[name].tolist() for name in names), media)
    return np.array([budget.overlong(Cost(*values)) for values in columns], dtype=bool)
