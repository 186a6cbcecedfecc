"""The states of all random number generators that a training draws from."""

from __future__ import annotations

import contextlib
import random
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
    """Undo whatever was drawn since `random_states(device)` returned `states`."""
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
    generator: torch.Generator | None = None,
) -> Iterator[None]:
    """Afterwards the generators, and `generator` if given, are as before, whatever was drawn within.

    states: what the generators are set to within (None: they stay as they are).
    """
    before, own = random_states(device), None if generator is None else generator.get_state()
    if states is not None:
        set_random_states(states, device)
    try:
        yield
    finally:
        set_random_states(before, device)
        if generator is not None and own is not None:
            generator.set_state(own)
