"""Packing loses nothing and saves memory."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import a_step

from odb_factory.data.samples import PackedInts, pack, unpack

ints = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200_000)


def stored(features: dict[str, Any]) -> dict[str, Any]:
    """What is inside a packed sample."""
    return pickle.loads(pack(features))


def same(value: Any, other: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True are three things to a collator."""
    if isinstance(value, list):
        return isinstance(other, list) and len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and (value is other or value == other)


@given(st.dictionaries(st.text(max_size=3), st.lists(ints, max_size=20), max_size=4))
def test_lists_of_ints_come_back_as_they_were(features: dict[str, list[int]]) -> None:
    restored = unpack(pack(features))
    assert restored == features
    assert all(same(values, restored[key]) for key, values in features.items())


@pytest.mark.parametrize(
    ("values", "itemsize"),
    [
        ([0, 1, 1, 1], 1),
        ([-100, 5, 5], 1),
        ([-100, 127], 1),
        ([-100, 128], 2),
        ([-100, 151_643], 4),
        ([0, 255], 1),
        ([0, 256], 2),
        ([65_535], 2),
        ([65_536], 4),
        ([-129], 2),
        ([-32_768, 65_535], 4),
        ([2**32], 8),
        ([-(2**63)], 8),
        ([2**63 - 1], 8),
    ],
)
def test_the_smallest_array_that_holds_the_values_is_taken(values: list[int], itemsize: int) -> None:
    """Labels carry -100 beside ids of six digits: a type too small would wrap around."""
    packed = stored({"labels": values})["labels"]
    assert isinstance(packed, PackedInts)
    assert packed.array.itemsize == itemsize
    assert same(values, unpack(pack({"labels": values}))["labels"])


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1.0, 2.0],
        [1, 2.5],
        [1, None],
        ["a", "b"],
        [1, "b"],
        [True, False],
        [[1, 2], [3, 4]],
        [None],
        ["picture.png"],
        [b"bytes"],
        [2**63],
        [2**70, 1],
        (1, 2),
        "text",
        None,
        7,
        {"a": [1, 2]},
        range(3),
    ],
)
def test_what_is_no_list_of_ints_is_left_untouched(value: Any) -> None:
    """Media references, nested lists and other values reach the collator as they were."""
    assert same(value, stored({"x": value})["x"])
    assert same(value, unpack(pack({"x": value}))["x"])


@pytest.mark.parametrize("value", [np.arange(3), torch.arange(3)])
def test_arrays_are_left_untouched(value: Any) -> None:
    restored = unpack(pack({"x": value}))["x"]
    assert type(restored) is type(value) and restored.tolist() == value.tolist()


@pytest.mark.parametrize("values", [[-100, 2**32], [-1, 2**63 - 1], [-(2**63), 2**63 - 1]])
def test_negative_and_very_large_ints_together_stay_ints(values: list[int]) -> None:
    assert same(values, unpack(pack({"x": values}))["x"])


def test_a_ragged_list_is_left_untouched() -> None:
    assert stored({"x": [1, [2, 3]]}) == {"x": [1, [2, 3]]}


def test_a_list_of_ints_and_bools_keeps_its_types() -> None:
    assert same([1, True], unpack(pack({"x": [1, True]}))["x"])


def test_a_packed_sample_is_a_fraction_of_its_lists() -> None:
    """1,024 waiting samples cost megabytes: an eighth of the lists' pointers alone, before their ints."""
    ids = [int(value) for value in np.random.default_rng(0).integers(300, 150_000, 2000)]
    features = {"input_ids": ids, "attention_mask": [1] * 2000, "labels": [-100] * 1000 + ids[1000:]}
    as_arrays = sum(value.array.nbytes for value in stored(features).values())
    pointers = sum(sys.getsizeof(value) for value in features.values())
    objects = sum(sys.getsizeof(value) for value in ids)
    assert as_arrays == 2000 * (4 + 1 + 4)
    assert as_arrays < 0.4 * pointers
    assert as_arrays < 0.2 * (pointers + objects)
    assert len(pack(features)) < 1.2 * as_arrays, "it waits, and is sent to the collate workers, at that size"


def test_unpacking_gives_a_fresh_dict_every_time() -> None:
    """The framework's collator pops keys and appends to lists; an idle step uses the same sample again."""
    packed = pack({"input_ids": [1, 2], "images": ["a.png"]})
    first = unpack(packed)
    first["input_ids"].append(3)
    first.pop("images")
    assert unpack(packed) == {"input_ids": [1, 2], "images": ["a.png"]}


def test_packing_leaves_its_argument_alone() -> None:
    features = {"input_ids": [1, 2]}
    pack(features)
    assert features == {"input_ids": [1, 2]}


def test_what_cannot_be_sent_is_said_where_it_was_made() -> None:
    """In a worker's queue it would vanish, and the training wait for ever."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pack({"audio": lambda: None})


@pytest.mark.parametrize(("ids", "idle"), [((), True), ((0,), False), ((3, 4), False)])
def test_a_step_without_samples_is_idle(ids: tuple[int, ...], idle: bool) -> None:
    """Row 0 is a sample like any other."""
    assert a_step(ids=ids).idle is idle
