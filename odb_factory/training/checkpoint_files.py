"""The files of a checkpoint that a training loads, and whether they can be.

The Trainer goes on with a fresh optimizer where `optimizer.pt` or `scheduler.pt` is missing, and a damaged file ends it
inside safetensors or pickle, long after the model has been loaded. So every file is looked at before: its structure
from its size, its head and its end, and its content where a hash was written with it (`checkpoint_hashes.py`).
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from odb_factory.errors import DataError, one_line

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp*", "optimizer_*"
DEEPSPEED = "global_step*"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
TENSORS, ARCHIVES = ".safetensors", (".pt", ".pth", ".bin")
NOT_LOADED = ("training_args.bin",)
OF_A_RANK = re.compile(r"rng_state_(\d+)\.pth|.*_pp_rank_(\d+)_.*|__(\d+)_\d+\.distcp", re.ASCII)
"""Names of files of one rank: random numbers, DeepSpeed's `zero_pp_rank_3_mp_rank_00_model_states.pt`, FSDP's."""
ZIP, PICKLE = b"PK\3\4", b"\x80"


def files_of(folder: Path) -> list[Path]:
    """Every file of a checkpoint that a training loads tensors or numbers from, of all ranks."""
    found = [path for path in folder.iterdir() if path.suffix in (TENSORS, *ARCHIVES) and path.name not in NOT_LOADED]
    found += [path for path in folder.glob("*/adapter_model.*") if path.suffix in (TENSORS, *ARCHIVES)]
    for pattern in (FSDP_WEIGHTS, FSDP_OPTIMIZER, DEEPSPEED):
        found += [path for part in folder.glob(pattern) if part.is_dir() for path in part.iterdir()]
    return sorted({path for path in found if path.is_file()})


def is_loaded_by(path: Path, rank: int, world_size: int) -> bool:
    """Whether this rank loads it: a file of all ranks, or its own. FSDP's, of any number of ranks, are shared out."""
    owner = rank_of(path)
    return owner is None or (owner % world_size if path.suffix == ".distcp" else owner) == rank


def rank_of(path: Path) -> int | None:
    """The rank that wrote a file for itself; None for a file of all ranks."""
    named = OF_A_RANK.fullmatch(path.name)
    return None if named is None else int(next(group for group in named.groups() if group))


def check_weights(folder: Path) -> None:
    """Raise `DataError` where weights are missing."""
    shards = [shard for name in INDICES if (folder / name).is_file() for shard in _shards(folder / name)]
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}: it is missing")
    is_alone = any((folder / name).is_file() for name in WEIGHTS) or any(folder.glob("*/adapter_model.*"))
    if not (shards or is_alone or any(folder.glob(FSDP_WEIGHTS)) or any(folder.glob(DEEPSPEED))):
        raise DataError(f"{folder}: it holds no weights ({WEIGHTS[0]} or what another engine writes)")


def check_optimizer(folder: Path) -> None:
    """Raise `DataError` where the state of optimizer or schedule is missing."""
    is_alone = any((folder / name).is_file() for name in OPTIMIZERS)
    if not (is_alone or any(folder.glob(FSDP_OPTIMIZER)) or any(folder.glob(f"{DEEPSPEED}/*optim_states.pt"))):
        raise DataError(
            f"{folder / OPTIMIZERS[0]}: it is missing, so the optimizer would begin anew (`save_only_model: true` "
            "leaves it out)"
        )
    if not (folder / SCHEDULER).is_file():
        raise DataError(f"{folder / SCHEDULER}: it is missing, so the schedule would begin anew")


def _shards(index: Path) -> list[Path]:
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index}: it cannot be read ({type(error).__name__})") from None
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise DataError(f"{index}: it names {name[:80]!r}, which is no file beside it")
    return [index.with_name(name) for name in sorted(names)]


def check_structure(path: Path) -> None:
    """Raise `DataError` for a file that is missing, empty, cut off, or does not begin as its kind does."""
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(8)
            if size == 0:
                raise DataError(f"{path}: it is empty")
            if not any(head):
                raise DataError(f"{path}: it is damaged (it begins with zeros)")
            if path.suffix == TENSORS:
                length = int.from_bytes(head, "little")
                if len(head) < 8 or size != _end_of_tensors(length, file.read(min(length, size))):
                    raise DataError(f"{path}: it was cut off ({size} bytes are not what its header says)")
            elif path.suffix in ARCHIVES:
                _check_archive(path, file, head)
    except FileNotFoundError:
        raise DataError(f"{path}: it is missing") from None
    except DataError:
        raise
    except Exception as error:  # of whatever a damaged header makes json and zipfile stumble over
        raise DataError(f"{path}: it cannot be read ({one_line(error)})") from None


def _end_of_tensors(length: int, header: bytes) -> int:
    """Bytes of a whole safetensors file: length of the header, the header, and the tensors that it describes."""
    if length != len(header):
        return -1
    tensors = (entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__")
    return struct.calcsize("<Q") + length + max(tensors, default=0)


def _check_archive(path: Path, file: BinaryIO, head: bytes) -> None:
    """What torch.save writes: a zip archive with a pickle in it or, in older releases, a row of pickles."""
    if head.startswith(PICKLE):
        return
    if not head.startswith(ZIP):
        raise DataError(f"{path}: it is damaged (it does not begin as a file of torch.save)")
    if not zipfile.is_zipfile(file):
        raise DataError(f"{path}: it was cut off (the end of the archive is missing)")
    with zipfile.ZipFile(file) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        for name in pickles:
            with archive.open(name) as content:
                if content.read(1) != PICKLE:
                    raise DataError(f"{path}: it is damaged ({name} in it is no pickle)")
