"""Custom loops: the step info has all they need, and mistakes are answered in one line."""

from __future__ import annotations

import copy
import re
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration
from loop.loops import BUDGET, EVERY_ROW, make, rows_of, stopped
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, default_collate
from toy import NUM_ROWS, Rows, Stream, item, pad
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from odb_factory import ConfigError, Cost, DataError, ODBConfig, ODBDataLoader, ODBError, apply_odb, pop_step_info
from odb_factory.planner import Media

# The figures of a loop


def test_a_loop_without_gradients_evaluates(tiny_text: Path) -> None:
    """The mean loss over all tokens, by the code of the guide."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    loss, tokens = 0.0, 0
    with torch.no_grad(), make(batch_size=32, token_budget=120) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            loss, tokens = loss + model(**batch).loss.item() * info.units, tokens + info.units
        rows = [pad([item(k)]) for k in range(NUM_ROWS)]
        expected = sum(model(**row).loss.item() * (row["labels"].shape[1] - 1) for row in rows)
    assert tokens == sum(row["labels"].shape[1] - 1 for row in rows) and loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "steps", [{"batch_size": 2, "gradient_accumulation_steps": 2}, {"global_batch_size": 4}], ids=["keep", "number"]
)
def test_the_step_info_has_the_figures_of_a_loop(steps: dict[str, Any]) -> None:
    """I9: each optimizer step has the next 4 samples of the order."""
    with make(**steps) as loader:
        assert loader.num_optimizer_steps == loader.estimate_optimizer_steps() == 15
        with pytest.raises(TypeError, match="num_optimizer_steps"):
            len(loader)
        batches = [(batch, pop_step_info(batch)) for batch in loader]
        second = {pop_step_info(batch).optimizer_step for batch in loader}
    assert second == set(range(16, 31)), "numbered over the run, as in the audit"
    of_step: dict[int, list[Any]] = {}
    for batch, info in batches:
        of_step.setdefault(info.optimizer_step, []).append(info)
        assert info.samples == info.samples_all_ranks == len(info.ids)
        assert not info.is_idle and info.epoch == 0
        assert info.tokens == sum(len(item(k)["input_ids"]) for k in info.ids)
        assert info.units == info.tokens - info.samples
        assert [int(row[0]) - 1 for row in batch["input_ids"]] == list(info.ids)
    assert list(of_step) == list(range(1, 16)) and len({len(infos) for infos in of_step.values()}) > 1, "K changes"
    for step, infos in of_step.items():
        assert [info.micro_batch for info in infos] == list(range(len(infos)))
        assert [info.ends_optimizer_step for info in infos] == [False] * (len(infos) - 1) + [True]
        assert {info.micro_batches for info in infos} == {len(infos)}
        assert {info.optimizer_step_samples for info in infos} == {sum(info.samples for info in infos)} == {4}
        assert {row for info in infos for row in info.ids} == set(range(4 * step - 4, 4 * step))
        assert {info.progress for info in infos} == {step / 15}
    assert repr(infos[0]).startswith("ODBStepInfo(loss_scaling='exact'") and "taken" not in repr(infos[0])


def test_a_config_for_a_trainer_weighs_exactly_in_a_loop() -> None:
    """Its default is `stock`, which is unknown in a loop."""
    with make(config=ODBConfig(token_budget=BUDGET), token_budget=None) as loader:
        assert pop_step_info(next(iter(loader))).loss_scaling == "exact"


def test_a_collator_that_returns_the_same_tensors_each_time() -> None:
    """I2: a micro-batch is yielded before the next is collated, with any accumulation."""
    place = torch.zeros(16, 40, dtype=torch.long)

    def reuse(items: list[Any]) -> Any:
        ids = pad(items)["input_ids"]
        view = place[: len(ids), : ids.shape[1]].copy_(ids)
        return {"input_ids": view, "labels": view.masked_fill(view == 0, -100)}

    with make(collate_fn=reuse, gradient_accumulation_steps=3) as loader:
        for batch in loader:
            assert (batch["input_ids"][:, 0] - 1).tolist() == list(pop_step_info(batch).ids)


@pytest.mark.parametrize("kind", [Rows, Stream])
def test_an_epoch_ends_as_in_torch(kind: Any) -> None:
    """An epoch ends with the remaining rows, or with `drop_last` at the last whole batch of all ranks."""
    for drop_last, samples in ((False, [21, 21, 18]), (True, [21, 21, 14])):
        with make(kind(), drop_last=drop_last, batch_size=7, gradient_accumulation_steps=3) as loader:
            infos = [pop_step_info(batch) for batch in loader]
            assert loader.num_optimizer_steps == (3 if kind is Rows else None)
        assert [info.optimizer_step_samples for info in infos if info.ends_optimizer_step] == samples
        assert infos[-1].progress == (1.0 if kind is Rows else None)


# Mistakes that are logged once


def test_a_step_info_that_is_not_taken_out_is_logged_once(logged: pytest.LogCaptureFixture) -> None:
    def model(input_ids: Any, labels: Any, **ignored: Any) -> None:
        """Swallows the step info, as models of transformers do."""

    with make() as loader:
        for batch in loader:
            pop_step_info(batch)
            with pytest.raises(DataError, match="no 'odb_step_info'"):
                pop_step_info(batch)
        kept = list(loader)
        assert not logged.messages, "batches that are kept may yet be asked"
        for batch in loader:
            model(**batch)
    assert [message.partition(":")[0] for message in logged.messages] == [
        "a batch was dropped with its step info in it, so its loss was not weighed"
    ]
    assert kept


def test_an_optimizer_step_that_is_left_is_logged(logged: pytest.LogCaptureFixture, accelerate_state: None) -> None:
    """Its gradients would become part of the next step. No row is lost; accelerate holds one batch more."""
    prepared = Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=16, collate_fn=pad))
    for loader in (make(), prepared):
        logged.clear()
        with apply_odb(prepared, token_budget=BUDGET) if loader is prepared else loader:
            for at_its_end in (True, False):
                for batch in loader:
                    if pop_step_info(batch).ends_optimizer_step == at_its_end:
                        break
                assert not logged.messages, "it may not be iterated again"
            assert rows_of(loader) == EVERY_ROW
        assert len(logged.messages) == 1 and "zero_grad" in logged.messages[0]


def widen(items: list[Any]) -> Any:
    return {key: torch.nn.functional.pad(ids, (0, -ids.shape[1] % 64), value=-100) for key, ids in pad(items).items()}


def sort(items: list[Any]) -> Any:
    return pad(sorted(items, key=lambda row: row["input_ids"][0] * 7 % 11))


IN_ONE_ROW = "into one row of .*padding figures are those of the plan.* With `layout: flat` they are planned as they"


@pytest.mark.parametrize(
    ("collate_fn", "layout", "words"),
    [
        (widen, "padded", "above the budget of 128 tokens"),
        (DataCollatorWithFlattening(), "padded", IN_ONE_ROW),
        (DataCollatorWithFlattening(), "flat", None),
        (sort, "padded", "so it has changed their order or their labels; `ids` of the step info"),
    ],
)
def test_a_collator_that_changes_its_rows_is_logged_once(
    collate_fn: Any, layout: Any, words: str | None, logged: pytest.LogCaptureFixture
) -> None:
    with make(collate_fn=collate_fn, layout=layout) as loader:
        loader.is_checked = True
        assert rows_of(loader) == EVERY_ROW
        assert (loader.accounting.summary()["over_budget"] > 3) is (collate_fn is widen)
    assert len(logged.messages) == (words is not None) and "None" not in logged.text
    assert re.search(words or "", logged.text)


# Calls in the wrong order


@pytest.mark.parametrize("change", [lambda handle: handle.set_epoch(5), lambda handle: handle.close()])
def test_an_iterator_that_goes_on_after_a_change(change: Callable[[Any], None], accelerate_state: None) -> None:
    prepared = Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=4, collate_fn=pad))
    with apply_odb(prepared, token_budget=BUDGET, buffer_size=16) as handle:
        batches = iter(prepared)
        next(batches)
        change(handle)
        with pytest.raises(ConfigError, match="iterator is stale"):
            list(batches)


def test_a_state_is_loaded_before_the_first_batch_or_after_the_loop() -> None:
    with make() as loader:
        batches = iter(loader)
        pop_step_info(next(batches))
        with pytest.raises(ConfigError, match="load_state_dict: batches of this iteration have been taken"):
            loader.load_state_dict(loader.state_dict())
        del batches
        loader.set_epoch(0)
        before, state = stopped(loader, 1)
        for _ in range(2):
            loader.load_state_dict(state)
            loader.set_epoch(0)
            assert rows_of(loader) + before == EVERY_ROW
        for value in ("x", [], {}, [1], {"version": 2}, None):
            with pytest.raises(DataError, match="is not a state"):
                loader.load_state_dict(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="closed"):
        iter(loader)


# Arguments


class Once(Stream):
    """A stream whose items can be read once."""

    def __init__(self) -> None:
        self.items = map(item, range(NUM_ROWS))

    def __iter__(self) -> Any:
        return self.items


class Breaks(Stream):
    def __iter__(self) -> Any:
        yield from map(item, range(20))
        raise OSError("no route to host")


def drop(items: list[Any]) -> Any:
    return pad(items[:-1] or items)


SPAWN = {"num_workers": 1, "multiprocessing_context": "spawn"}
NAMES = {f"row {k}": item(k) for k in range(NUM_ROWS)}
FILLED_AND_SCALED = ODBConfig(token_budget=8, global_batch_size="fill", lr_scale="sqrt")
SAMPLES_LEFT_OUT = r"collator made \d+ rows of \d+ tokens of these \d+ samples"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr_scale": "sqrt"}, "odb.lr_scale: 'sqrt' has no effect on kept optimizer steps"),
    ({"loss_scaling": "stock"}, "odb.loss_scaling: 'stock' is the loss of a trainer, and a custom loop computes"),
    ({"sampler": (k for k in range(9))}, "sampler: a generator can be iterated only once"),
    *(({"batch_size": size}, f"batch_size: {size} is not a whole number") for size in (0, None, -4)),
    ({"collate_fn": None}, "collate_fn: missing"),
    ({"token_budge": 8}, "did you mean `token_budget`"),
    ({"config": FILLED_AND_SCALED}, "odb.lr_scale: 'sqrt' has no effect in a custom loop"),
    ({"audit": True}, "give audit_dir= instead"),
    ({"batch_sampler": BatchSampler(SequentialSampler(Rows()), 4, False)}, "batch_sampler: a BatchSampler decides"),
    ({"in_order": False}, "in_order: False"),
    ({"timeout": 5}, "timeout: 5"),
    ({"pin_memory_device": "cuda"}, "pin_memory_device: 'cuda' is set, but there is no such key"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 is not"),
    ({"already_split": True}, "already_split: this dataset has an index"),
    ({"process_group": 3}, "process_group: expected .* found a int"),
    ({"dataset": (item(k) for k in range(9))}, "dataset: a generator .*IterableDataset"),
    ({"dataset": iter([1, 2])}, "dataset: a list_iterator .*IterableDataset"),
    ({"dataset": type("Shards", (), {"__iter__": lambda self: iter(())})()}, "dataset: a Shards .*IterableDataset"),
    ({"dataset": Dataset()}, "dataset: a Dataset .*IterableDataset"),
    ({"dataset": type("Rows", (), {"__getitem__": lambda self, k: k})()}, "no `__len__`"),
    # The error comes when the loader is made, and names what is missing rather than a row.
    ({"dataset": [([1], [2])] * 9}, "found tuple; give cost_fn=..., a function from an item to its size"),
    (
        {"dataset": [{"x": 1}] * 9, "collate_fn": default_collate},
        "found the keys x, .*give cost_fn=..., a function from",
    ),
    ({"dataset": [[1, 2]] * 9}, "row 0 .*found list; give cost_fn"),
    ({"dataset": [{"input_ids": [[1], [2]]}] * 9}, r"row 0 .*`input_ids`.*found shape \[2, 1\]"),
    ({"dataset": [{"input_ids": [1, 2, 3], "labels": [4, 5]}] * 9}, "2 labels for 3 `input_ids`.*give cost_fn"),
    (
        {"dataset": [{"input_ids": [1, 2]}] * 9, "collate_fn": lambda items: {"input_ids": pad(items)["input_ids"]}},
        "neither the item nor its collated batch has `labels`.*cost_fn",
    ),
    ({"cost_fn": lambda item: torch.tensor(item["input_ids"]).shape}, "cost_fn returned torch.Size"),
    # A wrong cost would be within any budget, or give a loss weight below 0.
    *(
        ({"cost_fn": lambda _, cost=cost: cost, "loss_scaling": "approx"}, "its cost is")
        for cost in (-3, 0, Cost(5, -1), Cost(5, 1, -1), 2**40, Cost(5, units=2**31))
    ),
    ({"dataset": Rows(make=lambda k: item(k)), **SPAWN}, "cannot be sent to a worker process"),
    ({"cost_fn": lambda row: 5, **SPAWN}, "cannot be sent to a worker process"),
    ({"collate_fn": lambda items: pad(items), **SPAWN}, "cannot be sent to a worker process"),
    # During the iteration.
    ({"drop_last": True, "global_batch_size": "fill"}, "drop_last: True"),
    ({"dataset": NAMES, "sampler": list(NAMES)}, "sampler: it yields 'row 0', and rows are known by whole numbers"),
    ({"dataset": Breaks()}, "after item 19: OSError: no route to host"),
    ({"dataset": Breaks(), "num_workers": 1}, "after item 19: OSError: no route to host"),
    ({"dataset": Once()}, "it yields nothing in epoch 1; its `__iter__` must restart each time.*$"),
    ({"collate_fn": drop}, SAMPLES_LEFT_OUT),
    ({"collate_fn": drop, "loss_scaling": "none"}, SAMPLES_LEFT_OUT),
    ({"layout": "flat", "collate_fn": lambda items: (*pad(items).values(),)}, "layout.*the collator returned a tuple"),
    # A batch that cannot hold the step info.
    ({"collate_fn": lambda items: pad(items) | {"odb_step_info": 1}}, "odb_step_info"),
    ({"collate_fn": lambda items: MappingProxyType(pad(items))}, "odb_step_info"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=["-".join(arguments) for arguments, _ in REFUSED])
def test_wrong_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: str) -> None:
    budget = {} if "config" in arguments else {"token_budget": BUDGET}
    arguments = {"batch_size": 16, "collate_fn": pad, "dataset": Rows()} | budget | arguments
    with pytest.raises(ODBError, match=words) as caught, ODBDataLoader(**arguments) as loader:
        rows_of(loader), rows_of(loader)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [torch.tensor, np.int64])
def test_a_cost_may_be_a_number_of_torch_or_numpy(number: Callable[[int], Any], tmp_path: Path) -> None:
    """It can be sent to another process, and written to the audit."""
    for cost_fn in (
        lambda row: number(len(row["input_ids"])),
        lambda row: Cost(number(len(row["input_ids"])), number(2), number(3), media=Media(number(2))),
    ):
        with make(cost_fn=cost_fn, audit_dir=tmp_path, num_workers=1, multiprocessing_context="fork") as loader:
            assert rows_of(loader) == EVERY_ROW


# accelerate


class Repeats(BatchSampler):
    """Yields every batch twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


