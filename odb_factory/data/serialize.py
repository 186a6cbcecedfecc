"""What is sent to other processes: samples as bytes, collators without weights; and fingerprints of rows."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from odb_factory.errors import ConfigError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# Features of a sample as bytes: how they wait until they are collated, and how samples travel between ranks.
# A list of token ids as pickle writes it takes 3 bytes an id, an array of int32 4, and neither is faster.


def pack(features: Any) -> bytes:
    """Features, most often a mapping, as bytes, about a quarter of the memory that their lists take.

    Raises what pickle raises, in the worker that made them.
    """
    pickled = io.BytesIO()
    _FeaturesPickler(pickled, pickle.HIGHEST_PROTOCOL).dump(
        dict(features) if isinstance(features, Mapping) else features
    )
    return pickled.getvalue()


class _FeaturesPickler(pickle.Pickler):
    """A tensor is its numbers: not the tensor that it is a view of, nor torch's file format, which is slower."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.device.type != "cpu" or obj.layout is not torch.strided:
            return NotImplemented
        if obj.is_quantized or obj.requires_grad or not obj.numel():
            return NotImplemented
        plain = obj.resolve_conj().resolve_neg().contiguous()
        return _tensor, (plain.flatten().view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def unpack(packed: bytes) -> Any:
    """Undo `pack`: a fresh copy of what the framework's collator expects, which it may change."""
    return pickle.loads(packed)


# ----------------------------------------------------------------------------------------------------------------------
# Send a collator to a worker process that is not forked, without the weights of a model it holds.
# LLaMA-Factory's collator holds the model, for its config and its `get_rope_index`. Pickled unchanged, every worker
# would get a copy of all weights, and engines that wrap the model later (FSDP, DeepSpeed) make it unpicklable. So a
# model of transformers is sent as its class and config: code that needs a weight raises, on torch's device "meta".

NOT_SENT = (
    "cannot be sent to a worker process, as the start methods 'spawn' and 'forkserver' require ({}); make it "
    "picklable, choose 'fork' (multiprocessing.set_start_method), or use num_workers 0."
)


class Picklable:
    """A callable that can be sent to a worker of any start method; there it is the plain callable again.

    Attributes and calls go to `inner`. role: its name in messages. Sending raises `ConfigError` if `inner` cannot be
    pickled.
    """

    def __init__(self, inner: Callable[..., Any], role: str):
        self.inner, self.role = inner, role

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(self.inner)
        except Exception as error:
            raise ConfigError(f"{self.role}: {type(self.inner).__name__} {NOT_SENT.format(one_line(error))}") from None
        return pickle.loads, (buffer.getvalue(),)


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module):
            return NotImplemented
        model: Any = getattr(obj, "get_base_model", lambda: obj)()  # PEFT's
        if not hasattr(model, "config"):
            return NotImplemented
        # FSDP2 puts a class of its own in the place of the model's.
        kind = next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
        return _without_weights, (kind, model.config)


def _without_weights(kind: Callable[[Any], torch.nn.Module], config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return kind(config)


# ----------------------------------------------------------------------------------------------------------------------
# What rows say, as a number: to notice that the data of ranks differ.


def fingerprint(value: Any, before: int = 0) -> int:
    """CRC-32 of the text and whole numbers in `value`, whatever containers hold them; of anything else (objects, and
    floating-point numbers, which augmentation may change) the type counts.

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
        is_plain = all(type(one) is int for one in value)  # at once, which is faster
        if not is_plain:
            for one in value:
                before = fingerprint(one, before)
    text = repr(value) if is_plain else type(value).__name__
    return zlib.crc32(text.encode(errors="surrogatepass"), before)
