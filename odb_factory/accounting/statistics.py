"""Count what was trained on: per log entry, for the whole run, and line by line in the audit."""

from __future__ import annotations

import dataclasses
import json
import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from odb_factory.data.samples import Measured, MicroBatch

SUMMARY_FILE = "odb_summary.json"
AUDIT_FILE = "odb_audit_rank{rank}.jsonl"


@dataclass
class StepStatistics:
    """Sums over steps, all ranks together; tokens are real, padded_tokens and patches as collated.

    awaited_tokens, awaited_patches: what there would be if every rank had as many as the one with most in the step.
    """

    steps: int = 0
    idle: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    supervised_tokens: int = 0
    patches: int = 0
    awaited_tokens: int = 0
    awaited_patches: int = 0
    moved: int = 0
    moved_bytes: int = 0
    data_wait_s: float = 0.0
    seconds_before: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, step: MicroBatch, world_size: int) -> None:
        self.steps += 1
        self.idle += world_size - step.totals.active_ranks
        self.samples += step.totals.samples
        self.tokens += step.totals.tokens
        self.padded_tokens += step.totals.padded_tokens
        self.supervised_tokens += step.totals.supervised_tokens
        self.patches += step.totals.patches
        self.awaited_tokens += world_size * step.totals.max_rank_tokens
        self.awaited_patches += world_size * step.totals.max_rank_patches
        self.moved += step.totals.moved
        self.moved_bytes += step.totals.moved_bytes

    @property
    def padding_ratio(self) -> float:
        """Share of the collated tokens that is padding (or filler), 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def balance(self) -> float:
        """Padded tokens of all ranks as a share of what they wait for, 0 to 1: 1 where no rank waits for another."""
        return self.padded_tokens / self.awaited_tokens if self.awaited_tokens else 1.0

    @property
    def patch_balance(self) -> float:
        """The same of vision patches."""
        return self.patches / self.awaited_patches if self.awaited_patches else 1.0

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def state_dict(self) -> dict[str, Any]:
        """What a `StepStatistics` is made from that goes on with these sums."""
        sums = dataclasses.asdict(self) | {"seconds_before": self.seconds}
        return {name: value for name, value in sums.items() if name != "started"}

    def summary(self) -> dict[str, float]:
        """The entries of `odb_summary.json` that are sums over the run, or made of such. These names are public."""
        return {
            "emitted": self.samples,
            "steps": self.steps,
            "idle_steps": self.idle,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "supervised_tokens": self.supervised_tokens,
            "padding_ratio": self.padding_ratio,
            "balance": self.balance,
            "patch_balance": self.patch_balance,
            "moved": self.moved,
            "moved_bytes": self.moved_bytes,
            "data_wait_s": self.data_wait_s,
            "seconds": self.seconds,
        }

    def metrics(self, token_budget: int, world_size: int) -> dict[str, float]:
        """The `odb/...` entries of a log line. These names are public."""
        steps = max(self.steps, 1)
        return {
            "odb/samples_per_step": round(self.samples / steps, 2),
            "odb/tokens_per_step": round(self.tokens / steps, 1),
            "odb/padding_ratio": round(self.padding_ratio, 4),
            "odb/budget_use": round(self.padded_tokens / (steps * world_size * token_budget), 4),
            "odb/balance": round(self.balance, 4),
            "odb/patch_balance": round(self.patch_balance, 4),
            "odb/samples_per_second": round(self.samples / self.seconds, 3),
            "odb/data_wait_s": round(self.data_wait_s, 4),
        }


class Audit:
    """`odb_audit_rank{r}.jsonl`: one line per step that this rank has taken. The key names are public.

    The file is opened with the first line. goes_on: behind the lines of the run that is resumed; steps after its last
    checkpoint then stand there twice.
    """

    def __init__(self, folder: Path, rank: int):
        self.path, self.goes_on = folder / AUDIT_FILE.format(rank=rank), False
        self._file: TextIO | None = None

    def write(self, step: MicroBatch, measured: Measured, weight: float, run_step: int, optimizer_step: int) -> None:
        """run_step: micro-step of the run, from 0; optimizer_step: the one it belongs to, from 1."""
        line = {
            "epoch": step.epoch,
            "step": run_step,
            "optimizer_step": optimizer_step,
            "ids": list(step.ids),
            "rows": measured.rows,
            "length": measured.length,
            "patches": measured.patches,
            "supervised_tokens": step.supervised_tokens,
            "weight": weight,
            "idle": step.idle,
        }
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.goes_on and self.path.exists():
            _cut_off_last_line(self.path)
        return self.path.open("a" if self.goes_on else "w", encoding="utf-8")


def _cut_off_last_line(path: Path) -> None:
    """Take away what stands behind the last line end, where a kill has cut off a line; reads from the end only."""
    with path.open("r+b") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
        file.truncate(end)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def summary_line(summary: Mapping[str, Any]) -> str:
    """The one line at the end of a run."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items()) or "none"
    overlong = f", {summary['overlong']} overlong ones alone" if summary["overlong"] else ""
    left_out = f", left out: {summary['left_out']}" if summary["left_out"] else ""
    mib = summary["moved_bytes"] / 2**20
    moved = f"; {summary['moved']} samples ({mib:.1f} MiB) handed over" if summary["moved"] else ""
    return (
        f"done: {summary['emitted']} samples emitted{overlong}, dropped: {dropped}{left_out}; {summary['steps']} steps "
        f"({summary['idle_steps']} idle) in {summary['optimizer_steps']} optimizer steps; "
        f"padding {summary['padding_ratio']:.1%} of {summary['padded_tokens']} tokens, "
        f"balance {summary['balance']:.3f}{moved}"
    )
