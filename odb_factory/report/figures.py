"""The figures of a run, as `odb-factory report --json` writes them; what no file has is None. docs/commands.md lists
them."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core
from pydantic import TypeAdapter

from odb_factory.errors import ODBError
from odb_factory.planning import Media
from odb_factory.report.read import (
    RUN_LOG,
    SUMMARY,
    TRAINER_STATE,
    Audit,
    Files,
    History,
    RowCounts,
    Summary,
    read_audit,
    read_history,
)
from odb_factory.report.words import compare, headline, notes_of_run
from odb_factory.version import __version__

RATIOS = ("padding_ratio", "balance", "patch_balance", "budget_use", "data_wait_s", "micro_batches", "units_per_step")
"""Figures of a log entry that odb logs as `odb/...`."""
STATE = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")
"""Settings that the Trainer's state has, of stock runs too."""
DATA_SETS_FILE = re.compile(r"odb_data_sets_[0-9a-f]{8}\.zlib")
BINS = 32


def report_of(folders: Sequence[Path]) -> dict[str, Any]:
    """The content of the JSON, of one run or two."""
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 2 and runs[0]["name"] == runs[1]["name"]:
        for run in runs:
            run["name"] = run["folder"]
    comparison = compare(*runs) if len(runs) == 2 else None
    return {
        "odb_factory": __version__,
        "headline": headline(runs, comparison),
        "runs": runs,
        "comparison": comparison,
    }


def read_run(folder: Path) -> dict[str, Any]:
    """The figures of the run in an output folder. Raises `ODBError` where there is none."""
    if not folder.is_dir():
        raise ODBError(f"{folder}: there is no such folder; give the output_dir of a training.")
    files = Files(folder)
    try:
        history = read_history(files)
        audit = read_audit(files, history.begins)
        summary = files.whole(SUMMARY, TypeAdapter(Summary))
    except OSError as error:
        raise ODBError(
            f"{error.filename}: cannot be read ({error.strerror}); give a folder that you may read."
        ) from None
    if not history.entries and not history.begins and audit is None:
        raise ODBError(
            f"{folder}: there is no run in it (no trainer_log.jsonl, trainer_state.json or odb_log.jsonl with a log "
            "entry); give the output_dir of a training that has logged, or wait for its first log entry."
        )
    kind = _kind(history, audit)
    is_finished = history.finished_at is not None if kind == "odb" and RUN_LOG in files.read else bool(history.results)
    last_step = max(history.last_step, history.finished_at or 0, *([] if audit is None else audit.steps["step"][-1:]))
    if summary is not None and (kind == "stock" or not is_finished or summary.optimizer_steps != last_step):
        summary = None  # of an earlier end of this run, or of another run in this folder
    rows = summary or next((entry.rows for entry in reversed(history.entries) if entry.rows is not None), None)
    run: dict[str, Any] = {
        "name": os.fsencode(folder.resolve().name).decode(errors="replace"),
        "folder": os.fsencode(folder).decode(errors="replace"),
        "kind": kind,
        "finished": is_finished,
        "diverged_at": _diverged_at(history),
        "files": {"read": files.read, "broken": list(files.broken.values())},
        "asked": _asked(history),
        "processes": [
            {"time": one.time, "optimizer_steps": one.optimizer_steps, "ranks": one.ranks, "ended": ended}
            for one, ended in zip(history.begins, history.ended)
        ],
        "totals": _totals(history, audit, summary, int(last_step), kind),
        "rows": None
        if rows is None
        else {item.name: getattr(rows, item.name) for item in dataclasses.fields(RowCounts)},
        "entries": _entries(history),
        "evaluations": [
            {"step": one.step, "seconds": one.seconds}
            | {name: value for name, value in one.values.items() if name.startswith("eval_") or name == "epoch"}
            for one in history.evaluations
        ],
        "optimizer_steps": None
        if audit is None
        else {name: values.tolist() for name, values in audit.steps.items() if not name.startswith("awaited")},
        "by_rank": None if audit is None else _by_rank(audit.batches),
        "datasets": None if audit is None else _datasets(history, audit, folder),
        "distributions": None if audit is None else _distributions(audit),
    }
    run["notes"] = notes_of_run(run, history, None if audit is None else audit.incomplete)
    return run


def _kind(history: History, audit: Audit | None) -> str | None:
    """None: TRAINER_LOG is alone, which has the same fields with odb and without."""
    figures = (name for entry in history.entries for name in entry.values)
    if history.begins or audit is not None or any(name.startswith("odb/") for name in figures):
        return "odb"
    return None if history.state is None or history.other_run == TRAINER_STATE else "stock"


