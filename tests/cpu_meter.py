"""A CPU in place of an accelerator: its peak memory is a count of live tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odb_factory.memory import MemoryMeter, fits


class CPUMeter(MemoryMeter):
    """Of a CPU with `capacity` bytes: above them it runs out of memory."""

    def __init__(self, capacity: int):
        self.capacity = capacity

    def limit(self, fraction: float) -> int:
        return int(fraction * self.capacity)

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        storages = {id(storage): storage for storage in (one.untyped_storage() for one in held)}
        there = sum(storage.nbytes() for storage in storages.values())
        live = _LiveBytes(self.capacity - there)

        def counted() -> None:
            with live:
                run()

        return there + live.peak if fits(counted) else None


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made by operators within it; out of memory above `limit`. peak: the most so far.

    torch hands every operator to a `TorchDispatchMode`; its results live until their storage is deleted. Memory that a
    kernel needs within itself is not seen.
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
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
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
