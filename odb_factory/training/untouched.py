"""A training that has not begun, as it was before micro-batches were tried on it."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

ACCUMULATION = "current_gradient_accumulation_steps"
"""What a loss is divided by; the Trainer's loop says it when it asks for the first batch."""
METRICS = "_stored_metrics"
"""Where trl's trainers of preferences collect what they log."""


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards gradients, buffers, modes of modules and random numbers are as they were.

    Weights and the optimizer are what nobody in it changes. What is tried must have gradients of zero: where an engine
    keeps them to itself (DeepSpeed), they stay there and add nothing.
    """
    model = trainer.model_wrapped
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    # DDP: whether the next forward brings the buffers of rank 0 to all.
    synced = getattr(model, "require_forward_param_sync", None)
    metrics = copy.deepcopy(getattr(trainer, METRICS, None))
    syncs_gradients = trainer.accelerator.sync_gradients
    numbers = random_states(trainer.args.device)
    attributes = set(vars(trainer))
    trainer.__dict__.setdefault(ACCUMULATION, 1)
    try:
        yield
    finally:
        for parameter in without:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes:
            module.training = training
        if synced is not None:
            model.require_forward_param_sync = synced
        if metrics is not None:
            setattr(trainer, METRICS, metrics)
        for name in set(vars(trainer)) - attributes:
            delattr(trainer, name)
        trainer.accelerator.sync_gradients = syncs_gradients
        set_random_states(trainer.args.device, numbers)


def random_states(device: torch.device) -> tuple[Any, ...]:
    """States of the random numbers of Python, numpy, torch on the CPU, and torch on `device`."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own


def set_random_states(device: torch.device, states: tuple[Any, ...]) -> None:
    python, numpy, cpu, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if own is not None:
        torch.get_device_module(device).set_rng_state(own, device)
