"""The flat row that a model computes: the lengths of its samples, for each part of the model that asks.

Attention and mixers take the lengths from here, not from arguments that each model would have to hand down: a model
cannot lose them on the way, and nothing is read back from the device. The row is global to the process, because
autograd recomputes checkpointed layers in threads of its own, which have no context. If a loop computes other rows
before the backward of one, `row_of_backward` brings its row back; a forward of another thread that is of no row leaves
the row of this one alone.
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
    """The flat row in forward and backward. segments: lengths of its samples (tokens), in order; they fill the row.

    number: counts the rows of the process.
    """

    def __init__(self, segments: Sequence[int]):
        self.number = next(_numbers)
        self.segments, self.tokens, self.longest = tuple(segments), sum(segments), max(segments)
        self.runs = [(len(list(run)), length) for length, run in itertools.groupby(segments)]
        """Neighbours of equal length: (number of samples, length)."""
        self.groups: dict[int | None, Any] = {}
        """Of samples of similar length, by their number: made once, for all layers (`mixers`)."""
        self._ends = {device: self._ends_on(device) for device in _devices}

    def ends(self, device: torch.device) -> Tensor:
        """int32[segments + 1] there, copied once for all layers and without waiting for the device."""
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
    """int64[tokens], of each token of a flat row within its sample."""
    return torch.cat([torch.arange(length) for length in segments])


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host there, without waiting for the device."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


_row: FlatRow | None = None
_owner: int | None = None
"""The thread that has begun the row."""
_before: list[FlatRow | None] = []
"""The rows that were in progress when rows of a backward began."""
_without_row: set[int] = set()
"""Other threads, in a forward that is of no row."""
_numbers = itertools.count()
_devices: set[torch.device] = set()
"""On which attention has asked for ends: rows have them there before a forward, so that a compiled graph is given them
and serves every row of its length."""


def row_in_progress() -> FlatRow | None:
    """The row that forward and backward are of; None for a padded micro-batch."""
    return None if _without_row and threading.get_ident() in _without_row else _row


def begin_row(segments: Sequence[int]) -> None:
    """From here on forward and backward are of this flat row; of a padded micro-batch if there are no segments."""
    global _row, _owner
    _row, _owner = FlatRow(segments) if segments else None, threading.get_ident()
    _before.clear()


def end_row(rows: Sequence[FlatRow | None] | None = None) -> None:
    """From here on forward and backward are of no row, if this thread has begun the one in progress, and it is one of
    these (None: any). Another may be in a forward: in its thread, or in this one when the garbage collector calls."""
    is_ended = rows is None or any(row is _row for row in rows)
    if _row is not None and _owner == threading.get_ident() and is_ended:
        begin_row(())


@contextlib.contextmanager
def flat_row(segments: Sequence[int]) -> Iterator[None]:
    """Within it forward and backward are of this flat row; of a padded micro-batch if there are no segments.

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
    """Let the backward from `output`, a result of a model, be of this row (None: of a padded micro-batch), whichever
    row has begun since."""

    def begin(_: Tensor) -> None:
        global _row
        if _row is not row:
            _before.append(_row)
            _row = row
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        """The row in progress is that of before the backward, however many rows the backward was of."""
        global _row
        if _before:
            _row = _before[0]
            _before.clear()

    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let the forward of `module` be this one, whose first argument is the module's own; returns what undoes it.

    If somebody has wrapped the forward since, it stays: in the doors of this room it has no effect without a row.
    """
    attributes, own = vars(module), module.forward
    before, added = attributes.get("forward"), functools.partial(forward, own)
    # Its signature is that of its own, by which `generate` decides what it makes; accelerate unwraps by it.
    vars(added)["__wrapped__"] = own
    attributes["forward"] = added

    return functools.partial(_put_back, module, added, before)


def _put_back(module: nn.Module, added: Callable[..., Any], before: Callable[..., Any] | None) -> None:
    attributes = vars(module)
    if attributes.get("forward") is added:
        del attributes["forward"]
        attributes.update({} if before is None else {"forward": before})


def call_all(undo: list[Callable[[], Any]]) -> None:
    """The last first, each once. Unlike an `ExitStack` the list can be copied and pickled, with the model it is of."""
    while undo:
        undo.pop()()


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The same for a while."""
    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()
