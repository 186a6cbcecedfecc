"""What a loop of one's own can do wrong is noticed and answered in one line; what it needs to know is told."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration
from loop.loops import BUDGET, EVERY_ROW, make, rows_of, stopped
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
from toy import NUM_ROWS, Rows, Stream, item, pad
from transformers import AutoModelForCausalLM

from odb_factory import (
    ConfigError,
    Cost,
    DataError,
    ODBConfig,
    ODBDataLoader,
    ODBError,
    apply_odb,
    pop_step_info,
)
from odb_factory.planner import Media

FILLED_AND_SCALED = ODBConfig(token_budget=8, global_batch_size="fill", lr_scale="sqrt")

# What a loop needs to know


def test_a_loop_without_gradients_evaluates(tiny_text: Path) -> None:
    """As in the guide: the mean loss over all tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    expected, loss, tokens = [0.0, 0], 0.0, 0
    with torch.no_grad(), make(batch_size=32, token_budget=120) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            loss, tokens = loss + model(**batch).loss.item() * info.units, tokens + info.units
        for k in range(NUM_ROWS):
            alone = pad([item(k)])
            units = alone["labels"].shape[1] - 1
            expected = [expected[0] + model(**alone).loss.item() * units, expected[1] + units]
    assert tokens == expected[1] and loss == pytest.approx(expected[0], rel=1e-5)


def test_a_config_for_a_trainer_weighs_exactly_in_a_loop() -> None:
    """Its default is `stock`, and what stock would do in a loop only the loop knows."""
    with make(config=ODBConfig(token_budget=BUDGET), token_budget=None) as loader:
        assert pop_step_info(next(iter(loader))).loss_scaling == "exact"


@pytest.mark.parametrize(
    "steps", [{"batch_size": 2, "gradient_accumulation_steps": 2}, {"global_batch_size": 4}], ids=["keep", "number"]
)
def test_the_step_info_says_what_a_loop_needs(steps: dict[str, Any]) -> None:
    """I9: each optimizer step has 4 samples, those that come next in the order."""
    with make(**steps) as loader:
        assert loader.num_optimizer_steps == loader.estimate_optimizer_steps() == 15
        batches = [(batch, pop_step_info(batch)) for batch in loader]
        second = {pop_step_info(batch).optimizer_step for batch in loader}
    assert second == set(range(16, 31)), "counted over the run, as in the audit"
    starts = [k for k, (_, info) in enumerate(batches) if info.micro_batch == 0]
    assert len(starts) == 15 and len({batches[k][1].micro_batches for k in starts}) > 1, "K changes"
    for step, (start, stop) in enumerate(zip(starts, [*starts[1:], len(batches)])):
        infos = [info for _, info in batches[start:stop]]
        assert [info.micro_batch for info in infos] == list(range(len(infos)))
        assert [info.ends_optimizer_step for info in infos] == [False] * (len(infos) - 1) + [True]
        assert {info.micro_batches for info in infos} == {len(infos)}
        assert {info.optimizer_step for info in infos} == {step + 1}
        assert {info.optimizer_step_samples for info in infos} == {sum(info.samples for info in infos)} == {4}
        assert {row for info in infos for row in info.ids} == set(range(4 * step, 4 * step + 4))
        assert {info.progress for info in infos} == {(step + 1) / 15}
        for batch, info in batches[start:stop]:
            assert info.samples == info.samples_all_ranks == len(info.ids)
            assert not info.is_idle and info.epoch == 0
            assert info.tokens == sum(len(item(k)["input_ids"]) for k in info.ids)
            assert info.units == info.tokens - info.samples
            assert [int(row[0]) - 1 for row in batch["input_ids"]] == list(info.ids)
    assert repr(infos[0]).startswith("ODBStepInfo(loss_scaling='exact'") and "Taken" not in repr(infos[0])


