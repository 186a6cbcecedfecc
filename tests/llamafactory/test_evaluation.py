"""Evaluations by budget (short memory, generated text, unreadable rows), and `auto` budgets of a vision-language model.

The figures of evaluations are stock's: `test_same_training.py`, cells "evaluation" and all others that evaluate.

"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_meter import CPUMeter
from distributed.rows import row, write_uneven_rows
from llamafactory.train.tuner import run_exp
from same_training import train
from support import noise, read_jsonl, read_log, training_config, write_dataset
from transformers import GenerationMixin, Qwen2ForCausalLM, TrainerCallback

from odb_factory import memory
from odb_factory.errors import DataError, OutOfMemoryError
from odb_factory.training import budgets

pytestmark = pytest.mark.timeout(600)

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "dataset": "one", "eval_dataset": "other"}


def test_out_of_memory_in_an_evaluation_names_the_key_to_lower(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 24})
    block = {"token_budget": 300, "eval_token_budget": 400}
    changes = EVALUATED | {"max_steps": 1, "per_device_eval_batch_size": 4, "cutoff_len": 120, "odb": block}
    forward = Qwen2ForCausalLM.forward

    @functools.wraps(forward)
    def of_little(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training and kwargs["input_ids"].numel() > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", of_little)
    with pytest.raises(OutOfMemoryError, match="eval_token_budget") as caught:
        train(training_config(tiny_text, data, tmp_path / "out", **changes))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_generated_text_is_that_of_stock(tiny_text, tmp_path, monkeypatch, caplog) -> None:
    """Greedy generation. Prompts of one length share a batch, and the file has the order of the rows."""
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 13})
    changes = EVALUATED | {"do_predict": True, "predict_with_generate": True, "do_sample": False}
    changes |= {"max_steps": 1, "max_new_tokens": 20, "cutoff_len": 140, "per_device_eval_batch_size": 3}
    config = training_config(tiny_text, data, tmp_path / "stock", **changes)
    block: dict[str, Any] = {"token_budget": 300, "eval_token_budget": 900, "row_multiple": 2, "layout": "padded"}
    generate, shapes = GenerationMixin.generate, list[torch.Size]()

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = generate(model, *args, **kwargs)
        shapes.append(made.shape)
        return made

    with monkeypatch.context() as context:
        context.setattr(GenerationMixin, "generate", watched)
        train(config | {"output_dir": str(tmp_path / "odb"), "odb": block})
    assert all(shape.numel() <= 900 for shape in shapes)
    assert any(shape[1] == 140 for shape in shapes), "within the training up to cutoff_len"
    assert any(message.startswith("evaluated 13 rows in ") for message in caplog.messages)
    train(config)
    ours, stock = (
        (tmp_path / name / "generated_predictions.jsonl").read_text(encoding="utf-8") for name in ("odb", "stock")
    )
    assert ours == stock and ours.count("\n") == 13


class Vanish(TrainerCallback):
    """Deletes a file when training begins."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.file.unlink()


def test_an_unreadable_row_ends_an_evaluation_with_any_on_error(tiny_vl: Path, tmp_path: Path) -> None:
    """Figures without the row would differ from stock's."""
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


CAPACITY = 60 * 2**20


def test_tokens_and_patches_of_images(tiny_vl, tmp_path, monkeypatch, caplog) -> None:
    """The training equals that with the two numbers; the patches of all images are within the budget."""
    caplog.set_level(logging.INFO, "odb_factory")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = write_uneven_rows(folder, {"mixed": 24})

    def run(name: str, **block: Any) -> list[float]:
        block |= {"layout": "padded", "audit": True, "eval_token_budget": 1024}
        changes = {"dataset": "mixed", "max_steps": 3, "gradient_accumulation_steps": 24, "freeze_vision_tower": False}
        changes |= {"val_size": 4, "do_eval": True, "per_device_eval_batch_size": 2}
        run_exp(training_config(tiny_vl, rows, tmp_path / name, odb=block, **changes))
        return [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]

    with monkeypatch.context() as context:
        context.setattr(budgets, "LIMIT_S", 600)  # on a busy machine
        context.setattr(memory, "find_meter", lambda device: CPUMeter(CAPACITY))
        auto = run("auto", token_budget="auto", max_patches="auto")
    (line,) = [message for message in caplog.messages if "token_budget: auto is" in message]
    tokens, patches = map(int, re.findall(r"auto is (\d+)", line))
    assert "as much as memory_fraction allows" in line
    evaluated = [message for message in caplog.messages if "evaluat" in message]
    assert len(evaluated) == 1 and evaluated[0].startswith("evaluated 4 rows"), "after the training that has chosen"
    assert auto == run("numbers", token_budget=tokens, max_patches=patches)
    lines = read_jsonl(tmp_path / "auto" / "odb_audit_rank0.jsonl")
    several = [line for line in lines if line["rows"] > 1]
    assert all(line["rows"] * line["length"] <= tokens and line["patches"] <= patches for line in several)
    assert any(line["patches"] > 16 for line in several)
