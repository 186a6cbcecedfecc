"""Orders of samplers, which a look at them leaves as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler
from transformers import set_seed

from odb_factory.data.order import ShardSampler, dismantle


class Custom(Sampler):
    """What it shuffles by is an attribute, as is the number of orders that it has drawn."""

    def __init__(self, numbers: Any, inner: Any = range(100)):
        self.numbers, self.inner, self.drawn = numbers, inner, 0

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        rows = list(self.inner)
        self.numbers.shuffle(rows)
        return iter(rows[self.drawn :] + rows[: self.drawn])


class Sized(Custom):
    def __len__(self) -> int:
        return 50


SAMPLERS: dict[str, Callable[[], Any]] = {
    "torch's numbers": lambda: RandomSampler(range(100)),
    "a generator": lambda: RandomSampler(range(100), generator=torch.Generator().manual_seed(3)),
    "Python's": lambda: Custom(random.Random(3)),
    "Python's global": lambda: Custom(random),
    "numpy's": lambda: Custom(np.random.default_rng(3)),
    "numpy's old": lambda: Custom(np.random.RandomState(3)),
    "nested": lambda: Custom(random.Random(3), Custom(np.random.default_rng(3))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_looking_at_an_order_leaves_the_next_as_it_is(name: str) -> None:
    set_seed(5)
    plain = SAMPLERS[name]()
    orders = [list(plain), list(plain)]
    assert orders[0] != orders[1]
    set_seed(5)
    sampler = ShardSampler(SAMPLERS[name](), 0, 1)
    for order in orders:
        assert sampler.peek().tolist() == order
        assert list(sampler) == order


@pytest.mark.parametrize("name", ["torch's", "Python's global"])
def test_a_sampler_of_global_random_numbers_gives_the_order_of_a_dataloader(name: str) -> None:
    """Over several epochs, whatever is drawn in between."""

    def loader() -> DataLoader:
        sampler = SubsetRandomSampler(range(50)) if name == "torch's" else Sized(random, range(50))
        return DataLoader(range(50), sampler=sampler, collate_fn=list)  # type: ignore[arg-type]

    set_seed(5)
    stock = loader()
    expected = [[row for (row,) in stock] for _ in range(3)]
    assert expected[0] != expected[1]
    set_seed(5)
    ours = dismantle(loader(), seed=9).sampler
    for order in expected:
        torch.rand(3), random.random()
        assert list(ours) == order
