"""Two runs compared, and what the figures say in words: numbers, headlines, notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from odb_factory.report.read import RUN_LOG, TRAINER_LOG, History

Run = Mapping[str, Any]
ROUNDING = 1e-4
"""Losses that differ by no more, relatively, are called the same: batches are summed in another order."""

# ----------------------------------------------------------------------------------------------------------------------
# Numbers for people.

UNKNOWN = "not known"


def number(value: float | None, digits: int = 4) -> str:
    """Thousands are separated; `digits` significant digits of a number that is not whole."""
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def counted(count: int, what: str) -> str:
    """ "1 sample", "12 samples"."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def percent(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def seconds_text(value: float | None) -> str:
    """ "3 h 05 min", "2 min 04 s", "12.3 s"."""
    if value is None:
        return UNKNOWN
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


# ----------------------------------------------------------------------------------------------------------------------
# Settings, by the names of LLaMA-Factory's YAML.


def settings(run: Run) -> dict[str, str]:
    """Those that the files of a run have, as text."""
    asked = run["asked"]
    found = {"ranks": asked.get("ranks"), **(asked.get("about") or {})} | (asked.get("arguments") or {})
    if layout := asked.get("layout"):
        found["layout"] = f"{layout.get('name')} ({layout.get('reason')})"
    found |= {f"odb.{name}": value for name, value in (asked.get("block") or {}).items()}
    found |= {f"version of {name}": value for name, value in (asked.get("versions") or {}).items()}
    return {
        name: ", ".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in found.items() if v is not None
    }