class Weighted(DataLoader):
    def __iter__(self) -> Any:
        return ({**batch, "weight": 1.0} for batch in super().__iter__())


def plain(dataset: Any = None, **options: Any) -> DataLoader:
    options = options or {"batch_size": 4}
    return DataLoader(Rows() if dataset is None else dataset, collate_fn=pad, **options)


def applied(loader: Any, **options: Any) -> Any:
    apply_odb(loader, token_budget=BUDGET, **options)
    return loader


def in_four(accumulates: Callable[[Accelerator, dict[str, int]], Any]) -> Callable[[Accelerator], Any]:
    """The count of accelerate would end optimizer steps elsewhere."""
    steps = {"gradient_accumulation_steps": 4}
    return lambda _: accumulates(Accelerator(cpu=True, **steps), steps)  # type: ignore[arg-type]


BATCHES = BatchSampler(SequentialSampler(Rows()), 4, False)
UNDISPATCHED = DataLoaderConfiguration(dispatch_batches=False)
SKIPPED, COUNTED = "skip_first_batches.*load_state_dict", "gradient_accumulation_steps: 4 in the Accelerator.*leave it"
UNDER_ACCELERATE: dict[str, tuple[Callable[[Accelerator], Any], str]] = {
    "skipped": (lambda _: skip_first_batches(make(), 2), SKIPPED),
    "prepared, skipped": (lambda accelerator: skip_first_batches(accelerator.prepare(make()), 2), SKIPPED),
    "applied, skipped": (lambda accelerator: skip_first_batches(applied(accelerator.prepare(plain())), 2), SKIPPED),
    "stream, skipped": (lambda _: skip_first_batches(make(Stream()), 2), "skip_first_batches"),
    "skipped, applied": (lambda _: applied(skip_first_batches(plain(), 2)), "SkipBatchSampler decides"),
    "skipped stream, applied": (
        lambda _: applied(
            skip_first_batches(Accelerator(cpu=True, dataloader_config=UNDISPATCHED).prepare(plain(Stream())), 2)
        ),
        "^accelerate.skip_first_batches: it would pass over micro-batches",
    ),
    "dispatched": (
        lambda accelerator: applied(accelerator.prepare(plain(Stream()))),
        "^dispatch_batches: accelerate lets one rank read for all",
    ),
    "batches": (
        lambda _: applied(plain(batch_sampler=Repeats(SequentialSampler(Rows()), 4, False))),
        "a Repeats decides which samples share a batch, as odb does; give the order",
    ),
    "its own iterator": (
        lambda _: applied(Weighted(Rows(), batch_size=4, collate_fn=pad)),
        "^apply_odb: Weighted has an `__iter__` of its own",
    ),
    "split": (
        lambda _: applied(plain(batch_sampler=BatchSamplerShard(BATCHES, 2, 0, True))),
        "^split_batches: True would cut each batch apart .* divide batch_size by 2",
    ),
    "accumulation": (in_four(lambda accelerator, steps: accelerator.prepare(make(**steps))), COUNTED),
    "applied, accumulation": (
        in_four(lambda accelerator, steps: applied(accelerator.prepare(plain()), **steps)),
        COUNTED,
    ),
}


