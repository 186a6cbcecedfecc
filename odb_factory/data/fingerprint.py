"""A checksum of what items say, to tell whether two ranks read the same."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any, before: int = 0) -> int:
    """CRC-32 of the text, whole numbers and arrays of whole numbers in `value`, whatever holds them.

    Floating-point numbers, which augmentation may change, and objects of other kinds count by their type alone.

        >>> fingerprint([{"input_ids": [1, 2]}]) == fingerprint([{"input_ids": [1, 3]}])
        False
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            before = fingerprint(value[key], fingerprint(key, before))
        return _add(f"{len(value)} keys", before)
    if isinstance(value, str | bool | int | None):
        return _add(repr(value), before)
    if isinstance(value, bytes):
        return zlib.crc32(value, before)
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype != torch.bfloat16:
        value = value.detach().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuSU":
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), _add(str(value.shape), before))
    if isinstance(value, list | tuple):
        if all(type(one) is int for one in value):
            return _add(repr(value), before)
        for one in value:
            before = fingerprint(one, before)
        return _add(f"{len(value)} items", before)
    return _add(type(value).__name__, before)


def of_rows(dataset: Any) -> object:
    """What the first and the last row of a dataset with an index say, for ranks to compare; None if that is random.

    A row that reads differently the second time (augmentation, masks drawn at random) says nothing about the data.
    """
    try:
        with same_random_numbers():
            first, again, last = (fingerprint(dataset[index]) for index in (0, 0, len(dataset) - 1))
    except Exception as error:  # the loader reports what cannot be read
        return type(error).__name__
    return [first, last] if first == again else None


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Reading rows in here leaves the random numbers that come after as they are."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _add(text: str, before: int) -> int:
    return zlib.crc32(text.encode(errors="surrogatepass"), before)
