"""Two runs side by side: whether they did the same, by what their logs show, and which took less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odb_factory.report.figures import read_run
from odb_factory.report.page import side_by_side
from odb_factory.report.read import UNKNOWN, counted, number, percent, seconds_text
from odb_factory.version import __version__

ROUNDING = 1e-4
"""Losses that differ by no more, relatively, are called the same: batches are summed in another order."""


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of both, as `read_run` returns them.

    same_amount: both have ended after as many optimizer steps and samples; None where a log does not tell.
    largest_loss_difference: of the optimizer steps that both have logged, relative to the loss; first_different_step:
    where it first exceeds `ROUNDING`. time_ratio: seconds of one as a share of the other's, None unless same_amount.
    """
    losses = [{entry["step"]: entry for entry in run["entries"]} for run in (one, other)]
    common = sorted(losses[0].keys() & losses[1].keys())
    steps = []
    for step in common:
        mine, theirs = (entries[step]["loss"] for entries in losses)
        difference = None if mine is None or not theirs else abs(mine - theirs) / abs(theirs)
        steps.append({"step": step, "loss": mine, "other_loss": theirs, "relative_difference": difference})
    differences = [
        (line["relative_difference"], line["step"]) for line in steps if line["relative_difference"] is not None
    ]
    same = _same_amount(one, other)
    seconds = _seconds(one, other, losses, common) if same else (None, None)
    return {
        "same_amount": same,
        "common_logged_steps": len(common),
        "largest_loss_difference": max(differences, default=(None,))[0],
        "first_different_step": next((step for size, step in differences if size > ROUNDING), None),
        "same_learning_rates": _same_learning_rates(losses, common),
        "seconds": seconds[0],
        "other_seconds": seconds[1],
        "time_ratio": seconds[0] / seconds[1] if seconds[0] and seconds[1] else None,
        "settings": side_by_side(one["asked"], other["asked"]),
        "steps": steps,
    } | {"notes": _notes(one, other, any(size > ROUNDING for size, _ in differences))}


def _notes(one: Mapping[str, Any], other: Mapping[str, Any], have_different_losses: bool) -> list[str]:
    said = ["No log says whether both runs had the same machine to themselves, which a ratio of times rests on."]
    if have_different_losses and {one["kind"], other["kind"]} == {"stock", "odb"}:
        said.append(
            "Stock training repeats samples to fill up the last optimizer step of an epoch and odb does not: where the "
            "samples of an epoch are no whole number of optimizer steps, losses may differ from there on."
        )
    return said


