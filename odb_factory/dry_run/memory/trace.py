"""Forward and backward of a model, and how much memory its activations take at each of their phases."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_factory.errors import ConfigError
from odb_factory.memory.live_bytes import LiveBytes


@dataclass(frozen=True, slots=True)
class Phases:
    """Bytes beside weights, their gradients and the optimizer's state.

    saved: alive when the body of the model is done, before its head makes logits. body: at the peak of the body's
    forward and backward. logits: what head and loss take beyond `saved`, in forward and backward.
    """

    saved: int
    body: int
    logits: int

    @property
    def peak(self) -> int:
        return max(self.body, self.saved + self.logits)


def trace(model: Any, batch: dict[str, Any], dtype: torch.dtype | None = None) -> Phases:
    """One forward and backward. Weights that are trained have gradients already. dtype: of autocast; None: without.

    Raises `ConfigError` where the model has no head over a vocabulary.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            f"{type(model).__name__} does not say which of its modules makes logits (get_output_embeddings), so its "
            "memory cannot be estimated; leave out --memory."
        )
    memory, found = LiveBytes(), {"saved": 0, "logits": 0}

    def body_ends(module: Any, args: tuple[Any, ...]) -> None:
        found["forward"] = memory.restart_peak()
        found["saved"] = memory.live
        if isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(head_ends)

    def head_ends(gradient: Tensor) -> None:
        found["logits"] = memory.restart_peak() - found["saved"]

    hook = head.register_forward_pre_hook(body_ends)
    autocast: Any = contextlib.nullcontext()
    if dtype is not None:
        autocast = torch.autocast("cpu", dtype=dtype)
    try:
        with memory:
            for value in batch.values():
                if isinstance(value, Tensor):
                    memory.add(value)
            loss = _loss(model, batch, autocast, upcasts=dtype is not None)
            loss.backward()
    finally:
        hook.remove()
    if not found["logits"]:  # no gradient goes back into the body
        found["logits"] = memory.peak - found["saved"]
    return Phases(found["saved"], max(found["forward"], memory.peak if "forward" in found else 0), found["logits"])


def _loss(model: Any, batch: dict[str, Any], autocast: Any, *, upcasts: bool) -> Tensor:
    """As the Trainer has it: where it computes with autocast, outputs are handed on in float32."""
    from accelerate.utils import convert_outputs_to_fp32

    with autocast:
        forward = convert_outputs_to_fp32(model.forward) if upcasts else model
        loss: Tensor = forward(**batch)["loss"]
    return loss