@pytest.mark.parametrize("kind", [Rows, Stream])
def test_an_epoch_ends_as_in_torch(kind: Any) -> None:
    """With what is left, or with `drop_last` at the last whole batch of all ranks."""
    for drop_last, samples in ((False, [21, 21, 18]), (True, [21, 21, 14])):
        with make(kind(), drop_last=drop_last, batch_size=7, gradient_accumulation_steps=3) as loader:
            infos = [pop_step_info(batch) for batch in loader]
            assert loader.num_optimizer_steps == (3 if kind is Rows else None)
        assert [info.optimizer_step_samples for info in infos if info.ends_optimizer_step] == samples
        assert infos[-1].progress == (1.0 if kind is Rows else None)


def test_len_neither_estimates_nor_begins_anything() -> None:
    with make() as loader:
        for _ in range(2):
            with pytest.raises(TypeError, match="num_optimizer_steps"):
                len(loader)
            assert "not begun" in repr(loader)
        assert loader.num_optimizer_steps == 4
        assert len(list(loader)) < NUM_ROWS
        assert "rank 0 of 1" in repr(loader)


# What a loop can forget


def test_a_step_info_that_is_not_taken_out_is_told_once(said: pytest.LogCaptureFixture) -> None:
    def model(input_ids: Any, labels: Any, **ignored: Any) -> None:
        """Swallows the step info, as models of transformers do."""

    with make() as loader:
        for batch in loader:
            pop_step_info(batch)
            with pytest.raises(DataError, match="no 'odb_step_info'"):
                pop_step_info(batch)
        kept = list(loader)
        assert not said.messages, "batches that are kept may yet be asked"
        for batch in loader:
            model(**batch)
    assert [message.partition(":")[0] for message in said.messages] == [
        "a batch was dropped with its step info in it, so its loss was not weighed"
    ]
    assert kept


def test_an_optimizer_step_that_is_left_is_told(said: pytest.LogCaptureFixture) -> None:
    """Its gradients would become part of the next one."""
    with make() as loader:
        for at_its_end in (True, False):
            for batch in loader:
                if pop_step_info(batch).ends_optimizer_step == at_its_end:
                    break
            assert not said.messages, "it may not be iterated again"
        for batch in loader:
            pop_step_info(batch)
    assert len(said.messages) == 1 and "zero_grad" in said.messages[0]


def test_breaking_off_forgets_nothing(said: pytest.LogCaptureFixture, accelerate_state: None) -> None:
    """accelerate holds one batch more than it has handed over."""
    prepared = Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=4, collate_fn=pad))
    with apply_odb(prepared, token_budget=BUDGET, buffer_size=16):
        for _ in range(2):
            for batch in prepared:
                pop_step_info(batch)
                break
        assert rows_of(prepared) == EVERY_ROW
    assert not said.messages


def drop(items: list[Any]) -> Any:
    return pad(items[:-1] or items)


def widen(items: list[Any]) -> Any:
    return {key: torch.nn.functional.pad(ids, (0, -ids.shape[1] % 64), value=-100) for key, ids in pad(items).items()}


def in_one_row(items: list[Any]) -> Any:
    return {key: torch.tensor([[one for row in items for one in row[key]]]) for key in ("input_ids", "labels")}


def sort(items: list[Any]) -> Any:
    return pad(sorted(items, key=lambda one: one["input_ids"][0] * 7 % 11))


@pytest.mark.parametrize(
    ("collate_fn", "loss_scaling", "over_budget", "words"),
    [
        (widen, "exact", True, "above the budget of 128 tokens"),
        (in_one_row, "approx", False, "into one row of .*padding figures are those of the plan"),
        (sort, "exact", False, "so it has changed their order or their labels; `ids` of the step info"),
    ],
)
def test_a_collator_that_makes_something_else_is_told_once(
    collate_fn: Any, loss_scaling: str, over_budget: bool, words: str, said: pytest.LogCaptureFixture
) -> None:
    with make(collate_fn=collate_fn, loss_scaling=loss_scaling) as loader:
        assert rows_of(loader) == EVERY_ROW
        assert (loader.accounting.summary()["over_budget"] > 3) is over_budget
    (message,) = said.messages
    assert re.search(words, message) and "None" not in message


