"""Features as bytes: nothing is lost, and memory is saved."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.data.serialize import fingerprint, pack, unpack
from odb_factory.llamafactory.media import EncodedImage

ints = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200_000)


def same(value: Any, other: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True are three things to a collator."""
    if isinstance(value, (list, tuple)):
        return type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        is_alike = type(value) is type(other) and (value.dtype, value.shape) == (other.dtype, other.shape)
        dense = [one.to_dense() if isinstance(one, torch.Tensor) else one for one in (value, other)]
        return is_alike and dense[0].tolist() == dense[1].tolist()
    return type(value) is type(other) and (value is other or value == other)


@given(st.dictionaries(st.text(max_size=3), st.lists(ints, max_size=20), max_size=4))
def test_lists_of_ints_come_back_as_they_were(features: dict[str, list[int]]) -> None:
    restored = unpack(pack(features))
    assert restored == features
    assert all(same(values, restored[key]) for key, values in features.items())


LISTS: list[Any] = [[1, True], [1, [2, 3]], [1, 2.5], [1, None], [1, "b"], [True, False], [None], [b"x"], [2**63], []]
OTHERS: list[Any] = [(1, 2), "text", None, 7, {"a": [1, 2]}, range(3), Path("a", "b.png"), np.int64(-3)]
MEDIA: list[Any] = [[EncodedImage(b"file", None, 2), "a.png", {"bytes": None, "path": "b.png"}]]
TENSORS: list[Any] = [
    torch.tensor(3),
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.randn(3, 2, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),
    torch.arange(12).reshape(3, 4).t(),
    np.arange(6, dtype=np.int16).reshape(3, 2),
    np.array(2.5),
    np.zeros((0, 3), np.float32),
    np.array(["a", "bc"]),
    torch.eye(3).to_sparse(),
]


@pytest.mark.parametrize("value", [*LISTS, *OTHERS, *MEDIA, *TENSORS], ids=lambda value: repr(value)[:20])
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    """Ids, media references, tensors and other values reach the collator with their types; packing changes nothing."""
    features = {"x": value}
    arrived = unpack(pack(features))["x"]
    assert same(value, arrived) and features == {"x": value} and features["x"] is value


def test_a_packed_sample_is_a_fraction_of_its_lists() -> None:
    """1,024 waiting samples cost megabytes: half of the lists' pointers alone, before their ints."""
    ids = [int(value) for value in np.random.default_rng(0).integers(300, 150_000, 2000)]
    features = {"input_ids": ids, "attention_mask": [1] * 2000, "labels": [-100] * 1000 + ids[1000:]}
    assert len(pack(features)) < 0.55 * sum(sys.getsizeof(value) for value in features.values())


class Pair(NamedTuple):
    series: Any
    target: Any


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: {"x": [x], "odd": range(3)}, lambda x: Pair(x, 1)])
def test_a_view_leaves_behind_what_it_is_a_view_of(wrap: Callable[[Any], Any]) -> None:
    """Also in what only pickle can write."""
    whole = torch.arange(1000.0)
    assert len(pack(wrap(whole[:10]))) < len(pack({"x": whole})) / 4
    assert str(unpack(pack(wrap(whole[10:20])))) == str(wrap(whole[10:20]))


def test_what_arrives_may_be_changed() -> None:
    """Collators pop keys, append to lists and fill in place; an idle step uses the same sample again."""
    packed = pack({"input_ids": [1, 2], "images": ["a.png"], "a": np.zeros(2), "t": torch.zeros(2)})
    first = unpack(packed)
    first["input_ids"].append(3)
    first["a"][0] = first["t"][0] = 1
    first.pop("images")
    again = unpack(packed)
    assert again["input_ids"] == [1, 2] and again["images"] == ["a.png"] and again["a"].sum() == again["t"].sum() == 0


def test_what_cannot_be_sent_is_said_where_it_was_made() -> None:
    """In a worker's queue it would vanish, and the training wait for ever."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pack({"audio": lambda: None})


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_what_a_row_says_are_its_whole_numbers_and_texts(kind: Any) -> None:
    def said(ids: list[Any], **more: Any) -> int:
        return fingerprint([3, {"input_ids": kind(ids), **more}])

    row = said([1, 2, 3], text="a", pixels=torch.zeros(2))
    assert said([1, 2, 3], pixels=torch.ones(2), text="a") == row, "augmentation may change pixels"
    assert len({row, said([1, 2, 4], text="a"), said([1, 2, 3], text="b"), said([[1], [2]]), said([1, 2])}) == 5
