"""Peak memory of what a function does on a device: an accelerator's own figures, or those of `LiveBytes` on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from odb_factory.memory.live_bytes import LiveBytes


class PeakMeter(Protocol):
    """What a search for a budget measures with."""

    def limit(self, fraction: float) -> int:
        """Bytes that may be in use: this fraction of the memory, and no more than others leave free."""

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        """Bytes in use at the most while `run` runs, everything included; None: that was more than there is.

        held: the tensors that were there before and stay.
        """


class AcceleratorMeter:
    """Of a device whose torch module counts what it allocates (`torch.cuda` and those like it)."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, torch.get_device_module(device)

    def limit(self, fraction: float) -> int:
        free, total = self._module.mem_get_info(self._device)
        return min(int(fraction * total), free + self._module.memory_reserved(self._device))

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)
        if not _fits(run):
            self._module.empty_cache()
            return None
        self._module.synchronize(self._device)
        return int(self._module.max_memory_allocated(self._device))


def find_meter(device: torch.device) -> PeakMeter | None:
    """The meter of an accelerator; None for a CPU, whose allocations torch does not count."""
    return None if device.type == "cpu" else AcceleratorMeter(device)


class CPUMeter:
    """A CPU in the place of an accelerator with `capacity` bytes, for tests: what needs more runs out of memory."""

    def __init__(self, capacity: int):
        self.capacity = capacity

    def limit(self, fraction: float) -> int:
        return int(fraction * self.capacity)

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        there = _size(held)
        memory = _Limited(self.capacity - there)

        def limited() -> None:
            with memory:
                run()

        return there + memory.peak if _fits(limited) else None


class _Limited(LiveBytes):
    """Out of memory where more than `most` bytes are alive."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live > self._most:
            raise torch.OutOfMemoryError(f"{self.live} bytes are alive, {self._most} are there")
        return result


def _fits(run: Callable[[], None]) -> bool:
    """Whether it ran. Nothing of a run that did not is kept alive: not by its error either."""
    try:
        run()
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    if not fits:
        gc.collect()
    return fits


def _size(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    storages = {id(storage): storage for storage in (one.untyped_storage() for one in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