@pytest.mark.parametrize("loss_scaling", ["exact", "none"])
def test_a_collator_that_leaves_samples_out_is_refused(loss_scaling: Any) -> None:
    words = r"collator made \d+ rows of \d+ tokens of these \d+ samples"
    with make(collate_fn=drop, loss_scaling=loss_scaling) as loader, pytest.raises(DataError, match=words):
        rows_of(loader)


def test_a_collator_that_returns_the_same_tensors_each_time() -> None:
    """I2: a micro-batch is handed over before the next one is collated, whatever the accumulation."""
    place = torch.zeros(16, 40, dtype=torch.long)

    def reuse(items: list[Any]) -> Any:
        ids = pad(items)["input_ids"]
        place[: len(ids), : ids.shape[1]] = ids
        view = place[: len(ids), : ids.shape[1]]
        return {"input_ids": view, "labels": view.masked_fill(view == 0, -100)}

    with make(collate_fn=reuse, gradient_accumulation_steps=3) as loader:
        seen = []
        for batch in loader:
            assert [int(row[0]) - 1 for row in batch["input_ids"]] == list(pop_step_info(batch).ids)
            seen += batch["input_ids"][:, 0].tolist()
    assert Counter(row - 1 for row in seen) == EVERY_ROW


def test_a_stream_that_yields_nothing_in_its_second_epoch() -> None:
    class Once(Stream):
        """Its items are gone once they have been read."""

        items = map(item, range(NUM_ROWS))

        def __iter__(self) -> Any:
            return self.items

    with make(Once()) as loader:
        assert rows_of(loader) == EVERY_ROW
        with pytest.raises(DataError, match="it yields nothing in epoch 1; its `__iter__` must restart each time.*$"):
            rows_of(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_raises_says_where(num_workers: int) -> None:
    class Breaks(Stream):
        def __iter__(self) -> Any:
            yield from map(item, range(20))
            raise OSError("no route to host")

    with make(Breaks(), num_workers=num_workers) as loader:
        with pytest.raises(DataError, match="after item 19: OSError: no route to host"):
            list(loader)


# What a loop can do out of turn


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
    with pytest.raises(ConfigError, match="closed"):
        iter(loader)


@pytest.mark.parametrize("state", ["x", [], {}, [1], {"version": 2}, None], ids=repr)
def test_what_is_no_state_is_not_loaded(state: Any) -> None:
    with make() as loader, pytest.raises(DataError, match="is not a state"):
        loader.load_state_dict(state)


def test_accelerates_skipping_of_batches_is_refused(accelerate_state: None) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(Rows(), batch_size=4, collate_fn=pad))
    with make() as loader, apply_odb(prepared, token_budget=BUDGET):
        for one in (loader, prepared, accelerator.prepare(loader)):
            with pytest.raises(ConfigError, match=r"skip_first_batches.*load_state_dict"):
                next(iter(skip_first_batches(one, 2)))
    with make(Stream()) as loader, pytest.raises(ConfigError, match="skip_first_batches"):
        next(iter(skip_first_batches(loader, 2)))


@pytest.mark.parametrize("cost", [-3, 0, Cost(5, -1), Cost(5, 1, -1), 2**40, Cost(5, units=2**31)])
def test_a_cost_that_cannot_be_is_refused(cost: Any) -> None:
    """It would become a budget that holds anything, or a loss weight below 0."""
    with pytest.raises(ConfigError, match="its cost is"):
        make(cost_fn=lambda _: cost, loss_scaling="approx")


@pytest.mark.parametrize("number", [torch.tensor, np.int64])
def test_a_cost_may_be_a_number_of_torch_or_numpy(number: Callable[[int], Any], tmp_path: Path) -> None:
    """It can still be sent to another process, and stand in the audit."""
    for cost_fn in (
        lambda row: number(len(row["input_ids"])),
        lambda row: Cost(number(len(row["input_ids"])), number(2), number(3), media=Media(number(2))),
    ):
        with make(cost_fn=cost_fn, audit_dir=tmp_path, num_workers=1, multiprocessing_context="fork") as loader:
            assert rows_of(loader) == EVERY_ROW


