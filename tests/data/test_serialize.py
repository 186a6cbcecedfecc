"""Features as bytes, and rows as numbers. That every value comes back as it was: test_pool.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from odb_factory.data.serialize import fingerprint, pack, unpack


class Pair(NamedTuple):
    series: Any
    target: Any


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: {"x": [x], "odd": range(3)}, lambda x: Pair(x, 1)])
def test_a_view_leaves_behind_what_it_is_a_view_of(wrap: Callable[[Any], Any]) -> None:
    """Also in what only pickle can write."""
    whole = torch.arange(1000.0)
    assert len(pack(wrap(whole[:10]))) < len(pack({"x": whole})) / 4
    assert str(unpack(pack(wrap(whole[10:20])))) == str(wrap(whole[10:20]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_what_a_row_says_are_its_whole_numbers_and_texts(kind: Any) -> None:
    def said(ids: list[Any], **more: Any) -> int:
        return fingerprint([3, {"input_ids": kind(ids), **more}])

    row = said([1, 2, 3], text="a", pixels=torch.zeros(2))
    assert said([1, 2, 3], pixels=torch.ones(2), text="a") == row, "augmentation may change pixels"
    assert len({row, said([1, 2, 4], text="a"), said([1, 2, 3], text="b"), said([[1], [2]]), said([1, 2])}) == 5
