"""Loops that train no language model: the loader needs only a `cost_fn`."""

from __future__ import annotations

import copy
import logging
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from odb_factory import Cost, ODBDataLoader, pop_step_info

NUM_ROWS, STEP, EPOCHS = 37, 8, 2
Pair = namedtuple("Pair", ["inputs", "targets"])
SERIES = [torch.randn(3 + 7 * k % 23, 4, generator=torch.Generator().manual_seed(k)) for k in range(NUM_ROWS)]
IMAGES = [torch.randn(3, 8, 8 + 4 * (k % 5), generator=torch.Generator().manual_seed(k)) for k in range(NUM_ROWS)]


def pad_tokens(items: list[Any]) -> dict[str, Tensor]:
    return {
        key: pad_sequence([torch.tensor(item[key]) for item in items], batch_first=True, padding_value=value)
        for key, value in {"input_ids": 0, "labels": -100}.items()
    }


# Each world returns items, collate_fn, cost_fn, budget, the model, and the mean loss of a batch.
def regression_of_tuples() -> tuple[Any, ...]:
    items = [(x, float(x.mean())) for x in SERIES]

    def collate(items: list[Any]) -> Any:
        series, y = zip(*items)
        return pad_sequence(series, batch_first=True), torch.tensor([len(x) for x in series]), torch.tensor(y)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, lengths, y = batch
        return functional.mse_loss(model(x)[..., 0].sum(1) / lengths, y)

    return items, collate, lambda item: len(item[0]), 64, nn.Linear(4, 1, bias=False), loss


def regression_of_a_named_tuple() -> tuple[Any, ...]:
    items, collate, cost_fn, budget, model, loss = regression_of_tuples()

    def named(items: list[Any]) -> Any:
        x, lengths, y = collate(items)
        return Pair((x, lengths), y)

    return items, named, cost_fn, budget, model, lambda model, batch: loss(model, (*batch.inputs, batch.targets))


def images_and_classes() -> tuple[Any, ...]:
    """`labels` has a class for each row, as for image classifiers of transformers."""
    items = [{"pixel_values": image, "labels": k % 5} for k, image in enumerate(IMAGES)]

    def collate(items: list[Any]) -> Any:
        widest = max(item["pixel_values"].shape[-1] for item in items)
        pixels = [functional.pad(item["pixel_values"], (0, widest - item["pixel_values"].shape[-1])) for item in items]
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor([item["labels"] for item in items])}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    # Padding of images would change the mean over pixels: only images of one width share a batch.
    def cost(item: Any) -> Cost:
        width = item["pixel_values"].shape[-1]
        return Cost(8 * width, modality=width)

    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return items, collate, cost, 300, model, loss


def tagged_tokens() -> tuple[Any, ...]:
    """A tag for each token and no causal shift: the loss is a mean over tags, which `Cost` counts."""
    rows = [list(range(3 + 7 * k % 23)) for k in range(NUM_ROWS)]
    items = [{"input_ids": ids, "labels": [-100 if i % 3 else i for i in ids]} for ids in rows]

    def cost(item: Any) -> Cost:
        return Cost(len(item["labels"]), units=sum(label != -100 for label in item["labels"]))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return items, pad_tokens, cost, 64, nn.Sequential(nn.Embedding(32, 6), nn.Linear(6, 32)), loss


WORLDS = [regression_of_tuples, regression_of_a_named_tuple, images_and_classes, tagged_tokens]


def loader_of(world: Callable[[], tuple[Any, ...]] = regression_of_tuples, **changes: Any) -> ODBDataLoader[Any]:
    items, collate, cost_fn, budget, *_ = world()
    settings = {"batch_size": STEP, "token_budget": budget, "collate_fn": collate, "cost_fn": cost_fn}
    return ODBDataLoader(items, **settings | changes)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_the_weights_are_those_of_whole_batches(world: Callable[[], tuple[Any, ...]], num_workers: int) -> None:
    """I9: the gradient of an optimizer step is that of the mean over its samples (or units of `Cost`), for any cut."""
    torch.manual_seed(0)
    items, collate, cost_fn, _, model, loss_of = world()
    by_odb, by_hand = model, copy.deepcopy(model)
    optimizer, steps, cuts = torch.optim.SGD(by_odb.parameters(), lr=0.1), Counter[tuple[int, int]](), set()
    with loader_of(world, num_workers=num_workers) as loader:
        for _ in range(EPOCHS):
            for batch in loader:
                info = pop_step_info(batch)
                (loss_of(by_odb, batch) * info.loss_scale).backward()
                steps.update((info.optimizer_step - 1, k) for k in info.ids)
                cuts.add(info.micro_batches)
                if info.ends_optimizer_step:
                    optimizer.step()
                    optimizer.zero_grad()
        assert max(cuts) > 1 and 0 < loader.stats()["odb/budget_use"] <= 1
    expected = [range(k, min(k + STEP, NUM_ROWS)) for k in range(0, NUM_ROWS, STEP)] * EPOCHS
    assert steps == Counter((step, k) for step, rows in enumerate(expected) for k in rows)

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for rows in expected:
        alone = [(loss_of(by_hand, collate([items[k]])), cost_fn(items[k])) for k in rows]
        units = [getattr(cost, "units", 0) or 1 for _, cost in alone]
        sum(loss * n / sum(units) for (loss, _), n in zip(alone, units)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight, expected in zip(by_odb.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "units"),
    [
        (lambda k: [-100, *range(3 + k)], sum(3 + k for k in range(16))),
        (lambda k: [1] * (1 + k % 3), 16),  # as in an encoder-decoder model: a row has one loss
    ],
    ids=["of tokens", "of another length"],
)
def test_labels_are_counted_if_there_is_one_for_each_token(labels: Callable[[int], list[int]], units: int) -> None:
    """I8, with a cost function."""
    rows = [{"input_ids": list(range(4 + k)), "labels": labels(k)} for k in range(16)]
    options = {"token_budget": 64, "collate_fn": pad_tokens, "cost_fn": lambda item: len(item["input_ids"])}
    with ODBDataLoader(rows, STEP, **options) as loader:
        assert sum(pop_step_info(batch).units for batch in loader) == units


def test_a_loop_logs_the_first_step_like_a_trainer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "odb_factory"):
        with loader_of() as loader:
            assert loader.num_optimizer_steps == 5
            list(loader), list(loader)
    (line,) = caplog.messages
    assert line.startswith("one optimizer step: 8 samples, as without odb") and "64 tokens" in line


@pytest.mark.parametrize("changes", [{}, {"global_batch_size": "fill"}, {"gradient_accumulation_steps": 4}])
def test_the_snippet_of_online_dynamic_batching_logs_that_nothing_is_batched(changes: dict[str, Any], caplog) -> None:
    """There `batch_size=1` is required; here it means optimizer steps of one sample."""
    snippet = {"batch_size": 1, "shuffle": True, "num_workers": 2, "prefetch_factor": 64, "loss_scaling": "exact"}
    with caplog.at_level(logging.INFO, "odb_factory"):
        with loader_of(join=True, **snippet | changes) as loader:
            num_batches = len(list(loader))
    logged = " ".join(caplog.messages)
    assert ("nothing can be batched" in logged and 'global_batch_size="fill"' in logged) is (not changes)
    assert num_batches == NUM_ROWS if not changes else num_batches < NUM_ROWS
