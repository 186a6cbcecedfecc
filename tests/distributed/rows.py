"""Rows of the small data sets that several ranks train on, and the invariants of DESIGN.md in the audits of a run."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support import noise, read_audit, read_log, write_dataset

WORDS = ["red", "round", "seven", "cats", "under", "a", "bridge"]
INVALID = {"messages": [{"role": "user", "content": "nobody answers"}], "images": []}
"""A row that LLaMA-Factory drops."""
PICTURES = ([], ["wide.png"], ["tall.png"], [], ["wide.png", "tall.png"])


def row(words: int, images: list[str] | None = None, videos: list[list[str]] | None = None) -> dict[str, Any]:
    """A question about `images` and `videos` (the files of their frames), and an answer of `words` words."""
    rng = random.Random(words)
    answer = " ".join(rng.choice(WORDS) for _ in range(words))
    question = "<image>" * len(images or []) + "<video>" * len(videos or []) + "what is it?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images or []} | ({} if videos is None else {"videos": videos})


def write_uneven_rows(folder: Path, num_rows: dict[str, int]) -> Path:
    """Rows of 3 to 100 words, all different in a dataset; some of `mixed` and `pictures` have one or two pictures."""
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        noise(size).convert("RGB").save(folder / f"{name}.png")
    rows = {
        name: [row(3 + (k * 23) % 97, PICTURES[k % 5] if name in ("mixed", "pictures") else []) for k in range(count)]
        for name, count in num_rows.items()
    }
    return write_dataset(folder, rows)


Audits = list[list[dict[str, Any]]]


def read_audits(output_dir: Path, num_ranks: int) -> Audits:
    return [read_audit(output_dir, rank) for rank in range(num_ranks)]


def check_audits(
    audits: Audits,
    *,
    ids: Collection[int],
    accumulation: int,
    token_budget: int,
    batch: int = 1,
    max_patches: int | None = None,
    epochs: int = 1,
    fill: bool = False,
) -> None:
    """I1, I2, I4, I7 and the weights. ids: the usable rows.

    accumulation, batch: stock's micro-batches per optimizer step and rank, and their rows. fill: an optimizer
    step has `accumulation` micro-batches of the budget.
    """
    steps = _optimizer_steps(audits)
    assert sorted(steps) == list(range(1, len(steps) + 1))
    for number, by_rank in steps.items():
        lengths = [len(lines) for lines in by_rank]
        assert len(set(lengths)) == 1, f"I1, micro-batches of optimizer step {number} on each rank: {lengths}"
        for lines in by_rank:
            assert [line["micro_batch"] for line in lines] == list(range(lengths[0]))
            assert all(line["micro_batches"] == lengths[0] for line in lines)
    by_epoch = [[s for s in steps.values() if s[0][0]["epoch"] == epoch] for epoch in range(epochs)]
    assert sum(map(len, by_epoch)) == len(steps)
    for epoch_steps in by_epoch:
        sizes = [len(s[0]) if fill else sum(len(line["ids"]) for lines in s for line in lines) for s in epoch_steps]
        size = accumulation * (1 if fill else batch * len(audits))
        assert all(0 < count <= size for count in sizes), f"I9, {sizes} of {size}"
        assert sum(size - count for count in sizes[:-1]) <= 0, f"I9, {sizes} of {size}"

    for epoch in range(epochs):
        emitted = Counter(id for audit in audits for line in audit if line["epoch"] == epoch for id in line["ids"])
        assert emitted == Counter(ids), f"I2: {emitted.most_common(3)}"

    for rank, audit in enumerate(audits):
        for line in audit:
            assert line["idle"] == (not line["ids"])
            if line["rows"] > 1:
                assert line["rows"] * line["length"] <= token_budget, f"I4, {line}"
                assert max_patches is None or line["patches"] <= max_patches, f"I4, {line}"
        for epoch in range(epochs):
            idle = [line["idle"] for line in audit if line["epoch"] == epoch]
            assert not fill or idle == sorted(idle), f"I7, rank {rank} idles before its end in epoch {epoch}: {idle}"

    for number, by_rank in steps.items():
        lines = [line for lines in by_rank for line in lines]
        if any(isinstance(line["weight"], list) for line in lines):
            continue  # samples have different weights, and the audit has no units of each sample
        assert sum(line["weight"] for line in lines) / len(audits) == pytest.approx(1), f"optimizer step {number}"
        if fill:
            supervised = sum(line["units"] for line in lines)
            for line in lines:
                assert line["weight"] == pytest.approx(line["units"] * len(audits) / supervised)


def _optimizer_steps(audits: Audits) -> dict[int, Audits]:
    """The lines of each optimizer step and rank."""
    steps: dict[int, Audits] = defaultdict(lambda: [[] for _ in audits])
    for rank, audit in enumerate(audits):
        for line in audit:
            steps[line["optimizer_step"]][rank].append(line)
    return steps


def check_books(output_dir: Path, audits: Audits, left_out: dict[str, int]) -> dict[str, Any]:
    """The summary agrees with the audits; every loss is finite. Returns the summary."""
    summary = json.loads((output_dir / "odb_summary.json").read_text())
    assert summary["samples"] == sum(len(line["ids"]) for audit in audits for line in audit)
    assert summary["micro_steps"] == len(audits[0])
    assert summary["idle_micro_batches"] == sum(line["idle"] for audit in audits for line in audit)
    assert summary["optimizer_steps"] == audits[0][-1]["optimizer_step"]
    assert summary["ranks"] == len(audits)
    assert (summary["left_out"], summary["remainder"]) == (left_out, 0)
    entries = losses(output_dir)
    assert len(entries) == summary["optimizer_steps"]
    assert all(math.isfinite(number) for entry in entries for number in entry)
    return summary


def losses(output_dir: Path) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each optimizer step."""
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in read_log(output_dir) if "loss" in entry]
