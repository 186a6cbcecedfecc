"""What accelerate does for a DataLoader it has prepared, done for one whose batches are formed online."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device

from odb_factory.data.resume.checked_file import read_checked, write_checked
from odb_factory.errors import ConfigError, DataError, one_line


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None: ...


class FixedBatchesRefused:
    """In the place of a DataLoader's `collate_fn`: nobody calls it while the batches are formed online.

    Who does has built another DataLoader from the attributes of this one, as `accelerate.skip_first_batches` does.
    """

    def __call__(self, items: Any) -> Any:
        raise ConfigError(
            "a DataLoader was built from the parts of one whose batches odb forms online, as "
            "accelerate.skip_first_batches does, and would yield fixed batches; to go on in the middle of an epoch use "
            "state_dict() and load_state_dict(), and else the online loader itself."
        )


def to_device(batch: Any, *, pin_memory: bool) -> Any:
    """Where accelerate puts the batches of the DataLoaders it has prepared."""
    return send_to_device(batch, AcceleratorState().device, non_blocking=pin_memory)


def check_accumulation() -> None:
    """Raise `ConfigError` where accelerate would end optimizer steps by a count of its own."""
    theirs = GradientState().num_steps
    if theirs != 1:
        raise ConfigError(
            f"gradient_accumulation_steps: {theirs} in the Accelerator, which would end its optimizer steps by that "
            "count, and odb cuts each into as many micro-batches as it needs; leave it at 1 there (give it to "
            "ODBDataLoader or apply_odb), and step where the step info says ends_optimizer_step."
        )


def checkpoint_with(accelerator: Accelerator, loader: Stateful, name: str) -> None:
    """Write the loader's state with `accelerator.save_state`, one file a rank, and read it with `load_state`.

    Loading raises `DataError` where a file is missing or damaged.
    """

    def save(models: Any, weights: Any, folder: str) -> None:
        state = loader.state_dict()
        path = _file(folder, name, state["rank"])
        try:
            write_checked(path, {"state": state})
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({one_line(error)}); the checkpoint is not whole.") from None

    def load(models: Any, folder: str) -> None:
        if not _file(folder, name, 0).exists():
            raise DataError(
                f"{folder}: holds no {name}_rank0.json, so nobody knows which samples were trained on; it was saved "
                "without checkpoint_with(accelerator). Load it without that call to begin the epoch anew."
            )
        # A folder that was written before, by more ranks, has files of ranks that are no more.
        states = [_read(folder, name, 0)]
        states += [_read(folder, name, rank) for rank in range(1, states[0]["world_size"])]
        loader.load_state_dict(states)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _file(folder: str, name: str, rank: int) -> Path:
    return Path(folder, f"{name}_rank{rank}.json")


def _read(folder: str, name: str, rank: int) -> dict[str, Any]:
    path = _file(folder, name, rank)
    try:
        content = read_checked(path)
        state = content.part("state")
        state.require(state.whole("rank") == rank, "rank", "it is of another rank")
        state.whole("world_size", 1)
    except DataError as error:
        raise DataError(
            f"{path}: {error}; load another checkpoint, or load this one without checkpoint_with(accelerator) to begin "
            "the epoch anew."
        ) from None
    return content.mapping("state")
