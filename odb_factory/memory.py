"""Peak memory of a function on an accelerator, and which errors say that memory was short."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from odb_factory.errors import ODBError

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of accelerators without an error class of their own, of the CPU's allocator and of libraries
with their own allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short; False for an error of ours that reports it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_ours = isinstance(error, ODBError)
    return isinstance(error, RuntimeError) and not is_ours and any(sign in str(error) for sign in SIGNS)


COUNTED = ("mem_get_info", "memory_reserved", "reset_peak_memory_stats", "max_memory_allocated")
"""Functions of a device's module of torch that `MemoryMeter` calls."""


class MemoryMeter:
    """Measures the memory of an accelerator whose torch module counts allocations, as `torch.cuda` does."""

    def __init__(self, device: torch.device):
        self._device = device

    def limit(self, fraction: float) -> int:
        """Bytes that may be in use: this fraction of the memory, at most what other processes leave free."""
        module = torch.get_device_module(self._device)
        free, total = module.mem_get_info(self._device)
        return min(int(fraction * total), free + module.memory_reserved(self._device))

    def peak(self, run: Callable[[], None]) -> int | None:
        """Peak of bytes in use while `run` runs, everything included; None if there was not enough memory."""
        module = torch.get_device_module(self._device)
        module.empty_cache()
        module.reset_peak_memory_stats(self._device)
        if not fits(run):
            module.empty_cache()
            return None
        module.synchronize(self._device)
        return int(module.max_memory_allocated(self._device))


def find_meter(device: torch.device) -> MemoryMeter | None:
    """The meter of an accelerator; None if torch does not count its allocations (a CPU, `mps`)."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return MemoryMeter(device) if all(hasattr(module, name) for name in COUNTED) else None


def fits(run: Callable[[], None]) -> bool:
    """Whether memory held the run. A run that failed keeps no tensor alive."""
    try:
        run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    gc.collect()  # after `except`, which has dropped the error and its frames
    return False
