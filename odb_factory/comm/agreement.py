"""Compare the settings of all ranks (I11).

Each rank sends a digest of its settings first; only where the digests differ do the ranks send the settings themselves.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from odb_factory.config import ODBConfig
from odb_factory.errors import CollectiveError, ODBError, one_line
from odb_factory.log import get_logger
from odb_factory.version import installed_version

logger = get_logger(__name__)

PACKAGES = (
    "odb_factory", "llamafactory", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "numpy", "pillow",
    "torchvision",
)  # fmt: skip
"""Distributions whose releases must be equal on all ranks."""
LOCAL_KEYS = ("audit", "collate_workers", "exchange_timeout_s")
"""Keys of the odb: block on which no plan and no weight depends."""
MAX_KEYS_NAMED = 3
MAX_VALUES_NAMED = 3
MAX_VALUE_CHARACTERS = 80

Settings = Mapping[str, object]
Texts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MayDiffer:
    """The value of a setting that does not change what is trained: ranks that differ in it are warned about."""

    value: object


def block_settings(config: ODBConfig) -> dict[str, object]:
    """The keys of the odb: block as settings."""
    values = config.to_dict().items()
    return {f"odb.{key}": MayDiffer(value) if key in LOCAL_KEYS else value for key, value in values}


def releases() -> dict[str, object]:
    """The releases that ranks compare: major.minor.patch of `PACKAGES`, major.minor of Python; builds may differ."""
    found: dict[str, object] = {}
    for name in PACKAGES:
        version = installed_version(name)
        release = _release(version)
        found[f"release of {name}"] = release
        if version != release:
            found[f"build of {name}"] = MayDiffer(version)
    found["release of Python"] = platform.python_version().rpartition(".")[0]
    found["build of Python"] = MayDiffer(platform.python_version())
    return found


def _release(version: str | None) -> str | None:
    try:
        return None if version is None else ".".join(map(str, Version(version).release[:3]))
    except InvalidVersion:
        return version


def compare(
    settings: Settings, gather: Callable[[bytes], Sequence[bytes]], *, rank: int, problem: ODBError | None = None
) -> None:
    """Raise one and the same error on every rank if the settings of the ranks differ. Collective.

    gather: sends the bytes of this rank and returns those of all ranks, in rank order. problem: why this rank cannot
    go on; the other ranks end for it too, unless a difference of the settings explains more.
    Raises `CollectiveError`, which nobody has to be told of; a rank alone raises `problem` itself. Rank 0 logs one
    warning for the settings that may differ.
    """
    mine = encode_settings(settings, problem)
    digests = gather(hashlib.blake2b(mine, digest_size=16).digest())
    if len(set(digests)) == 1:
        if problem is not None:
            raise problem if len(digests) == 1 else CollectiveError(one_line(problem))
        return
    encoded = gather(mine)
    if found := difference(encoded):
        raise CollectiveError(f"{found}; give every rank the same.")
    for other, text in enumerate(encoded):
        if (reason := json.loads(text)["problem"]) is not None:
            raise CollectiveError(f"rank {other} stopped: {reason}")
    if rank == 0 and (found := difference(encoded, "may")):
        _warn_once(f"{found}; this does not change what is trained, so the training goes on")


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def encode_settings(settings: Settings, problem: ODBError | None = None) -> bytes:
    """Settings as JSON of the `repr` of each value, so that 1, 1.0 and "1" differ; a long value is shortened."""
    must = {key: _text(value) for key, value in settings.items() if not isinstance(value, MayDiffer)}
    may = {key: _text(value.value) for key, value in settings.items() if isinstance(value, MayDiffer)}
    return json.dumps({"must": must, "may": may, "problem": None if problem is None else one_line(problem)}).encode()


def _text(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:MAX_VALUE_CHARACTERS]}... (checksum {zlib.crc32(text.encode(errors='surrogatepass')):08x})"


def difference(encoded: Sequence[bytes], kind: str = "must") -> str | None:
    """In what the settings of the ranks differ, in one line; None if they are the same.

    encoded: `encode_settings` of each rank, in rank order. kind: `must` be the same, or `may` differ.

        >>> difference([encode_settings({"seed": 1}), encode_settings({"seed": 2})])
        'the ranks differ in seed (1 on rank 0; 2 on rank 1)'
    """
    ranks: list[Texts] = [json.loads(one)[kind] for one in encoded]
    keys = list(dict.fromkeys(key for settings in ranks for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in ranks}) > 1]
    if not differing:
        return None
    named = ", ".join(f"{key} ({_values(key, ranks)})" for key in differing[:MAX_KEYS_NAMED])
    more = f" and {len(differing) - MAX_KEYS_NAMED} more" if len(differing) > MAX_KEYS_NAMED else ""
    return f"the ranks differ in {named}{more}"


def _values(key: str, ranks: Sequence[Texts]) -> str:
    """`1 on rank 0, 2; 4 on rank 1`: the value that most ranks have comes first."""
    by_value: dict[str, list[int]] = {}
    for rank, settings in enumerate(ranks):
        by_value.setdefault(settings.get(key, "nothing"), []).append(rank)
    parts = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    named = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in parts[:MAX_VALUES_NAMED])
    more = len(parts) - MAX_VALUES_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2` or `128 ranks (0, 1, 2, ...)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 8:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:3]))}, ...)"


def ranks_alike(values: Sequence[Hashable]) -> str:
    """Which ranks have the same value: `ranks 0, 2; rank 1`."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(map(name_ranks, ranks.values()))
