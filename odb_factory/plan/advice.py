"""What follows from a look: a recommendation in one sentence, and warnings."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.plan.look import CLOSE, Look, least_budget
from odb_factory.plan.simulate import Outcome

WELL_USED = 0.9
"""Ranks are well used where the step efficiency is this share of the best of any number of ranks."""
EMPTY = 0.5
"""A budget that is less full than this, though K is 1 or the least there can be, is mostly empty."""
OFTEN = 0.5


@dataclass(frozen=True, kw_only=True)
class Advice:
    """token_budget, max_patches (None: no limit is needed), layout: to be set, on the ranks that were asked for.

    ranks: how many the YAML's own budget keeps busy; None with filled batches. sentence: all of it in words, with the
    reasons. warnings: a line each.
    """

    token_budget: int
    max_patches: int | None
    layout: str
    ranks: int | None
    sentence: str
    warnings: list[str]


def advise(found: Look) -> Advice:
    best = least_budget(found.budgets, found.own)
    assert best.token_budget is not None
    patches, why_patches = _cap(found, best)
    ranks = _most_ranks(found)
    layout, why_layout = _layout(found)
    parts = [f"token_budget: {best.token_budget}"]
    if patches is not None:
        parts.append(f"max_patches: {patches}")
    parts.append(f"layout: {layout}")
    reasons = [_why_budget(found, best)]
    if patches is not None:
        reasons.append(why_patches)
    reasons.append(why_layout)
    sentence = f"{', '.join(parts)}: {'; '.join(reasons)}."
    return Advice(
        token_budget=best.token_budget,
        max_patches=patches,
        layout=layout,
        ranks=ranks,
        sentence=sentence if ranks is None else f"{sentence} {_busy(found, ranks)}",
        warnings=_warnings(found),
    )


def _cap(found: Look, best: Outcome) -> tuple[int | None, str]:
    """A limit on patches that was looked at together with the budget of `best`; None where none is needed."""
    caps = found.patch_caps
    if not caps:
        return None, ""
    fastest = max(one.speed for one in caps)
    chosen = next(one for one in caps if one.speed >= CLOSE * fastest)
    least = chosen.max_patches or 1 << (chosen.most_patches - 1).bit_length()
    if chosen.token_budget == best.token_budget:
        return least, f"no smaller limit on patches (a power of two) costs less than {1 - CLOSE:.0%} of the speed"
    return best.max_patches, "the limit on patches is the one that was looked at with this budget"


def _most_ranks(found: Look) -> int | None:
    if not found.by_ranks:
        return None
    best = max(one.step_efficiency for _, one in found.by_ranks)
    return max(ranks for ranks, one in found.by_ranks if one.step_efficiency >= WELL_USED * best)


def _layout(found: Look) -> tuple[str, str]:
    other = found.other_layout
    if found.layout == "padded":
        return found.config.layout, f"padded here ({found.layout_reason})"
    ratio = found.own.speed / max(other.speed, 1e-9)
    return (
        found.config.layout,
        f"flat here, {ratio:.2f} times the predicted speed of padded ({other.padding_ratio:.0%} padding)",
    )


def _why_budget(found: Look, best: Outcome) -> str:
    largest = max(one.token_budget or 0 for one in found.budgets)
    chosen, own = best.token_budget or 0, found.own.token_budget or 0
    why = f"no larger one up to {largest:,} is more than {1 / CLOSE - 1:.0%} faster, and each needs more memory"
    if chosen == largest:
        why = f"of those looked at the largest, and more than {1 / CLOSE - 1:.0%} faster than any other"
    return why if chosen <= own else f"{why} (`token_budget: auto` tries what fits)"


def _busy(found: Look, ranks: int) -> str:
    reached = dict(found.by_ranks)
    more = next((one for one in sorted(reached) if one > ranks), None)
    beyond = "" if more is None else f", on {more} {reached[more].step_efficiency:.2f}"
    return (
        f"With the YAML's own token_budget {found.own.token_budget}, {found.step_size} samples of an optimizer step "
        f"keep up to {ranks} rank{'s' * (ranks > 1)} busy: efficiency {reached[ranks].step_efficiency:.2f}{beyond} "
        f"(busy is at least {WELL_USED:.0%} of the best of any number of ranks)."
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
            "singleton": "a micro-batch of its own each, larger than the budget",
            "drop": "left out",
            "error": "the training ends at the first",
        }[config.overlong]
        lines.append(f"{own.overlong} samples break the budget alone: {does} (`overlong: {config.overlong}`)")
    if whole.cut_off:
        lines.append(
            f"{whole.cut_off} of {whole.samples} samples are cut off at cutoff_len "
            f"{found.asked.parsed.data.cutoff_len}; the longest would have {whole.longest_uncut:,} tokens"
        )
    lines += [_left_out(found, reason, number) for reason, number in whole.left_out.items()]
    if config.cost_model == "time":
        lines.append("cost_model: time is fitted while training; here micro-batches are compared by tokens")
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
