"""What a rank tells the others of the samples it holds: integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.cost import Cost

ROW = np.dtype(
    [
        ("tokens", "<i4"),
        ("row_tokens", "<i4"),
        ("patches", "<i4"),
        ("units", "<i4"),
        ("bytes", "<i4"),
        ("position", "<i4"),
        ("age", "u1"),
        ("modality", "u1"),
        ("has_media", "?"),
        ("leading_label", "?"),
        ("has_audio", "?"),
    ]
)
"""A sample: its `Cost`, its features in bytes, its position in the optimizer step (where steps are kept), and its age,
the rounds in which it was kept back (255: or more)."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferMetadata:
    """The samples a rank holds, as an array of `ROW`. exhausted: its sampler has no further one."""

    rows: np.ndarray
    exhausted: bool


def make_metadata(
    costs: Sequence[Cost],
    ages: Sequence[int],
    exhausted: bool,
    sizes: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> BufferMetadata:
    """costs, ages, sizes (bytes; default 0), positions (default 0): one entry a sample."""
    zeros = [0] * len(costs)
    rows = [
        (
            cost.tokens,
            cost.padded,
            cost.patches,
            cost.units,
            min(size, np.iinfo(np.int32).max),
            position,
            min(age, 255),
            cost.modality,
            cost.has_media,
            cost.leading_label,
            cost.has_audio,
        )
        for cost, age, size, position in zip(costs, ages, sizes or zeros, positions or zeros)
    ]
    return BufferMetadata(np.array(rows, dtype=ROW), exhausted)


Steps = list[list[np.ndarray | None]]
"""For each micro-step the group of every rank, as positions in the table; None: the rank idles."""
