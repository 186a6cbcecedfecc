"""The objects that travel through the loader: light samples, micro-batches of optimizer steps, rows left out."""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import mmap
import os
import pickle
import socket
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import Budget, Cost, Media, MicroStepTotals


@dataclass(slots=True)
class Sample:
    """One observed row: its index in the training dataset, its cost and its light features (see `pack`)."""

    id: int
    cost: Cost
    features: bytes


@dataclass(slots=True)
class Rejection:
    """A row left out when it is observed, before any plan. fatal: the training stops with `message`."""

    id: int
    reason: str
    message: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """The rest of the order of an epoch with `fill`: the positions from `first` on, and earlier positions held back.

    Rank p % ranks draws position p, and draws its held positions first. (With split streams, item n of rank r has the
    position n * ranks + r.)
    """

    first: int = 0
    held: list[int] = field(default_factory=list)

    def of_ranks(self, world_size: int) -> tuple[list[np.ndarray], np.ndarray]:
        """For each rank its held positions, and its first position from `first` on."""
        held, ranks = np.array(self.held, dtype=np.int64), np.arange(world_size)
        owners = held % world_size
        ends = np.cumsum(np.bincount(owners, minlength=world_size))
        held_by_rank = np.split(held[np.argsort(owners, kind="stable")], ends[:-1])
        return held_by_rank, self.first + (ranks - self.first) % world_size

    def positions(self, rank: int, world_size: int) -> Iterator[int]:
        """The positions that a rank draws, in ascending order, without end."""
        held, firsts = self.of_ranks(world_size)
        return itertools.chain(held[rank].tolist(), itertools.count(int(firsts[rank]), world_size))

    def after(self, drawn: np.ndarray, waiting: np.ndarray) -> Remaining:
        """The rest after each rank has drawn `drawn` of its positions (int[ranks]); `waiting`: not trained on yet."""
        world_size = len(drawn)
        held, starts = self.of_ranks(world_size)
        num_beyond = np.maximum(drawn - [len(positions) for positions in held], 0)
        nexts = starts + num_beyond * world_size
        first = max(self.first, int((nexts - world_size + 1)[num_beyond > 0].max(initial=0)))
        # A rank that is slower than others has not drawn all positions before `first`.
        slower = [positions[number:] for positions, number in zip(held, drawn)]
        slower += [np.arange(start, first, world_size) for start in nexts]
        remaining = np.unique(np.concatenate([waiting, *slower]))
        return Remaining(first=first, held=remaining.astype(np.int64).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep(MicroStepTotals):
    """One update of the weights, known to every rank before its first forward: the totals over its micro-steps, and its
    place in the epoch.

    index: number of the optimizer step in its epoch, from 0.
    num_micro_batches: K, the micro-batches of each rank. active_ranks: micro-batches of all ranks that are not idle.
    num_stock_means: stock divides the sum of its means by this number (with `fill` 0: no stock step to compare with).
    stock_input_tokens: padded tokens of the batches that stock would give this rank; None with `fill`.
    done: samples of the epoch planned or rejected on all ranks up to the end of this step.
    progress: share of the epoch (0 to 1) up to the end of this step, in stock's micro-steps; None if unknown.
    rejected: rows of the epoch rejected on all ranks until this step was planned, by reason.
    overlong: samples of the epoch, observed on all ranks until this step was planned, that break a budget alone.
    remainder: in the last step, rows that the epoch leaves out (`join: false`, `drop_last`); 0 before.
    epoch_steps: optimizer steps of the epoch: exact with kept steps of a dataset with a length (and in the last step),
        else estimated; 0 if unknown.
    last: no step follows in this epoch.
    remaining: with `fill`, the rest of the order after this step.
    """

    epoch: int
    index: int
    num_micro_batches: int
    num_stock_means: float
    stock_input_tokens: int | None
    done: int
    progress: float | None
    rejected: Counter[str]
    overlong: int
    remainder: int
    epoch_steps: int
    last: bool
    remaining: Remaining | None = None


class SampleInfo(NamedTuple):
    """A sample of a micro-batch without its features.

    id: row of the training dataset. tokens: without padding.
    stock_units: the divisor of the mean in stock that the sample is part of; stock_counted: the sample's share of this
    divisor. stock_batch: number of stock's micro-batch, counted rank by rank, then micro-step by micro-step. All 0 with
    `fill`.
    weight: of each unit of the sample in the loss of its optimizer step (see `token_weights`).
    """

    id: int
    tokens: int
    units: int
    stock_units: int = 0
    stock_counted: int = 0
    stock_batch: int = 0
    weight: float = 0.0

    @classmethod
    def of(cls, sample: Sample, *of_stock: int) -> SampleInfo:
        return cls(sample.id, sample.cost.tokens, sample.cost.units, *of_stock)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward of this rank.

    step: the optimizer step. index: number of the micro-batch in the optimizer step, from 0.
    samples: in batch order; empty if the micro-batch is idle.
    totals: the micro-step over all ranks.
    light: the light samples to collate; of an idle micro-batch the sample that is run with weight 0. Empty after the
        micro-batch was collated, unless it may be collated again.
    failed: late rows: planned for this micro-batch, but not in it, and why.
    start: of a part that was cut off (`oom: split`), the number of its first sample in the whole micro-batch.
    """

    step: OptimizerStep
    index: int
    samples: tuple[SampleInfo, ...]
    totals: MicroStepTotals
    light: Sequence[Sample] = field(default=(), repr=False, compare=False)
    failed: tuple[tuple[SampleInfo, str], ...] = ()
    start: int = 0

    def only(self, numbers: Sequence[int], failed: tuple[tuple[SampleInfo, str], ...] = ()) -> MicroBatch:
        """The micro-batch with only the samples of these numbers; their weights and the totals stay."""
        samples, light = tuple(self.samples[i] for i in numbers), [self.light[i] for i in numbers]
        return replace(self, samples=samples, light=light, failed=failed)

    def cut(self, at: int) -> tuple[MicroBatch, MicroBatch]:
        """Two parts, the second from sample number `at` on."""
        first, second = self.only(range(at)), self.only(range(at, len(self.samples)))
        return first, replace(second, start=self.start + at)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(sample.id for sample in self.samples)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(sample.tokens for sample in self.samples)

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(sample.units for sample in self.samples)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(sample.weight for sample in self.samples)

    @property
    def idle(self) -> bool:
        return not self.samples

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_units(self) -> int:
        return sum(self.units)

    @property
    def begins_optimizer_step(self) -> bool:
        return self.index == self.start == 0

    @property
    def ends_optimizer_step(self) -> bool:
        return self.index == self.step.num_micro_batches - 1


# The weight of every unit within its optimizer step (I8, I9), by `loss_scaling`:
#     stock     1 / (num_stock_means x stock_units of the sample)     as in stock training
#     exact     1 / (units of the step)     the mean over the units of the step
#     approx    as exact, with the micro-batch's share of the step's input tokens in place of its units
#     none      1 / (micro-batches of all ranks x units of this micro-batch)     the mean of micro-batch means
# The plan has all sums, so no communication is needed.


def token_weights(micro_batch: MicroBatch, loss_scaling: str, world_size: int) -> tuple[float, ...]:
    """The weight of each unit, times `world_size`, for each sample of a planned micro-batch; () if it is idle.

    world_size: data-parallel ranks. The engine averages gradients over ranks, and sums them over micro-batches.
    """
    samples, step = micro_batch.samples, micro_batch.step
    if not samples:
        return ()
    match loss_scaling:
        case "stock":
            return tuple(world_size / (step.num_stock_means * sample.stock_units or 1) for sample in samples)
        case "exact":
            divisor: float = step.units
        case "approx":
            divisor = step.tokens * micro_batch.num_units / micro_batch.tokens
        case _:
            divisor = step.active_ranks * micro_batch.num_units
    return (world_size / (divisor or 1),) * len(samples)


@dataclass(frozen=True, slots=True)
class Measured:
    """The size of a collated micro-batch: rows, padded row length (tokens), media, units (see `Cost`).

    segments: lengths (tokens) of the parts of a flat row: the samples, in the order of `ids`, then dummy media and
        filler; () if the micro-batch is padded.
    units_by_row: units of each row, or of each segment of a flat row, if units are labels that carry loss.
    why_padded: why the micro-batch is not the flat row that was planned; "" otherwise.
    """

    rows: int
    length: int
    media: Media
    units: int
    segments: tuple[int, ...] = ()
    units_by_row: tuple[int, ...] | None = None
    why_padded: str = ""

    @property
    def patches(self) -> int:
        return self.media.patches

    @property
    def num_supervised(self) -> int | None:
        """Tokens with a loss; None if units are not tokens."""
        return None if self.units_by_row is None else self.units

    def __str__(self) -> str:
        return describe_cost(self.rows * self.length, self.media)

    def is_within(self, budget: Budget) -> bool:
        """Whether the micro-batch is within `budget` as configured, not as lowered to what memory holds."""
        return not budget.excess(self.rows * self.length, self.patches)


def describe_cost(tokens: int, media: Media) -> str:
    """The size of a sample or a micro-batch for messages: `900 tokens, 400 image patches, 3000 audio frames`."""
    return f"{tokens} tokens, {media}" if any(media) else f"{tokens} tokens"


# Rows that are left out. A row is rejected when it is observed, before a plan, or it fails after it was planned: it
# cannot be collated, or memory does not hold its micro-batch. A row that fails after its optimizer step began is late:
# the other samples keep their weights, and the row's share of the loss is lost.

MAX_LOGGED, MAX_NAMED = 10, 16
"""Rows that are logged, and rows that a message names."""
COLLATION, OUT_OF_MEMORY = "collation", "out_of_memory"
"""Reasons of rows that fail."""
HINTS = {"unsupervised": " (no token carries loss; cutoff_len may cut the answers off, and nothing would be learned)"}

logger = get_logger(__name__)


class LeftOut:
    """Logs the first rows that this rank leaves out; the accounting counts those of all ranks."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def leave_out(self, reason: str, message: str) -> None:
        """Leave a row out. Any thread."""
        number = next(self._numbers)
        if number <= MAX_LOGGED:
            logger.warning("left out (%s): %s", reason, message)
        if number == MAX_LOGGED:
            logger.warning("further rows that are left out are counted and not logged")


def name_rows(ids: Sequence[int]) -> str:
    """Rows for messages, at most `MAX_NAMED`: `row 3`, `rows 1, 2, ...`."""
    ellipsis = ", ..." if len(ids) > MAX_NAMED else ""
    return f"row{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:MAX_NAMED]))}{ellipsis}"


def no_usable_row(rejected: Mapping[str, int], other_reasons: Sequence[str] = (), empty: str = "it is empty") -> str:
    """Why no row can be trained on. rejected: rows by reason. empty: the message if there is no reason at all."""
    reasons = [f"{count} {reason}{HINTS.get(reason, '')}" for reason, count in rejected.items()]
    named = "; the warnings above name the first of them" if rejected else ""
    return f"no row of the training dataset can be trained on: {', '.join([*reasons, *other_reasons]) or empty}{named}."


# Send objects to other processes: samples as bytes, batches, collators without weights. Fingerprints of rows.

# The features of a sample as bytes: so they wait until they are collated, and so they travel between ranks.
# Pickle writes 3 bytes for a token id of a list; an array of int32 would take 4 and is not faster.


def pack(features: Any) -> bytes:
    """Features, usually a mapping, as bytes: a quarter of the memory of their lists. Raises the errors of pickle."""
    pickled, plain = io.BytesIO(), dict(features) if isinstance(features, Mapping) else features
    _FeaturesPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(plain)
    return pickled.getvalue()


def reduce_tensor(obj: Any) -> Any:
    """Pickle only the numbers of a tensor: not the tensor it is a view of, nor in torch's format, which is slower."""
    if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.layout is not torch.strided:
        return NotImplemented
    if obj.is_quantized or obj.requires_grad or not obj.numel():
        return NotImplemented
    plain: Any = obj.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(plain), obj.dtype, tuple(obj.shape))


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


