"""Where a training stands in its data: (epoch, optimizer step), and the data that must not change.

The state is the same on all ranks. With kept optimizer steps it is a cursor: step t is the samples [tN, (t+1)N) of the
order, whatever the ranks, budgets and workers. With `fill` the state also names the samples that are held back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

from odb_factory.data.samples import OptimizerStep, Remaining
from odb_factory.errors import DataError, quoted

VERSION = 11
"""Version of the format of a state; states of other versions are refused."""
RESTART = "set `ignore_data_skip: true` (in a loop: load no state) to restart the epoch"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where all ranks stand in an epoch: after `optimizer_steps`.

    planned, rejected (by reason), overlong: samples of these steps, on all ranks. remaining: the rest, with `fill`.
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
        """The settings that ranks compare."""
        return {
            "epoch": self.epoch,
            "optimizer steps done in it": self.optimizer_steps,
            "samples done in it": self.done,
        }


SHOWN = {
    "global_batch_size": "samples of an optimizer step (global_batch_size, or per_device_train_batch_size x "
    "gradient_accumulation_steps x ranks)"
}
"""Names for messages of the data that must not change."""


class Cursor:
    """Follows the optimizer steps that are consumed; writes and reads states.

    data: what must not have changed for a place to mean anything: `global_batch_size` (N, or "fill"), `samples` (of an
    epoch, without those that `drop_last` drops; None if unknown), `seed` (of an order that is drawn here),
    `fingerprint` (of a `datasets.Dataset`), `split_among` (the ranks that a stream is split among beforehand).
    place: after the optimizer step consumed last. is_loaded: a state has been loaded, and no step taken since.
    """

    def __init__(self, data: Mapping[str, int | str | None]):
        self._data = data
        self.open(0)

    def open(self, epoch: int, *, is_loaded: bool = False, order: int | None = None, **place: Any) -> None:
        """Stand at the beginning of an epoch, or at `place` (fields of `Place`). order: its checksum, if known."""
        if self._data["global_batch_size"] == "fill":
            place.setdefault("remaining", Remaining())
        self.place, self._order = Place(epoch=epoch, **place), order
        self.is_loaded, self._has_moved = is_loaded, False

    def turn_to(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next pass; a loaded state that stands in this epoch stays."""
        if epoch != self.place.epoch or self._has_moved:
            self.open(epoch)

    def check_order(self, order: int) -> None:
        """Note the checksum of the order in which the epoch was drawn. Raises `DataError` if it is not that of a state
        in the middle of the epoch."""
        if self.is_loaded and self._order not in (None, order):
            self._refuse("its rows come in another order, as of another shuffling, data set or sampler")
        self._order = order

    def consume(self, step: OptimizerStep) -> None:
        """Stand after `step`."""
        if step.last:
            self.turn_to(step.epoch + 1)
            return
        self._has_moved, self.is_loaded = True, False
        self.place = replace(
            self.place,
            optimizer_steps=step.index + 1,
            planned=step.done - step.rejected.total(),  # steps that were passed over included
            rejected=dict(step.rejected),
            overlong=step.overlong,
            remaining=step.remaining,
        )

    def state(self) -> dict[str, Any]:
        """JSON types. At the beginning of an epoch the state holds no order: the epoch may come in any."""
        order = self._order if self.place.done else None
        return {"version": VERSION, **asdict(self.place), "data": {**self._data, "order": order}}

    def load(self, state: Any) -> None:
        """Stand where `state` was written. Raises `DataError` if it is not a state, or names what differs."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            shown = " ".join(quoted(state).split())
            raise DataError(f"{shown} is not a state of this odb_factory; load one of state_dict(), or {RESTART}")
        saved = state["data"]
        unlike = [key for key in self._data if saved.get(key) != self._data[key]]
        if unlike:
            self._refuse(*(f"{SHOWN.get(key, key)} was {saved.get(key)}, is {self._data[key]}" for key in unlike))
        place = {attribute.name: state[attribute.name] for attribute in fields(Place)}
        if (remaining := place["remaining"]) is not None:
            place["remaining"] = Remaining(**remaining)
        self.open(is_loaded=True, order=saved["order"], **place)

    def _refuse(self, *differences: str) -> NoReturn:
        raise DataError(
            f"data or optimizer steps are not those of the checkpoint ({'; '.join(differences)}), so what is left of "
            f"the epoch is unknown; set them back, or {RESTART}"
        )
