"""How long the samples are: tokens, patches and units of each data set of a mix, and what is wrong with its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.dry_run.rows import Seen

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of a measure over samples: mean, percentiles, most."""

    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that were seen of one data set. rows: all; samples: those that can be trained on.

    cut_off: samples of which cutoff_len cuts tokens off; longest_uncut: tokens of the longest of them without it, 0
    where there is none. left_out: rows that are no samples, by reason.
    """

    name: str
    rows: int
    samples: int
    tokens: Spread
    patches: Spread
    units: Spread
    cut_off: int
    longest_uncut: int
    left_out: dict[str, int]


def parts_of(seen: Sequence[Seen], sources: Sequence[str]) -> list[Part]:
    """All rows as one part, then the parts of a mix of several data sets."""
    whole = part_of(ALL, seen)
    if len(sources) < 2:
        return [whole]
    return [whole, *(part_of(name, [row for row in seen if row.source == name]) for name in dict.fromkeys(sources))]


def part_of(name: str, rows: Sequence[Seen]) -> Part:
    costs = [row.cost for row in rows if row.cost is not None]
    uncut = [row.uncut for row in rows if row.uncut]
    return Part(
        name=name,
        rows=len(rows),
        samples=len(costs),
        tokens=spread([cost.tokens for cost in costs]),
        patches=spread([cost.patches for cost in costs]),
        units=spread([cost.units for cost in costs]),
        cut_off=len(uncut),
        longest_uncut=max(uncut, default=0),
        left_out=dict(Counter(row.reason for row in rows if row.cost is None)),
    )


def spread(amounts: Sequence[int]) -> Spread:
    if not amounts:
        return Spread()
    p50, p90, p99 = (int(found) for found in np.percentile(amounts, [50, 90, 99], method="higher"))
    return Spread(mean=float(np.mean(amounts)), p50=p50, p90=p90, p99=p99, most=int(max(amounts)))
