"""Iterable datasets: the training process of a rank reads, and workers observe. tests/llamafactory/test_streaming.py
tests that order and resume do not depend on the number of workers (I2, I6)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset
from toy import Observer, item, pad
from worlds import LENGTHS, Stream, run

from odb_factory import ODBDataLoader, pop_step_info
from odb_factory.errors import DataError
from odb_factory.planner import Cost


class LeavingFiles(Observer):
    """Leaves a file named after the process that observes."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def __call__(self, item: tuple[int, int]) -> tuple[dict[str, Any], Cost]:
        (self.folder / str(os.getpid())).touch()
        return super().__call__(item)


def test_workers_observe_and_this_process_reads(tmp_path: Path) -> None:
    class Read(Stream):
        def __iter__(self) -> Iterator[int]:
            (tmp_path / f"read_by_{os.getpid()}").touch()
            return super().__iter__()

    run(LENGTHS, num_workers=3, stream=Read, observer=LeavingFiles(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    readers = {name.removeprefix("read_by_") for name in names if name.startswith("read_by_")}
    assert len(names) > 1 and readers == {str(os.getpid())}, "workers take what comes next, so one may take all"


class Unsendable(IterableDataset):
    """The fifth item cannot be pickled."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (item(k) | ({"made_by": lambda: None} if k == 4 else {}) for k in range(9))


def test_an_item_that_cannot_be_sent_to_a_worker_is_named() -> None:
    options = {"token_budget": 64, "collate_fn": pad, "num_workers": 2}
    with ODBDataLoader(Unsendable(), 3, **options) as loader, pytest.raises(DataError) as caught:
        list(loader)
    message = str(caught.value)
    assert "row 4 " in message and "cannot be sent to another process" in message and "\n" not in message
    with ODBDataLoader(Unsendable(), 3, on_error="skip", **options) as loader:
        list(loader)
        assert loader.stats()["odb/skipped"] == 1


class Lines(IterableDataset):
    """All iterators read one file, each from the beginning."""

    def __init__(self, path: Path):
        self.file = path.open()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.file.seek(0)
        while line := self.file.readline():
            yield item(int(line))


def without_row_100(items: list[dict[str, Any]]) -> Any:
    if any(item["input_ids"][0] == 101 for item in items):
        raise ValueError("no pixels")
    return pad(items)


@pytest.mark.parametrize("batch_size", [1, 12])
def test_a_stand_in_is_not_read_by_another_iterator(batch_size: int, tmp_path: Path) -> None:
    """I2: the current iterator would go on elsewhere in the file."""
    path = tmp_path / "rows"
    path.write_text("".join(f"{k:60}\n" for k in range(600)))
    options = {"token_budget": 41, "collate_fn": without_row_100, "on_error": "skip"}
    with ODBDataLoader(Lines(path), batch_size, **options) as loader:
        assert Counter(id for batch in loader for id in pop_step_info(batch).ids) == Counter(set(range(600)) - {100})
