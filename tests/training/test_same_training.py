"""I9: with kept optimizer steps a training equals that of the stock Trainer.

Both are real `transformers.Trainer`s, which train over three epochs with evaluations and checkpoints. The rows of every
optimizer step, learning rates, epochs, input tokens, FLOPs, and all of the Trainer's log and checkpoints are equal to
the last digit; losses, gradient norms and the final weights up to rounding. Other sizes of batches, losses and stages:
`tests/llamafactory/test_same_training.py`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from same_training import RELATIVE, check_same_training, read, report
from training.trainings import LIMIT_S, ODB, STOCK, Training, train

EVERY = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
SCHEDULE = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
SCHEDULE |= {"include_num_input_tokens_seen": "all"}
THREE_EPOCHS = EVERY | SCHEDULE | {"num_train_epochs": 3, "load_best_model_at_end": True}
SMOOTHED = THREE_EPOCHS | {"label_smoothing_factor": 0.1}
# One evaluation of one batch, at the end, because an evaluation draws random numbers to group its rows.
BY_LENGTH = (
    {"train_sampling_strategy": "group_by_length"}
    | THREE_EPOCHS
    | {"eval_steps": 12, "save_steps": 12, "per_device_eval_batch_size": 5}
)
ON_EACH = {"average_tokens_across_devices": False}
WITH_IMAGES = {"max_patches": 200, "token_budget": 120}

SETS: dict[str, tuple[int, dict[str, Training]]] = {
    "1_rank": (
        1,
        {
            "text": Training(batch=2, accumulation=4, rows=27, arguments=THREE_EPOCHS),
            "images": Training("vl", batch=4, accumulation=1, rows=12, arguments=THREE_EPOCHS, block=WITH_IMAGES),
            "by length": Training(batch=2, accumulation=4, rows=27, arguments=BY_LENGTH),
        },
    ),
    "2_ranks": (
        2,
        {
            "no balance": Training(batch=4, accumulation=1, rows=24, arguments=THREE_EPOCHS, block={"balance": False}),
            "smoothed on each rank": Training(batch=2, rows=24, arguments=SMOOTHED | ON_EACH),
            "by length": Training(batch=2, rows=28, arguments=BY_LENGTH),
            "smoothed, images": Training("vl", batch=3, rows=42, arguments=SMOOTHED, block=WITH_IMAGES),
        },
    ),
}
EXACT = ("global_step", "max_steps", "num_train_epochs", "epoch", "total_flos", "num_input_tokens_seen")
EXACT += ("train_batch_size", "logging_steps", "eval_steps", "save_steps", "best_global_step")
"""Fields of a `trainer_state.json` that must be the same to the last digit."""


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in SETS for case in SETS[name][1]])
def test_the_same_training(trained: Any, name: str, case: str) -> None:
    """Run with -s to see the deviation."""
    (folder, _), (world_size, trainings) = trained(name, case), SETS[name]
    ours, stock = (read(folder / kind, world_size) for kind in (ODB, STOCK))
    training = trainings[case]
    size, num_rows = training.batch * training.accumulation * world_size, training.rows
    assert [len(rows) for rows in stock.rows] == [min(size, num_rows - k) for k in range(0, num_rows, size)] * 3
    for checkpoint in stock.folders:
        check_checkpoint(folder / ODB / checkpoint, folder / STOCK / checkpoint)
    differs = check_same_training(ours, stock)
    report(f"{name}, {case}", differs)
    assert all(line["segments"] for line in ours.audit) or "smoothed" in case, "flat, images too"
    assert differs.grad_norm < RELATIVE


def check_checkpoint(odb: Path, stock: Path) -> None:
    ours, theirs = (json.loads((path / "trainer_state.json").read_text()) for path in (odb, stock))
    assert {key: ours[key] for key in EXACT} == {key: theirs[key] for key in EXACT}
    assert ours["best_metric"] == pytest.approx(theirs["best_metric"], rel=RELATIVE)
    assert [entry["step"] for entry in ours["log_history"]] == [entry["step"] for entry in theirs["log_history"]]
    arguments = [torch.load(path / "training_args.bin", weights_only=False) for path in (odb, stock)]
    changed = {key for key, value in vars(arguments[0]).items() if vars(arguments[1]).get(key) != value}
    assert "gradient_accumulation_steps" not in changed and "ignore_data_skip" not in changed


# Resume

SAVING = SCHEDULE | {"save_strategy": "steps", "save_steps": 1}
"""Saves a checkpoint of every optimizer step."""
ALONE = Training(batch=2, accumulation=4, rows=28, arguments=SAVING)
IN_PAIRS = Training(batch=2, accumulation=2, rows=28, arguments=SAVING, block={"token_budget": 150})
"""The same optimizer steps of 8 rows, on two ranks with another budget."""
STEPS = (1, 4, 6)
"""Steps to resume from: in the middle of either epoch (of four steps), and between them."""


def resume_all(rank: int, training: dict[str, Any], model: str, source: str, output_dir: str) -> None:
    """Resume with odb from the checkpoints of `source`: from step k into `output_dir`/k. Only the first saves its own
    checkpoints."""
    if dist.is_initialized():
        os.environ["LOCAL_RANK"] = str(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # torch cannot load the optimizer to cpu:0
    steps = [step for step in STEPS if Path(source, f"checkpoint-{step}").exists()]
    for step in steps:
        saves = {"save_strategy": "steps" if step == steps[0] else "no"}
        again = Training(**training | {"arguments": training["arguments"] | saves})
        train(again, model, Path(output_dir, str(step)), ODB, resume=Path(source, f"checkpoint-{step}"))
        gc.collect()


@pytest.fixture(scope="module")
def resumed(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings with a checkpoint of every optimizer step, and others resumed from some of these."""
    folder, model, alone = tmp_path_factory.mktemp("resumed"), str(tiny_text), dataclasses.asdict(ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        for kind in (STOCK, ODB):
            train(ALONE, model, folder / kind, kind)
            resume_all(0, alone, model, str(folder / kind), str(folder / f"from {kind}"))
        options = {"training": dataclasses.asdict(IN_PAIRS), "model": model, "source": str(folder / ODB)}
        options["output_dir"] = str(folder / "on two ranks")
        run_ranks("training.test_same_training:resume_all", folder, limit_s=LIMIT_S, **options)
        resume_all(0, alone, model, str(folder / "on two ranks" / "1"), str(folder / "from two ranks"))
    return folder


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(f"from {STOCK}", 1), (f"from {ODB}", 1), ("on two ranks", 2), ("from two ranks", 1)],
    ids=str,
)
def test_the_same_training_from_a_checkpoint(resumed: Path, name: str, num_ranks: int) -> None:
    """A checkpoint of stock, of odb, and of another number of ranks. From every checkpoint: test_resume.py, and without
    a model tests/data/test_resume.py."""
    steps = sorted(int(path.name) for path in (resumed / name).iterdir() if path.is_dir())
    assert steps == list(STEPS[name == "from two ranks" :])
    for step in steps:
        ours, whole = read(resumed / name / str(step), num_ranks), read(resumed / STOCK, 1)
        for training in (ours, whole):  # `train_loss` is a mean over the steps since the resume
            training.log[-1].pop("train_loss")
        rest = {"rows": whole.rows[step:], "learning_rates": whole.learning_rates[step:], "folders": ours.folders}
        assert check_same_training(ours, dataclasses.replace(whole, **rest)).grad_norm < RELATIVE
