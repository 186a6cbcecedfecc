"""Ranks that differ in settings or releases stop in one line before the first step (I11)."""

from __future__ import annotations

import functools
import pickle
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence

from odb_factory.config import ODBConfig
from odb_factory.errors import CollectiveError, ODBError, one_line
from odb_factory.version import installed_version

PACKAGES = (
    "odb_factory", "llamafactory", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "numpy", "pillow",
    "torchvision",
)  # fmt: skip
"""Distributions that must have the same release on all ranks; the builds may differ."""
LOCAL_KEYS = ("audit", "exchange_timeout_s")
"""Keys of the odb: block that change no plan and no weight."""
MAX_KEYS_NAMED = 3
MAX_VALUE_CHARACTERS = 80


def block_settings(config: ODBConfig) -> dict[str, object]:
    """The keys of the odb: block as settings."""
    return {f"odb.{key}": value for key, value in config.to_dict().items() if key not in LOCAL_KEYS}


@functools.cache
def releases() -> dict[str, object]:
    """The releases that ranks compare: `PACKAGES` without their builds, and major.minor of Python."""
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["Python"] = platform.python_version().rpartition(".")[0]
    return {f"release of {name}": version and version.partition("+")[0] for name, version in versions.items()}


def compare(
    settings: Mapping[str, object], gather: Callable[[bytes], Sequence[bytes]], *, problem: ODBError | None = None
) -> None:
    """Raise the same error on every rank if the settings of the ranks differ. Collective.

    settings: compared by the `repr` of each value, so that 1, 1.0 and "1" differ. gather: sends the bytes of this rank
    and returns the bytes of all ranks, in rank order.
    problem: why this rank cannot continue; all ranks raise it, unless settings differ, which explains more.
    Raises `CollectiveError`; if there is one rank, `problem` itself.
    """
    texts = {name: repr(value) for name, value in settings.items()}
    reason = None if problem is None else one_line(problem)
    ranks = [pickle.loads(text) for text in gather(pickle.dumps((texts, reason), 5))]
    if problem is not None and len(ranks) == 1:
        raise problem
    differing = []
    for name in dict.fromkeys(name for texts, _ in ranks for name in texts):
        values = [texts.get(name, "nothing") for texts, _ in ranks]
        if (rank := first_unlike(values)) is not None:
            here, there = (
                value[:MAX_VALUE_CHARACTERS] + "..." * (len(value) > MAX_VALUE_CHARACTERS)
                for value in (values[0], values[rank])
            )
            differing.append(f"{name} ({here} on rank 0; {there} on rank {rank})")
    if differing:
        named, num_more = ", ".join(differing[:MAX_KEYS_NAMED]), len(differing) - MAX_KEYS_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        raise CollectiveError(f"the ranks differ in {named}{more}; give every rank the same.")
    reasons = [reason for _, reason in ranks]
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CollectiveError(reason if len(set(reasons)) == 1 else f"rank {rank} stopped: {reason}")


def first_unlike(values: Sequence[Hashable]) -> int | None:
    """The first rank whose value differs from the value of rank 0; None if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
