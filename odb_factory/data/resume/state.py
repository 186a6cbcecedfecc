"""What a loader saves of one rank: read back whatever the mode it was written in."""

from __future__ import annotations

from typing import Any

from odb_factory.data.resume.fields import VERSION, Fields
from odb_factory.data.resume.fill_state import FillState
from odb_factory.data.resume.keep_state import KeepState
from odb_factory.errors import DataError

DataState = FillState | KeepState


def read_state(saved: Any) -> DataState:
    """What `to_dict` of a state has made. Raises `DataError`, a clause without a way out, where it is damaged."""
    fields = Fields(saved)
    version = fields.value("version")
    if version != VERSION:
        raise DataError(f"it has version {version!r} of the data state, and this odb_factory reads {VERSION}")
    mode = fields.value("mode")
    if mode == "keep":
        return KeepState.from_dict(saved)
    if mode == "fill":
        return FillState.from_dict(saved)
    raise DataError(f"`mode` is {mode!r}, not keep or fill")
