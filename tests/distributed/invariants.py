"""The invariants of DESIGN.md, read from the audits of all ranks of a run."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support import read_jsonl, read_log

Audits = list[list[dict[str, Any]]]


def read_audits(output_dir: Path, num_ranks: int) -> Audits:
    return [read_jsonl(output_dir / f"odb_audit_rank{rank}.jsonl") for rank in range(num_ranks)]


def check_audits(
    audits: Audits,
    *,
    ids: Collection[int],
    accumulation: int,
    token_budget: int,
    max_patches: int | None = None,
    epochs: int = 1,
    join: bool = True,
) -> None:
    """I1 to I4, I7 and the weights. ids: the usable rows; without `join` each may be emitted at most once."""
    counts = [Counter(line["epoch"] for line in audit) for audit in audits]
    assert all(count == counts[0] for count in counts), f"I1, steps of each epoch on each rank: {counts}"
    assert sorted(counts[0]) == list(range(epochs))
    assert all(steps % accumulation == 0 for steps in counts[0].values()), f"I1, {counts[0]} with GA {accumulation}"
    for audit in audits:
        assert [line["step"] for line in audit] == list(range(len(audit)))
        assert [line["optimizer_step"] for line in audit] == [k // accumulation + 1 for k in range(len(audit))]

    for epoch in range(epochs):
        emitted = Counter(id for audit in audits for line in audit if line["epoch"] == epoch for id in line["ids"])
        assert max(emitted.values(), default=1) == 1, f"I2, I3, twice: {emitted.most_common(3)}"
        if join:
            assert set(emitted) == set(ids), "I2"
        else:
            assert set(emitted) <= set(ids), "I3"

    for rank, audit in enumerate(audits):
        for line in audit:
            assert line["idle"] == (not line["ids"])
            if line["rows"] > 1:
                assert line["rows"] * line["length"] <= token_budget, f"I4, {line}"
                assert max_patches is None or line["patches"] <= max_patches, f"I4, {line}"
        for epoch in range(epochs):
            idle = [line["idle"] for line in audit if line["epoch"] == epoch]
            assert idle == sorted(idle), f"I7, rank {rank} idles before its end in epoch {epoch}: {idle}"
            assert join or not any(idle), "I3, no idle step"

    steps = defaultdict(list)
    for audit in audits:
        for line in audit:
            steps[line["optimizer_step"]].append(line)
    for number, lines in steps.items():
        supervised = sum(line["supervised_tokens"] for line in lines)
        assert sum(line["weight"] for line in lines) / len(audits) == pytest.approx(1), f"optimizer step {number}"
        for line in lines:
            assert line["weight"] == pytest.approx(line["supervised_tokens"] * len(audits) / supervised)


def check_books(output_dir: Path, audits: Audits, dropped: dict[str, int], left_out: int = 0) -> dict[str, Any]:
    """The summary says what the audits say; every loss is finite. Returns the summary."""
    summary = json.loads((output_dir / "odb_summary.json").read_text())
    assert summary["emitted"] == sum(len(line["ids"]) for audit in audits for line in audit)
    assert summary["steps"] == len(audits[0])
    assert summary["idle_steps"] == sum(line["idle"] for audit in audits for line in audit)
    assert summary["optimizer_steps"] == audits[0][-1]["optimizer_step"]
    assert summary["world_size"] == len(audits)
    assert (summary["dropped"], summary["left_out"]) == (dropped, left_out)
    entries = losses(output_dir)
    assert len(entries) == summary["optimizer_steps"]
    assert all(math.isfinite(number) for entry in entries for number in entry)
    return summary


def losses(output_dir: Path) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each optimizer step."""
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in read_log(output_dir) if "loss" in entry]