@pytest.mark.parametrize("part", ["dataset", "cost_fn", "collate_fn"])
def test_what_a_spawned_worker_cannot_be_sent_is_refused_in_one_line(part: str) -> None:
    unsendable: dict[str, Any] = {
        "dataset": Rows(make=lambda k: item(k)),
        "cost_fn": lambda row: 5,
        "collate_fn": lambda items: pad(items),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="cannot be sent to a worker process") as error:
            with make(**{part: unsendable[part]}, num_workers=1, multiprocessing_context="spawn") as loader:
                list(loader)
    assert "\n" not in str(error.value)


# What a loop can be given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr_scale": "sqrt"}, "odb.lr_scale: 'sqrt' has no effect on kept optimizer steps"),
        ({"loss_scaling": "stock"}, "odb.loss_scaling: 'stock' is the loss of a trainer, and a custom loop computes"),
        ({"sampler": (k for k in range(9))}, "sampler: a generator can be iterated only once"),
        ({"batch_size": 0}, "batch_size: 0 is not a whole number"),
        ({"batch_size": None}, "batch_size: None is not a whole number"),
        ({"batch_size": -4}, "batch_size: -4 is not a whole number"),
        ({"collate_fn": None}, "collate_fn: missing"),
        ({"token_budge": 8}, "did you mean `token_budget`"),
        (
            {"config": FILLED_AND_SCALED, "token_budget": None},
            "odb.lr_scale: 'sqrt' has no effect in a custom loop",
        ),
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
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_are_answered_as_what_they_are(arguments: dict[str, Any], words: str) -> None:
    arguments = {"token_budget": BUDGET, "collate_fn": pad, "dataset": Rows()} | arguments
    if "config" in arguments:
        del arguments["token_budget"]
    with pytest.raises(ConfigError, match=words) as caught:
        ODBDataLoader(**arguments)
    assert "\n" not in str(caught.value)


def test_what_torch_takes_reaches_torch() -> None:
    """`drop_last=False` and the like come from frameworks that build a DataLoader anew."""
    with make(drop_last=False, num_workers=1, timeout=7, persistent_workers=True) as loader:
        assert (loader.timeout, loader.persistent_workers, loader.drop_last) == (7, True, False)


def test_filled_steps_drop_no_last_batch() -> None:
    with make(drop_last=True, global_batch_size="fill") as loader, pytest.raises(ConfigError, match="drop_last: True"):
        list(loader)


def test_rows_that_are_known_by_names_are_refused() -> None:
    rows = {f"row {k}": item(k) for k in range(NUM_ROWS)}
    with make(rows, sampler=list(rows)) as loader:
        with pytest.raises(ODBError, match="sampler: it yields 'row 0', and rows are known by whole numbers here"):
            rows_of(loader)


def test_an_order_that_changes_between_epochs_is_followed() -> None:
    """As torch does: of a curriculum, or of examples that are drawn by their losses."""
    order = list(range(NUM_ROWS))
    with make(sampler=order, batch_size=NUM_ROWS) as loader:
        assert rows_of(loader) == EVERY_ROW
        order[:] = [7] * 20 + [3] * 40
        assert rows_of(loader) == Counter({7: 20, 3: 40})


class Repeats(BatchSampler):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield from (batch, batch)


def test_batches_that_are_not_cut_in_order_are_refused(accelerate_state: None) -> None:
    """A sampler of batches has an order beside its own batches."""
    batches = Repeats(SequentialSampler(Rows()), 4, False)
    with pytest.raises(ConfigError, match="a Repeats decides which samples share a batch, as odb does; give the order"):
        apply_odb(DataLoader(Rows(), batch_sampler=batches, collate_fn=pad), token_budget=BUDGET)
    accelerator = Accelerator(cpu=True)
    skipping = skip_first_batches(DataLoader(Rows(), batch_size=4, collate_fn=pad), 2)
    with pytest.raises(ConfigError, match="SkipBatchSampler decides"):
        apply_odb(skipping, token_budget=BUDGET)
    stream = DataLoader(Stream(), batch_size=4, collate_fn=pad)
    undispatched = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    with pytest.raises(ConfigError, match="^accelerate.skip_first_batches: it would pass over micro-batches"):
        apply_odb(skip_first_batches(undispatched.prepare(stream), 2), token_budget=BUDGET)
    with pytest.raises(ConfigError, match="^dispatch_batches: accelerate lets one rank read for all"):
        apply_odb(accelerator.prepare(stream), token_budget=BUDGET)
    split = DataLoader(
        Rows(), batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(Rows()), 4, False), 2, 0, True)
    )
    with pytest.raises(ConfigError, match="^split_batches: True would cut each batch apart .* divide batch_size by 2"):
        apply_odb(split, token_budget=BUDGET)


