"""The tiny models load offline as real ones do, and their parts agree with one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from odb_factory.cli.tiny_model import build_tiny_qwen2

TEXTS = ["def f(x):\n\treturn x['key'] + 1234  # it's done\r\n\n", "Grüße, 你好, 🤗", "<think>\nhm\n</think>\n\nyes"]
SMALL = "a small text, a small text"


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_round_trips_text(tiny_vl: Path, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_vl)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("size", [(64, 64), (640, 480), (3000, 200)])
def test_an_image_expands_to_a_quarter_of_its_patches(tiny_vl: Path, size: tuple[int, int]) -> None:
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    out = processor(images=[Image.new("RGB", size)], text=[prompt], return_tensors="pt")
    num_patches = int(out["image_grid_thw"].prod())
    assert out["pixel_values"].shape == (num_patches, 3 * 2 * 16 * 16) and num_patches <= 400
    assert int((out["input_ids"] == processor.image_token_id).sum()) == num_patches // 4


def test_the_model_learns_from_an_image(tiny_vl: Path) -> None:
    """Forward and backward reach the vision tower, through the deepstack branch too."""
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
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
