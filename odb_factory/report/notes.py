"""What a reader of a report has to know of its figures: where they end, what is missing, and how to get it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from odb_factory.report.audit import Audit
from odb_factory.report.files import FilesRead
from odb_factory.report.history import RUN_LOG, History
from odb_factory.report.numbers import counted


def of_run(history: History, audit: Audit | None, files: FilesRead, run: Mapping[str, Any]) -> list[str]:
    """One line each."""
    return [
        line
        for line in (*_of_files(history, audit, files), *_of_times(history), *_missing(history, audit, files, run))
        if line
    ]


def _of_files(history: History, audit: Audit | None, files: FilesRead) -> list[str]:
    said = [
        f"{name}: {counted(count, 'broken ' + ('line' if name.endswith('.jsonl') else 'entry'))} left out."
        for name, count in files.broken.items()
    ]
    said += [f"{name} is broken (no JSON, or not what it must hold) and left out." for name in files.broken_files]
    said += [f"{name}: its last line is half written and left out." for name in files.half_written]
    said += [f"{name} tells of another run ({by}) and is left out." for name, by in history.other_runs.items()]
    if audit is not None and audit.incomplete:
        said.append(
            f"{counted(audit.incomplete, 'optimizer step')} left out of what is made of the audits: not all lines of "
            "all ranks are there (a run under way, broken lines, or audits on another node's disk)."
        )
    return said


def _of_times(history: History) -> list[str]:
    said = []
    worlds = {process.ranks for process in history.processes}
    if len(history.processes) > 1 or history.restarts:
        times = max(len(history.processes) - 1, history.restarts)
        ranks = f", with {' and '.join(map(str, sorted(worlds)))} ranks" if len(worlds) > 1 else ""
        said.append(
            f"The run was resumed {counted(times, 'time')}{ranks}: seconds are of training until the last log entry "
            "before each checkpoint and since then, without the pauses and without what was taken again."
        )
    if history.processes and history.processes[0].optimizer_steps and any(one.sums is None for one in history.entries):
        first = history.processes[0].optimizer_steps
        said.append(
            f"Until optimizer step {first} it was trained without odb, or its log is not here, so there are no sums."
        )
    unsaid = sum(not math.isfinite(value) for entry in history.entries for value in entry.values.values())
    if unsaid:
        said.append(f"Logged figures that are NaN or infinite ({unsaid}) are not in the charts, and null in the JSON.")
    if history.whole_seconds:
        said.append("trainer_log.jsonl counts whole seconds, so times over short spans are coarse.")
    if history.entries and all(entry.seconds is None for entry in history.entries):
        said.append("No file says when the log entries were made (LLaMA-Factory's trainer_log.jsonl would).")
    return said


def _missing(history: History, audit: Audit | None, files: FilesRead, run: Mapping[str, Any]) -> list[str]:
    if run["kind"] is None:
        return [
            "It is not known whether it was trained with odb: trainer_log.jsonl has the same fields without; "
            "odb_log.jsonl and trainer_state.json would tell."
        ]
    if run["kind"] == "stock":
        return [
            "Stock training logs no tokens, padding, balance or lengths, so these are not here; `odb-factory plan` "
            "tells them for a YAML, and a training with an odb: block logs them."
        ]
    said = []
    if run["totals"]["oom_cuts"]:
        said.append(
            f"Memory was short {counted(run['totals']['oom_cuts'], 'time')}, and a micro-batch was cut in two: set "
            "budgets that fit."
        )
    if audit is None:
        missing = "there are no distributions and no figures by rank, data set and optimizer step"
        if any(name.startswith("odb_audit_rank") for name in files.names):
            said.append(f"No line of the audits is of this run and whole, so {missing}.")
        else:
            said.append(f"Without an audit {missing}: set `audit: true` in the odb: block of the next run.")
    elif run["datasets"] is None and len(run["asked"].get("about", {}).get("dataset") or []) > 1:
        is_told = "rows_of" in history.processes[-1].begin["about"]
        why = (
            "what odb_log.jsonl says of them is broken"
            if is_told
            else "they are a stream, or were tokenized beforehand"
        )
        said.append(f"Rows are not known by data set: {why}.")
    if history.no_begin:
        said.append(
            "odb_log.jsonl lacks the begin line of a process, so its settings, ranks and exact times are missing."
            if history.processes
            else "odb_log.jsonl has no begin line, so settings, ranks and exact times are missing."
        )
    elif not history.processes:
        how = "has no whole line" if RUN_LOG in files.names else "is not here"
        said.append(f"odb_log.jsonl {how}, so settings, sums and exact times are missing.")
    return said
