"""What travels to other processes: samples as bytes, collators without weights; and checksums of what rows say."""

from __future__ import annotations

import bisect
import contextlib
import copyreg
import dataclasses
import functools
import io
import pickle
import types
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np
import torch

from odb_factory.data.samples import Sample
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.planning import Cost, Media, Plan

# ----------------------------------------------------------------------------------------------------------------------
# Features of a sample as bytes: how they wait in the buffer, and how samples travel between ranks.
# Built-in values, arrays and numbers of numpy, tensors, paths and registered dataclasses are written as msgpack.
# Anything else is pickled, and then stays in this rank: what comes from another rank is never unpickled.

_PLAIN, _PICKLED = b"\0", b"\1"
_TUPLE, _ARRAY, _TENSOR, _DATACLASS, _PATH = range(1, 6)
_dataclasses: dict[str, type] = {}
T = TypeVar("T", bound=type)


def register_dataclass(kind: T) -> T:
    """Class decorator: instances of this dataclass, whose fields are plain values, may travel between ranks."""
    _dataclasses[kind.__name__] = kind
    return kind


def pack(features: Any) -> bytes:
    """Features, most often a mapping, as bytes, about a quarter of the memory that their lists take.

    Raises what pickle raises where it cannot write a value either; here, in the worker that made them, rather than in
    a queue where nobody sees it.
    """
    values = dict(features) if isinstance(features, Mapping) else features
    try:
        return _PLAIN + _write(values)
    except (TypeError, ValueError, OverflowError):
        pickled = io.BytesIO()
        _FeaturesPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(values)
        return _PICKLED + pickled.getvalue()


class _FeaturesPickler(pickle.Pickler):
    """Without what a tensor is a view of, which it would take along."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            not isinstance(obj, torch.Tensor)
            or obj.layout is not torch.strided
            or obj.untyped_storage().nbytes() <= obj.nbytes
        ):
            return NotImplemented
        return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Any:
    """Undo `pack`: a fresh copy of what the framework's collator expects, which it may change."""
    if packed[:1] == _PICKLED:
        return pickle.loads(packed[1:])
    return _read(packed[1:])


def sample_to_bytes(sample: Sample) -> bytes:
    """A sample for another rank. Raises `DataError` where its features hold what must not travel."""
    if sample.features[:1] == _PICKLED:
        raise DataError(
            f"row {sample.id} holds {', '.join(_not_plain(unpack(sample.features)))}, which cannot be sent to another "
            "rank; let items hold lists, strings, numbers, arrays, tensors or paths, or set `balance: false`"
        )
    return msgpack.packb([sample.id, dataclasses.astuple(sample.cost), sample.features])


def sample_from_bytes(received: bytes) -> Sample:
    """Undo `sample_to_bytes`. Raises `DataError` for bytes of another origin."""
    try:
        sample_id, cost, features = msgpack.unpackb(received)
        cost[-1] = cost[-1] and Media(*cost[-1])
        sample = Sample(sample_id, Cost(*cost), features)
    except (TypeError, ValueError, msgpack.UnpackException):
        features = b""
    if features[:1] != _PLAIN:
        raise DataError("a sample from another rank is damaged; look for other versions of odb_factory among the ranks")
    return sample


def redistribute(
    plan: Plan,
    ranks: range,
    rank: int,
    held: Sequence[Sample],
    swap: Callable[[Mapping[int, bytes], Sequence[int]], Mapping[int, bytes]],
) -> dict[int, Sample]:
    """The samples that this rank has for the plan, by their number in it.

    ranks: those that the plan is for. held: the samples in this rank's buffer. swap: as `Ranks.swap`.
    These ranks know the plan, so what travels needs no address: the samples for a rank are in the order in which it
    takes them. All ranks call it, and nothing is sent to a rank that gets no sample.
    """
    here = rank - ranks.start
    start, end = plan.starts[here : here + 2]
    samples = dict(enumerate(held, start))
    given = {}
    for taker, groups in zip(ranks, plan.groups):
        mine = [row for group in groups for row in group if taker != rank and start <= row < end]
        if mine:
            given[taker] = msgpack.packb([sample_to_bytes(samples[row]) for row in mine])
    wanted = [
        (row, ranks[bisect.bisect_right(plan.starts, row) - 1])
        for group in plan.groups[here]
        for row in group
        if not start <= row < end
    ]
    sources = sorted({owner for _, owner in wanted})
    if plan.moves:  # all ranks know it, and make the same calls
        received = {owner: iter(msgpack.unpackb(text)) for owner, text in swap(given, sources).items()}
        samples |= {row: sample_from_bytes(next(received[owner])) for row, owner in wanted}
    return samples


