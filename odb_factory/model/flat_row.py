"""The flat row that a model computes: the lengths of its samples, for whatever part of the model asks.

Attention and mixers take the lengths from here, not from arguments that each model would have to hand down: a model
cannot lose them on the way, and nothing is read back from the device. The row is global to the process, for autograd
recomputes checkpointed layers in threads of its own, which have no context.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FlatRow:
    """The flat row in forward and backward. segments: lengths of its samples (tokens), in order; they fill the row.

    is_trial: the log does not name its kernel, which is not that of a training. number: counts the rows of the process.
    """

    def __init__(self, segments: Sequence[int], is_trial: bool = False):
        self.number = next(_numbers)
        self.segments, self.is_trial = tuple(segments), is_trial
        self.tokens, self.longest = sum(segments), max(segments)
        self.runs = [(len(list(run)), length) for length, run in itertools.groupby(segments)]
        """Neighbours of equal length: (number of samples, length)."""
        self._ends = {device: self._ends_on(device) for device in _devices}

    def positions(self) -> Tensor:
        """int64[tokens], of each token within its sample."""
        return torch.cat([torch.arange(length) for length in self.segments])

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


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host there, without waiting for the device."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


_row: FlatRow | None = None
_numbers = itertools.count()
_devices: set[torch.device] = set()
"""Where attention has asked for ends: rows have them there before a forward, so that a compiled graph is given them and
serves every row of its length."""


def row_in_progress() -> FlatRow | None:
    """The row that forward and backward are of; None for a padded micro-batch."""
    return _row


def begin_row(segments: Sequence[int]) -> None:
    """From here on forward and backward are of this flat row; of a padded micro-batch where there are no segments."""
    global _row
    _row = FlatRow(segments) if segments else None


@contextlib.contextmanager
def flat_row(segments: Sequence[int], *, is_trial: bool = False) -> Iterator[None]:
    """Within it forward and backward are of this flat row; of a padded micro-batch where there are no segments.

    with flat_row((5, 3)):
        model(input_ids=ids, position_ids=positions).loss.backward()  # ids: [1, 8]
    """
    global _row
    before = _row
    if before is None or before.segments != tuple(segments):
        _row = FlatRow(segments, is_trial) if segments else None
    try:
        yield
    finally:
        _row = before


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let the forward of `module` be this one, whose first argument is the module's own; returns what undoes it.

    Where somebody has wrapped the forward since, it stays: in the doors of this room it has no effect without a row.
    """
    attributes = vars(module)
    before, added = attributes.get("forward"), functools.partial(forward, module.forward)
    attributes["forward"] = added

    def undo() -> None:
        if attributes.get("forward") is added:
            del attributes["forward"]
            attributes.update({} if before is None else {"forward": before})

    return undo


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The same for a while."""
    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()