@pytest.mark.parametrize("clash", ["odb_step_info", None])
def test_a_batch_that_cannot_hold_the_step_info(clash: str | None) -> None:
    from types import MappingProxyType

    def collate(items: list[Any]) -> Any:
        return pad(items) | {clash: 1} if clash else MappingProxyType(pad(items))

    with make(collate_fn=collate) as loader, pytest.raises(DataError, match="odb_step_info"):
        rows_of(loader)


# accelerate


def test_a_prepared_loader_moves_its_batches(accelerate_state: None) -> None:
    accelerator = Accelerator(cpu=True)
    PartialState().device = torch.device("meta")  # where an accelerator would be
    with make() as loader:
        assert next(iter(loader))["input_ids"].device.type == "cpu"
        assert accelerator.prepare(loader) is loader
        batch = next(iter(loader))
        assert {batch["input_ids"].device.type, batch["labels"].device.type} == {"meta"}
        assert pop_step_info(batch).samples == len(batch["input_ids"])
    stock = DataLoader(Rows(), collate_fn=pad)
    with apply_odb(stock, token_budget=BUDGET):
        assert next(iter(accelerator.prepare(stock)))["input_ids"].device.type == "meta"


def test_accelerate_and_the_loader_agree_on_the_optimizer_step(accelerate_state: None) -> None:
    """Its own count would end them elsewhere."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared = accelerator.prepare(DataLoader(Rows(), batch_size=4, collate_fn=pad))
    wrapped = apply_odb(prepared, gradient_accumulation_steps=4, token_budget=BUDGET)
    for loader in (accelerator.prepare(make(gradient_accumulation_steps=4)), wrapped):
        with loader, pytest.raises(ConfigError, match="gradient_accumulation_steps: 4 in the Accelerator.*leave it at"):
            next(iter(loader))


def test_batches_that_accelerate_counts_are_no_optimizer_steps(accelerate_state: None) -> None:
    """`accelerator.accumulate` would let a prepared optimizer step after each micro-batch, with no word."""
    accelerator = Accelerator(cpu=True)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    prepared = accelerator.prepare(DataLoader(Rows(), batch_size=16, collate_fn=pad))

    def accumulate(loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate():
                pop_step_info(batch)

    for loader in (accelerator.prepare(make()), make(), apply_odb(prepared, token_budget=BUDGET)):
        with loader:
            for batch in loader:
                info = pop_step_info(batch)
                if info.micro_batch == 0:
                    optimizer.zero_grad()
                    assert parameter.grad is None, "also if a step has only begun"
                accelerator.backward(parameter * info.loss_scale)
                if info.ends_optimizer_step:
                    assert parameter.grad.item() == pytest.approx(1.0)
                    optimizer.step()
            with pytest.raises(ConfigError, match="accelerator.accumulate: it counts batches.*step where"):
                accumulate(loader)
        assert accelerator.sync_gradients is True


def test_accelerate_gathers_all_of_the_last_micro_batch(accelerate_state: None) -> None:
    """Of a last batch of fixed size it drops the rows that other ranks have to fill it."""
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(Rows(num_rows=17), batch_size=16, collate_fn=pad))
    with apply_odb(prepared, token_budget=1024, global_batch_size=17):
        gathered = [accelerator.gather_for_metrics(batch["input_ids"][:, 0]) for batch in prepared]
    assert sorted(torch.cat(gathered).tolist()) == list(range(1, 18)) and len(gathered) == 1
    assert [len(accelerator.gather_for_metrics(batch["input_ids"])) for batch in prepared] == [16, 1]
