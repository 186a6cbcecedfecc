"""I8: with `loss_scaling: exact` an optimizer step equals one batch of one process.

Real Trainers with odb train two epochs of rows of unequal length with unequal shares of supervised tokens; with `fill`,
ranks other than the first end early and take idle micro-batches. Then stock's Trainer trains in one process on the
samples of each optimizer step (from the audit) as ONE batch: the mean over all supervised tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from same_training import Deviation, deviation, read
from training.trainings import ODB, SGD, Training, replay

CLOSE, CLOSE_IN_BF16, WRONG = 1e-5, 3e-2, 0.1
"""Relative. bfloat16 has 8 bits, and other groups round differently. Wrong weights are off by about 1."""
NORM_UNDER_ZERO = 1e-4
"""DeepSpeed sums the squares of all gradients in float32."""
FILL = {"loss_scaling": "exact", "global_batch_size": "fill", "balance": False, "layout": "padded"}
KEEP = FILL | {"global_batch_size": "keep", "balance": True}
FILLED = Training(unequal=2, arguments=SGD, block=FILL, kinds=(ODB,))
ALONE = replace(FILLED, unequal=1, rows=21)
IMAGES = replace(FILLED, model="vl", rows=44)
IMAGES_OF_FOUR = replace(IMAGES, unequal=4, rows=88, accumulation=1)
KEPT = replace(FILLED, batch=3, block=KEEP)
SETS: dict[str, tuple[int, dict[str, Training]]] = {
    "1_rank": (1, {"text": ALONE, "own loss": replace(ALONE, loss="divides")}),
    "2_ranks": (
        2,
        {
            "text": FILLED,
            "images": IMAGES,
            "gradient checkpointing": replace(FILLED, arguments=SGD | {"gradient_checkpointing": True}),
            "bf16": replace(FILLED, arguments=SGD | {"bf16": True}),
            "own loss": replace(FILLED, loss="divides"),
            "own mean": replace(FILLED, loss="means"),
            "kept": KEPT,
            "kept, own loss": replace(KEPT, loss="divides"),
            "flat": replace(KEPT, block=KEEP | {"layout": "flat"}),
            "zero3": replace(IMAGES, zero=3),
            "approx": replace(FILLED, block=FILL | {"loss_scaling": "approx"}),
            "none": replace(FILLED, block=FILL | {"loss_scaling": "none"}),
        },
    ),
    "4_ranks": (4, {"text": replace(FILLED, unequal=4, rows=164, accumulation=4), "images": IMAGES_OF_FOUR}),
}
OTHERS = ("approx", "none")
EXACT = [
    pytest.param(name, training, marks=pytest.mark.nightly if name == "4_ranks" else [])
    for name, (_, trainings) in SETS.items()
    for training in trainings
    if training not in OTHERS
]


def measured(name: str, case: str, folder: Path, path: str) -> Deviation:
    """The deviation of a training in `folder` from its replay."""
    world_size, trainings = SETS[name]
    training, ours = trainings[case], read(folder / ODB, world_size)
    batches: list[list[int]] = [[] for _ in ours.rows]
    for line in ours.audit:
        batches[line["optimizer_step"] - 1] += line["ids"]
    for epoch in range(2):
        lines = [line for line in ours.audit if line["epoch"] == epoch]
        assert sorted(row for line in lines for row in line["ids"]) == list(range(training.rows)), "I2"
        assert training.batch > 1 or any(line["idle"] for line in lines) == (world_size > 1)
    replay(training, path, folder / "replayed", [sorted(batch) for batch in batches])
    return deviation(ours, read(folder / "replayed", 1))


@pytest.mark.parametrize(("name", "case"), EXACT)
def test_an_optimizer_step_equals_one_batch_of_one_process(trained: Any, models: Any, name: str, case: str) -> None:
    training = SETS[name][1][case]
    differs = measured(name, case, trained(name, case)[0], models[training.model])
    close = CLOSE_IN_BF16 if training.arguments.get("bf16") else CLOSE
    assert differs.loss < close and differs.weights < close, differs
    assert differs.grad_norm < (NORM_UNDER_ZERO if training.zero else close), differs


@pytest.mark.parametrize("case", OTHERS)
def test_other_scalings_give_another_gradient(trained: Any, models: Any, case: str) -> None:
    """On the same rows in the same groups, so the other tests would fail if `exact` became one of these. The means of
    micro-batches weigh by their tokens (`approx`) or equally (`none`)."""
    folder, _ = trained("2_ranks", case)
    differs = measured("2_ranks", case, folder, models["text"])
    assert differs.grad_norm > WRONG and differs.weights > 100 * CLOSE, differs
    of_steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in read(folder / ODB, 2).audit:
        of_steps[line["optimizer_step"]] += [] if line["idle"] else [line]
    for lines in of_steps.values():
        shares = [sum(line["lengths"]) if case == "approx" else 1 for line in lines]
        assert [line["weight"] for line in lines] == pytest.approx([2 * share / sum(shares) for share in shares])
