"""examples/mm_mix/build.py mixes users' own sources in their proportions."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from odb_factory.errors import DataError

BUILD = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mm_mix" / "build.py"))
Source, build_mix = BUILD["Source"], BUILD["build_mix"]


def load(folder: Path, name: str = "mm_mix") -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


@pytest.fixture
def own_sources(tmp_path: Path) -> list[Any]:
    """48 rows of JSONL with pictures, 64 of JSON conversations, 40 captions; weights 1, 2, 1."""
    root = tmp_path / "sources"
    (root / "photos").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(root / "photos" / "0.png")

    def rows(task: str, number: int) -> str:
        answer = {"role": "assistant", "content": "x"}
        turns = ([{"role": "user", "content": f"<image>{task} {i}"}, answer] for i in range(number))
        return "\n".join(json.dumps({"messages": messages, "images": ["photos/0.png"]}) for messages in turns) + "\n"

    (root / "ocr.jsonl").write_text(rows("ocr", 48))
    (root / "captions.jsonl").write_text(rows("caption", 40))
    talks = [
        {"conversations": [{"from": "human", "value": f"talk {i}"}, {"from": "gpt", "value": "y"}]} for i in range(64)
    ]
    (root / "talk.json").write_text(json.dumps(talks))
    return [Source(root / "ocr.jsonl"), Source(root / "talk.json", 2.0), Source(root / "captions.jsonl")]


def test_own_sources_in_their_proportions_and_no_row_twice(tmp_path: Path, own_sources: list[Any]) -> None:
    summary = build_mix(tmp_path / "out", sources=own_sources, samples=60)
    assert (summary.train, summary.val) == (60, 4)
    assert list(summary.parts.values()) == [16, 32, 16]
    rows = load(tmp_path / "out") + load(tmp_path / "out", "mm_mix_val")
    assert len({json.dumps(row["messages"]) for row in rows}) == 64
    assert sum("talk" in json.dumps(row["messages"]) for row in rows) == 32
    assert all(m["role"] in ("user", "assistant") for row in rows for m in row["messages"])
    images = [path for row in rows for path in row.get("images", [])]
    assert len(images) == 32 and all(Path(path).is_absolute() and Path(path).is_file() for path in images)


def test_own_sources_without_a_number_give_what_the_scarcest_allows(tmp_path: Path, own_sources: list[Any]) -> None:
    """talk.json is the scarcest: 64 rows for half of the mix. Other entries of dataset_info.json stay."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    summary = build_mix(tmp_path / "out", sources=own_sources)
    assert (summary.train, summary.val) == (120, 8)
    with pytest.raises(DataError, match="128"):
        build_mix(tmp_path / "out", sources=own_sources, samples=200)
    assert set(json.loads((tmp_path / "out" / "dataset_info.json").read_text())) == {"mine", "mm_mix", "mm_mix_val"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.json", "{not json", "a.json: cannot be read"),
        ("a.json", '{"messages": []}', "not a list"),
        ("a.jsonl", '{"instruction": "do"}\n{"instruction": "do"}', "row [01]: no `messages`"),
        ("a.jsonl", '{"messages": [], "images": ["gone.png"]}\n' * 2, "row [01]: .*gone.png is not there"),
        ("a.json", "[]", "the sources hold 0"),
    ],
)
def test_a_bad_source_is_named_in_one_line(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        build_mix(tmp_path / "out", sources=[Source(tmp_path / file)])
    assert "\n" not in str(caught.value)


def test_source_parsing() -> None:
    assert Source.parse("data/x.json:2.5") == Source(Path("data/x.json"), 2.5)
    assert Source.parse("C:/data/x.json") == Source(Path("C:/data/x.json"))
    with pytest.raises(DataError, match="weight 0"):
        Source.parse("x.json:0")
