"""The built-in MM-Mix has the documented lengths, and its answers are true."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import transformers
from PIL import Image

from odb_factory.cli.mm_mix import build_builtin_mix


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    build_builtin_mix(folder, samples=300)
    assert (len(load(folder)), len(load(folder, "mm_mix_val"))) == (300, 20)
    return folder


def load(folder: Path, name: str = "mm_mix") -> list[dict]:
    entry = json.loads((folder / "dataset_info.json").read_text())[name]
    rows = json.loads((folder / entry["file_name"]).read_text("utf-8"))
    assert all(set(row) == set(entry["columns"]) for row in rows)
    return rows


def test_rows_are_well_formed_and_true(mix: Path) -> None:
    """A placeholder for each picture, alternating roles, no missing file, true sizes in the answers."""
    sizes = set()
    for row in load(mix) + load(mix, "mm_mix_val"):
        contents = [message["content"] for message in row["messages"]]
        assert "".join(contents).count("<image>") == len(row["images"])
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert all(content.strip() for content in contents)
        for path in row["images"]:
            with Image.open(mix / path) as image:
                for answer in re.findall(r"\d+ by \d+ pixels", " ".join(contents)):
                    assert answer == f"{image.width} by {image.height} pixels"
                    sizes.add(image.size)
    assert len(sizes) > 10


def test_four_fifths_are_short_and_one_fifth_long(mix: Path, tiny_vl: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(tiny_vl)
    lengths = []
    for row in load(mix):
        text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        lengths.append(len(processor.tokenizer(text)["input_ids"]))
        for path in row["images"]:
            with Image.open(mix / path) as image:
                grid = processor.image_processor(images=[image.convert("RGB")], return_tensors="pt")["image_grid_thw"]
            lengths[-1] += int(grid.prod()) // 4
    assert 0.74 <= sum(80 <= length <= 260 for length in lengths) / len(lengths) <= 0.84
    assert 0.16 <= sum(length >= 350 for length in lengths) / len(lengths) <= 0.22
    assert 2000 <= max(lengths) <= 4096


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> dict[str, str]:
        build_builtin_mix(tmp_path / name, samples=30, seed=seed)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(p.relative_to(tmp_path / name)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    first, same, other = digest("first", 1), digest("same", 1), digest("other", 2)
    assert first == same and first["mm_mix.json"] != other["mm_mix.json"]
    assert digest("other", 1) == first, "a second build leaves nothing of the first"
