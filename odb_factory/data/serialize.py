"""Send objects to other processes: samples as bytes, batches, collators without weights. Fingerprints of rows."""

from __future__ import annotations

import copyreg
import functools
import io
import mmap
import os
import pickle
import socket
import types
import zlib
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from odb_factory.errors import ConfigError, one_line

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