class _FeaturesPickler(pickle.Pickler):
    reducer_override = staticmethod(reduce_tensor)


def unpack(packed: bytes) -> Any:
    """Undo `pack`: a fresh copy, which the collator may change."""
    return pickle.loads(packed)


# An object for another process, with its tensors and arrays in one anonymous file in memory.
# torch makes a file for each tensor, and the receiver requests it from a thread of the sender in several messages; a
# sender that computes answers late. Here the file of a batch is sent at once, over a socket that both processes have
# from the beginning. An anonymous file vanishes with its processes, and the limit of /dev/shm does not apply to it.

ALIGNMENT = 64
"""Bytes; a multiple of the size of every dtype."""
Dumped = tuple[bytes, tuple[int, ...]]
"""The pickled object without its buffers, and the size of each buffer in the file (bytes)."""


def dump(value: Any, connection: socket.socket) -> Dumped:
    """Pickle `value` and send the file with its tensors over `connection`. Raises the errors of pickle."""
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _BatchPickler(pickled, pickle.HIGHEST_PROTOCOL, True, buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    if raw:
        file = os.memfd_create("odb-batch")
        try:
            with open(file, "wb", closefd=False) as stream:
                for view in raw:
                    stream.write(view)
                    stream.write(bytes(-view.nbytes % ALIGNMENT))
            socket.send_fds(connection, [b"f"], [file])
        finally:
            os.close(file)
    return pickled.getvalue(), tuple(view.nbytes for view in raw)


def load(dumped: Dumped, connection: socket.socket) -> Any:
    """Undo `dump`, in the order of its calls. The tensors are in the memory of the file, which lives as long as they
    do and belongs to this process alone."""
    pickled, sizes = dumped
    buffers, start = [], 0
    if sizes:
        file = socket.recv_fds(connection, 1, 1)[1][0]
        try:
            memory = memoryview(mmap.mmap(file, 0))
        finally:
            os.close(file)
        for size in sizes:
            buffers.append(memory[start : start + size])
            start += size + -size % ALIGNMENT
    return pickle.loads(pickled, buffers=buffers)


class _BatchPickler(ForkingPickler):
    reducer_override = staticmethod(reduce_tensor)


# Send a collator to a worker process that is not forked, without the weights of its model.
# LLaMA-Factory's collator holds the model, for its config and its `get_rope_index`, and pickle would copy all weights
# to every worker. So each module is sent with tensors on torch's device "meta": code that needs only the config works
# as before, and code that needs a weight raises.

NOT_SENT = (
    "cannot be sent to a worker process, as the start methods 'spawn' and 'forkserver' require ({}); make it "
    "picklable, choose 'fork' (multiprocessing.set_start_method), or use num_workers 0."
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Picklable:
    """A callable that can be sent to a worker of any start method; the worker receives `inner` itself.

    Attributes and calls go to `inner`. role: the name of `inner` in messages. A model in it is pickled once: engines
    that wrap the model later (FSDP, DeepSpeed) make it unpicklable. Sending raises `ConfigError` if `inner` cannot be
    pickled.
    """

    def __init__(self, inner: Callable[..., Any], role: str):
        self.inner, self.role = inner, role
        self._models: dict[int, bytes] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._models).dump(self.inner)
        except Exception as error:
            raise ConfigError(f"{self.role}: {type(self.inner).__name__} {NOT_SENT.format(one_line(error))}") from None
        return pickle.loads, (buffer.getvalue(),)


class _Pickler(ForkingPickler):
    """Pickles modules with their classes, submodules and attributes, tensors on device "meta", and without functions
    that were set on them. models: pickles of modules that were sent before, by their id; None within a module."""

    def __init__(self, file: io.BytesIO, models: dict[int, bytes] | None = None):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._models = models

    def reducer_override(self, obj: Any) -> Any:
        if self._models is None and isinstance(obj, torch.Tensor):
            return _meta, (type(obj) is torch.nn.Parameter, tuple(obj.shape), obj.dtype)
        if not isinstance(obj, torch.nn.Module):
            return NotImplemented
        if self._models is not None:
            if id(obj) not in self._models:
                buffer = io.BytesIO()
                _Pickler(buffer).dump(obj)
                self._models[id(obj)] = buffer.getvalue()
            return pickle.loads, (self._models[id(obj)],)
        # Hooks belong to the trainer of the model, functions are often closures of an engine.
        blank = vars(torch.nn.Module())
        state = {name: value for name, value in vars(obj).items() if name not in blank}
        state = {name: value for name, value in state.items() if not isinstance(value, _FUNCTIONS)}
        state |= blank | {name: dict(vars(obj)[name]) for name in ("_parameters", "_buffers", "_modules")}
        return copyreg.__newobj__, (type(obj),), {**state, "training": obj.training}  # type: ignore[attr-defined]


def _meta(is_parameter: bool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


# The content of rows as a number: to notice that the data of ranks differ.


def fingerprint(value: Any, before: int = 0) -> int:
    """CRC-32 of the text and whole numbers in `value`, whatever containers hold them. Only the type counts of anything
    else: of objects, and of floating-point numbers, which augmentation may change. before: CRC-32 of the values before.

        >>> fingerprint([{"input_ids": [1, 2]}]) == fingerprint([{"input_ids": [1, 3]}])
        False
    """
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=lambda item: repr(item[0]))
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biu":
        value = [list(value.shape), value.astype("<i8").tobytes()]
    is_plain = isinstance(value, str | bytes | int | None)
    if isinstance(value, list | tuple):
        is_plain = all(type(item) is int for item in value)  # at once, which is faster
        if not is_plain:
            for item in value:
                before = fingerprint(item, before)
    text = repr(value) if is_plain else type(value).__name__
    return zlib.crc32(text.encode(errors="surrogatepass"), before)
