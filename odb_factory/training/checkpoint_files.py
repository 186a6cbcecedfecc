"""Whether the Trainer's own files of a checkpoint are there and whole, told from sizes and ends of files alone.

The Trainer goes on with a fresh optimizer where `optimizer.pt` or `scheduler.pt` is missing, and a file that was cut
off ends it inside safetensors or pickle, long after the model has been loaded.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from odb_factory.errors import DataError

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp*", "optimizer_*"
DEEPSPEED = "global_step*"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
CHECKED = (".safetensors", ".pt", ".bin", ".json")
MARK_OF_A_RANK = "_pp_rank_"
"""In the names of DeepSpeed's files of one rank: `zero_pp_rank_3_mp_rank_00_model_states.pt`."""


def check_weights(folder: Path, rank: int) -> None:
    """Raise `DataError` where the weights are missing or cut off. rank: whose files are read, beside common ones."""
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    found += [path for path in folder.glob("*/adapter_model.*") if path.suffix in (".safetensors", ".bin")]
    for name in INDICES:
        if (folder / name).is_file():
            found += _shards(folder / name)
    engines = [*_files(folder, FSDP_WEIGHTS, rank), *_files(folder, DEEPSPEED, rank)]
    if not found and not engines:
        raise DataError(f"{folder}: it holds no weights ({WEIGHTS[0]} or what another engine writes)")
    for path in (*found, *engines):
        _check_whole(path)


def check_optimizer(folder: Path, rank: int, *, may_be_missing: bool = False) -> None:
    """Raise `DataError` where the state of optimizer or schedule is missing, unless it may be, or cut off."""
    found = [folder / name for name in OPTIMIZERS if (folder / name).is_file()]
    engines = [*_files(folder, FSDP_OPTIMIZER, rank)]
    engines += [path for path in _files(folder, DEEPSPEED, rank) if path.name.endswith("optim_states.pt")]
    scheduler = folder / SCHEDULER
    if not may_be_missing and not found and not engines:
        raise DataError(
            f"{folder / OPTIMIZERS[0]}: it is missing, so the optimizer would begin anew (`save_only_model: true` "
            "leaves it out)"
        )
    if not may_be_missing and not scheduler.is_file():
        raise DataError(f"{scheduler}: it is missing, so the schedule would begin anew")
    for path in (*found, *engines, *([scheduler] if scheduler.is_file() else [])):
        _check_whole(path)


def _files(folder: Path, pattern: str, rank: int) -> Iterator[Path]:
    """The files of an engine that match, or are in folders that do, but for those of other ranks."""
    for path in sorted(folder.glob(pattern)):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if MARK_OF_A_RANK not in file.name or f"{MARK_OF_A_RANK}{rank}_" in file.name:
                yield file


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: it cannot be read ({type(error).__name__})") from None
    return [index.with_name(str(name)) for name in sorted(names)]


def _check_whole(path: Path) -> None:
    """Raise `DataError` for a file that is missing, empty or cut off. Reads its head and its end."""
    if path.suffix not in CHECKED:
        return
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path}: it is empty")
        with path.open("rb") as file:
            head = file.read(8)
            if path.suffix == ".safetensors":
                if len(head) < 8 or size != _end_of_tensors(head, file.read(_header_length(head, size))):
                    raise DataError(f"{path}: it was cut off ({size} bytes are not what its header says)")
            elif head.startswith(b"PK\3\4") and not zipfile.is_zipfile(path):
                raise DataError(f"{path}: it was cut off (the end of the archive is missing)")
    except FileNotFoundError:
        raise DataError(f"{path}: it is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: it cannot be read ({type(error).__name__})") from None


def _header_length(head: bytes, size: int) -> int:
    return min(struct.unpack("<Q", head)[0], size)


def _end_of_tensors(head: bytes, header: bytes) -> int:
    """Bytes of a whole safetensors file: length of the header, the header, and the tensors it tells of."""
    length = struct.unpack("<Q", head)[0]
    if length != len(header):
        return -1
    tensors = (entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__")
    return 8 + length + max(tensors, default=0)
