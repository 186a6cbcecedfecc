"""The audits of all ranks as arrays: what each micro-batch was, and each sample in it."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.report import shapes
from odb_factory.report.files import FilesRead
from odb_factory.report.history import Process

COLUMNS = (
    "rank", "step", "micro_batches", "micro_batch", "part", "parts", "samples", "tokens", "padded_tokens", "patches",
    "units", "idle",
)  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """batches: columns of equal length, one entry a micro-batch, or a part of one that was cut (`oom: split`):
    `COLUMNS`, `data_wait_s`, `time`, `ranks`.

    An idle one has no tokens and patches here, whatever it is computed with. lengths, ids: of each sample, in tokens;
    batch_of: the micro-batch it is in. steps: by optimizer step, of those that are whole: see `_steps`.
    incomplete: optimizer steps of which lines are missing, as at the end of a run under way.
    """

    batches: dict[str, np.ndarray]
    lengths: np.ndarray
    ids: np.ndarray
    batch_of: np.ndarray
    steps: dict[str, np.ndarray]
    incomplete: int

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.batches["rank"])]


def read_audit(folder: Path, processes: Sequence[Process], files: FilesRead) -> Audit | None:
    """None where there is none, or none whose lines can be used. What was taken again after a resume counts once, as it
    was taken last."""
    pattern = re.compile(r"odb_audit_rank([0-9]{1,9})\.jsonl")
    found = {path: pattern.fullmatch(path.name) for path in folder.glob("odb_audit_rank*")}
    paths = {int(match[1]): path for path, match in found.items() if match}
    if not paths:
        return None
    columns = {name: array("q") for name in COLUMNS}
    seconds = {name: array("d") for name in ("data_wait_s", "time")}
    lengths, ids, batch_of = array("q"), array("q"), array("q")
    for rank, path in sorted(paths.items()):
        for line in files.lines(path, shapes.audit_line):
            values, times, samples, numbers = _values(rank, line)
            batch_of.extend([len(columns["rank"])] * len(samples))
            lengths.extend(samples)
            ids.extend(numbers)
            for name, value in zip(COLUMNS, values, strict=True):
                columns[name].append(value)
            for name, time in zip(seconds, times, strict=True):
                seconds[name].append(time)
    batches = {name: np.array(values) for name, values in (columns | seconds).items()}
    keep = _taken_last(batches, processes)
    owners = np.array(batch_of, dtype=np.int64)
    of_kept, place = keep[owners], np.cumsum(keep) - 1
    if not keep.any():
        return None
    batches = {name: values[keep] for name, values in batches.items()}
    batches["ranks"] = _num_ranks(batches["step"], processes, len(paths))
    steps, incomplete = _steps(batches)
    return Audit(batches, np.array(lengths)[of_kept], np.array(ids)[of_kept], place[owners[of_kept]], steps, incomplete)


def _values(rank: int, line: Mapping[str, Any]) -> tuple[list[int], list[float], list[int], list[int]]:
    """In the order of `COLUMNS`; the seconds; lengths and ids of the samples."""
    lengths, ids, idle = line["lengths"], line["ids"], bool(line["idle"])
    padded, patches = (0, 0) if idle else (line["rows"] * line["length"], line["patches"])
    place = [line[name] for name in ("optimizer_step", "micro_batches", "micro_batch")]
    values = [rank, *place, line.get("part", 0), line.get("parts", 1), len(ids), sum(lengths)]
    return [*values, padded, patches, line["units"], idle], [line["data_wait_s"], line["time"]], lengths, ids


def _taken_last(batches: Mapping[str, np.ndarray], processes: Sequence[Process]) -> np.ndarray:
    """Which lines stand: those that no later process has gone back behind."""
    keep = np.ones(len(batches["step"]), dtype=bool)
    for process in processes:
        keep &= (batches["time"] >= process.time) | (batches["step"] <= process.optimizer_steps)
    return keep


def _num_ranks(steps: np.ndarray, processes: Sequence[Process], otherwise: int) -> np.ndarray:
    """Of each optimizer step the ranks of the process that took it."""
    world = np.full(len(steps), otherwise)
    for process in processes:
        world[steps > process.optimizer_steps] = process.ranks
    return world


def _steps(batches: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """Of each optimizer step over all ranks: `step`, `micro_batches` (K), sums of `samples`, `tokens`, `padded_tokens`,
    `patches` and `units`, `awaited_tokens` and `awaited_patches` as in `StepStatistics`; and how many are incomplete.
    """
    numbers, of_line = np.unique(batches["step"], return_inverse=True)
    first = np.zeros(len(numbers), dtype=np.int64)
    first[of_line] = np.arange(len(of_line))
    micro_batches, world = batches["micro_batches"][first], batches["ranks"][first]
    found = np.bincount(of_line, weights=1 / batches["parts"], minlength=len(numbers))
    whole = np.isclose(found, micro_batches * world)
    steps = {"step": numbers, "micro_batches": micro_batches}
    for name in ("samples", "tokens", "padded_tokens", "patches", "units"):
        steps[name] = np.bincount(of_line, weights=batches[name], minlength=len(numbers)).astype(np.int64)
    places = np.stack((of_line, batches["micro_batch"], batches["rank"]))
    place, of_place = np.unique(places, axis=1, return_inverse=True)
    micro_step, of_micro_step = np.unique(place[:2], axis=1, return_inverse=True)
    for name, awaited in (("padded_tokens", "awaited_tokens"), ("patches", "awaited_patches")):
        most = np.zeros(micro_step.shape[1], dtype=np.int64)
        whole_batch = np.bincount(of_place.reshape(-1), weights=batches[name]).astype(np.int64)
        np.maximum.at(most, of_micro_step.reshape(-1), whole_batch)
        steps[awaited] = world * np.bincount(micro_step[0], weights=most, minlength=len(numbers)).astype(np.int64)
    return {name: values[whole] for name, values in steps.items()}, int(np.count_nonzero(~whole))


def dataset_numbers(
    rows_of: Mapping[str, Any] | None, ids: np.ndarray, folder: Path
) -> tuple[list[str], np.ndarray] | None:
    """Names of the data sets, and of each sample the number of its own; None where that is not known.

    rows_of: as `odb_factory.training.run_log` writes it.
    """
    try:
        names = [str(name) for name in (rows_of or {})["names"]]
        content = (folder / (rows_of or {})["file"]).read_bytes()
        of_sample = np.frombuffer(zlib.decompress(content), dtype="<i2")[ids]
    except (KeyError, TypeError, ValueError, IndexError, OSError, zlib.error):
        return None
    return names, of_sample
