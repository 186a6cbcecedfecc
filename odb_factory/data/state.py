"""What a stopped epoch needs to go on: which samples are done, what the windows hold, where the plan stands.

A state belongs to what the training has consumed, not to what was fetched or planned ahead. It does not
list the samples that are done: every rank draws its share in order, so the number of draws and the few that
were drawn and are not done tell them all. Continued with the same ranks and settings, the round under way is
planned again from what the window held before it, and its consumed steps are passed over: the same groups in
the same order. Otherwise what is done is marked in a bitmap over the order, and the rest is dealt out anew.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from odb_factory.batching import CostModel
from odb_factory.errors import DataError

VERSION = 2


@dataclass(frozen=True, slots=True)
class Held:
    """A drawn sample that is not done. draw: its number in this rank's draws; age: rounds it was kept back."""

    draw: int
    age: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank before it plans a round. steps, emitted, tokens_emitted: of the epoch, on all ranks.

    drawn, rejected, overlong: of this rank. next: drawn beyond the window; spare: what idle steps are run with.
    model: the cost model it proposes.
    """

    round_index: int
    steps: int
    emitted: int
    tokens_emitted: int
    drawn: int
    rejected: dict[str, int]
    overlong: int
    held: tuple[Held, ...]
    next: Held | None
    spare: Held | None
    model: CostModel

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Snapshot:
        held = tuple(Held(**one) for one in saved["held"])
        lone = {key: None if saved[key] is None else Held(**saved[key]) for key in ("next", "spare")}
        return cls(**saved | {"held": held, "model": CostModel(**saved["model"])} | lone)

    @property
    def waiting(self) -> list[Held]:
        """All that was drawn and is to be observed again, in the order of the draws, each once."""
        by_draw = {one.draw: one for one in (self.spare, *self.held, self.next) if one is not None}  # the window's ages
        return [by_draw[draw] for draw in sorted(by_draw)]


def mark_done(states: Sequence[dict[str, Any]], num_positions: int) -> np.ndarray:
    """bool[num_positions]: the positions of the epoch's order that are done by these states, one a rank."""
    done = unpack_done(states[0]["done"], num_positions)[:num_positions]
    left = np.flatnonzero(~done)
    world_size = len(states)
    for state in states:
        if state["snapshot"] is None:
            continue
        mine = left[state["rank"] :: world_size]
        snapshot = Snapshot.from_dict(state["snapshot"])
        done[mine[: snapshot.drawn]] = True
        waiting = [one.draw for one in (*snapshot.held, snapshot.next) if one is not None]
        done[mine[waiting]] = False
        done[mine[state["emitted"]]] = True
    return done


def pack_done(done: np.ndarray) -> str:
    """A bitmap as text; at most a sixth of a byte a sample."""
    return base64.b64encode(zlib.compress(np.packbits(done).tobytes(), 9)).decode()


def unpack_done(packed: str | None, num_positions: int) -> np.ndarray:
    """bool[num_positions], or longer if more were packed; none: nothing is done."""
    if packed is None:
        return np.zeros(num_positions, dtype=bool)
    bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8)).astype(bool)
    return np.pad(bits, (0, max(num_positions - len(bits), 0)))


def check_states(states: Sequence[dict[str, Any]]) -> None:
    """Raise `DataError` unless these are the states of all ranks at one moment of one run."""
    if any(state.get("version") != VERSION for state in states):
        found = sorted({str(state.get("version")) for state in states})
        raise DataError(f"the data state has version {', '.join(found)}, this odb_factory reads {VERSION}")
    world_size = states[0]["world_size"]
    ranks = [state["rank"] for state in states]
    if ranks != list(range(world_size)):
        raise DataError(
            f"the data state was written by {world_size} ranks, and of these {ranks} were found; all are needed to go "
            "on with other ranks or settings (are the checkpoint's files of all nodes in one place?)"
        )
    rounds = [state["snapshot"] and state["snapshot"]["round_index"] for state in states]
    if len({(state["epoch"], index, state["consumed"]) for state, index in zip(states, rounds)}) > 1:
        raise DataError("the data states of the ranks are of different moments; use another checkpoint")