def _asked(history: History) -> dict[str, Any]:
    """The settings: of the last process with odb, and those in the Trainer's state."""
    state = {} if history.state is None else {name: getattr(history.state, name) for name in STATE}
    found = {name: value for name, value in state.items() if value is not None}
    if not history.begins:
        return {"arguments": found}
    begin = history.begins[-1]
    about = {name: value for name, value in (begin.about or {}).items() if name != "rows_of"}
    asked = {"ranks": begin.ranks, "block": begin.config, "layout": begin.layout, "arguments": found}
    asked["arguments"] = found | (begin.arguments or {}) | {"max_steps": begin.max_steps or found.get("max_steps")}
    return asked | {"about": about, "versions": begin.versions}


def _totals(
    history: History, audit: Audit | None, summary: Summary | None, steps: int, kind: str | None
) -> dict[str, Any]:
    """Of the whole run, or until the last log entry of a run under way; counted, not estimated."""
    sums, results = _sums(history, audit, summary, steps), history.results
    samples, tokens, padded, awaited = (sums.get(n) for n in ("samples", "tokens", "padded_tokens", "awaited_tokens"))
    seconds, source = _seconds(history)
    if kind == "stock" and samples is None and {"train_runtime", "train_samples_per_second"} <= results.keys():
        # The Trainer rounds the quotient to three digits: only a single whole number within that is known.
        is_exact = results["train_runtime"] * 0.0005 < 0.5
        samples = round(results["train_runtime"] * results["train_samples_per_second"]) if is_exact else None
    names = ("padded_tokens", "micro_steps", "idle_micro_batches", "moved", "oom_cuts", "units", "data_wait_s")
    totals = {"optimizer_steps": steps, "max_steps": history.max_steps, "samples": samples, "tokens": tokens}
    totals |= {"seconds": seconds, "seconds_from": source} | {name: sums.get(name) for name in names}
    totals["padding_ratio"] = 1 - tokens / padded if padded else None
    totals["balance"] = sums.get("balance", padded / awaited if padded and awaited else None)
    patches, awaited = sums.get("patches"), sums.get("awaited_patches")
    totals["patch_balance"] = sums.get("patch_balance", patches / awaited if awaited else None)
    if not awaited and not any(entry.values.get("odb/patch_balance", 1.0) < 1.0 for entry in history.entries):
        totals["patch_balance"] = None  # there are no patches
    totals["encoder_patches"] = sums.get("encoder_patches") or None
    budgets = {(begin.ranks, begin.config.get("token_budget")) for begin in history.begins}
    totals["budget_use"] = None
    if padded and len(budgets) == 1 and isinstance(budget := next(iter(budgets))[1], int) and sums.get("micro_steps"):
        totals["budget_use"] = padded / (sums["micro_steps"] * next(iter(budgets))[0] * budget) if budget else None
    units = None if audit is None else audit.steps["units"]
    of_units = float(units.std() / units.mean()) if units is not None and units.sum() else None
    totals["units_cv"] = sums.get("units_cv", of_units)
    for name, amount in (("samples_per_second", samples), ("tokens_per_second", tokens)):
        totals[name] = amount / seconds if amount is not None and seconds else None
    return totals | {"train_loss": results.get("train_loss")}


def _sums(history: History, audit: Audit | None, summary: Summary | None, steps: int) -> dict[str, Any]:
    """Of log entries or audits where they cover all optimizer steps, and those of the summary."""
    found: dict[str, Any] = {}
    logged = [entry.sums for entry in history.entries if entry.sums is not None]
    if logged and sum(one["optimizer_steps"] for one in logged) == steps:
        found = {name: sum(one[name] for one in logged) for name in logged[0] if all(name in one for one in logged)}
    elif audit is not None and len(audit.steps["step"]) == steps:
        found = {name: int(values.sum()) for name, values in audit.steps.items() if name != "step"}
        found |= {"micro_steps": found["micro_batches"], "idle_micro_batches": int(audit.batches["idle"].sum())}
    known = {} if summary is None else dataclasses.asdict(summary)
    return found | {name: value for name, value in known.items() if value is not None}


def _seconds(history: History) -> tuple[float | None, str | None]:
    """Seconds of training and where they are from: the Trainer's own figure knows one process only."""
    if (
        "train_runtime" in history.results
        and not history.restarts
        and not any(b.optimizer_steps for b in history.begins)
    ):
        return history.results["train_runtime"], "train_runtime"
    known = [entry.seconds for entry in history.entries if entry.seconds is not None]
    return (max(known), "log") if known and len(known) == len(history.entries) else (None, None)