def _same_amount(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool | None:
    if not (one["finished"] and other["finished"]):
        return False
    amounts = [[run["totals"][name] for name in ("optimizer_steps", "samples")] for run in (one, other)]
    if amounts[0][0] != amounts[1][0]:
        return False
    return None if None in (amounts[0][1], amounts[1][1]) else amounts[0] == amounts[1]


def _seconds(
    one: Mapping[str, Any], other: Mapping[str, Any], entries: list[dict[int, Any]], common: list[int]
) -> tuple[float | None, float | None]:
    """Of both until the same optimizer step, measured in the same way: `train_runtime`, or until the last log entry."""
    totals = one["totals"], other["totals"]
    if all(run["seconds_from"] == "train_runtime" for run in totals):
        return totals[0]["seconds"], totals[1]["seconds"]
    if not common or common[-1] != totals[0]["optimizer_steps"]:
        return None, None
    return entries[0][common[-1]]["seconds"], entries[1][common[-1]]["seconds"]


def _same_learning_rates(losses: list[dict[int, Any]], common: list[int]) -> bool | None:
    pairs = [[entries[step]["learning_rate"] for entries in losses] for step in common]
    known = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return all(abs(mine - theirs) <= 1e-9 * abs(theirs) for mine, theirs in known) if known else None


def diverged(run: Mapping[str, Any], name: str = "") -> str:
    return f"the loss{name and f' of {name}'} is NaN or infinite from optimizer step {number(run['diverged_at'])} on"


def headline_of_two(one: Mapping[str, Any], other: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    """One sentence with what the logs show, and no time where they do not show that both did the same."""
    said = _what_both_did(one, other, comparison)
    ended = [diverged(run, run["name"]) for run in (one, other) if run["diverged_at"] is not None]
    return f"{'; '.join([*ended, said])}."


def _what_both_did(one: Mapping[str, Any], other: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    totals, others = one["totals"], other["totals"]
    names = f"{one['name']} and {other['name']}"
    if comparison["same_amount"]:
        said = f"{names} each took {_amount(totals)}{_losses(comparison)}"
        if comparison["time_ratio"] is not None:
            said += (
                f"; {one['name']} needed {percent(comparison['time_ratio'], 0)} of the time "
                f"({seconds_text(comparison['seconds'])} against {seconds_text(comparison['other_seconds'])})"
            )
        return said
    under_way = [run["name"] for run in (one, other) if not run["finished"]]
    if under_way:
        which = f"{' and '.join(under_way)} {'has' if len(under_way) == 1 else 'have'} not come to the end"
        entries = comparison["common_logged_steps"]
        both = f" in the {counted(entries, 'optimizer step')} that both have logged" if entries else ""
        return f"{names}{_losses(comparison)}{both}, cannot be compared in time: {which}"
    if totals["optimizer_steps"] == others["optimizer_steps"] and comparison["same_amount"] is None:
        said = f"{names} each took {counted(totals['optimizer_steps'], 'optimizer step')}"
        return f"{said}{_losses(comparison)}; their logs do not show that it was on as many samples"
    amounts = " and ".join(_amount(run["totals"]) for run in (one, other))
    return f"{names} are different trainings: {amounts}"


def _amount(totals: Mapping[str, Any]) -> str:
    steps, samples = counted(totals["optimizer_steps"], "optimizer step"), totals["samples"]
    return f"{steps} on {'an unknown number of samples' if samples is None else counted(samples, 'sample')}"


def _losses(comparison: Mapping[str, Any]) -> str:
    largest, first = comparison["largest_loss_difference"], comparison["first_different_step"]
    if largest is None:
        return ", with no logged loss in common"
    if first is None:
        return f", with the same losses to {largest:.1e}" if largest else ", with the very same losses"
    return f", with losses that differ from optimizer step {number(first)} on, by {percent(largest, 2)} at most"


def report_of(folders: Sequence[Path]) -> dict[str, Any]:
    """The figures of one run or two; see docs/reference.md."""
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 2 and runs[0]["name"] == runs[1]["name"]:
        for run in runs:
            run["name"] = run["folder"]
    comparison = compare(*runs) if len(runs) == 2 else None
    headline = _headline(runs[0]) if comparison is None else headline_of_two(runs[0], runs[1], comparison)
    return {"odb_factory": __version__, "headline": headline, "runs": runs, "comparison": comparison}


def _headline(run: Mapping[str, Any]) -> str:
    totals = run["totals"]
    steps = counted(totals["optimizer_steps"], "optimizer step")
    said = steps if totals["samples"] is None else f"{counted(totals['samples'], 'sample')} in {steps}"
    if totals["seconds"] is not None:
        said += f", {seconds_text(totals['seconds'])}"
    known = [("padding", percent(totals["padding_ratio"])), ("balance", number(totals["balance"], 3))]
    said += "".join(f"{';' if name == 'padding' else ','} {name} {value}" for name, value in known if value != UNKNOWN)
    if run["diverged_at"] is not None:
        said += f"; {diverged(run)}"
    losses = [entry["loss"] for entry in run["entries"] if entry["loss"] is not None]
    if losses and run["diverged_at"] is None:
        said += f"; loss from {number(losses[0])} to {number(losses[-1])}"
    state = "" if run["finished"] else "so far: "
    return f"{run['name']}: {state}{said}."
