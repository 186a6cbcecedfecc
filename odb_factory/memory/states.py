"""Bytes that an optimizer keeps of a weight."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 3, 5
"""Shape of the weight that an optimizer is tried with."""


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