def _entries(history: History) -> list[dict[str, Any]]:
    made = []
    for entry in history.entries:
        values, sums, taken, steps = entry.values, entry.sums or {}, entry.taken, entry.step - entry.first_step + 1
        line: dict[str, Any] = {"step": entry.step, "first_step": entry.first_step, "seconds": entry.seconds}
        line |= {name: _finite(values.get(name)) for name in ("epoch", "loss", "learning_rate", "grad_norm")}
        line |= {name: _finite(values.get(f"odb/{name}")) for name in RATIOS}
        for name in ("samples", "tokens"):
            line[name] = sums.get(name)
            line[f"{name}_per_second"] = sums[name] / taken if taken and name in sums else None
        line["seconds_per_step"] = taken / steps if taken and steps > 0 else None
        made.append(line)
    return made


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _diverged_at(history: History) -> int | None:
    """The first optimizer step of those at the end whose logged losses are all NaN or infinite."""
    found = None
    for entry in reversed(history.entries):
        if math.isfinite(entry.values["loss"]):
            break
        found = entry.step
    return found


# ----------------------------------------------------------------------------------------------------------------------
# From the audits: distributions, and the shares of ranks and data sets.


def _distributions(audit: Audit) -> dict[str, Any]:
    """Histograms of what was trained on; idle micro-batches are not among them."""
    active = audit.batches[audit.batches["idle"] == 0]
    # By modality where patches are not all of images.
    names = [name for name in Media._fields if active[name].any()]
    media = {} if names == ["image_patches"] else {f"{name}_of_micro_batch": active[name] for name in names}
    values = {
        "length": audit.lengths,
        "tokens_of_micro_batch": active["padded_tokens"],
        "samples_of_micro_batch": active["samples"],
        "patches_of_micro_batch": active["patches"] if active["patches"].any() else active["patches"][:0],
        **media,
        "micro_batches_of_step": audit.steps["micro_batches"],
    }
    return {name: histogram(amounts) if len(amounts) else None for name, amounts in values.items()}


def histogram(values: np.ndarray) -> dict[str, Any]:
    """values: whole numbers, at least one. edges: one more than counts; a bin is [edge, next edge)."""
    low, high = int(values.min()), int(values.max())
    widths = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    width = next(width for width in widths if width * BINS >= high - low + 1)
    edges = np.arange(low // width, high // width + 2) * width
    quantiles = {
        name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    counts = np.bincount(values // width - low // width).tolist()
    found = {"edges": edges.tolist(), "counts": counts, "count": len(values), "min": low, "mean": float(values.mean())}
    return found | quantiles | {"max": high}


def _by_rank(batches: np.ndarray) -> list[dict[str, Any]]:
    """Sums of each rank. data_wait_s: seconds that its training process waited for data."""
    made = []
    for rank in np.unique(batches["rank"]).tolist():
        mine = batches[batches["rank"] == rank]
        line = {
            "rank": rank,
            "micro_batches": int((mine["part"] == 0).sum()),
            "idle_micro_batches": int(mine["idle"].sum()),
        }
        line |= {name: int(mine[name].sum()) for name in ("samples", "tokens", "padded_tokens", "patches")}
        line["padding_ratio"] = 1 - line["tokens"] / line["padded_tokens"] if line["padded_tokens"] else None
        made.append(line | {"data_wait_s": float(mine["data_wait_s"].sum())})
    return made


def _datasets(history: History, audit: Audit, folder: Path) -> list[dict[str, Any]] | None:
    """Of each data set of a mix the samples trained on; None where rows are not known by data set."""
    rows_of = ((history.begins[-1].about or {}) if history.begins else {}).get("rows_of")
    if not isinstance(rows_of, dict) or not DATA_SETS_FILE.fullmatch(str(rows_of.get("file"))):
        return None
    try:
        numbers = np.frombuffer(zlib.decompress((folder / rows_of["file"]).read_bytes()), dtype="<i2")[audit.ids]
    except (OSError, zlib.error, ValueError, IndexError):
        return None
    names = rows_of.get("names")
    made = []
    for number, name in enumerate(names if isinstance(names, list) else ()):
        lengths = audit.lengths[numbers == number]
        line: dict[str, Any] = {"name": str(name), "samples": len(lengths), "tokens": int(lengths.sum())}
        line["share_of_tokens"] = line["tokens"] / max(int(audit.lengths.sum()), 1)
        line["mean_length"] = float(lengths.mean()) if len(lengths) else None
        made.append(line | {"longest": int(lengths.max()) if len(lengths) else None})
    return made


def to_json(figures: Mapping[str, Any]) -> str:
    """Strict JSON: null in place of NaN and infinity."""
    return pydantic_core.to_json(figures, inf_nan_mode="null").decode() + "\n"
