"""A model of bytes over the shape of a micro-batch: linear in tokens, patches and rows x length squared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls


class Shape(Protocol):
    """rows x row_length = tokens; patches of its media."""

    @property
    def rows(self) -> int: ...
    @property
    def row_length(self) -> int: ...
    @property
    def patches(self) -> int: ...


def terms(shape: Shape) -> list[float]:
    """What bytes are linear in. Attention of several rows may need a mask of all their pairs where one row needs none,
    so pairs count apart."""
    tokens, pairs = shape.rows * shape.row_length, shape.rows * shape.row_length**2
    return [1.0, tokens, shape.patches, pairs, pairs if shape.rows > 1 else 0.0]


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """coefficients: of `terms`, none below 0."""

    coefficients: tuple[float, ...]

    def of(self, shape: Shape) -> int:
        return round(float(np.dot(self.coefficients, terms(shape))))


def fit(shapes: Sequence[Shape], measured: Sequence[int]) -> LinearBytes:
    """Non-negative least squares (Lawson and Hanson 1974), by relative errors: more of anything never needs less."""
    rows = np.array([terms(shape) for shape in shapes])
    values = np.array(measured, dtype=float)
    weights = 1 / np.maximum(values, 1.0)
    rows = rows * weights[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found, _ = nnls(rows / scale, values * weights)
    return LinearBytes(tuple(found / scale))
