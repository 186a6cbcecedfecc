"""examples/benchmark/train.py, its short run: the real LLaMA-Factory, every contestant on the same samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmark" / "train.py"


def test_the_short_run(tmp_path: Path) -> None:
    """I9: the optimizer steps and losses of fixed batches. No higher peak, figures that belong together, the table."""
    printed = subprocess.run(
        [sys.executable, str(SCRIPT), "--short", "--output-dir", str(tmp_path)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert printed.returncode == 0, printed.stdout[-4000:]
    tables = json.loads((tmp_path / "train.json").read_text("utf-8"))
    assert {title: [row["name"] for row in rows] for title, rows in tables.items()} == {
        "text, 1 rank": ["fixed batch", "packing", "odb"],
        "MM-Mix, 2 ranks": ["fixed batch", "odb"],
    }
    for title, rows in tables.items():
        assert f"| {title} | optimizer steps | samples/s |" in printed.stdout
        peaks = {row["name"]: row["peak_padded_tokens"] for row in rows}
        assert max(peaks.values()) == peaks["fixed batch"]
        # The same samples and the same tokens for everyone.
        assert len({round(row["samples_per_second"] * row["seconds"]) for row in rows}) == 1
        assert len({round(row["tokens_per_second"] * row["seconds"]) for row in rows}) == 1
        for row in rows:
            share = row["tokens_per_second"] / row["padded_tokens_per_second"]
            assert row["padding"] == pytest.approx(1 - share)
            assert 0 < row["validation_loss"] < 8.5 and row["peak_memory"] > 0
            assert (row["balance"] is None) == (title == "text, 1 rank")
        fixed, ours = (next(row for row in rows if row["name"] == name) for name in ("fixed batch", "odb"))
        assert ours["steps"] < fixed["steps"]
        assert ours["optimizer_steps"] == fixed["optimizer_steps"] == len(fixed["losses"]) > 1
        assert ours["losses"] == pytest.approx(fixed["losses"], rel=1e-4)
        assert ours["validation_loss"] == pytest.approx(fixed["validation_loss"], rel=1e-4)
    assert printed.stdout.count("head of odb") + printed.stdout.count("odb is ahead") == len(tables)
    assert (tmp_path / "train.png").stat().st_size > 10_000
