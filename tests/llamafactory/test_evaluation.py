"""Evaluations by budget where memory is short, where text is generated, and where a row cannot be read.

That their figures are stock's: `test_same_training.py`, cells "evaluation" and all others that evaluate.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.rows import row, write_uneven_rows
from llamafactory.train.tuner import run_exp
from same_training import train
from support import noise, training_config, write_dataset
from transformers import GenerationMixin, Qwen2ForCausalLM, TrainerCallback

from odb_factory.errors import DataError

pytestmark = pytest.mark.timeout(600)

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "dataset": "one", "eval_dataset": "other"}


def test_memory_that_was_short_lowers_the_budget_of_later_evaluations(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 24})
    changes = EVALUATED | {"max_steps": 2, "per_device_eval_batch_size": 4, "eval_on_start": True, "cutoff_len": 120}
    changes |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    config = training_config(tiny_text, data, tmp_path / "stock", **changes)
    forward = Qwen2ForCausalLM.forward

    @functools.wraps(forward)
    def of_little(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training and kwargs["input_ids"].numel() > 200:
            raise torch.OutOfMemoryError("as of an accelerator")
        return forward(model, *args, **kwargs)

    stock = train(config)
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", of_little)
    ours = train(config | {"output_dir": str(tmp_path / "odb"), "odb": {"token_budget": 300, "eval_token_budget": 400}})
    cuts = [number for number, message in enumerate(caplog.messages) if "in an evaluation" in message]
    ends = [number for number, message in enumerate(caplog.messages) if message.startswith("evaluated 24 rows")]
    assert cuts and len(ends) > 1 and max(cuts) < ends[0]
    losses = [[entry["eval_loss"] for entry in run.log if "eval_loss" in entry] for run in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], 1e-6)


def test_generated_text_is_that_of_stock(tiny_text, tmp_path, monkeypatch, caplog) -> None:
    """Greedy; prompts of one length share a batch, and the file has the order of the rows. So it is where the
    model trains flat and memory holds two prompts and no more."""
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 13})
    changes = EVALUATED | {"do_predict": True, "predict_with_generate": True, "do_sample": False}
    changes |= {"max_steps": 1, "max_new_tokens": 20, "cutoff_len": 140, "per_device_eval_batch_size": 3}
    config = training_config(tiny_text, data, tmp_path / "stock", **changes)
    block: dict[str, Any] = {"token_budget": 300, "eval_token_budget": 900}
    padded = {"output_dir": str(tmp_path / "odb"), "odb": block | {"row_multiple": 2, "layout": "padded"}}
    generate, shapes = GenerationMixin.generate, list[torch.Size]()

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = generate(model, *args, **kwargs)
        shapes.append(made.shape)
        return made

    with monkeypatch.context() as context:
        context.setattr(GenerationMixin, "generate", watched)
        train(config | padded)
    assert all(shape.numel() <= 900 for shape in shapes)
    assert any(shape[1] == 140 for shape in shapes), "within the training up to cutoff_len"
    train(config)
    assert any(message.startswith("evaluated 13 rows in ") for message in caplog.messages)

    def of_two(model: Any, *args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("as of an accelerator")
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", of_two)
    train(config | {"output_dir": str(tmp_path / "short"), "odb": block | {"layout": "flat"}})
    assert any("in an evaluation" in message and "cut in two" in message for message in caplog.messages)
    files = (tmp_path / name / "generated_predictions.jsonl" for name in ("odb", "stock", "short"))
    ours, stock, short = (file.read_text(encoding="utf-8") for file in files)
    assert ours == stock == short and ours.count("\n") == 13


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
    data = write_dataset(tmp_path, {"one": texts, "other": pictures})
    block = {"token_budget": 256, "eval_token_budget": 256, "on_error": "skip"}
    changes = EVALUATED | {"max_steps": 2, "per_device_eval_batch_size": 2, "odb": block}
    config = training_config(tiny_vl, data, tmp_path / "out", **changes)
    with pytest.raises(DataError, match="row 0 of the evaluation dataset") as caught:
        run_exp(config, callbacks=[Vanish(picture)])
    assert "picture.png" in str(caught.value) and "on_error" not in str(caught.value)
