"""The orders of custom samplers are those that a DataLoader draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import set_seed

from odb_factory.data.order import dismantle


class Custom(Sampler):
    """Shuffles by an attribute; depends on the number of orders it has drawn."""

    def __init__(self, numbers: Any, inner: Any = range(50)):
        self.numbers, self.inner, self.drawn = numbers, inner, 0

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        rows = list(self.inner)
        self.numbers.shuffle(rows)
        return iter(rows[self.drawn :] + rows[: self.drawn])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "torch's global": lambda: SubsetRandomSampler(range(50)),
    "torch's": lambda: WeightedRandomSampler([1.0] * 50, 50, generator=torch.Generator().manual_seed(3)),
    "Python's global": lambda: Custom(random),
    "Python's": lambda: Custom(random.Random(3)),
    "nested": lambda: Custom(random.Random(3), Custom(np.random.default_rng(3))),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_epoch_has_the_order_of_a_dataloader(name: str) -> None:
    """Also an epoch that begins again, a resumed epoch, and whatever else draws random numbers in between."""

    def loader() -> DataLoader:
        set_seed(5)
        return DataLoader(range(50), sampler=SAMPLERS[name](), collate_fn=list)  # type: ignore[arg-type]

    stock = loader()
    expected = [[row for (row,) in stock] for _ in range(3)]
    assert expected[0] != expected[1]
    for epochs in ([0, 0, 1, 2], [2]):
        sampler = dismantle(loader(), seed=9).sampler
        for epoch in epochs:
            torch.rand(3), random.random()
            sampler.set_epoch(epoch)
            assert list(sampler) == expected[epoch]
