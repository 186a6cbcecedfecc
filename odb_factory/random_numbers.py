"""States of all random number generators that a training uses."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device | None = None) -> tuple[Any, ...]:
    """States of the generators of Python, numpy, torch on the CPU, and torch on `device`."""
    on_device = None
    if device is not None and device.type != "cpu":
        on_device = torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def set_random_states(states: tuple[Any, ...], device: torch.device | None = None) -> None:
    """Set the generators to `states`, which `random_states(device)` returned."""
    python, numpy, cpu, on_device = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)


@contextlib.contextmanager
def kept_random_numbers(
    device: torch.device | None = None,
    *,
    states: tuple[Any, ...] | None = None,
) -> Iterator[None]:
    """Restore the generators at the end. states: states of the generators within (None: unchanged)."""
    before = random_states(device)
    if states is not None:
        set_random_states(states, device)
    try:
        yield
    finally:
        set_random_states(before, device)


def random_seed(*key: int) -> int:
    """A seed (0 to 2**63 - 1) derived from these numbers, independent of the seeds of other numbers."""
    return _words(key)[0] >> 1


def seed_random_numbers(*key: int) -> None:
    """Seed the generators of Python, numpy, and torch on the CPU with seeds derived from these numbers."""
    words = _words(key)
    random.seed(words[1])
    np.random.seed(words[2] & 0xFFFFFFFF)
    torch.default_generator.manual_seed(words[0] >> 1)  # torch.manual_seed looks for devices


def _words(key: tuple[int, ...]) -> tuple[int, ...]:
    return struct.unpack("3Q", hashlib.blake2b(repr(key).encode(), digest_size=24).digest())
