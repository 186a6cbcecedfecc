"""The end of a run: `odb_summary.json` and one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMMARY_FILE = "odb_summary.json"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def summary_line(summary: Mapping[str, Any]) -> str:
    """summary: as `StepAccounting.summary` returns it."""
    left_out = ", ".join(f"{count} {reason}" for reason, count in summary["left_out"].items()) or "none"
    overlong = f", {summary['overlong']} overlong ones alone" if summary["overlong"] else ""
    not_trained = f", not trained on: {summary['not_trained']}" if summary["not_trained"] else ""
    mib = summary["moved_bytes"] / 2**20
    moved = f"; {summary['moved']} samples ({mib:.1f} MiB) moved between ranks" if summary["moved"] else ""
    cuts = f"; memory was short {summary['oom_cuts']} times" if summary["oom_cuts"] else ""
    if summary["lowered_to"]:
        lowered = ", ".join(f"{key} {value}" for key, value in summary["lowered_to"].items() if value is not None)
        cuts = f"{cuts}, budgets lowered to: {lowered}"
    return (
        f"done: {summary['samples']} samples trained on{overlong}, left out: {left_out}{not_trained}; "
        f"{summary['optimizer_steps']} optimizer steps of {summary['micro_steps']} micro-steps "
        f"({summary['idle_micro_batches']} idle micro-batches); padding {summary['padding_ratio']:.1%} of "
        f"{summary['padded_tokens']} tokens, balance {summary['balance']:.3f}{moved}{cuts}"
    )
