"""All figures of one run, as `odb-factory report --json` writes them; what no file tells is None."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.errors import ODBError
from odb_factory.report import read
from odb_factory.report.read import (
    RUN_LOG,
    Audit,
    Entry,
    FilesRead,
    History,
    counted,
    dataset_numbers,
    read_audit,
    read_history,
)

# ----------------------------------------------------------------------------------------------------------------------
# What kind of run it was, whether it is over, and whether the summary in its folder is of its end.

SUMMARY = "odb_summary.json"


def kind_of_run(history: History, *, is_odb: bool) -> str | None:
    """odb, stock, or mixed: stock's checkpoint was gone on from with odb, or the other way round. None: no file tells.

    LLaMA-Factory's `trainer_log.jsonl` has the same fields with odb as without. is_odb: other files than logs, which
    are of this run, say that it was trained with odb.
    """
    telling = [entry for entry in history.entries if entry.tells_odb]
    with_odb = [entry for entry in telling if any(name.startswith("odb/") for name in entry.values)]
    if with_odb or history.processes:
        return "odb" if len(with_odb) == len(telling) else "mixed"
    if telling:
        return "stock"
    return "odb" if is_odb else None


def run_is_over(history: History) -> bool:
    """Whether the process that wrote last came to its end."""
    is_of_odb = not history.entries or history.entries[-1].sums is not None
    if is_of_odb and (history.processes or history.ended_at is not None):
        return history.ended_at is not None
    return bool(history.results)


def last_step_of(history: History, audit: Audit | None) -> int:
    """The last optimizer step that any file tells of."""
    steps = [entry.step for entry in history.entries[-1:]] + [history.ended_at or 0]
    if audit is not None:
        steps += audit.steps["step"][-1:].tolist()
    return max(steps)


def own_summary(summary: dict[str, Any], history: History, steps: int, counted: Mapping[str, float]) -> dict[str, Any]:
    """The summary, if it is of the end of this run; empty if it is of an earlier end, of a part, or of another run,
    which is noted in `history.other_runs` where it is sure.

    steps: the last optimizer step. counted: sums of all of them, as far as they are known from logs or audits.
    """
    of_logs, processes = kind_of_run(history, is_odb=False), history.processes
    if not summary or of_logs == "mixed":
        return {}
    is_at_end, stated = run_is_over(history), summary["optimizer_steps"]
    is_one_process = not history.restarts and [one.optimizer_steps for one in processes] in ([], [0])
    other = None
    if of_logs == "stock":
        other = "one with odb"
    elif stated != steps:
        is_known = is_at_end or (is_one_process and stated < steps)
        if is_known and stated not in {process.ended_at for process in processes}:
            other = f"{stated:,} optimizer steps against {steps:,}"
    elif is_at_end and is_one_process:
        theirs = {"samples": summary["samples"], "tokens": summary["tokens"]}
        differing = [name for name in theirs if counted.get(name, theirs[name]) != theirs[name]]
        other = " and ".join(f"{theirs[name]:,} {name} against {counted[name]:,}" for name in differing) or None
    if other is not None:
        history.other_runs[SUMMARY] = other
    is_partly_untold = bool(processes) and any(not entry.tells_odb for entry in history.entries)
    return summary if is_at_end and stated == steps and other is None and not is_partly_untold else {}


# ----------------------------------------------------------------------------------------------------------------------
# How lengths and micro-batches are distributed, and what each rank and each data set has had of them.

BINS = 32
FEWEST_PAIRS = 3


def distributions(audit: Audit | None) -> dict[str, Any] | None:
    """Histograms of what was trained on; idle micro-batches are not among them."""
    if audit is None or not len(audit.lengths):
        return None
    batches = audit.batches
    active = batches["idle"] == 0
    found = {
        "length": histogram(audit.lengths),
        "tokens_of_micro_batch": histogram(batches["padded_tokens"][active]),
        "samples_of_micro_batch": histogram(batches["samples"][active]),
        "micro_batches_of_step": histogram(audit.steps["micro_batches"]),
    }
    if batches["patches"].any():
        found["patches_of_micro_batch"] = histogram(batches["patches"][active])
    return {name: made if made["count"] else None for name, made in found.items()}


def histogram(values: np.ndarray) -> dict[str, Any]:
    """edges: one more than counts; a value belongs to the bin [edge, next edge)."""
    if not len(values):
        return {"edges": [], "counts": [], "count": 0}
    low, high = int(values.min()), int(values.max())
    width = _round_width(max(high - low + 1, 1) / BINS)
    edges = np.arange(low // width * width, high + width + 1, width)
    counts, _ = np.histogram(values, edges)
    if counts[-1] == 0 and len(counts) > 1:
        edges, counts = edges[:-1], counts[:-1]
    quantiles = {
        name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "count": len(values),
        "min": low,
        "mean": float(values.mean()),
        **quantiles,
        "max": high,
    }


def _round_width(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= width:
                return factor * power
        power *= 10


def of_ranks(audit: Audit | None) -> list[dict[str, Any]] | None:
    """Sums of each rank. data_wait_s: that its training process waited for data."""
    if audit is None:
        return None
    made = []
    for rank in audit.ranks:
        mine = audit.batches["rank"] == rank
        line: dict[str, Any] = {"rank": rank, "micro_batches": int((mine & (audit.batches["part"] == 0)).sum())}
        line |= {"idle_micro_batches": int(audit.batches["idle"][mine].sum())}
        for name in ("samples", "tokens", "padded_tokens", "patches"):
            line[name] = int(audit.batches[name][mine].sum())
        line["padding_ratio"] = 1 - line["tokens"] / line["padded_tokens"] if line["padded_tokens"] else None
        made.append(line | {"data_wait_s": float(audit.batches["data_wait_s"][mine].sum())})
    return made


def of_datasets(audit: Audit | None, rows_of: Mapping[str, Any] | None, folder: Path) -> list[dict[str, Any]] | None:
    """Of each data set of a mix what was trained on; None where rows are not known by data set."""
    found = None if audit is None else dataset_numbers(rows_of, audit.ids, folder)
    if audit is None or found is None or not len(audit.lengths):
        return None
    names, numbers = found
    made = []
    for number, name in enumerate(names):
        lengths = audit.lengths[numbers == number]
        line: dict[str, Any] = {"name": name, "samples": len(lengths), "tokens": int(lengths.sum())}
        line["share_of_tokens"] = line["tokens"] / max(int(audit.lengths.sum()), 1)
        line["mean_length"] = float(lengths.mean()) if len(lengths) else None
        made.append(line | {"longest": int(lengths.max()) if len(lengths) else None})
    return made


def successive_correlation(entries: Sequence[Entry], audit: Audit | None) -> dict[str, Any] | None:
    """Correlation (Pearson) of the mean sample lengths of each optimizer step and the next.

    About 0 where samples come in random order; length-grouped orders have long steps follow each other. pairs: that
    it is made from. None where optimizer steps are not known one by one, or are too few or all alike.
    """
    means: dict[int, float] = {}
    if audit is not None:
        steps = audit.steps
        means = {
            int(step): tokens / samples
            for step, tokens, samples in zip(steps["step"], steps["tokens"], steps["samples"])
            if samples
        }
    else:
        for entry in entries:
            if entry.sums is not None and entry.sums["optimizer_steps"] == 1 and entry.sums["samples"]:
                means[entry.step] = entry.sums["tokens"] / entry.sums["samples"]
    pairs = np.array([(mean, means[step + 1]) for step, mean in means.items() if step + 1 in means])
    if len(pairs) < FEWEST_PAIRS or not np.ptp(pairs[:, 0]) or not np.ptp(pairs[:, 1]):
        return None
    return {"correlation": float(np.corrcoef(pairs.T)[0, 1]), "pairs": len(pairs)}


# ----------------------------------------------------------------------------------------------------------------------
# What a reader of a report has to know of its figures: where they end, what is missing, and how to get it.


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


# ----------------------------------------------------------------------------------------------------------------------

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
        summary = files.whole(folder / SUMMARY, read.summary)
        card = read.read_model_card(folder, files)
    except OSError as error:
        raise ODBError(
            f"{error.filename}: cannot be read ({error.strerror}); give a folder that you may read."
        ) from None
    if not history.entries and not history.processes and audit is None:
        raise ODBError(
            f"{folder}: there is no run in it (no trainer_log.jsonl, trainer_state.json or odb_log.jsonl with a log "
            "entry); give the output_dir of a training that has logged, or wait for its first log entry."
        )
    is_over, last_step = run_is_over(history), last_step_of(history, audit)
    summary = own_summary(summary, history, last_step, _sums(history, audit, {}, last_step))
    kind = kind_of_run(history, is_odb=bool(summary) or audit is not None)
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
        "asked": read.asked(history, card),
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
    run["notes"] = of_run(history, audit, files, run)
    return dict(plain(run))


def _rows_of(history: History) -> Mapping[str, Any] | None:
    return (history.processes[-1].begin.get("about") or {}).get("rows_of") if history.processes else None


def _totals(history: History, audit: Audit | None, summary: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Of the whole run, or of a run under way until its last log entry; counted, not estimated."""
    steps, results = last_step_of(history, audit), history.results
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
