"""Where a training stands in its data: (epoch, optimizer step), and what must not have changed since.

The state is the same on all ranks. With kept optimizer steps it is a cursor: step t is the samples [tN, (t+1)N) of the
order, whatever the ranks, budgets and workers. With `fill` it has the samples that are held back, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from odb_factory.data.samples import OptimizerStep, Remaining
from odb_factory.errors import DataError, quoted

VERSION = 11
"""Of a state; another one is refused."""
RESTART = "set `ignore_data_skip: true` (in a loop: load no state) to restart the epoch"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where all ranks stand in an epoch.

    optimizer_steps: done. planned, rejected (by reason), overlong: samples of these steps, on all ranks.
    remaining: with `fill`.
    """

    epoch: int = 0
    optimizer_steps: int = 0
    planned: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    overlong: int = 0
    remaining: Remaining | None = None

    @property
    def done(self) -> int:
        """Samples planned or rejected."""
        return self.planned + sum(self.rejected.values())

    @property
    def settings(self) -> dict[str, int]:
        """What ranks compare."""
        return {
            "epoch": self.epoch,
            "optimizer steps done in it": self.optimizer_steps,
            "samples done in it": self.done,
        }


SHOWN = {
    "global_batch_size": "samples of an optimizer step (global_batch_size, or per_device_train_batch_size x "
    "gradient_accumulation_steps x ranks)"
}
"""What must be as it was, in the words of a user, if it differs."""


class Cursor:
    """Follows the optimizer steps that are consumed; writes and reads states.

    data: what must be as it was for a place to mean anything: `global_batch_size` (N, or "fill"), `samples` (of an
    epoch, without those that `drop_last` drops; None if nobody knows), `seed` (of an order that is drawn here),
    `fingerprint` (of a `datasets.Dataset`), `split_among` (the ranks that a stream is split among beforehand).
    place: after the optimizer step consumed last. order: the checksum that the order of its epoch must have, if a state
    in the middle of an epoch was loaded. is_loaded: a state has been loaded, and no step taken since.
    """

    def __init__(self, data: Mapping[str, int | str | None]):
        self._data = data
        self.open(0)

    def open(self, epoch: int, *, is_loaded: bool = False, **place: Any) -> None:
        """Stand at the begin of an epoch, or at `place` (fields of `Place`)."""
        if self._data["global_batch_size"] == "fill":
            place.setdefault("remaining", Remaining())
        self.place = Place(epoch=epoch, **place)
        self.order: int | None = None
        self.is_loaded, self._has_moved = is_loaded, False

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.place.epoch or self._has_moved:
            self.open(epoch)

    def consume(self, step: OptimizerStep) -> None:
        """Stand after `step`."""
        if step.last:
            self.open(step.epoch + 1)
            return
        self._has_moved, self.is_loaded = True, False
        self.place = replace(
            self.place,
            optimizer_steps=step.index + 1,
            planned=step.done - step.rejected.total(),  # of steps that were passed over, too
            rejected=dict(step.rejected),
            overlong=step.overlong,
            remaining=step.remaining,
        )

    def state(self, order: int) -> dict[str, Any]:
        """JSON types. order: the checksum of that of the epoch."""
        return {"version": VERSION, **asdict(self.place), "data": {**self._data, "order": order}}

    def load(self, state: Any, order: int) -> None:
        """Stand where `state` was written. order: the checksum of that of its epoch, here.

        Raises `DataError` that names what differs.
        """
        saved, data = state["data"], {**self._data, "order": order}
        unlike = [key for key in data if saved.get(key) != data[key]]
        differs = [f"{SHOWN.get(key, key)} was {saved.get(key)}, is {data[key]}" for key in unlike]
        if differs:
            if len(differs) > 1:
                differs = [difference for difference in differs if not difference.startswith("order ")]
            elif saved["order"] != order:
                differs = ["its rows come in another order, as of another shuffling, data set or sampler"]
            raise DataError(
                f"data or optimizer steps are not those of the checkpoint ({'; '.join(differs)}), so what is left of "
                f"the epoch is not known; set them back, or {RESTART}"
            )
        place = {attribute.name: state[attribute.name] for attribute in fields(Place)}
        if (remaining := place["remaining"]) is not None:
            place["remaining"] = Remaining(**remaining)
        self.open(is_loaded=True, **place)
        self.order = order if self.place.done else None


def epoch_of(state: Any) -> int:
    """That a state stands in. Raises `DataError` for a value that is none."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        shown = " ".join(quoted(state).split())
        raise DataError(f"{shown} is not a state of this odb_factory; load one of state_dict(), or {RESTART}")
    epoch: int = state["epoch"]
    return epoch
