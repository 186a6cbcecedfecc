"""A CPU in place of an accelerator: its peak memory is a count of live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odb_factory.memory import MemoryMeter, fits


class CPUMeter(MemoryMeter):
    """A CPU that runs out of memory above `capacity` bytes."""

    def __init__(self, capacity: int):
        self.capacity = capacity

    def limit(self, fraction: float) -> int:
        return int(fraction * self.capacity)

    def peak(self, run: Callable[[], None]) -> int | None:
        live = _LiveBytes(self.capacity)

        def counted() -> None:
            with live:
                run()

        return live.peak if fits(counted) else None


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators within it read or make; out of memory above `limit`. peak: the
    most so far.

    torch hands every operator to a `TorchDispatchMode`. A tensor is counted from the first operator that reads or makes
    it, with its gradient, until its storage is deleted. Memory that a kernel needs within itself is not seen.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._limit = limit
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
                if leaf.is_leaf and leaf.grad is not None:
                    self._add(leaf.grad.untyped_storage())
        if self._live > self._limit:
            raise torch.OutOfMemoryError(f"{self._live} bytes are alive, {self._limit} are there")
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, size = id(storage), storage.nbytes()
        if number not in self._storages:
            self._storages.add(number)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._remove, number, size)

    def _remove(self, number: int, size: int) -> None:
        self._storages.discard(number)
        self._live -= size
