"""MM-Mix: OCR, visual questions and captions, in LLaMA-Factory's sharegpt format.

Most samples are short (80 to 250 tokens, image tokens included), one in five is long (several
hundred to several thousand): the shape that makes fixed-size batches wasteful. `build_mix` makes one
from data the user has on disk; `mm_mix_builtin.py` makes one from files every installation has.

A mix is a folder with `mm_mix.json` (training rows), `mm_mix_val.json` and their entries `mm_mix` and
`mm_mix_val` in `dataset_info.json`.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.errors import DataError

TRAIN, VAL = "mm_mix", "mm_mix_val"
PICTURE_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp"}

Row = dict[str, Any]  # messages: [{role, content}], and where there are any: images, videos: [path]


@dataclass(frozen=True, kw_only=True)
class MixSummary:
    """What was built: rows for training and validation, and rows of both by task or by source."""

    folder: Path
    train: int
    val: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Source:
    """A data set on disk and its weight: its share of the rows is its weight over the sum of weights.

    `path` is a .json or .jsonl file of rows with `messages` (role, content) or `conversations`
    (from, value) and, if any, `images` and `videos` (paths, relative ones from the file's folder),
    or a folder of pictures, each with its text in a .txt file of the same name.
    """

    path: Path
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise DataError(f"{self.path}: weight {self.weight:g} is not a positive number.")

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read `PATH` or `PATH:weight`."""
        match = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", text)
        return cls(Path(match[1]), float(match[2])) if match else cls(Path(text))


def build_mix(folder: Path, *, sources: Sequence[Source], samples: int | None = None, seed: int = 0) -> MixSummary:
    """Write a mix of the given sources; no row is taken twice, one row in sixteen is for validation.

    `samples` is the number of training rows (none: as many as the weights allow). Media stay where
    they are, named by absolute paths. Raises `DataError` for a source that cannot be read or is too small.
    """
    folder, rng = Path(folder), random.Random(f"mix {seed}")
    records = [_read(source.path) for source in sources]
    weights = [source.weight for source in sources]
    most = math.floor(min(len(own) * sum(weights) / w for own, w in zip(records, weights, strict=True)) + 1e-9)
    total = most if samples is None else samples + num_validation(samples)
    if not 2 <= total <= most:
        raise DataError(
            f"{total} rows were asked for, validation included; the sources hold {most} in these proportions "
            "(at least 2 are needed): change the weights, ask for fewer samples or add rows."
        )
    counts = apportion(total, weights)
    val_counts = apportion(max(1, total // 16) if samples is None else total - samples, counts)
    rows: dict[str, list[Row]] = {TRAIN: [], VAL: []}
    for source, own, count, num_val in zip(sources, records, counts, val_counts, strict=True):
        taken = [_standard_row(own[i], source.path, i) for i in rng.sample(range(len(own)), count)]
        rows[VAL] += taken[:num_val]
        rows[TRAIN] += taken[num_val:]
    for part in rows.values():
        rng.shuffle(part)
    return write_mix(folder, rows, {str(source.path): count for source, count in zip(sources, counts, strict=True)})


def num_validation(num_train: int) -> int:
    return max(1, num_train // 15)


def apportion(total: int, weights: Iterable[float]) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total` (largest remainders)."""
    weights = list(weights)
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def make_row(*turns: tuple[str, str], **media: list[str]) -> Row:
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    return {"messages": messages, **media}


def _read(path: Path) -> list[Row]:
    """The rows of a source as they stand there."""
    if path.is_dir():
        pictures = sorted(picture for picture in path.iterdir() if picture.suffix.lower() in PICTURE_SUFFIXES)
        pairs = ((picture.name, picture.with_suffix(".txt")) for picture in pictures)
        question = "<image>Describe the picture."
        return [
            make_row((question, text.read_text("utf-8").strip()), images=[name])
            for name, text in pairs
            if text.exists()
        ]
    try:
        text = path.read_text("utf-8")
        lines = path.suffix == ".jsonl"
        rows = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds {type(rows).__name__}, not a list of rows.")
    return rows


def _standard_row(record: Row, path: Path, number: int) -> Row:
    """A source's row under the names `dataset_info.json` will give, its media found on disk."""
    roles = {"human": "user", "gpt": "assistant"}
    if "messages" in record:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in record["messages"]]
    elif "conversations" in record:
        turns = record["conversations"]
        messages = [{"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    else:
        raise DataError(f"{path}, row {number}: no `messages` and no `conversations`; has {', '.join(record)}.")
    row: Row = {"messages": messages}
    for kind in ("images", "videos"):
        home = path if path.is_dir() else path.parent
        row[kind] = [str((home / name).resolve()) for name in record.get(kind) or []]
        for name in row[kind]:
            if not Path(name).is_file():
                raise DataError(f"{path}, row {number}: {name} is not there.")
    return row


def write_mix(folder: Path, rows: dict[str, list[Row]], parts: dict[str, int]) -> MixSummary:
    """Write the JSON files and enter them in `dataset_info.json`, whose other entries stay."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "dataset_info.json"
    entries = json.loads(index.read_text("utf-8")) if index.exists() else {}
    for name, own in rows.items():
        kinds = [kind for kind in ("images", "videos") if any(row.get(kind) for row in own)]
        own = [{"messages": row["messages"], **{kind: row.get(kind, []) for kind in kinds}} for row in own]
        (folder / f"{name}.json").write_text(json.dumps(own, ensure_ascii=False, indent=1) + "\n", "utf-8")
        entries[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {column: column for column in ("messages", *kinds)},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        }
    index.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
    return MixSummary(folder=folder, train=len(rows[TRAIN]), val=len(rows[VAL]), parts=parts)
