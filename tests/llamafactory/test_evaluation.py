"""Evaluations by budget give stock's figures: losses, accuracies, rewards, generated text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.rows import row, write_uneven_rows
from llamafactory.train.tuner import run_exp
from same_training import Cell, Config, Training, run_cells, train
from support import noise, training_config, write_dataset
from transformers import GenerationMixin, Qwen2ForCausalLM, TrainerCallback

from odb_factory.errors import DataError

RELATIVE = 1e-6
NOT_COMPARED = ("runtime", "per_second", "logits/")
"""Of the clock; means over padding."""
EVALUATED = {
    "val_size": 21,
    "per_device_eval_batch_size": 4,
    "max_steps": 1,
    "eval_steps": 1,
    "learning_rate": 0.0,
}
"""On two ranks two full rounds, and a last one of 5 rows that stock fills up by repeating some. The five rows that are
left to train on are no whole optimizer step, so they change nothing."""
BLOCK = {"token_budget": 300, "eval_token_budget": 400}
OF_IMAGES = {"dataset": "albums", "val_size": 11, "per_device_eval_batch_size": 2}
CELLS = {
    "text": Cell(changes=EVALUATED | {"train_on_prompt": True, "compute_accuracy": True}, block=BLOCK),
    "means of ranks": Cell(
        changes=EVALUATED | {"average_tokens_across_devices": False}, block=BLOCK | {"layout": "padded"}
    ),
    "images": Cell(changes=EVALUATED | OF_IMAGES, model="vl", block=BLOCK | {"max_patches": 300}),
    "kto": Cell("kto", EVALUATED, block=BLOCK),
    "smoothed": Cell(changes=EVALUATED | {"label_smoothing_factor": 0.1}, block=BLOCK),
}
STOCK_S = (
    "this evaluation: figures of CustomKTOTrainer depend on which rows share a batch",
    "this evaluation: the trainer computes the loss in place of the model",
)


def evaluated(training: Training) -> list[dict[str, float]]:
    """The figures of each evaluation."""
    return [
        {
            name: value
            for name, value in entry.items()
            if name.startswith("eval_") and not any(part in name for part in NOT_COMPARED)
        }
        for entry in training.log
        if "eval_loss" in entry
    ]


@pytest.mark.timeout(600)
def test_figures_are_those_of_stock_on_two_ranks(config_of: Config, tmp_path: Path) -> None:
    """Those of dpo and rm: in the trainings of `test_same_training.py`."""
    for name, (ours, stock) in run_cells(CELLS, config_of, tmp_path / "ranks", 2, limit_s=560).items():
        assert evaluated(stock)
        for mine, its in zip(evaluated(ours), evaluated(stock), strict=True):
            assert mine == {key: pytest.approx(its[key], RELATIVE, 1e-6) for key in its}, name
    log = (tmp_path / "ranks" / "rank0.log").read_text(encoding="utf-8")
    in_and_after = 2  # evaluations of a training
    assert log.count("[odb] evaluated ") == in_and_after * (len(CELLS) - len(STOCK_S))
    assert all(log.count(f"has no effect on {one}") == in_and_after for one in STOCK_S)


def test_memory_that_was_short_lowers_the_budget_of_later_evaluations(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 24})
    changes = {"max_steps": 2, "eval_steps": 1, "eval_strategy": "steps", "per_device_eval_batch_size": 4}
    changes |= {"eval_on_start": True, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    config = training_config(
        tiny_text, data, tmp_path / "stock", dataset="one", eval_dataset="other", cutoff_len=120, **changes
    )
    forward = Qwen2ForCausalLM.forward

    @functools.wraps(forward)
    def of_little(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training and kwargs["input_ids"].numel() > 200:
            raise torch.OutOfMemoryError("as of an accelerator")
        return forward(model, *args, **kwargs)

    stock = train(config)
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", of_little)
    ours = train(config | {"output_dir": str(tmp_path / "odb"), "odb": {"token_budget": 300, "eval_token_budget": 400}})
    cuts = [number for number, said in enumerate(caplog.messages) if "in an evaluation" in said]
    ends = [number for number, said in enumerate(caplog.messages) if said.startswith("evaluated 24 rows")]
    assert cuts and len(ends) > 1 and max(cuts) < ends[0]
    for mine, its in zip(evaluated(ours), evaluated(stock), strict=True):
        assert mine == {key: pytest.approx(its[key], RELATIVE, 1e-6) for key in its}


@pytest.mark.timeout(600)
def test_generated_text_is_that_of_stock(tiny_text, tmp_path, monkeypatch, caplog) -> None:
    """Greedy; prompts of one length share a batch, and the file has the order of the rows. So it is where memory holds
    two prompts and no more."""
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 13})
    config = training_config(
        tiny_text,
        data,
        tmp_path / "stock",
        dataset="one",
        eval_dataset="other",
        max_steps=1,
        do_predict=True,
        predict_with_generate=True,
        do_sample=False,
        max_new_tokens=20,
        cutoff_len=140,
        per_device_eval_batch_size=3,
        eval_strategy="steps",
        eval_steps=1,
    )
    ours = config | {
        "output_dir": str(tmp_path / "odb"),
        "odb": {"token_budget": 300, "row_multiple": 2, "eval_token_budget": 900, "layout": "padded"},
    }
    generate, shapes = GenerationMixin.generate, list[torch.Size]()

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = generate(model, *args, **kwargs)
        shapes.append(made.shape)
        return made

    with monkeypatch.context() as context:
        context.setattr(GenerationMixin, "generate", watched)
        train(ours)
    assert all(shape.numel() <= 900 for shape in shapes)
    assert any(shape[1] == 140 for shape in shapes), "within the training up to cutoff_len"
    train(config)
    assert any(message.startswith("evaluated 13 rows in ") for message in caplog.messages)

    def of_two(model: Any, *args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("as of an accelerator")
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", of_two)
    train(ours | {"output_dir": str(tmp_path / "short")})
    assert any("in an evaluation" in message and "cut in two" in message for message in caplog.messages)
    mine, its, short = (
        (tmp_path / name / "generated_predictions.jsonl").read_text(encoding="utf-8")
        for name in ("odb", "stock", "short")
    )
    assert mine == its == short and mine.count("\n") == 13


class Vanish(TrainerCallback):
    """Deletes a file when training begins."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.file.unlink()


def test_a_row_that_cannot_be_read_ends_an_evaluation_whatever_on_error_says(tiny_vl: Path, tmp_path: Path) -> None:
    """Figures without it would not be stock's."""
    picture = tmp_path / "picture.png"
    noise((64, 64)).convert("RGB").save(picture)
    texts, pictures = [row(9) for _ in range(4)], [row(9, [picture.name])] * 4
    config = training_config(
        tiny_vl,
        write_dataset(tmp_path, {"texts": texts, "pictures": pictures}),
        tmp_path / "out",
        eval_dataset="pictures",
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        odb={"token_budget": 256, "eval_token_budget": 256, "on_error": "skip"},
    )
    with pytest.raises(DataError, match="row 0 of the evaluation dataset") as caught:
        run_exp(config, callbacks=[Vanish(picture)])
    assert "picture.png" in str(caught.value) and "on_error" not in str(caught.value)
