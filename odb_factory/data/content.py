"""What a row says, as a number: to notice that training data have changed."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from odb_factory.planning import Cost


def checksum(features: Any, cost: Cost) -> int:
    """32 bits, never 0, of a row's cost, token ids and labels: the same in every process and version.

    Of a pair those of both answers. Not of its media, which are not read for it: a picture that is exchanged for one of
    the same size goes unnoticed.
    """
    sizes = f"{cost.tokens} {cost.patches} {cost.units} {int(cost.has_media)} {cost.modality}"
    sizes += " audio" * cost.has_audio
    crc = zlib.crc32(sizes.encode())
    named = features if isinstance(features, Mapping) else {}
    for key in sorted(key for key in named if str(key).endswith(("input_ids", "labels"))):
        crc = zlib.crc32(_numbers(named[key]), crc)
    return crc or 1


def _numbers(values: Any) -> bytes:
    """Whole numbers of any container as 64 bits each, others as floats; nothing for what is not made of numbers."""
    try:
        if isinstance(values, list) and values and isinstance(values[0], int):
            return array("q", values).tobytes()  # the usual case, a little faster so
        flat = np.asarray(values).reshape(-1)
        return flat.astype("<i8" if flat.dtype.kind in "iub" else "<f8").tobytes()
    except (OverflowError, TypeError, ValueError):
        return b""
