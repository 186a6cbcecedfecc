"""A look before training: everything that `odb-factory plan` says, as plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from odb_factory.config import ResolvedConfig
from odb_factory.dry_run.arguments import Asked
from odb_factory.dry_run.distribution import Part, parts_of
from odb_factory.dry_run.layout import layout_of
from odb_factory.dry_run.observe import Sample, observe
from odb_factory.dry_run.outcome import Outcome
from odb_factory.dry_run.plans import Plans, budgets_around, least_budget
from odb_factory.dry_run.rows import open_rows
from odb_factory.dry_run.simulate import baseline
from odb_factory.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Look:
    """asked: the YAML. layout, layout_reason: as resolved before training, without its check of real samples.

    step_size: N, samples of an optimizer step on all ranks; None: filled. parts: the distributions (see `Part`).
    own: under the YAML's budgets; compared: the same over the optimizer steps that all others are planned over, fewer
    where planning takes long; budgets: under a range of them, the YAML's among them. other_layout: under the YAML's
    in the other layout; any_size: without `length_buckets`, `row_multiple` and
    `pad_to_multiple_of`, None where none is set. by_ranks: the same N on other numbers of ranks, () with filled ones.
    patch_caps: the smallest budget that is about as fast as any, under caps on patches.
    bound_by_longest: share of the optimizer steps in which the longest sample is more than the mean load of a rank.
    examples: a message for each reason why a row is left out.
    """

    asked: Asked
    layout: str
    layout_reason: str
    step_size: int | None
    sample: Sample
    parts: list[Part]
    own: Outcome
    compared: Outcome
    budgets: list[Outcome]
    other_layout: Outcome
    any_size: Outcome | None
    fixed: Outcome
    length_grouped: Outcome
    by_ranks: list[tuple[int, Outcome]]
    patch_caps: list[Outcome]
    bound_by_longest: float
    examples: dict[str, str]

    @property
    def config(self) -> ResolvedConfig:
        return self.asked.config


def look(asked: Asked, samples: int) -> Look:
    """Observe about `samples` rows and plan them. Raises what a training would before its first step."""
    rows = open_rows(asked, samples)
    layout = layout_of(asked, rows)
    step_size = _step_size(asked)
    drawn = asked.accumulation * asked.ranks * asked.batch_size
    sample = observe(rows, step_size or drawn, samples)
    examples = {seen.reason: seen.message for seen in reversed(sample.seen) if seen.cost is None}
    if not sample.steps:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(s.reason for s in sample.seen).items())
        raise DataError(
            f"no row of the training dataset can be trained on ({reasons or 'it has none'})"
            + "".join(f"; {message}" for message in list(examples.values())[:1])
        )
    plans = Plans(asked, rows, layout.name, step_size, sample)
    own = plans.own
    parts = parts_of(sample.seen, rows.sources)
    budgets = [
        plans.compared if budget == own.token_budget else plans.under(budget)
        for budget in budgets_around(asked, least=parts[0].tokens.p50)
    ]
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
        compared=plans.compared,
        budgets=budgets,
        other_layout=plans.in_other_layout(),
        any_size=plans.without_sizes(),
        fixed=baseline("fixed", sample, plans.setting),
        length_grouped=baseline("length-grouped", sample, plans.setting),
        by_ranks=plans.by_ranks() if step_size else [],
        patch_caps=list(plans.under_patch_caps(least_budget(budgets, own))),
        bound_by_longest=sum(longest) / len(longest),
        examples=examples,
    )


def _step_size(asked: Asked) -> int | None:
    size = asked.config.global_batch_size
    if isinstance(size, int):
        return size
    return asked.batch_size * asked.accumulation * asked.ranks if size == "keep" else None