@pytest.mark.parametrize("name", UNDER_ACCELERATE)
def test_wrong_uses_of_accelerate_are_refused(name: str, accelerate_state: None) -> None:
    loader_of, words = UNDER_ACCELERATE[name]
    accelerator = None if "accumulation" in name else Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=words):
        next(iter(loader_of(accelerator)))  # type: ignore[arg-type]


def test_a_prepared_loader_moves_its_batches(accelerate_state: None) -> None:
    accelerator = Accelerator(cpu=True)
    PartialState().device = torch.device("meta")  # in place of an accelerator
    with make() as loader:
        assert next(iter(loader))["input_ids"].device.type == "cpu"
        assert accelerator.prepare(loader) is loader
        batch = next(iter(loader))
        assert {batch["input_ids"].device.type, batch["labels"].device.type} == {"meta"}
        assert pop_step_info(batch).samples == len(batch["input_ids"])
    stock = DataLoader(Rows(), collate_fn=pad)
    with apply_odb(stock, token_budget=BUDGET):
        assert next(iter(accelerator.prepare(stock)))["input_ids"].device.type == "meta"


def test_batches_that_accelerate_counts_are_no_optimizer_steps(accelerate_state: None) -> None:
    """`accelerator.accumulate` would let a prepared optimizer step after each micro-batch."""
    accelerator = Accelerator(cpu=True)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))

    def accumulate(loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate():
                pop_step_info(batch)

    for loader in (accelerator.prepare(make()), make(), applied(accelerator.prepare(plain(batch_size=16)))):
        for batch in loader:
            info = pop_step_info(batch)
            if info.micro_batch == 0:
                optimizer.zero_grad()
                assert parameter.grad is None, "also after the first micro-batch of a step"
            accelerator.backward(parameter * info.loss_scale)
            if info.ends_optimizer_step:
                assert parameter.grad.item() == pytest.approx(1.0)
                optimizer.step()
        with pytest.raises(ConfigError, match="accelerator.accumulate: it counts batches.*step where"):
            accumulate(loader)
        assert accelerator.sync_gradients


def test_accelerate_gathers_all_of_the_last_micro_batch(accelerate_state: None) -> None:
    """It drops rows of a last batch of fixed size, which fill that up."""
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(Rows(num_rows=17), batch_size=16, collate_fn=pad))
    with apply_odb(prepared, token_budget=1024, global_batch_size=17):
        gathered = [accelerator.gather_for_metrics(batch["input_ids"][:, 0]) for batch in prepared]
    assert sorted(torch.cat(gathered).tolist()) == list(range(1, 18)) and len(gathered) == 1
    assert [len(accelerator.gather_for_metrics(batch["input_ids"])) for batch in prepared] == [16, 1]


