"""Bytes of weights, gradients and optimizer state on a rank, under the engine that a training names.

| engine | weights | gradients | optimizer state |
|---|---|---|---|
| one process | all | of what is trained | of the optimizer |
| DDP | all | twice: the buckets are copies | of the optimizer |
| ZeRO-1 | all, in the dtype of the training | of what is trained | float32 weights of its own and state, a share |
| ZeRO-2 | as ZeRO-1 | a share, and buckets | a share |
| ZeRO-3 | a share, and those gathered at a time | a share, and buckets | a share |
| FSDP | a share, and two layers gathered | a share, and a layer | a share |

What is offloaded takes nothing. Rajbhandari et al. 2020 (ZeRO) for the shares.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odb_factory.errors import ConfigError, one_line

ROWS, COLUMNS = 3, 5
"""Of the weight that an optimizer is tried with."""
BUCKET = 500_000_000
"""Elements of DeepSpeed's communication buckets, where a config does not say (or says auto)."""
LIVE = 1_000_000_000
"""Elements of weights that ZeRO-3 keeps gathered, likewise."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    parameters: int
    gradients: int
    optimizer_state: int


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


def optimizer_bytes(training: Any, dtype: torch.dtype) -> PerWeight:
    """What the optimizer of `training` keeps of a weight of `dtype`: by one update of a small one."""
    from transformers import Trainer

    try:
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(training)
        return update_bytes(kind, arguments, dtype)
    except Exception as error:
        raise ConfigError(
            f"optim: {training.optim} cannot be tried without an accelerator ({one_line(error)}), so its memory is not "
            "known; leave out --memory."
        ) from error


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


def state_bytes(model: Any, training: Any, ranks: int) -> StateBytes:
    """Of each of `ranks` data-parallel ranks. training: LLaMA-Factory's training arguments."""
    weights = list(model.parameters())
    trained = [one for one in weights if one.requires_grad]
    if training.deepspeed is not None:
        return _deepspeed(weights, trained, training, ranks)
    per_weight = optimizer_bytes(training, trained[0].dtype)
    plain = StateBytes(_size(weights), _size(trained), per_weight.of(trained))
    if getattr(training, "fsdp", None):
        return _fsdp(model, plain, training, ranks)
    return plain if ranks == 1 else dataclasses.replace(plain, gradients=2 * plain.gradients)


def _deepspeed(weights: list[Tensor], trained: list[Tensor], training: Any, ranks: int) -> StateBytes:
    zero = _config(training.deepspeed).get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    number = sum(one.numel() for one in trained)
    size = trained[0].element_size()
    share = ranks if stage else 1
    # In half precision, and with ZeRO always, it updates float32 weights of its own.
    own = 4 * number if stage or size < 4 else 0
    state = (own + optimizer_bytes(training, torch.float32).of(trained)) // share
    gradients, parameters = number * size, _size(weights)
    bucket = min(_number(zero, "reduce_bucket_size", BUCKET), number) * size * (2 if zero.get("overlap_comm") else 1)
    if stage >= 2:
        gradients = gradients // ranks + bucket
    if stage == 3:
        live = min(_number(zero, "stage3_max_live_parameters", LIVE), sum(one.numel() for one in weights))
        parameters = (0 if _offloads(zero, "offload_param") else parameters // ranks) + live * size
    if _offloads(zero, "offload_optimizer"):
        state = 0
        gradients = bucket if stage >= 2 else gradients
    return StateBytes(parameters, gradients, state)


def _fsdp(model: Any, plain: StateBytes, training: Any, ranks: int) -> StateBytes:
    kinds = {str(one) for one in training.fsdp}
    if any("offload" in kind for kind in kinds):
        raise ConfigError("fsdp: offload is not estimated; leave out --memory, or the offload.")
    layer = max((_size(one.parameters(recurse=True)) for one in _layers(model)), default=plain.parameters)
    shares_weights = not any("shard_grad_op" in kind for kind in kinds)
    return StateBytes(
        plain.parameters // ranks + 2 * layer if shares_weights else plain.parameters,
        plain.gradients // ranks + layer,
        plain.optimizer_state // ranks,
    )


def _layers(model: Any) -> list[Any]:
    """What is gathered at a time: the members of the module lists."""
    return [one for part in model.modules() if isinstance(part, torch.nn.ModuleList) for one in part]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    return (zero.get(key) or {}).get("device", "none") not in ("none", None)


def _number(zero: Mapping[str, Any], key: str, default: int) -> int:
    value = zero.get(key, default)
    return default if value == "auto" else int(value)


def _config(deepspeed: Any) -> dict[str, Any]:
    config = deepspeed if isinstance(deepspeed, Mapping) else json.loads(Path(deepspeed).read_text())
    return dict(config)
