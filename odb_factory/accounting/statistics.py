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

from odb_factory.accounting.losses import MicroBatchLoss
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import ConfigError, one_line
from odb_factory.planning import EncoderPlan, MicroStepTotals

# ----------------------------------------------------------------------------------------------------------------------
# Sums over what was trained on, and the figures that are made of them. The fields of `StepStatistics` are the one list
# of sums: the others name the fields they use.

FROM_TOTALS = ("samples", "tokens", "padded_tokens", "units", "patches", "moved", "moved_bytes", "squares")
"""Sums of fields of `MicroStepTotals`."""
SUMMARY = (
    "samples", "micro_steps", "idle_micro_batches", "tokens", "padded_tokens", "units", "units_cv", "padding_ratio",
    "balance", "patch_balance", "moved", "moved_bytes", "oom_cuts", "lost_weight", "data_wait_s", "seconds",
)  # fmt: skip
"""Entries of `odb_summary.json`. These names are public."""


@dataclass
class StepStatistics:
    """Sums over micro-steps, all ranks together; tokens are real, padded_tokens and patches as collated.

    awaited_tokens, awaited_patches: the sums if every rank had as many as the fullest one in each micro-step.
    encoder_work, awaited_encoder_work: the same of what the vision tower costs, where its work is shared out.
    squared_units: of optimizer steps, all ranks together. squares: of the tokens of each sample. oom_cuts: how often a
    micro-batch, or a part of one, was cut in two because memory did not hold it. lost_weight: the loss of late rows,
    as a share of the loss of an optimizer step.
    """

    micro_steps: int = 0
    optimizer_steps: int = 0
    idle_micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    units: int = 0
    squared_units: int = 0
    patches: int = 0
    awaited_tokens: int = 0
    awaited_patches: int = 0
    encoder_work: int = 0
    awaited_encoder_work: int = 0
    moved: int = 0
    moved_bytes: int = 0
    squares: int = 0
    oom_cuts: int = 0
    lost_weight: float = 0.0
    data_wait_s: float = 0.0
    seconds: float = 0.0

    def add(self, totals: MicroStepTotals, world_size: int) -> None:
        """Count a micro-step over all ranks."""
        for name in FROM_TOTALS:
            setattr(self, name, getattr(self, name) + getattr(totals, name))
        self.micro_steps += 1
        self.idle_micro_batches += world_size - totals.active_ranks
        self.awaited_tokens += world_size * totals.max_rank_tokens
        self.awaited_patches += world_size * totals.max_rank_patches

    def since(self, before: StepStatistics) -> StepStatistics:
        """What was added to these sums after a copy of them was made."""
        return StepStatistics(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    @property
    def padding_ratio(self) -> float:
        """Share of the collated tokens that is padding (or dummy media), 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def balance(self) -> float:
        """Padded tokens of all ranks as a share of awaited_tokens, 0 to 1: 1 if no rank waits for another."""
        return self.padded_tokens / self.awaited_tokens if self.awaited_tokens else 1.0

    @property
    def patch_balance(self) -> float:
        """The same of vision patches."""
        return self.patches / self.awaited_patches if self.awaited_patches else 1.0

    @property
    def encoder_balance(self) -> float:
        """The same of the vision tower's work, as encoded."""
        return self.encoder_work / self.awaited_encoder_work if self.awaited_encoder_work else 1.0

    @property
    def units_cv(self) -> float:
        """Standard deviation of the units of an optimizer step over their mean; 0 if all steps are alike."""
        if not self.units or not self.optimizer_steps:
            return 0.0
        mean = self.units / self.optimizer_steps
        return math.sqrt(max(self.squared_units / self.optimizer_steps - mean**2, 0.0)) / mean

    def summary(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in SUMMARY}

    def metrics(self, token_budget: int, world_size: int) -> dict[str, float]:
        """The `odb/...` entries of a log line. These names are public.

        odb/micro_batches: micro-batches of an optimizer step on each rank; odb/units_per_step: of an optimizer step
        on all ranks, and odb/units_cv their standard deviation over their mean.
        """
        micro_steps, optimizer_steps = max(self.micro_steps, 1), max(self.optimizer_steps, 1)
        seconds = self.seconds or math.inf
        return {
            "odb/micro_batches": round(self.micro_steps / optimizer_steps, 2),
            "odb/samples_per_micro_step": round(self.samples / micro_steps, 2),
            "odb/tokens_per_micro_step": round(self.tokens / micro_steps, 1),
            "odb/units_per_step": round(self.units / optimizer_steps, 1),
            "odb/budget_use": round(self.padded_tokens / (micro_steps * world_size * token_budget), 4),
            "odb/samples_per_second": round(self.samples / seconds, 3),
            "odb/tokens_per_second": round(self.tokens / seconds, 1),
            "odb/data_wait_share": round(self.data_wait_s / seconds, 4),
            **{
                f"odb/{name}": round(getattr(self, name), 4)
                for name in ("units_cv", "padding_ratio", "balance", "patch_balance", "data_wait_s")
            },
        }


# ----------------------------------------------------------------------------------------------------------------------
# Files of one JSON object a line: the audit, and the rows left out.

AUDIT_FILE = "odb_audit_rank{rank}.jsonl"
LEFT_OUT_FILE = "odb_left_out_rank{rank}.jsonl"


class Lines:
    """A file of one JSON object a line, opened with the first line.

    what: its name in an error. append: continue the file of the run that is resumed; what that run wrote after its last
    checkpoint is then in the file twice. Else the file of an earlier run goes with the first `flush`, at the latest.
    Raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, path: Path, what: str):
        self.path, self.what, self.append = path, what, False
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
                    f"{self.path}: {self.what} cannot be written ({one_line(error)}); give another folder."
                ) from error
        self._file.write(json.dumps(line, default=str) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        elif not self.append:
            self.path.unlink(missing_ok=True)
            self.append = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(slots=True)
class Computing:
    """A micro-batch, or a part of one, in forward and backward.

    is_weighed: the loss has been computed with its weights. encoded: runs of the vision tower whose work the ranks have
    shared.
    """

    micro_batch: MicroBatch
    measured: Measured
    loss: MicroBatchLoss
    is_weighed: bool = False
    encoded: Sequence[EncoderPlan] = ()

    @property
    def num_items(self) -> int:
        """Units that the loss is a mean over (>= 1)."""
        return max(self.measured.units, 1)


def audit_line(
    done: Computing, rank: int, optimizer_step: int, data_wait_s: float = 0.0, part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """The line of a micro-batch that this rank has trained on. The key names are public.

    optimizer_step: of the run, from 1. data_wait_s: waited for data since the line before. part, parts: of a
    micro-batch that was cut (`oom: split`), from 0.
    """
    micro_batch, measured, loss = done.micro_batch, done.measured, done.loss
    encoded = [int(plan.patches[rank]) for plan in done.encoded]  # for any rank
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


def summary_line(summary: Mapping[str, Any]) -> str:
    """summary: as `StepAccounting.summary` returns it."""
    left_out = ", ".join(f"{count} {reason}" for reason, count in summary["left_out"].items()) or "none"
    overlong = f", {summary['overlong']} overlong ones alone" if summary["overlong"] else ""
    remainder = f", remainder of epochs: {summary['remainder']}" if summary["remainder"] else ""
    mib = summary["moved_bytes"] / 2**20
    moved = f"; {summary['moved']} samples ({mib:.1f} MiB) moved between ranks" if summary["moved"] else ""
    cuts = f"; memory was short {summary['oom_cuts']} times" if summary["oom_cuts"] else ""
    if summary["lowered_to"]:
        lowered = ", ".join(f"{key} {value}" for key, value in summary["lowered_to"].items() if value is not None)
        cuts = f"{cuts}, budgets lowered to: {lowered}"
    return (
        f"done: {summary['samples']} samples trained on{overlong}, left out: {left_out}{remainder}; "
        f"{summary['optimizer_steps']} optimizer steps of {summary['micro_steps']} micro-steps "
        f"({summary['idle_micro_batches']} idle micro-batches); padding {summary['padding_ratio']:.1%} of "
        f"{summary['padded_tokens']} tokens, balance {summary['balance']:.3f}{moved}{cuts}"
    )
