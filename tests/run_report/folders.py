"""Output folders as trainings leave them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
BUDGET = 100


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def begin(optimizer_steps: int = 0, time: float = BEGAN, ranks: int = 1, **about: Any) -> dict[str, Any]:
    """The first line of a process in odb_log.jsonl."""
    line = {"event": "begin", "time": time, "optimizer_steps": optimizer_steps, "max_steps": 100}
    said = {"config": {"token_budget": BUDGET}, "arguments": {}, "about": about, "versions": {}, "layout": None}
    return line | {"ranks": ranks} | said


def entry(step: int, time: float, loss: float = 1.0, *, steps: int = 1, **metrics: float) -> dict[str, Any]:
    """A log entry of one rank: 4 samples and 80 tokens an optimizer step, of which 20 are padding."""
    sums = {"micro_steps": steps, "optimizer_steps": steps, "idle_micro_batches": 0, "samples": 4 * steps}
    sums |= {"tokens": 60 * steps, "padded_tokens": 80 * steps, "awaited_tokens": 80 * steps, "units": 30 * steps}
    sums |= {"squared_units": 900 * steps, "patches": 0, "awaited_patches": 0, "moved": 0, "data_wait_s": 0.5}
    logs = {"loss": loss, "learning_rate": 1e-3, "odb/balance": 1.0, "odb/padding_ratio": 0.25} | metrics
    rows = {"left_out": {"invalid": 2}, "remainder": 0, "overlong": 1, "over_budget": 0}
    line = {"event": "log", "time": time, "optimizer_step": step, "epoch": 0.1, "logs": logs, "sums": sums}
    return line | {"rows": rows}


def end(step: int, time: float) -> dict[str, Any]:
    return {"event": "end", "time": time, "optimizer_step": step}


def audit_line(step: int, lengths: Sequence[int], time: float = BEGAN + 1, **changes: Any) -> dict[str, Any]:
    """The only micro-batch of this rank in an optimizer step."""
    line = {"epoch": 0, "optimizer_step": step, "micro_batch": 0, "micro_batches": 1, "part": 0, "parts": 1}
    line |= {"ids": list(range(len(lengths)))}
    line |= {"lengths": list(lengths), "rows": len(lengths), "length": max(lengths, default=0), "segments": []}
    line |= {"patches": 0, "units": sum(lengths), "weight": 1.0, "idle": not lengths, "data_wait_s": 0.1, "time": time}
    return line | changes


def write_stock(
    folder: Path, losses: Sequence[float], *, seconds: int = 2, samples: int = 8, unlogged: int = 0
) -> Path:
    """What LLaMA-Factory leaves of a stock run. seconds, samples: of an optimizer step. unlogged: optimizer steps after
    the last logged loss."""
    steps = range(1, len(losses) + 1)
    logged = [
        {
            "current_steps": k,
            "total_steps": len(losses),
            "loss": loss,
            "lr": 1e-3,
            "epoch": 0.5,
            "elapsed_time": f"{seconds * k // 3600}:{seconds * k // 60 % 60:02d}:{seconds * k % 60:02d}",
        }
        for k, loss in zip(steps, losses)
    ]
    write_lines(folder / "trainer_log.jsonl", logged)
    history: list[dict[str, Any]] = [
        {"step": k, "loss": loss, "learning_rate": 1e-3, "epoch": 0.5} for k, loss in zip(steps, losses)
    ]
    runtime = float(seconds * len(losses))
    rate = round(samples * len(losses) / runtime, 3)
    at_end = {"train_runtime": runtime, "train_samples_per_second": rate, "epoch": 1.0}
    history.append({"step": len(losses) + unlogged, **at_end})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": len(losses)}))
    return folder