def _side_by_side(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[dict[str, Any]]:
    """A line for each setting: same is None where one run does not have it; those that both have come first."""
    names = sorted(dict.fromkeys((*mine, *theirs)), key=lambda name: name not in mine or name not in theirs)
    lines = [{"name": name, "value": mine.get(name), "other_value": theirs.get(name)} for name in names]
    return [line | {"same": _same(line["value"], line["other_value"])} for line in lines]


def _same(mine: str | None, theirs: str | None) -> bool | None:
    if mine is None or theirs is None:
        return None
    try:
        return mine == theirs or float(mine) == float(theirs)
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------------------------
# Two runs side by side: whether they did the same, as far as their logs show, and which took less time.


def compare(one: Run, other: Run) -> dict[str, Any]:
    """The `comparison` of docs/commands.md. time_ratio: seconds of one as a share of the other's; None unless both
    logs show as many optimizer steps and samples."""
    losses = [{entry["step"]: entry for entry in run["entries"]} for run in (one, other)]
    common, steps = sorted(losses[0].keys() & losses[1].keys()), []
    for step in common:
        mine, theirs = (entries[step]["loss"] for entries in losses)
        difference = None if mine is None or not theirs else abs(mine - theirs) / abs(theirs)
        steps.append({"step": step, "loss": mine, "other_loss": theirs, "relative_difference": difference})
    differences = [
        (line["relative_difference"], line["step"]) for line in steps if line["relative_difference"] is not None
    ]
    rates = [[entries[step]["learning_rate"] for entries in losses] for step in common]
    known = [(mine, theirs) for mine, theirs in rates if mine is not None and theirs is not None]
    same_amount = _same_amount(one, other)
    seconds = _seconds(one, other, losses, common) if same_amount else (None, None)
    first_different = next((step for size, step in differences if size > ROUNDING), None)
    ratio = seconds[0] / seconds[1] if seconds[0] and seconds[1] else None
    notes = []
    if ratio is not None:
        notes.append("A ratio of times holds only if each run had the machine to itself; no log shows whether it had.")
    if first_different is not None and {one["kind"], other["kind"]} == {"stock", "odb"}:
        notes.append(
            "Stock training repeats samples to fill up the last optimizer step of an epoch and odb does not: where the "
            "samples of an epoch are not a multiple of the global batch, losses may differ from there on."
        )
    return {
        "same_amount": same_amount,
        "common_logged_steps": len(common),
        "largest_loss_difference": max(differences, default=(None,))[0],
        "first_different_step": first_different,
        "same_learning_rates": all(abs(a - b) <= 1e-9 * abs(b) for a, b in known) if known else None,
        "seconds": seconds[0],
        "other_seconds": seconds[1],
        "time_ratio": ratio,
        "settings": _side_by_side(settings(one), settings(other)),
        "steps": steps,
        "notes": notes,
    }


def _same_amount(one: Run, other: Run) -> bool | None:
    if not (one["finished"] and other["finished"]):
        return False
    steps, samples = ([run["totals"][name] for run in (one, other)] for name in ("optimizer_steps", "samples"))
    if steps[0] != steps[1]:
        return False
    return None if None in samples else samples[0] == samples[1]


def _seconds(
    one: Run, other: Run, entries: Sequence[Mapping[int, Run]], common: Sequence[int]
) -> tuple[float | None, float | None]:
    """Of both until the same optimizer step, measured in the same way: `train_runtime`, or until the last log entry."""
    totals = one["totals"], other["totals"]
    if all(run["seconds_from"] == "train_runtime" for run in totals):
        return totals[0]["seconds"], totals[1]["seconds"]
    if not common or common[-1] != totals[0]["optimizer_steps"]:
        return None, None
    return entries[0][common[-1]]["seconds"], entries[1][common[-1]]["seconds"]


def headline(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> str:
    """One sentence; of a run that has diverged that comes first, and no time where two runs did not do the same."""
    diverged = [
        (f"The loss of {run['name']}" if comparison else "the loss")
        + f" is NaN or infinite from optimizer step {number(run['diverged_at'])} on"
        for run in runs
        if run["diverged_at"] is not None
    ]
    if comparison is not None:
        return f"{'; '.join([*diverged, _of_two(runs[0], runs[1], comparison)])}."
    (run,) = runs
    totals, losses = run["totals"], [entry["loss"] for entry in run["entries"] if entry["loss"] is not None]
    steps = counted(totals["optimizer_steps"], "optimizer step")
    parts = [steps if totals["samples"] is None else f"{counted(totals['samples'], 'sample')} in {steps}"]
    if totals["seconds"] is not None:
        parts[0] += f", {seconds_text(totals['seconds'])}"
    ratios = [f"{name} {percent(totals[key])}" for name, key in (("padding", "padding_ratio"), ("balance", "balance"))]
    parts.append(
        ", ".join(ratio for ratio in ratios[: 1 if run["asked"].get("ranks") == 1 else 2] if UNKNOWN not in ratio)
    )
    if losses and not diverged:
        parts.append(f"loss from {number(losses[0])} to {number(losses[-1])}")
    return f"{run['name']}: {'' if run['finished'] else 'so far: '}{'; '.join(filter(None, [*diverged, *parts]))}."


def _of_two(one: Run, other: Run, comparison: Mapping[str, Any]) -> str:
    totals, others = one["totals"], other["totals"]
    names, losses = f"{one['name']} and {other['name']}", _losses(comparison)
    if any(run["diverged_at"] is not None for run in (one, other)):
        losses += " before that" if losses else ""
    if comparison["same_amount"]:
        text = f"{names} each took {_amount(totals)}{losses}"
        if comparison["time_ratio"] is not None:
            text += (
                f"; {one['name']} needed {percent(comparison['time_ratio'], 0)} of the time "
                f"({seconds_text(comparison['seconds'])} against {seconds_text(comparison['other_seconds'])})"
            )
        return text
    under_way = [run["name"] for run in (one, other) if not run["finished"]]
    if under_way:
        which = f"{' and '.join(under_way)} {'has' if len(under_way) == 1 else 'have'} not finished"
        entries = comparison["common_logged_steps"]
        both = f" in the {counted(entries, 'optimizer step')} that both have logged" if entries else ""
        return f"{names}{losses}{both}, cannot be compared in time: {which}"
    if totals["optimizer_steps"] == others["optimizer_steps"] and comparison["same_amount"] is None:
        text = f"{names} each took {counted(totals['optimizer_steps'], 'optimizer step')}"
        return f"{text}{losses}; their logs do not show that it was on as many samples"
    return f"{names} are different trainings: {_amount(totals)} and {_amount(others)}"


def _amount(totals: Run) -> str:
    steps, samples = counted(totals["optimizer_steps"], "optimizer step"), totals["samples"]
    return f"{steps} on {'an unknown number of samples' if samples is None else counted(samples, 'sample')}"


def _losses(comparison: Mapping[str, Any]) -> str:
    largest, first = comparison["largest_loss_difference"], comparison["first_different_step"]
    if largest is None:
        return ", with no logged loss in common"
    if first is None:
        return f", with the same losses to {largest:.1e}" if largest else ", with exactly the same losses"
    return f", with losses that differ from optimizer step {number(first)} on, by {percent(largest, 2)} at most"


# ----------------------------------------------------------------------------------------------------------------------
# What a reader has to know of the figures: where they end, what is missing, and how to get it.


def notes_of_run(run: Run, history: History, incomplete: int | None) -> list[str]:
    """One line each. incomplete: optimizer steps without all lines of the audits; None: there is no audit."""
    notes = []
    for one in run["files"]["broken"]:
        place = f"line {one['line']}: " if one["line"] and one["file"].endswith(".jsonl") else ""
        what = "is broken and" if one["line"] is None else f"has {counted(one['count'], 'broken line')},"
        notes.append(f"{one['file']} {what} left out ({place}{one['wrong']}).")
    if history.other_run is not None:
        notes.append(f"{history.other_run} has other losses at the same optimizer steps: another run, left out.")
    if incomplete:
        notes.append(
            f"{counted(incomplete, 'optimizer step')} left out of the figures from the audits: lines of some ranks are "
            "missing (a run under way, broken lines, or audits on another node's disk)."
        )
    if history.restarts:
        ranks = sorted({begin.ranks for begin in history.begins})
        changed = f", with {' and '.join(map(str, ranks))} ranks" if len(ranks) > 1 else ""
        notes.append(
            f"The run was resumed {counted(history.restarts, 'time')}{changed}: seconds are of training until the last "
            "log entry before each checkpoint and since then, without the pauses and the repeated steps."
        )
    unshown = sum(not math.isfinite(value) for entry in history.entries for value in entry.values.values())
    if unshown:
        notes.append(f"{counted(unshown, 'logged figure')} NaN or infinite: not in the charts, null in the JSON.")
    if any(entry.seconds is None for entry in history.entries):
        notes.append(
            "Times of some log entries are not known: the begin line in odb_log.jsonl or trainer_log.jsonl is missing."
        )
    elif not history.begins:
        notes.append(f"{TRAINER_LOG} counts whole seconds, so times over short spans are coarse.")
    return notes + _missing(run, history, incomplete)


def _missing(run: Run, history: History, incomplete: int | None) -> list[str]:
    if run["kind"] is None:
        return [
            f"Whether it was trained with odb is not known: {TRAINER_LOG} has the same fields without; {RUN_LOG} and "
            "trainer_state.json would show it."
        ]
    if run["kind"] == "stock":
        return [
            "Stock training logs no tokens, padding, balance or lengths; `odb-factory plan` computes them for a YAML, "
            "and a training with an `odb:` block logs them."
        ]
    notes = []
    if run["totals"]["oom_cuts"]:
        notes.append(
            f"A micro-batch did not fit into memory {counted(run['totals']['oom_cuts'], 'time')} and was cut in two: "
            "lower the budgets."
        )
    if incomplete is None:
        notes.append(
            "Without an audit there are no distributions and no figures by rank, data set and optimizer step: set "
            "`audit: true` in the `odb:` block of the next run."
        )
    elif run["datasets"] is None and len(settings(run).get("dataset", "").split(", ")) > 1:
        notes.append(
            "Rows are not known by data set: the data is a stream, was tokenized beforehand, or its file is broken."
        )
    if not history.begins:
        notes.append(f"{RUN_LOG} has no whole begin line, so settings, ranks and exact times are missing.")
    return notes
