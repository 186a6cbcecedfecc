"""Metadata as bytes. Nothing that comes from another rank is unpickled."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np

from odb_factory.comm.coordinator import RankMetadata
from odb_factory.planning import ROW, BufferMetadata, CostModel, Limits

MAX_REASON_CHARACTERS = 2000
_LENGTH_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What a rank sends in place of something else: why it cannot go on."""

    reason: str


def encode(message: RankMetadata | Failure) -> bytes:
    """The length of a JSON header, the header, the buffered samples as an array of `ROW` (29 bytes a sample)."""
    if isinstance(message, Failure):
        header: dict[str, object] = {"failure": message.reason[:MAX_REASON_CHARACTERS]}
        rows = b""
    else:
        header = {
            "exhausted": message.buffer.exhausted,
            "rejected": message.rejected,
            "overlong": message.overlong,
            "order": message.order,
            "model": dataclasses.astuple(message.model),
            "limits": None if message.limits is None else dataclasses.astuple(message.limits),
        }
        rows = message.buffer.rows.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + rows


def decode(message: bytes) -> RankMetadata | Failure:
    """Undo `encode`."""
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    header = json.loads(message[_LENGTH_BYTES:end])
    if "failure" in header:
        return Failure(header["failure"])
    buffer = BufferMetadata(np.frombuffer(message, dtype=ROW, offset=end), header["exhausted"])
    return RankMetadata(
        buffer,
        Counter(header["rejected"]),
        header["overlong"],
        header["order"],
        CostModel(*header["model"]),
        None if header["limits"] is None else Limits(*header["limits"]),
    )
