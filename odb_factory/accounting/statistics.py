"""What was trained on: its sums and figures, the audit, the summary."""

from __future__ import annotations

import json
import math
import mmap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from odb_factory.accounting.losses import MicroBatchLoss
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import ConfigError, one_line
from odb_factory.planner import EncoderPlan, MicroStepTotals

# ----------------------------------------------------------------------------------------------------------------------
# Sums over what was trained on, and the figures that are made of them.

FROM_TOTALS = ("samples", "tokens", "padded_tokens", "units", "moved")
"""Sums of fields of `MicroStepTotals`."""
SUMMARY = (
    "optimizer_steps", "micro_steps", "idle_micro_batches", "samples", "tokens", "padded_tokens", "units", "moved",
    "oom_cuts", "lost_weight", "data_wait_s", "seconds",
)  # fmt: skip
"""Sums that are entries of `odb_summary.json`. These names are public."""


class StepStatistics(dict[str, float]):
    """Sums by name, all ranks together; a sum that was never added to is 0.

    The names of `SUMMARY`, skipped (rows left out) and awaited_tokens: the sum of padded_tokens if every rank had as
    many as the fullest one in each micro-step. tokens are real, padded_tokens as collated.
    oom_cuts: how often a micro-batch, or a part of one, was cut in two because memory did not hold it. lost_weight: the
    loss of late rows, as a share of the loss of an optimizer step.
    """

    def __missing__(self, name: str) -> float:
        return 0

    def add(self, totals: MicroStepTotals, world_size: int) -> None:
        """Count a micro-step over all ranks."""
        for name in FROM_TOTALS:
            self[name] += getattr(totals, name)
        self["micro_steps"] += 1
        self["idle_micro_batches"] += world_size - totals.active_ranks
        self["awaited_tokens"] += world_size * totals.max_rank_tokens

    def since(self, before: StepStatistics) -> StepStatistics:
        """What was added to these sums after a copy of them was made."""
        return StepStatistics({name: value - before[name] for name, value in self.items()})

    @property
    def padding_ratio(self) -> float:
        """Share of the collated tokens that is padding (or dummy media), 0 to 1."""
        return 1 - self["tokens"] / self["padded_tokens"] if self["padded_tokens"] else 0.0

    @property
    def balance(self) -> float:
        """Padded tokens of all ranks as a share of awaited_tokens, 0 to 1: 1 if no rank waits for another."""
        return self["padded_tokens"] / self["awaited_tokens"] if self["awaited_tokens"] else 1.0

    def metrics(self, token_budget: int, world_size: int) -> dict[str, float]:
        """The `odb/...` entries of a log line. These names are public.

        odb/micro_batches: micro-batches of an optimizer step on each rank, mean. odb/idle: idle micro-batches.
        odb/skipped: rows left out. odb/peak_memory_gib: of this process on its GPU, since it began.
        """
        seconds = self["seconds"] or math.inf
        budgets = max(self["micro_steps"], 1) * world_size * token_budget
        metrics = {
            "odb/tokens_per_second": round(self["tokens"] / seconds, 1),
            "odb/samples_per_second": round(self["samples"] / seconds, 3),
            "odb/padding_ratio": round(self.padding_ratio, 4),
            "odb/budget_use": round(self["padded_tokens"] / budgets, 4),
            "odb/micro_batches": round(self["micro_steps"] / max(self["optimizer_steps"], 1), 2),
            "odb/balance": round(self.balance, 4),
            "odb/data_wait_share": round(self["data_wait_s"] / seconds, 4),
            "odb/skipped": self["skipped"],
            "odb/idle": self["idle_micro_batches"],
        }
        if torch.cuda.is_initialized():
            metrics["odb/peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return metrics

    def summary(self) -> dict[str, float]:
        ratios = {"padding_ratio": self.padding_ratio, "balance": self.balance}
        return {name: self[name] for name in SUMMARY} | ratios


# ----------------------------------------------------------------------------------------------------------------------
# The audit: one JSON object a line for each micro-batch of a rank.

AUDIT_FILE = "odb_audit_rank{rank}.jsonl"


class Audit:
    """The audit file of a rank, opened with the first line.

    append: continue the file of the run that is resumed; what that run wrote after its last checkpoint is then in the
    file twice. Raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, folder: Path, rank: int):
        self.path, self.append = folder / AUDIT_FILE.format(rank=rank), False
        self._file: TextIO | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.append and self.path.exists():
                    cut_off_last_line(self.path)
                self._file = self.path.open("a" if self.append else "w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"{self.path}: the audit cannot be written ({one_line(error)}); give another folder."
                ) from error
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Computing:
    """A micro-batch, or a part of one, in forward and backward.

    is_weighed: the loss has been computed with its weights. encoded: runs of the vision tower whose work the ranks have
    shared. pads_left: of each row, whether padding stands before its tokens; empty if unknown.
    """

    micro_batch: MicroBatch
    measured: Measured
    loss: MicroBatchLoss
    is_weighed: bool = False
    encoded: Sequence[EncoderPlan] = ()
    pads_left: Sequence[bool] = ()

    @property
    def num_items(self) -> int:
        """Units that the loss is a mean over (>= 1)."""
        return max(self.measured.units, 1)


def audit_line(
    computed: Computing, rank: int, optimizer_step: int, data_wait_s: float = 0.0, part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """The line of a micro-batch that this rank has trained on. The key names are public.

    optimizer_step: of the run, from 1. data_wait_s: waited for data since the line before. part, parts: of a
    micro-batch that was cut (`oom: split`), from 0.
    """
    micro_batch, measured, loss = computed.micro_batch, computed.measured, computed.loss
    encoded = [int(plan.patches[rank]) for plan in computed.encoded]  # for any rank
    weights = loss.row_weights and [loss.scale * weight for weight in loss.row_weights[: len(micro_batch.ids)]]
    return {
        "epoch": micro_batch.step.epoch,
        "optimizer_step": optimizer_step,
        "micro_batch": micro_batch.index,
        "micro_batches": micro_batch.step.num_micro_batches,
        "part": part,
        "parts": parts,
        "ids": list(micro_batch.ids),
        "lengths": list(micro_batch.lengths),
        "rows": measured.rows,
        "length": measured.length,
        "segments": list(measured.segments),
        "patches": measured.patches,
        "encoder_patches": sum(encoded) if encoded else measured.patches,
        **measured.media._asdict(),
        "units": micro_batch.num_units,
        # Of the mean loss of the micro-batch, or of each token loss of each sample.
        "weight": loss.scale if weights is None else weights,
        "idle": micro_batch.idle,
        "data_wait_s": round(data_wait_s, 4),
        "time": round(time.time(), 3),
    }


def cut_off_last_line(path: Path) -> None:
    """Remove what follows the last line end (a kill may have cut off a line); reads from the end only."""
    with path.open("r+b") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
        file.truncate(end)


# ----------------------------------------------------------------------------------------------------------------------
# The end of a run: `odb_summary.json` and one line.

SUMMARY_FILE = "odb_summary.json"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def summary_line(summary: Mapping[str, Any], steps: int) -> str:
    """summary: as `StepAccounting.summary` returns it. steps: optimizer steps since the run began or was resumed."""
    before = summary["optimizer_steps"] - steps
    resumed = f" after {before} of a run before" if before else ""
    parts = [
        f"done: {summary['samples']} samples in {steps} optimizer steps{resumed}",
        f"{summary['micro_steps']} micro-batches on each rank, {summary['idle_micro_batches']} idle on all ranks",
        f"padding {summary['padding_ratio']:.1%}, balance {summary['balance']:.3f}",
    ]
    left_out = ", ".join(f"{count} {reason}" for reason, count in summary["left_out"].items())
    counts = {
        f"left out: {left_out}": left_out,
        f"rows that epochs ended without: {summary['remainder']}": summary["remainder"],
        f"overlong samples, each alone: {summary['overlong']}": summary["overlong"],
        f"micro-batches cut because memory was short: {summary['oom_cuts']}": summary["oom_cuts"],
        f"budgets lowered to: {summary['lowered_to']}": summary["lowered_to"],
    }
    return "; ".join(parts + [text for text, count in counts.items() if count])
