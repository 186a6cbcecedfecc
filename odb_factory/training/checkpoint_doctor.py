"""What `odb-factory doctor CHECKPOINT` looks at: every file of a checkpoint, those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from odb_factory.data.resume.checked_file import read_checked
from odb_factory.errors import DataError
from odb_factory.training.checkpoint_files import check_optimizer, check_structure, check_weights, files_of
from odb_factory.training.checkpoint_hashes import HASHES, NUM_BLOCKS, compare
from odb_factory.training.state_files import RANK_FILE, by_rank, read_marker, read_rank_state, read_trainer_state


class Line(NamedTuple):
    text: str
    is_problem: bool = False


def examine(folder: Path) -> Iterator[Line]:
    """A line for each part: what is wrong with it, or how far it was compared."""
    if not folder.is_dir():
        yield Line(f"{folder}: it is no folder", is_problem=True)
        return
    entries: dict[str, dict[str, Any]] = {}
    yield from _try("trainer_state.json is readable", lambda: read_trainer_state(folder))
    if by_rank(folder, RANK_FILE):
        yield from _try("odb_state.json is readable: all ranks have saved", lambda: read_marker(folder))
    for rank in by_rank(folder, RANK_FILE):
        yield from _try(f"the state of rank {rank} is readable", partial(read_rank_state, folder, rank))
    for rank, path in by_rank(folder, HASHES).items():
        yield from _try(
            f"the hashes of rank {rank} are readable",
            partial(_read_hashes, path, entries),
            path,
        )
    yield from _try("weights are there", lambda: check_weights(folder))
    yield from _try("optimizer and schedule are there", lambda: check_optimizer(folder))
    for path in sorted({*files_of(folder), *(folder / name for name in entries)}):
        name = path.relative_to(folder).as_posix()
        entry = entries.get(name)
        yield from _try(f"{name}: {_depth(entry)}", partial(_check, path, entry))


def _read_hashes(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    entries |= read_checked(path).mapping("files")


def _check(path: Path, entry: dict[str, Any] | None) -> None:
    check_structure(path)
    if entry is not None:
        compare(path, entry)


def _depth(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "no hash was written; its head and its end are those of a whole file"
    if entry["sampled"]:
        return f"{NUM_BLOCKS} blocks are as they were saved, of {entry['bytes']:,} bytes; the rest has no hash"
    return f"all {entry['bytes']:,} bytes are as it was saved"


def _try(what: str, look: Callable[[], object], path: Path | None = None) -> Iterator[Line]:
    try:
        look()
    except DataError as error:
        yield Line(f"{path}: {error}" if path else str(error), is_problem=True)
    else:
        yield Line(what)
