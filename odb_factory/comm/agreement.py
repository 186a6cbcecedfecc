"""Compare the settings of all ranks (I11)."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence

MAX_KEYS_NAMED = 3
MAX_VALUES_NAMED = 3
MAX_VALUE_CHARACTERS = 80


def encode_settings(settings: Mapping[str, object]) -> bytes:
    """Settings as bytes: a JSON object of the `repr` of each value, so that 1, 1.0 and "1" differ."""
    return json.dumps({key: repr(value) for key, value in settings.items()}, sort_keys=True).encode()


def difference(encoded: Sequence[bytes]) -> str | None:
    """In what the settings of the ranks differ, as one line; None if they are the same.

    encoded: of each rank, in rank order, what `encode_settings` has made.

        >>> difference([encode_settings({"seed": 1}), encode_settings({"seed": 2})])
        'the ranks differ in seed (1 on rank 0; 2 on rank 1); give every rank the same.'
    """
    if len(set(encoded)) == 1:
        return None
    ranks: list[dict[str, str]] = [json.loads(one) for one in encoded]
    keys = sorted({key for settings in ranks for key in settings})
    differing = [key for key in keys if len({settings.get(key) for settings in ranks}) > 1]
    named = ", ".join(f"{key} ({_values(key, ranks)})" for key in differing[:MAX_KEYS_NAMED])
    more = f" and {len(differing) - MAX_KEYS_NAMED} more" if len(differing) > MAX_KEYS_NAMED else ""
    return f"the ranks differ in {named}{more}; give every rank the same."


def _values(key: str, ranks: Sequence[Mapping[str, str]]) -> str:
    """`1 on rank 0, 2; 4 on rank 1`: the value that most ranks have comes first."""
    by_value: dict[str, list[int]] = {}
    for rank, settings in enumerate(ranks):
        by_value.setdefault(settings.get(key, "nothing"), []).append(rank)
    parts = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    named = "; ".join(f"{_short(value)} on {name_ranks(ranks)}" for value, ranks in parts[:MAX_VALUES_NAMED])
    more = len(parts) - MAX_VALUES_NAMED
    return f"{named}; and {more} more" if more > 0 else named


def _short(value: str) -> str:
    return value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."


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
