"""`LiveBytes`: the bytes of tensors that live while a piece of code runs, real tensors and fake ones alike.

torch hands every operator to a `TorchDispatchMode`; what an operator returns lives from then until its storage is
deleted. So the peak is known operator by operator, also where nothing is computed (fake tensors). What a kernel needs
within itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BOOLEAN_INDEX = torch.ops.aten.index.Tensor


class LiveBytes(TorchDispatchMode):
    """A context in which tensors are counted that operators have made since it was entered.

    live: bytes of those alive. peak: the most so far; `restart_peak` begins it anew.

        with LiveBytes() as memory:
            model(**batch).loss.backward()
        print(memory.peak)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: set[int] = set()

    def restart_peak(self) -> int:
        """The peak until now; the next begins with what is alive."""
        peak, self.peak = self.peak, self.live
        return peak

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that no operator has made here."""
        storage = tensor.untyped_storage()
        number, size = id(storage), storage.nbytes()
        if number in self._storages:
            return
        self._storages.add(number)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, number, size)

    def _remove(self, number: int, size: int) -> None:
        self._storages.discard(number)
        self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is BOOLEAN_INDEX:
            args = (args[0], _whole_numbers(args[1]))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


def _whole_numbers(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the positions that they select: how many these are is known of a real mask, even of a fake tensor."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions
