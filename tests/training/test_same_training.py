"""I9: with kept optimizer steps a training is that of the stock Trainer, in everything but its time.

Both train, in the same processes: real `transformers.Trainer`s, over three epochs with evaluations and checkpoints in
between. The rows of every optimizer step, learning rates, epochs, input tokens, FLOPs, what other callbacks see, and
everything in the Trainer's log and in its checkpoints are equal to the last digit; losses, gradient norms and the
weights at the end up to rounding. Other sizes of batches: `tests/llamafactory/test_same_training.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks
from same_training import Deviation, report
from support import once
from training.side_by_side import ODB, RESUMED, STOCK, Training, compare, compare_resumed, resume_from_each, train
from transformers import TrainingArguments

LIMIT_S = 240
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
SMOOTHED = {"label_smoothing_factor": 0.1}
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
if not BY_LENGTH.keys() <= TrainingArguments.__dataclass_fields__.keys():
    BY_LENGTH = {"group_by_length": True}
# One evaluation of one batch, at the end: an evaluation draws random numbers, too, and groups its rows by them.
BY_LENGTH |= {"eval_steps": 12, "save_steps": 12, "per_device_eval_batch_size": 5}

SETS: dict[str, tuple[int, dict[str, Training]]] = {
    "1_rank": (
        1,
        {
            "text": Training(batch=2, accumulation=4, more=3),
            "float64": Training(rows="leading", batch=3, accumulation=2, dtype="float64", more=2),
            "smoothed": Training(rows="leading", batch=3, accumulation=3, more=4, arguments=SMOOTHED),
            "mixed": Training("vl", "mixed", batch=4, accumulation=1, dtype="float64"),
            "by length": Training(batch=2, accumulation=4, more=3, arguments=BY_LENGTH),
        },
    ),
    "2_ranks": (
        2,
        {
            "without balance": Training(batch=4, accumulation=1, dtype="float64", block={"balance": False}),
            "smoothed on each rank": Training(
                batch=2, accumulation=2, arguments=SMOOTHED | {"average_tokens_across_devices": False}
            ),
            "by length": Training(batch=2, accumulation=2, dtype="float64", more=4, arguments=BY_LENGTH),
            "smoothed, mixed": Training("vl", "mixed", batch=3, accumulation=2, more=6, arguments=SMOOTHED),
        },
    ),
}
"""Trainings that the same processes run one after the other: starting them costs most."""


CELLS = [(name, training) for name, (_, trainings) in SETS.items() for training in trainings]

Measure = Callable[[str, str], Deviation]


@pytest.fixture(scope="module")
def measure(tiny_text, tiny_vl, tmp_path_factory) -> Measure:
    """`measure("1_rank", "text")` compares one training of a set, which is run once."""
    models = {"text": str(tiny_text), "vl": str(tiny_vl)}

    @once
    def run(name: str) -> Path:
        world_size, trainings = SETS[name]
        folder = tmp_path_factory.mktemp("ranks")
        run_ranks(
            "training.side_by_side:train_all",
            folder,
            world_size=world_size,
            limit_s=LIMIT_S,
            trainings=[dataclasses.asdict(training) for training in trainings.values()],
            models=models,
            output_dir=str(folder),
        )
        return folder

    def measure(name: str, training: str) -> Deviation:
        world_size, trainings = SETS[name]
        number = list(trainings).index(training)
        return compare(run(name) / str(number), trainings[training], world_size)

    return measure


@pytest.mark.parametrize(("name", "training"), CELLS)
def test_the_same_training(measure: Measure, name: str, training: str) -> None:
    """Run with -s to see how far it is from stock's."""
    found = measure(name, training)
    report(f"{name}, {training}", found)
    largest = max(found.loss, found.grad_norm, found.eval_loss, found.weights)
    assert largest < TOLERANCE[SETS[name][1][training].dtype]


# Resume

SAVING = {
    "num_train_epochs": 2,
    "save_steps": 1,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
}
"""A checkpoint of every optimizer step."""
ALONE = Training(batch=2, accumulation=4, more=4, arguments=SAVING)
IN_PAIRS = Training(batch=2, accumulation=2, more=4, arguments=SAVING, block={"token_budget": 150})
"""The same optimizer steps of 8 rows, by two ranks that plan with another budget."""


@pytest.fixture(scope="module")
def resumed(tiny_text, tmp_path_factory) -> Path:
    """Trainings with a checkpoint of every optimizer step, and others that go on from some of these."""
    folder, model = tmp_path_factory.mktemp("resumed"), str(tiny_text)
    for kind in (STOCK, ODB):
        train(ALONE, model, folder / kind, odb=kind == ODB)
        resume_from_each(ALONE, model, folder / kind, folder / f"from {kind}")
    run_ranks(
        "training.side_by_side:resume_all",
        folder,
        world_size=2,
        limit_s=LIMIT_S,
        training=dataclasses.asdict(IN_PAIRS),
        model=model,
        source=str(folder / ODB),
        output_dir=str(folder / "on two ranks"),
    )
    resume_from_each(ALONE, model, folder / "on two ranks" / "1", folder / "from two ranks")
    return folder


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(f"from {STOCK}", 1), (f"from {ODB}", 1), ("on two ranks", 2), ("from two ranks", 1)],
    ids=str,
)
def test_the_same_training_from_a_checkpoint(resumed: Path, name: str, num_ranks: int) -> None:
    """Of a stock training, of one with odb, and onto another number of ranks; from every one: test_resume.py, and
    tests/data/test_resume.py without a model."""
    steps = sorted(int(path.name) for path in (resumed / name).iterdir() if path.is_dir())
    assert steps == list(RESUMED[name == "from two ranks" :])
    found = [compare_resumed(resumed / name / str(step), step, resumed / STOCK, num_ranks) for step in steps]
    assert max(one.grad_norm for one in found) < TOLERANCE["float32"]
