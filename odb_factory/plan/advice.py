"""What follows from a look: a recommendation in one sentence, and warnings."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.plan.look import CLOSE, Look, best_budget

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
        kind = f"flat here, {ratio:.2f} times the predicted speed of padded ({other.padding_ratio:.0%} padding)"
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
    if whole.cut_off:
        lines.append(
            f"{whole.cut_off} of {whole.samples} samples are cut off at cutoff_len "
            f"{found.asked.parsed.data.cutoff_len}; the longest would have {whole.longest_uncut:,} tokens"
        )
    lines += [_left_out(found, reason, number) for reason, number in whole.left_out.items()]
    if config.cost_model is not None:
        lines.append("cost_model is not looked at here: micro-batches are compared by tokens")
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
