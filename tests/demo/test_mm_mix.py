"""MM-Mix has the shape it claims, says only what is true, and keeps the user's proportions."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from PIL import Image, ImageChops, ImageFont  # noqa: E402
from support import need  # noqa: E402

from odb_factory.demo import mm_mix  # noqa: E402
from odb_factory.demo.mm_mix import build_builtin_mix, draw_text  # noqa: E402
from odb_factory.demo.tiny_model import build_tiny_qwen3_vl  # noqa: E402
from odb_factory.errors import DataError  # noqa: E402


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    summary = build_builtin_mix(folder, samples=300)
    assert (summary.train, summary.val) == (300, 20)
    assert sum(summary.parts.values()) == 320
    return folder


def load(folder: Path, name: str = "mm_mix") -> list[dict]:
    entry = json.loads((folder / "dataset_info.json").read_text())[name]
    rows = json.loads((folder / entry["file_name"]).read_text("utf-8"))
    assert all(set(row) == set(entry["columns"]) for row in rows)
    return rows


def content(row: dict) -> str:
    return "".join(message["content"] for message in row["messages"])


def test_rows_are_well_formed(mix: Path) -> None:
    """One placeholder for each medium, roles in turn, no empty message, every file there."""
    for row in load(mix) + load(mix, "mm_mix_val"):
        for kind, mark in (("images", "<image>"), ("videos", "<video>")):
            assert content(row).count(mark) == len(row.get(kind, []))
            assert all((mix / path).is_file() for path in row.get(kind, []))
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
        assert all(message["content"].strip() for message in row["messages"])


def test_lengths_are_four_fifths_short_and_one_fifth_long(mix: Path, tmp_path: Path) -> None:
    processor = transformers.AutoProcessor.from_pretrained(build_tiny_qwen3_vl(tmp_path / "model"))
    lengths = []
    for row in load(mix):
        num_tokens = len(
            processor.tokenizer(processor.tokenizer.apply_chat_template(row["messages"], tokenize=False))["input_ids"]
        )
        for path in row.get("images", []):
            with Image.open(mix / path) as image:
                grid = processor.image_processor(images=[image.convert("RGB")], return_tensors="pt")["image_grid_thw"]
            num_tokens += int(grid.prod()) // 4
        lengths.append(num_tokens)
    share_short = sum(80 <= n <= 260 for n in lengths) / len(lengths)
    share_long = sum(n >= 350 for n in lengths) / len(lengths)
    assert 0.74 <= share_short <= 0.84
    assert 0.16 <= share_long <= 0.22
    assert 2000 <= max(lengths) <= 4096


def test_ocr_answers_are_exactly_the_text_in_the_picture(mix: Path) -> None:
    rows = [row for row in load(mix) if "Read the text" in content(row)]
    assert len(rows) > 20
    missing = bytes(ImageFont.load_default(12).getmask("\U0010ffff"))
    for letter in {letter for row in rows for letter in row["messages"][1]["content"]}:
        assert letter.isspace() or bytes(ImageFont.load_default(12).getmask(letter)) != missing, letter
    for row in rows[:10]:
        with Image.open(mix / row["images"][0]) as image:
            drawn = (draw_text(row["messages"][1]["content"], size) for size in range(11, 17))
            assert any(d.size == image.size and ImageChops.difference(d, image).getbbox() is None for d in drawn)


def test_answers_on_size_are_true_and_pictures_differ_in_size(mix: Path) -> None:
    sizes = []
    for row in load(mix):
        for question, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            if "How large is the picture?" in question["content"]:
                with Image.open(mix / row["images"][0]) as image:
                    assert answer["content"] == f"{image.width} by {image.height} pixels."
                    sizes.append(image.size)
    assert len(set(sizes)) > 10


def test_facts_of_a_known_picture() -> None:
    """Left half dark blue, right half white: brighter on the right, landscape."""
    image = Image.new("RGB", (300, 100), (40, 80, 190))
    image.paste("white", (200, 0, 300, 100))
    answers = dict(mm_mix.facts(image))
    assert answers["How large is the picture?"] == "300 by 100 pixels."
    assert answers["How many pixels has it?"] == "30000."
    assert answers["Which colour covers most of it?"] == "Mostly blue."
    assert answers["Which half is brighter, left or right?"] == "The right half is brighter."
    assert "landscape, 3.00 times" in answers["Is it landscape, portrait or square?"]


def test_validation_shares_no_topic_and_no_picture_with_training(mix: Path) -> None:
    need("gradio")  # without its pictures there are too few for both

    def named(name: str, pattern: str) -> set[str]:
        return {found for row in load(mix, name) for found in re.findall(pattern, content(row))}

    for pattern in (r'(?:reference say on|the Python topic) "(.+?)"', r"A part of the picture (\S+),"):
        assert named("mm_mix_val", pattern)
        assert not named("mm_mix", pattern) & named("mm_mix_val", pattern)


def test_same_seed_same_bytes_another_seed_another_mix(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> dict[str, str]:
        build_builtin_mix(tmp_path / name, samples=30, seed=seed)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(p.relative_to(tmp_path / name)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    one, same, other = digest("one", 1), digest("same", 1), digest("other", 2)
    assert one == same
    assert one["mm_mix.json"] != other["mm_mix.json"]
    assert digest("other", 1) == one  # a second build leaves nothing of the first


def test_a_missing_package_is_tolerated_two_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = mm_mix.importlib.util.find_spec
    missing = {"gradio"}
    monkeypatch.setattr(mm_mix.importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    summary = build_builtin_mix(tmp_path / "mix", samples=20)
    assert summary.train == 20 and "video" not in summary.parts
    missing.add("matplotlib")
    with pytest.raises(DataError, match="no picture found"):
        build_builtin_mix(tmp_path / "none", samples=20)
