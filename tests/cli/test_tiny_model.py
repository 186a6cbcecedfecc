"""The tiny models load offline like real models, and their parts agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from odb_factory.cli.demo import build_tiny_qwen2

TEXT = "def f(x):\n\treturn x['key'] + 1234  # it's\r\n\n Grüße, 你好, 🤗 <think>\nhm\n</think>\n\nyes"
SMALL = "a small text, a small text"


def test_the_model_learns_from_an_image(tiny_vl: Path) -> None:
    """Forward and backward reach the vision tower, through the deepstack branch too."""
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
    assert processor.tokenizer.decode(processor.tokenizer(TEXT)["input_ids"]) == TEXT
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny_vl, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    text = "<|vision_start|><|image_pad|><|vision_end|>A lion."
    batch = processor(images=[Image.linear_gradient("L").convert("RGB")], text=[text], return_tensors="pt")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert any(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "deepstack" in name)


def test_a_folder_is_kept_replaced_or_refused(tmp_path: Path) -> None:
    folder, before = tmp_path / "model", torch.random.get_rng_state()
    weights = []
    for seed in (0, 1, 0):
        build_tiny_qwen2(folder, text=SMALL, seed=seed)
        weights.append((folder / "model.safetensors").read_bytes())
        assert json.loads((folder / "tiny_model.json").read_text())["seed"] == seed
    assert weights[0] == weights[2] != weights[1] and torch.equal(before, torch.random.get_rng_state())
    written = (folder / "config.json").stat().st_mtime_ns
    build_tiny_qwen2(folder, text=SMALL)
    assert (folder / "config.json").stat().st_mtime_ns == written
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="mine"):
        build_tiny_qwen2(tmp_path / "mine", text=SMALL)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
