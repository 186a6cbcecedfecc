"""Peak memory of a function on a device: the figures of an accelerator, or a count of live tensors on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odb_factory.errors import ODBError

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""In the messages of accelerators without an error class of their own, of the CPU's allocator and of libraries that
allocate beside torch's."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short; False for an error of ours that reports it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_ours = isinstance(error, ODBError)
    return isinstance(error, RuntimeError) and not is_ours and any(sign in str(error) for sign in SIGNS)


class PeakMeter(Protocol):
    """Measures the micro-batches that a search for a budget tries."""

    def limit(self, fraction: float) -> int:
        """Bytes that may be in use: this fraction of the memory, and no more than other processes leave free."""

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        """Peak of bytes in use while `run` runs, everything included; None if there was not enough memory.

        held: tensors that exist before and stay.
        """


COUNTED = ("mem_get_info", "memory_reserved", "reset_peak_memory_stats", "max_memory_allocated")
"""What `AcceleratorMeter` asks of a device's module of torch."""


class AcceleratorMeter:
    """For a device whose torch module counts allocations (`torch.cuda` and those like it)."""

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
    """The meter of an accelerator; None where torch does not count allocations (a CPU, `mps`)."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return AcceleratorMeter(device) if all(hasattr(module, name) for name in COUNTED) else None


class NoMeter:
    """A device without a meter: whether memory holds a micro-batch, without figures."""

    def limit(self, fraction: float) -> int:
        return 0

    def peak(self, run: Callable[[], None], held: Iterable[Tensor]) -> int | None:
        return 0 if _fits(run) else None


class CPUMeter:
    """A CPU in place of an accelerator with `capacity` bytes, for tests: above them it runs out of memory."""

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

        return there + live.peak if _fits(counted) else None


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


def _fits(run: Callable[[], None]) -> bool:
    """Whether memory held the run. A run that failed keeps nothing alive, not even by its error."""
    try:
        run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    else:
        fits = True
    if not fits:
        gc.collect()
    return fits
