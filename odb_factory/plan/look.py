"""A look before training: everything that `odb-factory plan` shows, as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np

from odb_factory.config import ResolvedConfig
from odb_factory.data.loader import LayoutName, make_budget
from odb_factory.errors import DataError
from odb_factory.plan.arguments import Asked
from odb_factory.plan.rows import Part, Sample, layout_of, observe, open_rows, parts_of
from odb_factory.plan.simulate import Figures, Simulation

RANGE = 8
"""Budgets from an eighth of the YAML's to eight times it are planned."""
CLOSE = 0.98
"""A budget whose predicted speed is this share of the best is as good."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """asked: the YAML. layout, layout_reason: as resolved before training, without its check of real samples.

    step_size: N, samples of an optimizer step on all ranks; None: filled. parts: the distributions (see `Part`).
    own: under the YAML's budgets; budgets: under a range of them, the YAML's among them; other_layout: under the YAML's
    in the other layout. bound_by_longest: share of the optimizer steps in which the longest sample is more than the
    mean load of a rank. examples: a message for each reason why a row is left out.
    """

    asked: Asked
    layout: str
    layout_reason: str
    step_size: int | None
    sample: Sample
    parts: list[Part]
    own: Figures
    budgets: list[Figures]
    other_layout: Figures
    fixed: Figures
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
        encoder=rows.encoder,
    )

    def under(token_budget: int, layout: LayoutName = layout.name) -> Figures:
        """`max_patches` grows and shrinks with token_budget, to at least what a micro-batch without media has."""
        least = rows.collation.dummies(0, 0)[1]
        patches = config.max_patches
        if patches is not None and token_budget != config.token_budget:
            patches = max(patches * token_budget // config.token_budget, least, 1)
        changed = dataclasses.replace(config, token_budget=token_budget, max_patches=patches)
        return simulation.planned(make_budget(changed, rows.collation, layout))

    own = under(config.token_budget)
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
        budgets=[own if one == config.token_budget else under(one) for one in budgets],
        other_layout=under(config.token_budget, "padded" if layout.name == "flat" else "flat"),
        fixed=simulation.fixed(),
        bound_by_longest=sum(longest) / len(longest),
        examples=examples,
    )


def budgets_around(config: ResolvedConfig, least: int) -> list[int]:
    """Powers of two around the YAML's budget, of at least `least`, and that one."""
    own = config.token_budget
    least = max(own // RANGE, least, config.pad_to_multiple_of or 1)
    powers = [1 << exponent for exponent in range((own * RANGE).bit_length())]
    return sorted({own, *(power for power in powers if power >= least)})


def best_budget(found: Look) -> Figures:
    """The smallest budget that is about as fast as any, of those that no more samples break than the YAML's own."""
    within = [one for one in found.budgets if one.overlong <= found.own.overlong] or found.budgets
    fastest = max(one.speed for one in within)
    return next(one for one in within if one.speed >= CLOSE * fastest)


# ----------------------------------------------------------------------------------------------------------------------
# What follows from a look: a recommendation in one sentence, and warnings.

EMPTY = 0.5
"""A budget that is less full than this, with K = 1, is mostly empty."""
OFTEN = 0.5


@dataclass(frozen=True, kw_only=True)
class Advice:
    """token_budget, max_patches (None: the YAML has no limit), layout: to be set, on the planned ranks.
    sentence: these with the reasons. warnings: a line each."""

    token_budget: int
    max_patches: int | None
    layout: str
    sentence: str
    warnings: list[str]


def advise(found: Look) -> Advice:
    best, own, other = best_budget(found), found.own.token_budget or 0, found.other_layout
    token_budget, largest = best.token_budget or 0, max(one.token_budget or 0 for one in found.budgets)
    faster = f"{1 / CLOSE - 1:.0%}"
    why = f"no larger token_budget up to {largest:,} is more than {faster} faster, and each needs more memory"
    if token_budget == largest:
        why = f"the largest one planned, and more than {faster} faster than any other"
    if token_budget > own:
        why += " (`token_budget: auto` tries what fits)"
    kind = f"padded here ({found.layout_reason})"
    if found.layout == "flat":
        ratio = found.own.speed / max(other.speed, 1e-9)
        kind = (
            f"flat here, at {own:,} {ratio:.2f} times the predicted speed of padded ({other.padding_ratio:.0%} padding)"
        )
    keys = [f"token_budget: {token_budget}", f"layout: {found.config.layout}"]
    if best.max_patches is not None:
        keys.insert(1, f"max_patches: {best.max_patches}")
        why += "; max_patches grows with token_budget"
    return Advice(
        token_budget=token_budget,
        max_patches=best.max_patches,
        layout=found.config.layout,
        sentence=f"{', '.join(keys)}: {why}; {kind}.",
        warnings=_warnings(found),
    )


def _warnings(found: Look) -> list[str]:
    own, whole, config = found.own, found.parts[0], found.config
    lines = []
    if found.asked.ranks > 1 and found.bound_by_longest > OFTEN and config.keeps:
        lines.append(
            f"in {found.bound_by_longest:.0%} of the optimizer steps the longest sample (up to {whole.tokens.most:,} "
            f"tokens) is more than the mean load of a rank, so that all ranks wait for it: take fewer ranks, a larger "
            f"optimizer batch, or a smaller cutoff_len"
        )
    population = found.sample.population
    if found.step_size and population is not None and population < found.step_size:
        lines.append(
            f"there are {population} rows and an optimizer step has {found.step_size} samples (N): each epoch is one "
            "optimizer step of all rows; take fewer ranks, or a smaller batch"
        )
    elif config.keeps and own.budget_use is not None and own.budget_use < EMPTY and own.micro_batches < 2:
        lines.append(
            f"the kept optimizer batch of {found.step_size} samples fills {own.budget_use:.0%} of the budgets of "
            f"{found.asked.ranks} rank{'s' * (found.asked.ranks > 1)}: a smaller token_budget costs no speed"
            + ", fewer ranks waste less"
            * (found.asked.ranks > 1)
        )
    if own.overlong:
        does = {
            "singleton": "each in a micro-batch alone, larger than the budget",
            "drop": "left out",
            "error": "the training ends at the first",
        }[config.overlong]
        lines.append(f"{own.overlong} samples break the budget alone: {does} (`overlong: {config.overlong}`)")
    if whole.patches.most and own.max_patches is None and "max_patches" not in found.asked.auto:
        lines.append(
            f"without max_patches a micro-batch may have as many vision patches as its tokens allow, up to "
            f"{own.most_patches:,} here: set it if the vision tower needs the memory"
        )
    if whole.cut_off:
        lines.append(
            f"{whole.cut_off} of {whole.samples} samples are cut off at cutoff_len "
            f"{found.asked.parsed.data.cutoff_len}; the longest would have {whole.longest_uncut:,} tokens"
        )
    lines += [_left_out(found, reason, number) for reason, number in whole.left_out.items()]
    if found.sample.resampled:
        lines.append(f"{found.sample.resampled}: optimizer steps are drawn from these, with replacement")
    return lines


def _left_out(found: Look, reason: str, number: int) -> str:
    config, rows = found.config, found.parts[0].rows
    what = {
        "media_cut": "have media that are opened and then cut off by cutoff_len",
        "overlong": "break the budget alone",
        "unsupervised": "have no supervised token",
        "invalid": "are dropped by LLaMA-Factory's preprocessing",
        "unreadable": "cannot be read",
    }.get(reason, f"are left out ({reason})")
    ends = (reason in ("media_cut", "overlong") and config.overlong != "drop") or (
        reason == "unreadable" and config.on_error == "raise"
    )
    then = "the training would end at the first of them" if ends else "they are left out"
    return f"{number} of {rows} rows {what}; {then}: {found.examples[reason]}"
