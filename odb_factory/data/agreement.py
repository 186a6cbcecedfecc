"""Ranks that differ in settings or releases stop in one line before the first step (I11)."""

from __future__ import annotations

import hashlib
import pickle
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence

from packaging.version import InvalidVersion, Version

from odb_factory.config import ODBConfig
from odb_factory.errors import CollectiveError, ODBError, one_line
from odb_factory.version import installed_version

PACKAGES = (
    "odb_factory", "llamafactory", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "numpy", "pillow",
    "torchvision",
)  # fmt: skip
"""Distributions whose releases must be equal on all ranks; their builds may differ."""
LOCAL_KEYS = ("audit", "exchange_timeout_s")
"""Keys of the odb: block on which no plan and no weight depends."""
MAX_KEYS_NAMED = 3
MAX_VALUES_NAMED = 3
MAX_VALUE_CHARACTERS = 80


def block_settings(config: ODBConfig) -> dict[str, object]:
    """The keys of the odb: block as settings."""
    return {f"odb.{key}": value for key, value in config.to_dict().items() if key not in LOCAL_KEYS}


def releases() -> dict[str, object]:
    """The releases that ranks compare: major.minor.patch of `PACKAGES`, major.minor of Python."""
    of_packages = {f"release of {name}": _release(installed_version(name)) for name in PACKAGES}
    return {**of_packages, "release of Python": platform.python_version().rpartition(".")[0]}


def _release(version: str | None) -> str | None:
    try:
        return None if version is None else ".".join(map(str, Version(version).release[:3]))
    except InvalidVersion:
        return version


def compare(
    settings: Mapping[str, object], gather: Callable[[bytes], Sequence[bytes]], *, problem: ODBError | None = None
) -> None:
    """Raise one and the same error on every rank if the settings of the ranks differ. Collective.

    settings: compared by the `repr` of each value, so that 1, 1.0 and "1" differ. gather: sends the bytes of this rank
    and returns those of all ranks, in rank order; only ranks whose digests differ send the settings themselves.
    problem: why this rank cannot go on; the other ranks end for it too, unless a difference explains more.
    Raises `CollectiveError`, which all ranks have; a rank alone raises `problem` itself.
    """
    texts = {name: repr(value) for name, value in settings.items()}
    mine = pickle.dumps((texts, None if problem is None else one_line(problem)), 5)
    digests = gather(hashlib.blake2b(mine, digest_size=16).digest())
    if len(set(digests)) == 1:
        if problem is not None:
            raise problem if len(digests) == 1 else CollectiveError(one_line(problem))
        return
    ranks = [pickle.loads(text) for text in gather(mine)]
    if (different := difference([texts for texts, _ in ranks])) is not None:
        raise CollectiveError(f"{different}; give every rank the same.")
    for rank, (_, reason) in enumerate(ranks):
        if reason is not None:
            raise CollectiveError(f"rank {rank} stopped: {reason}")


def difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """In what the settings of the ranks differ, in one line; None if they are the same. ranks: name -> text of each.

    >>> difference([{"seed": "1"}, {"seed": "2"}])
    'the ranks differ in seed (1 on rank 0; 2 on rank 1)'
    """
    keys = list(dict.fromkeys(key for settings in ranks for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in ranks}) > 1]
    if not differing:
        return None
    named = ", ".join(f"{key} ({_values(key, ranks)})" for key in differing[:MAX_KEYS_NAMED])
    more = f" and {len(differing) - MAX_KEYS_NAMED} more" if len(differing) > MAX_KEYS_NAMED else ""
    return f"the ranks differ in {named}{more}"


def _values(key: str, ranks: Sequence[Mapping[str, str]]) -> str:
    """`1 on ranks 0, 2; 4 on rank 1`: the value that most ranks have comes first."""
    by_value: dict[str, list[int]] = {}
    for rank, settings in enumerate(ranks):
        by_value.setdefault(settings.get(key, "nothing"), []).append(rank)
    parts = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    named = "; ".join(f"{_short(value)} on {name_ranks(ranks)}" for value, ranks in parts[:MAX_VALUES_NAMED])
    more = len(parts) - MAX_VALUES_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."


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
