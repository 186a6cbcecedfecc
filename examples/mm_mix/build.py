"""Build an MM-Mix data set: from files every installation has, or from your own (`--source`)."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odb_factory.cli.mm_mix import (
    TRAIN,
    VAL,
    MixSummary,
    Row,
    apportion,
    build_builtin_mix,
    num_validation,
    write_mix,
)
from odb_factory.cli.tiny_model import build_tiny_qwen3_vl
from odb_factory.errors import DataError, ODBError


@dataclass(frozen=True)
class Source:
    """A data set on disk and its weight: its share of the rows is its weight over the sum of weights.

    `path` is a .json or .jsonl file of rows with `messages` (role, content) or `conversations`
    (from, value) and, if any, `images` and `videos` (paths, relative ones from the file's folder).
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


def _read(path: Path) -> list[Row]:
    """The rows of a source as they stand there."""
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
        row[kind] = [str((path.parent / name).resolve()) for name in record.get(kind) or []]
        for name in row[kind]:
            if not Path(name).is_file():
                raise DataError(f"{path}, row {number}: {name} is not there.")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("mm_mix_data"), help="where to write (%(default)s)")
    parser.add_argument("--source", action="append", metavar="PATH[:weight]", help="JSON or JSONL; repeatable")
    parser.add_argument("--samples", type=int, help="training rows (600; with --source: all the weights allow)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny-model", type=Path, metavar="FOLDER", help="also make a tiny random Qwen3-VL there")
    args = parser.parse_args()

    given = {} if args.samples is None else {"samples": args.samples}
    try:
        if args.source:
            sources = [Source.parse(text) for text in args.source]
            summary = build_mix(args.folder, sources=sources, seed=args.seed, **given)
        else:
            summary = build_builtin_mix(args.folder, seed=args.seed, **given)
    except ODBError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{summary.folder}: {summary.train} training rows, {summary.val} validation rows")
    for name, rows in summary.parts.items():
        print(f"{rows:6d}  {name}")
    if args.tiny_model:
        print(f"{build_tiny_qwen3_vl(args.tiny_model)}: tiny random Qwen3-VL")


if __name__ == "__main__":
    main()
