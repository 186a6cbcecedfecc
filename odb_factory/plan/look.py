"""A look before training: everything that `odb-factory plan` shows, as plain values."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.config import ResolvedConfig
from odb_factory.data.loader import LayoutName, make_budget
from odb_factory.errors import DataError
from odb_factory.plan.arguments import Asked
from odb_factory.plan.observe import Part, Sample, Step, observe, parts_of
from odb_factory.plan.rows import layout_of, open_rows
from odb_factory.plan.simulate import Figures, Simulation

RANGE = 8
"""Budgets from an eighth of the YAML's to eight times it are planned."""
PLANNING_SECONDS = 20.0
"""Time for about 8 plans beside the YAML's own; they are made of fewer optimizer steps where these take longer."""
CLOSE = 0.98
"""A budget whose predicted speed is this share of the best is as good."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """asked: the YAML. layout, layout_reason: as resolved before training, without its check of real samples.

    step_size: N, samples of an optimizer step on all ranks; None: filled. parts: the distributions (see `Part`).
    own: under the YAML's budgets; compared: the same over the optimizer steps that all others are planned over, fewer
    where planning takes long; budgets: under a range of them, the YAML's among them; other_layout: under the YAML's in
    the other layout. bound_by_longest: share of the optimizer steps in which the longest sample is more than the mean
    load of a rank. examples: a message for each reason why a row is left out.
    """

    asked: Asked
    layout: str
    layout_reason: str
    step_size: int | None
    sample: Sample
    parts: list[Part]
    own: Figures
    compared: Figures
    budgets: list[Figures]
    other_layout: Figures
    fixed: Figures
    length_grouped: Figures
    bound_by_longest: float
    examples: dict[str, str]

    @property
    def config(self) -> ResolvedConfig:
        return self.asked.config


def look(asked: Asked, samples: int) -> Look:
    """Observe about `samples` rows and plan them. Raises what a training would before its first step."""
    rows = open_rows(asked, samples)
    config, layout = asked.config, layout_of(asked, rows)
    size = config.global_batch_size
    drawn = asked.batch_size * asked.accumulation * asked.ranks
    step_size = size if isinstance(size, int) else drawn if size == "keep" else None
    sample = observe(rows, step_size or drawn, samples)
    examples = {seen.reason: seen.message for seen in reversed(sample.seen) if seen.cost is None}
    if not sample.steps:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(s.reason for s in sample.seen).items())
        first = "".join(f"; {message}" for message in list(examples.values())[:1])
        raise DataError(f"no row of the training dataset can be trained on ({reasons or 'it has none'}){first}")
    simulation = Simulation(
        asked=asked,
        sample=sample,
        step_size=step_size,
        equal_weights=rows.stage.equal_weights and config.loss_scaling == "stock",
        collation=rows.collation.in_one_row(),
    )

    def under(token_budget: int, steps: Sequence[Step], layout: LayoutName = layout.name) -> Figures:
        """max_patches grows and shrinks with token_budget; at least what a micro-batch without media has."""
        patches = config.max_patches
        if patches is not None and token_budget != config.token_budget:
            patches = max(patches * token_budget // config.token_budget, rows.collation.dummies(0, 0)[1], 1)
        changed = dataclasses.replace(config, token_budget=token_budget, max_patches=patches)
        return simulation.planned(make_budget(changed, rows.collation, layout), steps)

    start = time.thread_time()  # what other processes do is not counted
    own = under(config.token_budget, sample.steps)
    some = _thinned(sample.steps, PLANNING_SECONDS / (RANGE * max(time.thread_time() - start, 1e-3)))
    compared = own if some is sample.steps else under(config.token_budget, some)
    parts = parts_of(sample.seen, rows.sources)
    budgets = budgets_around(config, least=parts[0].tokens.p50)
    stacked = [step.rows["tokens"] for step in sample.steps]
    longest = [int(tokens.max()) * asked.ranks > int(tokens.sum(dtype=np.int64)) for tokens in stacked]
    return Look(
        asked=asked,
        layout=layout.name,
        layout_reason=layout.reason,
        step_size=step_size,
        sample=sample,
        parts=parts,
        own=own,
        compared=compared,
        budgets=[compared if one == config.token_budget else under(one, some) for one in budgets],
        other_layout=under(config.token_budget, some, "padded" if layout.name == "flat" else "flat"),
        fixed=simulation.fixed(),
        length_grouped=simulation.length_grouped(),
        bound_by_longest=sum(longest) / len(longest),
        examples=examples,
    )


def budgets_around(config: ResolvedConfig, least: int) -> list[int]:
    """Powers of two around the YAML's budget, of at least `least`, and that one."""
    own = config.token_budget
    least = max(own // RANGE, least, config.pad_to_multiple_of or 1, *(config.length_buckets or ()))
    powers = [1 << exponent for exponent in range((own * RANGE).bit_length())]
    return sorted({own, *(power for power in powers if power >= least)})


def best_budget(found: Look) -> Figures:
    """The smallest budget that is about as fast as any, of those that no more samples break than the YAML's own."""
    within = [one for one in found.budgets if one.overlong <= found.own.overlong] or found.budgets
    fastest = max(one.speed for one in within)
    return next(one for one in within if one.speed >= CLOSE * fastest)


def _thinned(steps: list[Step], share: float) -> list[Step]:
    """This share of the optimizer steps, evenly spread."""
    if share >= 1:
        return steps
    count = max(round(share * len(steps)), 1)
    spread = np.linspace(0, len(steps) - 1, count).round().astype(int).tolist()
    return [steps[number] for number in dict.fromkeys(spread)]