# Loops that train no language model: the loader needs only a `cost_fn`

NUM_ITEMS, STEP, EPOCHS = 37, 8, 2
Series = namedtuple("Series", ["x", "lengths", "y"])
SERIES = [torch.randn(3 + 7 * k % 23, 4, generator=torch.Generator().manual_seed(k)) for k in range(NUM_ITEMS)]
IMAGES = [torch.randn(3, 8, 8 + 4 * (k % 5), generator=torch.Generator().manual_seed(k)) for k in range(NUM_ITEMS)]


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
        return Series(pad_sequence(series, batch_first=True), torch.tensor([len(x) for x in series]), torch.tensor(y))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch.x)[..., 0].sum(1) / batch.lengths, batch.y)

    return items, collate, lambda item: len(item[0]), 64, nn.Linear(4, 1, bias=False), loss


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
    rows = [list(range(3 + 7 * k % 23)) for k in range(NUM_ITEMS)]
    items = [{"input_ids": ids, "labels": [-100 if i % 3 else i for i in ids]} for ids in rows]

    def cost(item: Any) -> Cost:
        return Cost(len(item["labels"]), units=sum(label != -100 for label in item["labels"]))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    return items, pad_tokens, cost, 64, nn.Sequential(nn.Embedding(32, 6), nn.Linear(6, 32)), loss


def loader_of(world: Callable[[], tuple[Any, ...]] = regression_of_tuples, **changes: Any) -> ODBDataLoader[Any]:
    items, collate, cost_fn, budget, *_ = world()
    settings = {"batch_size": STEP, "token_budget": budget, "collate_fn": collate, "cost_fn": cost_fn}
    return ODBDataLoader(items, **settings | changes)


@pytest.mark.parametrize(
    ("world", "num_workers"), [(regression_of_tuples, 2), (images_and_classes, 0), (tagged_tokens, 2)]
)
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
    expected = [range(k, min(k + STEP, NUM_ITEMS)) for k in range(0, NUM_ITEMS, STEP)] * EPOCHS
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