def _extended(value: Any) -> msgpack.ExtType:
    """What msgpack has no type for. Raises TypeError for what only pickle can write."""
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _write(list(value)))
    if kind is np.ndarray and value.dtype.kind not in "OV":
        return msgpack.ExtType(_ARRAY, _write([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.bool_ | np.number):
        return msgpack.ExtType(_ARRAY, _write([value.dtype.str, None, value.tobytes()]))
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, _write(str(value)))
    if (
        kind is torch.Tensor
        and value.layout is torch.strided
        and not value.requires_grad
        and value.device.type == "cpu"
    ):
        data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return msgpack.ExtType(_TENSOR, _write([str(value.dtype).removeprefix("torch."), list(value.shape), data]))
    if _dataclasses.get(kind.__name__) is kind:
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return msgpack.ExtType(_DATACLASS, _write([kind.__name__, fields]))
    raise TypeError(f"{kind.__name__} is not plain")


def _restored(code: int, data: bytes) -> Any:
    content = _read(data)
    if code == _TUPLE:
        return tuple(content)
    if code == _ARRAY:
        dtype, shape, values = content
        array = np.frombuffer(bytearray(values), dtype=dtype)
        return array[0] if shape is None else array.reshape(shape)
    if code == _TENSOR:
        name, shape, values = content
        flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, name)).reshape(shape)
    if code == _PATH:
        return Path(content)
    if code == _DATACLASS and content[0] in _dataclasses:
        return _dataclasses[content[0]](*content[1])
    raise DataError(f"features of an unknown kind ({code}); look for other versions of odb_factory among the ranks")


def _write(value: Any) -> bytes:
    return msgpack.packb(value, default=_extended, strict_types=True)


def _read(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def _not_plain(features: Any) -> list[str]:
    """`key (type)` of each feature that is not plain."""
    if not isinstance(features, Mapping):
        return [f"a {type(features).__name__}"]
    found = []
    for key, value in features.items():
        try:
            _write(value)
        except (TypeError, ValueError, OverflowError):
            found.append(f"{key} ({type(value).__name__})")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Send a collator to a worker process that is not forked, without the weights of a model it holds.
# LLaMA-Factory's collator holds the model, for its config and its `get_rope_index`. Pickled unchanged, every worker
# would get a copy of all weights. So each module is sent with tensors of torch's device "meta" in their place: code
# that needs only the config works as before, and code that needs a weight raises.

NOT_SENT = (
    "cannot be sent to a worker process, as the start methods 'spawn' and 'forkserver' require ({}); make it "
    "picklable, choose 'fork' (multiprocessing.set_start_method), or use no workers (num_workers and "
    "collate_workers 0)."
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class Picklable:
    """A callable that can be sent to a worker of any start method; there it is the plain callable again.

    Attributes and calls go to `inner`. role: its name in messages. A model in it is pickled once: engines that wrap the
    model later on (FSDP, DeepSpeed) make it unpicklable. Sending raises `ConfigError` if `inner` cannot be pickled.
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
    """Pickles modules without their weights: classes, submodules, attributes; tensors as "meta", functions as
    `_NotSent`. models: the pickles of modules that were sent before, by their id; None within a module."""

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
        state = {name: _NotSent(name) if isinstance(value, _FUNCTIONS) else value for name, value in state.items()}
        state |= blank | {name: dict(vars(obj)[name]) for name in ("_parameters", "_buffers", "_modules")}
        return copyreg.__newobj__, (type(obj),), {**state, "training": obj.training}  # type: ignore[attr-defined]


class _NotSent:
    """Stands for a function that was set on a module; raises if it is called."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name} of the model is not there in a worker process that is not forked")


def _meta(is_parameter: bool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


# ----------------------------------------------------------------------------------------------------------------------
# What rows say, as a number: to notice that training data have changed, or differ between ranks.


def checksum(features: Any, cost: Cost) -> int:
    """32 bits, never 0, of a row's cost, token ids and labels: the same in every process and version.

    For a pair: of both answers. Media are not read: a picture replaced by another one of the same size goes unnoticed.
    """
    named = features if isinstance(features, Mapping) else {}
    tokens = {key: value for key, value in named.items() if str(key).endswith(("input_ids", "labels"))}
    return fingerprint([dataclasses.astuple(cost), tokens], floats=True) or 1


def fingerprint(value: Any, before: int = 0, *, floats: bool = False) -> int:
    """CRC-32 of the text and numbers in `value`, whatever container holds them.

    Floating-point numbers, which augmentation may change, count with `floats` only; else, like objects of other kinds,
    by their type.

        >>> fingerprint([{"input_ids": [1, 2]}]) == fingerprint([{"input_ids": [1, 3]}])
        False
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            before = fingerprint(value[key], fingerprint(key, before), floats=floats)
        return _add(f"{len(value)} keys", before)
    if isinstance(value, str | bool | int | None) or (floats and isinstance(value, float)):
        return _add(repr(value), before)
    if isinstance(value, bytes):
        return zlib.crc32(value, before)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype != torch.bfloat16:
        value = value.detach().numpy()
    if isinstance(value, np.ndarray | np.generic):
        kind, before = value.dtype.kind, _add(str(value.shape), before)
        if kind in "biu" or (floats and kind == "f"):
            value = value.astype("<f8" if kind == "f" else "<i8")
        if kind in "biuSU" or (floats and kind == "f"):
            return zlib.crc32(np.ascontiguousarray(value).tobytes(), before)
    if isinstance(value, list | tuple):
        if value and type(value[0]) is int:
            with contextlib.suppress(TypeError, OverflowError):  # the usual case, faster, and as an array counts
                return zlib.crc32(array("q", value).tobytes(), _add(f"({len(value)},)", before))
        for one in value:
            before = fingerprint(one, before, floats=floats)
        return _add(f"{len(value)} items", before)
    return _add(type(value).__name__, before)


def _add(text: str, before: int) -> int:
    return zlib.crc32(text.encode(errors="surrogatepass"), before)
