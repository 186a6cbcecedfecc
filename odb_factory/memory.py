"""How much memory a micro-batch takes: measured, modelled, estimated without an accelerator."""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ----------------------------------------------------------------------------------------------------------------------
# A model of bytes over the shape of a micro-batch: linear in tokens, patches and rows x length squared.


class Shape(Protocol):
    """rows x row_length = tokens; patches of its media."""

    @property
    def rows(self) -> int: ...
    @property
    def row_length(self) -> int: ...
    @property
    def patches(self) -> int: ...


def terms(shape: Shape) -> list[float]:
    """What bytes are linear in. Attention of several rows may need a mask of all their pairs where one row needs none,
    so pairs count apart."""
    tokens, pairs = shape.rows * shape.row_length, shape.rows * shape.row_length**2
    return [1.0, tokens, shape.patches, pairs, pairs if shape.rows > 1 else 0.0]


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """coefficients: of `terms`, none below 0."""

    coefficients: tuple[float, ...]

    def of(self, shape: Shape) -> int:
        return round(float(np.dot(self.coefficients, terms(shape))))


def fit(shapes: Sequence[Shape], measured: Sequence[int]) -> LinearBytes:
    """Non-negative least squares (Lawson and Hanson 1974), by relative errors: more of anything never needs less."""
    rows = np.array([terms(shape) for shape in shapes])
    values = np.array(measured, dtype=float)
    weights = 1 / np.maximum(values, 1.0)
    rows = rows * weights[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found, _ = nnls(rows / scale, values * weights)
    return LinearBytes(tuple(found / scale))


# ----------------------------------------------------------------------------------------------------------------------
# The largest budgets whose heaviest micro-batch fits, from the peaks of a few that were tried. Pure.

HEADROOM = 1.25
"""Patches that a budget of auto leaves room for, as a multiple of what the data bring on average with its tokens."""
GRAIN = 64
"""Tokens; budgets beyond a thousand are multiples of it."""


@dataclass(frozen=True, slots=True)
class TriedShape:
    """rows x row_length tokens as collated; patches of its media."""

    rows: int
    row_length: int
    patches: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length


@dataclass(frozen=True, slots=True)
class DataShape:
    """What the samples that were looked at say of the heaviest micro-batches.

    longest: tokens of the longest sample. most_patches: of any sample. densest: patches of a token at the most, and
    mean: on average, of samples with media and without. is_flat: all samples in one row.
    """

    longest: int
    most_patches: int
    densest: float
    mean: float
    is_flat: bool

    def heaviest(self, tokens: int, max_patches: int | None) -> TriedShape:
        """Of the micro-batches within these budgets."""
        patches = math.ceil(self.densest * tokens)
        patches = patches if max_patches is None else min(patches, max_patches)
        if self.is_flat:
            return TriedShape(1, tokens, patches)
        length = min(self.longest, tokens)
        return TriedShape(tokens // length, length, patches)

    def patches_for(self, tokens: int) -> int | None:
        """A cap for micro-batches of so many tokens; None for data without media."""
        if not self.most_patches:
            return None
        return max(self.most_patches, math.ceil(HEADROOM * self.mean * tokens))


@dataclass(slots=True)
class Tried:
    """Micro-batches that have been run, and the bytes that each rank needed at the most (None: more than it had).

    limits: bytes that each rank may use.
    """

    limits: tuple[int, ...]
    shapes: list[TriedShape] = field(default_factory=list)
    peaks: list[tuple[int | None, ...]] = field(default_factory=list)

    def add(self, shape: TriedShape, peaks: Sequence[int | None]) -> bool:
        """Returns whether it is within the limits of all ranks."""
        self.shapes.append(shape)
        self.peaks.append(tuple(peaks))
        return all(peak is not None and peak <= limit for peak, limit in zip(peaks, self.limits))

    def models(self) -> list[LinearBytes]:
        """Of each rank, by what has run there."""
        fits = []
        for rank in range(len(self.limits)):
            ran = [(shape, peaks[rank]) for shape, peaks in zip(self.shapes, self.peaks)]
            known = [(shape, peak) for shape, peak in ran if peak is not None]
            fits.append(fit([shape for shape, _ in known], [peak for _, peak in known]))
        return fits

    def holds(self, shape: TriedShape, models: Sequence[LinearBytes]) -> bool:
        """Whether `shape` should fit, and is no larger than what did not."""
        for failed, peaks in zip(self.shapes, self.peaks):
            is_too_much = any(peak is None or peak > limit for peak, limit in zip(peaks, self.limits))
            if is_too_much and shape.tokens >= failed.tokens and shape.patches >= failed.patches:
                return False
        return all(model.of(shape) <= limit for model, limit in zip(models, self.limits))


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of [low, high] that `holds`; low if none does. It holds for all below one that does."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def rounded(tokens: int, least: int) -> int:
    """Down to the grain, but not below `least`."""
    return max(tokens - tokens % GRAIN if tokens > 1024 else tokens, least)


# ----------------------------------------------------------------------------------------------------------------------
# `LiveBytes`: the bytes of tensors that live while a piece of code runs, real tensors and fake ones alike.
# torch hands every operator to a `TorchDispatchMode`; what an operator returns lives from then until its storage is
# deleted. So the peak is known operator by operator, also where nothing is computed (fake tensors). What a kernel
# needs within itself is not seen.

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


# ----------------------------------------------------------------------------------------------------------------------
# Peak memory of what a function does on a device: an accelerator's own figures, or those of `LiveBytes` on a CPU.


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


# ----------------------------------------------------------------------------------------------------------------------
# Bytes that an optimizer keeps of a weight.

ROWS, COLUMNS = 3, 5
"""Shape of the weight that an optimizer is tried with."""


@dataclass(frozen=True, slots=True)
class PerWeight:
    """Bytes of optimizer state for each element of a weight [rows, columns], each row, each column and each weight."""

    element: float
    row: float
    column: float
    weight: float

    def of(self, weights: Iterable[Tensor]) -> int:
        total = 0.0
        for one in weights:
            rows, columns = (one.shape[0], one.numel() // one.shape[0]) if one.dim() > 1 else (0, 0)
            total += one.numel() * self.element + rows * self.row + columns * self.column + self.weight
            if one.dim() <= 1 and self.row:  # what is factored is not for vectors
                total += one.numel() * 4
        return round(total)


def update_bytes(
    kind: Any, arguments: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PerWeight:
    """What an optimizer of this class keeps of a weight: by one update of a small one. Raises what the class raises."""
    weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=dtype, device=device))
    known = inspect.signature(kind.__init__).parameters
    optimizer = kind([weight], **{key: value for key, value in arguments.items() if key in known})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = {"element": 0.0, "row": 0.0, "column": 0.0, "weight": 0.0}
    for value in optimizer.state[weight].values():
        if not isinstance(value, Tensor):
            continue
        size = value.numel() * value.element_size()
        if value.numel() == weight.numel():
            found["element"] += size / value.numel()
        elif value.shape == (ROWS,):
            found["row"] += size / ROWS
        elif value.shape == (COLUMNS,):
            found["column"] += size / COLUMNS
        else:
            found["weight"] += size
    return PerWeight(**found)
