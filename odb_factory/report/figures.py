"""All figures of one run, as `odb-factory report --json` writes them; what no file tells is None."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odb_factory.errors import ODBError
from odb_factory.report import asked, ending, notes, shapes
from odb_factory.report.audit import Audit, read_audit
from odb_factory.report.distributions import distributions, of_datasets, of_ranks, successive_correlation
from odb_factory.report.files import FilesRead
from odb_factory.report.history import Entry, History, read_history

RATIOS = ("padding_ratio", "balance", "patch_balance", "budget_use", "data_wait_s", "micro_batches", "units_per_step")
"""Of a log entry, as in its `odb/...` metrics."""


def read_run(folder: Path) -> dict[str, Any]:
    """The figures of the run in an output folder (`docs/reference.md` has the fields). Raises `ODBError` where there is
    no run."""
    if not folder.is_dir():
        raise ODBError(f"{folder}: there is no such folder; give the output_dir of a training.")
    files = FilesRead()
    try:
        history = read_history(folder, files)
        audit = read_audit(folder, history.processes, files)
        summary = files.whole(folder / ending.SUMMARY, shapes.summary)
        card = asked.read_model_card(folder, files)
    except OSError as error:
        raise ODBError(
            f"{error.filename}: cannot be read ({error.strerror}); give a folder that you may read."
        ) from None
    if not history.entries and not history.processes and audit is None:
        raise ODBError(
            f"{folder}: there is no run in it (no trainer_log.jsonl, trainer_state.json or odb_log.jsonl with a log "
            "entry); give the output_dir of a training that has logged, or wait for its first log entry."
        )
    is_over, last_step = ending.is_over(history), ending.last_step(history, audit)
    summary = ending.own_summary(summary, history, last_step, _sums(history, audit, {}, last_step))
    kind = ending.kind(history, is_odb=bool(summary) or audit is not None)
    totals = _totals(history, audit, summary, kind)
    run: dict[str, Any] = {
        "name": folder.resolve().name,
        "folder": str(folder),
        "kind": kind,
        "finished": is_over,
        "diverged_at": _diverged_at(history),
        "files": {
            "read": files.names,
            "broken_lines": files.broken,
            "broken_files": files.broken_files,
            "half_written": files.half_written,
        },
        "asked": asked.asked(history, card),
        "processes": [
            {"time": one.time, "optimizer_steps": one.optimizer_steps, "ranks": one.ranks, "ended": one.ended}
            for one in history.processes
        ],
        "totals": totals,
        "rows": _rows(history, summary),
        "entries": _entries(history),
        "evaluations": [{"step": one.step, "seconds": one.seconds, **_evaluation(one)} for one in history.evaluations],
        "lengths_of_successive_steps": successive_correlation(history.entries, audit),
        "optimizer_steps": _optimizer_steps(audit),
        "by_rank": of_ranks(audit),
        "datasets": of_datasets(audit, _rows_of(history), folder),
        "distributions": distributions(audit),
    }
    run["notes"] = notes.of_run(history, audit, files, run)
    return dict(plain(run))


def _rows_of(history: History) -> Mapping[str, Any] | None:
    return (history.processes[-1].begin.get("about") or {}).get("rows_of") if history.processes else None


def _totals(history: History, audit: Audit | None, summary: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Of the whole run, or of a run under way until its last log entry; counted, not estimated."""
    steps, results = ending.last_step(history, audit), history.results
    totals: dict[str, Any] = {"optimizer_steps": steps, "max_steps": history.max_steps}
    sums = _sums(history, audit, summary, steps)
    seconds, source = _seconds(history)
    samples = sums.get("samples")
    if samples is None and kind == "stock" and {"train_runtime", "train_samples_per_second"} <= results.keys():
        # The Trainer divides one by the other and rounds to three digits: only a whole number within that is known.
        samples = round(results["train_runtime"] * results["train_samples_per_second"])
        if results["train_runtime"] * 0.0005 >= 0.5:
            samples = None
    tokens, padded, awaited = (sums.get(name) for name in ("tokens", "padded_tokens", "awaited_tokens"))
    totals |= {"samples": samples, "seconds": seconds, "seconds_from": source, "tokens": tokens}
    totals |= {name: sums.get(name) for name in ("padded_tokens", "micro_steps", "idle_micro_batches")}
    totals |= {name: sums.get(name) for name in ("moved", "oom_cuts")}
    totals["padding_ratio"] = 1 - tokens / padded if padded else None
    totals["balance"] = summary.get("balance", padded / awaited if padded and awaited else None)
    patches, awaited_patches = sums.get("patches"), sums.get("awaited_patches")
    has_patches = awaited_patches if awaited_patches is not None else _logged_patch_balance(history)
    totals["patch_balance"] = None
    if has_patches:
        totals["patch_balance"] = summary.get("patch_balance", patches / awaited_patches if awaited_patches else None)
    totals["budget_use"] = _budget_use(history, padded, sums.get("micro_steps"))
    totals |= {"units": sums.get("units"), "units_cv": summary.get("units_cv", _units_cv(audit))}
    totals["data_wait_s"] = sums.get("data_wait_s")
    for name, amount in (("samples_per_second", samples), ("tokens_per_second", tokens)):
        totals[name] = amount / seconds if amount is not None and seconds else None
    totals["train_loss"] = results.get("train_loss")
    return totals


