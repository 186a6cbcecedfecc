"""What kind of run it was, whether it is over, and whether the summary in its folder is of its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_factory.report.audit import Audit
from odb_factory.report.history import History

SUMMARY = "odb_summary.json"


def kind(history: History, *, is_odb: bool) -> str | None:
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


def is_over(history: History) -> bool:
    """Whether the process that wrote last came to its end."""
    is_of_odb = not history.entries or history.entries[-1].sums is not None
    if is_of_odb and (history.processes or history.ended_at is not None):
        return history.ended_at is not None
    return bool(history.results)


def last_step(history: History, audit: Audit | None) -> int:
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
    of_logs, processes = kind(history, is_odb=False), history.processes
    if not summary or of_logs == "mixed":
        return {}
    is_at_end, stated = is_over(history), summary["optimizer_steps"]
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
