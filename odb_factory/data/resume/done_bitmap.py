"""Which positions of an epoch's order are done, as a bitmap: what states of other ranks or settings are turned into."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from odb_factory.data.resume.fields import packed
from odb_factory.errors import DataError

if TYPE_CHECKING:
    from odb_factory.data.resume.fill_state import FillState


def mark_done(states: Sequence[FillState], num_samples: int | None) -> np.ndarray:
    """bool[num_samples]: the positions of the epoch's order that are done by these states, one a rank.

    num_samples: of the epoch; None for a stream, of which as many positions are marked as were looked at.
    Raises `DataError` where the states speak of positions that the order does not have.
    """
    num_positions = _num_looked_at(states) if num_samples is None else num_samples
    done = np.zeros(num_positions, dtype=bool)
    before = states[0].done
    if before is not None:
        done[: len(before)] = before[:num_positions]
    left = np.flatnonzero(~done)
    for state in states:
        snapshot = state.snapshot
        if snapshot is None:
            continue
        mine = left[state.rank :: len(states)]
        if max([snapshot.drawn - 1, *state.emitted]) >= len(mine):
            raise DataError(f"the state of rank {state.rank} speaks of more samples than its share of the order has")
        done[mine[: snapshot.drawn]] = True
        done[mine[[one.draw for one in snapshot.undone]]] = False
        done[mine[list(state.emitted)]] = True
    return done


def _num_looked_at(states: Sequence[FillState]) -> int:
    drawn = [max([-1, *state.emitted, state.snapshot.drawn if state.snapshot else 0]) + 1 for state in states]
    before = max(0 if state.done is None else len(state.done) for state in states)
    return before + max(drawn) * len(states)


def pack_done(done: np.ndarray) -> str:
    """A bitmap as text of JSON; at most a sixth of a byte a sample."""
    return packed(zlib.compress(np.packbits(done).tobytes(), 9))


def unpack_done(raw: bytes, num_samples: int | None) -> np.ndarray:
    """bool[num_samples rounded up to 8]: undo `pack_done`, of which `raw` are the bytes.

    num_samples: of the epoch; None if nobody knows. Raises `DataError` where it is damaged or has another length.
    """
    try:
        bits = np.unpackbits(np.frombuffer(zlib.decompress(raw), dtype=np.uint8)).astype(bool)
    except zlib.error as error:
        raise DataError(f"`done` cannot be unpacked ({error})") from None
    if num_samples is not None and (len(bits) != -(-num_samples // 8) * 8 or bits[num_samples:].any()):
        raise DataError(f"`done` marks {len(bits)} positions of an order of {num_samples}")
    return bits