def _sums(history: History, audit: Audit | None, summary: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Those of the summary, or of log entries or the audit where they cover all optimizer steps."""
    found: dict[str, Any] = {}
    logged = [entry.sums for entry in history.entries if entry.sums is not None]
    if logged and sum(one["optimizer_steps"] for one in logged) == steps:
        names = [name for name in logged[0] if all(name in one for one in logged)]
        found = {name: sum(one[name] for one in logged) for name in names}
    elif audit is not None and len(audit.steps["step"]) == steps:
        found = {name: int(values.sum()) for name, values in audit.steps.items() if name != "step"}
        found["micro_steps"] = found.pop("micro_batches")
        found["idle_micro_batches"] = int(audit.batches["idle"].sum())
    if summary:
        found |= {name: value for name, value in summary.items() if isinstance(value, int | float)}
        found["samples"] = summary["samples"]
    return found


def _seconds(history: History) -> tuple[float | None, str | None]:
    """Of training, and where they are from: the Trainer's own figure knows one process only."""
    is_one = len(history.processes) < 2 and not history.restarts
    if "train_runtime" in history.results and is_one and all(one.optimizer_steps == 0 for one in history.processes):
        return history.results["train_runtime"], "train_runtime"
    known = [entry.seconds for entry in history.entries if entry.seconds is not None]
    return (max(known), "log") if known and len(known) == len(history.entries) else (None, None)


def _budget_use(history: History, padded: float | None, micro_steps: float | None) -> float | None:
    budgets = {(one.ranks, one.begin["config"].get("token_budget")) for one in history.processes}
    if not padded or not micro_steps or len(budgets) != 1:
        return None
    ranks, budget = budgets.pop()
    return padded / (micro_steps * ranks * budget) if budget else None


def _units_cv(audit: Audit | None) -> float | None:
    units = None if audit is None else audit.steps["units"]
    return float(units.std() / units.mean()) if units is not None and units.sum() else None


def _logged_patch_balance(history: History) -> bool:
    """Without vision patches no rank ever waits for another's."""
    return any(entry.values.get("odb/patch_balance", 1.0) < 1.0 for entry in history.entries)


def _rows(history: History, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    names = ("left_out", "not_trained", "overlong", "over_budget")
    if summary:
        return {name: summary.get(name) for name in names}
    rows = next((entry.rows for entry in reversed(history.entries) if entry.rows is not None), None)
    return None if rows is None else {name: rows.get(name) for name in names}


def _entries(history: History) -> list[dict[str, Any]]:
    """Log entries. first_step: of the optimizer steps that the sums of an entry are of."""
    made, step_before, seconds_before = [], 0, 0.0
    for entry in history.entries:
        values, sums = entry.values, entry.sums or {}
        steps = sums.get("optimizer_steps") or entry.step - max(step_before, entry.begin_step)
        taken = None
        if entry.seconds is not None:
            taken = entry.seconds - max(seconds_before, entry.begin_seconds)
            seconds_before = entry.seconds
        line: dict[str, Any] = {"step": entry.step, "first_step": entry.step - steps + 1, "seconds": entry.seconds}
        line |= {name: values.get(name) for name in ("epoch", "loss", "learning_rate", "grad_norm")}
        line |= {name: values.get(f"odb/{name}") for name in RATIOS}
        line |= {name: sums.get(name) for name in ("samples", "tokens")}
        for name in ("samples", "tokens"):
            line[f"{name}_per_second"] = sums[name] / taken if taken and name in sums else None
        line["seconds_per_step"] = taken / steps if taken and steps > 0 else None
        made.append(line)
        step_before = entry.step
    return made


def _evaluation(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in entry.values.items() if name.startswith("eval_") or name == "epoch"}


def _optimizer_steps(audit: Audit | None) -> dict[str, list[int]] | None:
    """By optimizer step, of those that the audits of all ranks have whole."""
    if audit is None:
        return None
    return {name: values.tolist() for name, values in audit.steps.items() if not name.startswith("awaited")}


def _diverged_at(history: History) -> int | None:
    """The first optimizer step of those at the end whose logged losses are all NaN or infinite; None without any."""
    found = None
    for entry in reversed(history.entries):
        loss = entry.values.get("loss")
        if loss is not None and math.isfinite(loss):
            break
        found = found if loss is None else entry.step
    return found


def plain(figures: Any) -> Any:
    """The same as strict JSON and UTF-8 have it: None in place of NaN and infinity, no surrogates in a text."""
    kind = type(figures)
    if kind is float:
        return figures if math.isfinite(figures) else None
    if kind is str:
        return figures if figures.isascii() else figures.encode(errors="replace").decode()
    if kind is dict:
        return {plain(key): plain(value) for key, value in figures.items()}
    if kind is list or kind is tuple:
        return [plain(value) for value in figures]
    return figures


def to_json(figures: Mapping[str, Any]) -> str:
    """A line for each key; of a run each of its own."""
    named = {key: value if key == "runs" else plain(value) for key, value in figures.items()}  # runs are plain
    runs = ",\n".join(_by_lines(run) for run in named.pop("runs"))
    return _by_lines(named)[:-2] + f',\n"runs": [\n{runs}\n]\n}}\n'


def _by_lines(values: Mapping[str, Any]) -> str:
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}"
