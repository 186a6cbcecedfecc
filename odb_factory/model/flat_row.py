"""The flat row in progress: the lengths of its samples, for every part of the model.

Attention and mixers read the lengths here instead of getting them as arguments: no model has to hand them down, and
nothing is read back from the device. The row is global to the process, because autograd recomputes checkpointed layers
in its own threads, which have no context. If a loop computes other rows between the forward and the backward of a row,
`row_of_backward` restores that row. A forward without a row in another thread does not change the row of this thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class FlatRow:
    """A flat row. segments: lengths of its samples in order (tokens), which fill the row. number: of the row in this
    process."""

    def __init__(self, segments: Sequence[int]):
        self.number = next(_numbers)
        self.segments, self.tokens, self.longest = tuple(segments), sum(segments), max(segments)
        self.runs = [(len(list(run)), length) for length, run in itertools.groupby(segments)]
        """Consecutive samples of equal length: (number of samples, length)."""
        self.groups: dict[int | None, Any] = {}
        """The `PaddedGroups` of this row by their `number`, made once for all layers (`mixers`)."""
        self._ends = {device: self._ends_on(device) for device in _devices}

    def ends(self, device: torch.device) -> Tensor:
        """int32[segments + 1] on `device`, copied once for all layers, without waiting for the device."""
        if device not in self._ends:
            _devices.add(device)
            self._ends[device] = self._ends_on(device)
        return self._ends[device]

    def _ends_on(self, device: torch.device) -> Tensor:
        ends = copy_to(torch.tensor([0, *itertools.accumulate(self.segments)], dtype=torch.int32), device)
        if "torch._dynamo" in sys.modules and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(ends, 0)
        return ends


def positions_of(segments: Sequence[int]) -> Tensor:
    """The position of each token of a flat row in its sample, int64[tokens]."""
    return torch.cat([torch.arange(length) for length in segments])


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device`, without waiting for the device."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


_row: FlatRow | None = None
_owner: int | None = None
"""The thread that began the row."""
_before: list[FlatRow | None] = []
"""The rows in progress when `row_of_backward` changed the row."""
_without_row: set[int] = set()
"""Other threads, in a forward without a row."""
_numbers = itertools.count()
_devices: set[torch.device] = set()
"""Devices on which attention has needed `ends`. Later rows have them before the forward, so a compiled graph gets them
as input and serves every row of its length."""


def row_in_progress() -> FlatRow | None:
    """The row in forward and backward; None for a padded micro-batch."""
    return None if _without_row and threading.get_ident() in _without_row else _row


def begin_row(segments: Sequence[int]) -> None:
    """Begin a flat row, the row of every forward and backward from now on; no segments: a padded micro-batch."""
    global _row, _owner
    _row, _owner = FlatRow(segments) if segments else None, threading.get_ident()
    _before.clear()


def end_row(rows: Sequence[FlatRow | None] | None = None) -> None:
    """End the row in progress, if this thread began it and it is one of `rows` (None: any). A row that somebody else
    began may be in a forward: of another thread, or of this thread if the garbage collector calls this function."""
    is_ended = rows is None or any(row is _row for row in rows)
    if _row is not None and _owner == threading.get_ident() and is_ended:
        begin_row(())


@contextlib.contextmanager
def flat_row(segments: Sequence[int]) -> Iterator[None]:
    """Within it forward and backward compute this flat row; no segments: a padded micro-batch.

    with flat_row((5, 3)):
        model(input_ids=ids, position_ids=positions).loss.backward()  # ids: [1, 8]
    """
    global _row, _owner
    before, thread = _row, threading.get_ident()
    if before is not None and not segments and thread != _owner and thread not in _without_row:
        _without_row.add(thread)
        try:
            yield
        finally:
            _without_row.remove(thread)
        return
    if segments:
        _owner = thread
    if before is None or before.segments != tuple(segments):
        _row = FlatRow(segments) if segments else None
    try:
        yield
    finally:
        _row = before


def row_of_backward(output: Any, row: FlatRow | None) -> None:
    """Make `row` (None: a padded micro-batch) the row of the backward from `output`, a result of a model, whichever row
    began after the forward."""

    def begin(_: Tensor) -> None:
        global _row
        if _row is not row:
            _before.append(_row)
            _row = row
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        """Restore the row before the backward, whose parts may belong to several rows."""
        global _row
        if _before:
            _row = _before[0]
            _before.clear()

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of `module` by `forward(own forward, ...)`; returns a function that undoes it.

    The undo changes nothing if the new forward has been wrapped since.
    """
    attributes, own = vars(module), module.forward
    before, added = attributes.get("forward"), functools.partial(forward, own)
    # `generate` reads the signature of the own forward by this attribute, and accelerate unwraps by it.
    vars(added)["__wrapped__"] = own
    attributes["forward"] = added
    return functools.partial(_put_back, module, added, before)


def _put_back(module: nn.Module, added: Callable[..., Any], before: Callable[..., Any] | None) -> None:
    attributes = vars(module)
    if attributes.get("forward") is added:
        del attributes["forward"]
        attributes.update({} if before is None else {"forward": before})


def call_all(undo: list[Callable[[], Any]]) -> None:
    """Call the functions, last first, and empty the list. Unlike an `ExitStack`, the list can be copied and pickled
    together with a model."""
    while undo:
        undo.pop()()


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`replace_forward`, undone at the end."""
    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()
