"""Features as bytes, and fingerprints of rows. test_pool.py tests that every value comes back unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from odb_factory.data.samples import fingerprint, pack, unpack


class Pair(NamedTuple):
    series: Any
    target: Any


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: {"x": [x], "odd": range(3)}, lambda x: Pair(x, 1)])
def test_a_view_is_sent_without_its_base(wrap: Callable[[Any], Any]) -> None:
    """Also in objects that only pickle can write."""
    whole = torch.arange(1000.0)
    assert len(pack(wrap(whole[:10]))) < len(pack({"x": whole})) / 4
    assert str(unpack(pack(wrap(whole[10:20])))) == str(wrap(whole[10:20]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_fingerprint_of_a_row_depends_on_whole_numbers_and_texts(kind: Any) -> None:
    def of(ids: list[Any], **more: Any) -> int:
        return fingerprint([3, {"input_ids": kind(ids), **more}])

    row = of([1, 2, 3], text="a", pixels=torch.zeros(2))
    assert of([1, 2, 3], pixels=torch.ones(2), text="a") == row, "augmentation may change pixels"
    assert len({row, of([1, 2, 4], text="a"), of([1, 2, 3], text="b"), of([[1], [2]]), of([1, 2])}) == 5
