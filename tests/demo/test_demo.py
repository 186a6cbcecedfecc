"""What the demo makes of recorded trainings: figures, conclusion, picture. CI runs the trainings (`demo --short`)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from odb_factory.demo import demo
from odb_factory.demo.demo import Batch, Run, draw


def make_run(folder: Path, name: str, *, seconds: float, steps: list[list[tuple[list[int], int]]]) -> Run:
    """Two ranks that take the same micro-batches; steps: of each optimizer step the (lengths, padded length)."""
    batches: list[Batch] = []
    for step, micro_batches in enumerate(steps):
        for lengths, length in micro_batches:
            begin = 10.0 + len(batches) * seconds
            line = {
                "optimizer_step": step,
                "lengths": lengths,
                "rows": len(lengths),
                "length": length,
                "begin": begin,
                "end": begin + seconds,
            }
            times = {"begin": begin, "end": begin + seconds, "cpu_begin": begin, "cpu_end": begin + seconds / 2}
            batches.append(line | times)
    history = [{"step": step + 1, "loss": 4.0 - step, "epoch": 0.5} for step in range(len(steps))]
    output = folder / name
    output.mkdir()
    state = {"log_history": [*history, {"step": len(steps), "eval_loss": 2.5, "epoch": 1.0}]}
    (output / "trainer_state.json").write_text(json.dumps(state))
    return Run(output, [batches, [batch | {"end": batch["end"] + 0.5} for batch in batches]], started=9.0)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Run]:
    fixed = [[([2, 4], 4), ([1, 1], 1)], [([3, 1], 3), ([2, 2], 2)]]
    kept = [[([4, 2, 1, 1], 4)], [([3, 1, 2, 2], 3)]]
    return {
        name: make_run(tmp_path, name, seconds=1.0, steps=kept if name == "odb" else fixed) for name in demo.CONTESTANTS
    }


def test_losses_are_dated_by_the_last_rank_to_end_the_optimizer_step(runs: dict[str, Run]) -> None:
    assert runs["fixed"].losses() == [(1, 2.5, 4.0), (2, 4.5, 3.0)]
    assert runs["odb"].losses() == [(1, 1.5, 4.0), (2, 2.5, 3.0)]


def test_results_count_all_ranks(runs: dict[str, Run]) -> None:
    fixed, ours = (SimpleNamespace(**demo._result(name, runs[name])) for name in ("fixed", "odb"))
    assert (fixed.optimizer_steps, fixed.micro_steps, fixed.seconds) == (2, 4, 4.5)
    assert (ours.optimizer_steps, ours.micro_steps, ours.seconds) == (2, 2, 2.5)
    assert fixed.samples_per_second * fixed.seconds == ours.samples_per_second * ours.seconds == 16
    assert (fixed.cpu_seconds, ours.cpu_seconds) == (3.5, 1.5)
    assert fixed.padding_ratio == pytest.approx(1 - 16 / 20)
    assert (fixed.peak_padded_tokens, ours.peak_padded_tokens) == (8, 16)
    assert (ours.train_loss, ours.validation_loss, ours.seconds_to_first_step) == (3.0, 2.5, 1.0)
    text = demo._conclusion({name: demo._result(name, run) for name, run in runs.items()})
    assert "in 56% of the time" in text and "2 instead of 4" in text


def test_the_picture_is_drawn(runs: dict[str, Run], tmp_path: Path) -> None:
    draw(runs, 16, tmp_path / "demo.png")
    assert 10_000 < (tmp_path / "demo.png").stat().st_size < 300_000
