"""`odb-factory demo`, its tiny models, which load offline like real models, and the built-in MM-Mix."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from odb_factory.cli import demo
from odb_factory.cli.demo import build_tiny_qwen2
from odb_factory.cli.main import main
from odb_factory.cli.mm_mix import build_builtin_mix

pytestmark = pytest.mark.timeout(600)

TEXT = "def f(x):\n\treturn x['key'] + 1234  # it's\r\n\n Grüße, 你好, 🤗 <think>\nhm\n</think>\n\nyes"
SMALL = "a small text, a small text"


def test_stock_and_odb_have_the_same_losses(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHORT_SAMPLES", 2 * demo.STEP_SIZE)
    assert main(["demo", "--short", "--json", "--output", str(tmp_path / "demo")]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["optimizer steps"] == [2, 2]
    assert figures["last loss"][0] == pytest.approx(figures["last loss"][1], rel=1e-5)
    assert figures["odb/tokens_per_second"][0] > 0 and (tmp_path / "demo" / "demo.html").is_file()


def test_a_failure_is_one_line(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CUTOFF_LEN", "none")
    assert main(["demo", "--short", "--output", str(tmp_path / "demo")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("odb-factory demo: stock: exit code ")
    (tmp_path / "file").write_text("")
    assert main(["demo", "--output", str(tmp_path / "file")]) == 1
    assert "--output" in capsys.readouterr().err


def test_the_tiny_model_learns_from_an_image(tiny_vl: Path) -> None:
    """Forward and backward reach the vision tower, through the deepstack branch too."""
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
    assert processor.tokenizer.decode(processor.tokenizer(TEXT)["input_ids"]) == TEXT
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny_vl, dtype=torch.float32)
    text = "<|vision_start|><|image_pad|><|vision_end|>A lion."
    batch = processor(images=[Image.linear_gradient("L").convert("RGB")], text=[text], return_tensors="pt")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert any(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "deepstack" in name)


def test_a_folder_of_a_tiny_model_is_kept_replaced_or_refused(tmp_path: Path) -> None:
    folder, before = tmp_path / "model", torch.random.get_rng_state()
    weights, written = [], []
    for seed in (0, 1, 0, 0):
        build_tiny_qwen2(folder, text=SMALL, seed=seed)
        weights.append((folder / "model.safetensors").read_bytes())
        written.append((folder / "config.json").stat().st_mtime_ns)
    assert weights[0] == weights[2] != weights[1] and torch.equal(before, torch.random.get_rng_state())
    assert written[1] < written[2] == written[3]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="mine"):
        build_tiny_qwen2(tmp_path / "mine", text=SMALL)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


# MM-Mix


def test_rows_of_the_mix_are_true_four_fifths_short_and_one_fifth_long(tmp_path: Path, tiny_vl: Path) -> None:
    """A placeholder for each picture, alternating roles, no missing file, true sizes in the answers."""
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
    build_builtin_mix(tmp_path, samples=300)
    sizes, lengths = set(), []
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    trained, validated = (json.loads((tmp_path / info[name]["file_name"]).read_text("utf-8")) for name in info)
    assert (len(trained), len(validated)) == (300, 20)
    for row in validated + trained:
        assert set(row) == set(info["mm_mix"]["columns"])
        contents = [message["content"] for message in row["messages"]]
        assert "".join(contents).count("<image>") == len(row["images"])
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert all(content.strip() for content in contents)
        text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        lengths.append(len(processor.tokenizer(text)["input_ids"]))
        for path in row["images"]:
            with Image.open(tmp_path / path) as image:
                grid = processor.image_processor(images=[image.convert("RGB")], return_tensors="pt")["image_grid_thw"]
            lengths[-1] += int(grid.prod()) // 4
            for answer in re.findall(r"\d+ by \d+ pixels", " ".join(contents)):
                assert answer == f"{image.width} by {image.height} pixels"
                sizes.add(image.size)
    assert len(sizes) > 10
    lengths = lengths[20:]
    assert 0.74 <= sum(80 <= length <= 260 for length in lengths) / 300 <= 0.84
    assert 0.16 <= sum(length >= 350 for length in lengths) / 300 <= 0.22
    assert 2000 <= max(lengths) <= 4096


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> dict[str, str]:
        build_builtin_mix(tmp_path / name, samples=30, seed=seed)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(p.relative_to(tmp_path / name)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    first, same, other = digest("first", 1), digest("same", 1), digest("other", 2)
    assert first == same and first["mm_mix.json"] != other["mm_mix.json"]
    assert digest("other", 1) == first, "a second build leaves nothing of the first"
