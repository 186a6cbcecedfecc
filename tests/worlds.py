"""Epochs of the core loader over rows that are lengths or costs, with threads as ranks; and a checker of the result:
I1 to I7, I9."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from plan_checks import check_groups, shape_of, totals_of
from thread_ranks import LOST, Seat, run_ranks
from torch.utils.data import BatchSampler, IterableDataset
from toy import core_loader, cost_of

from odb_factory.data.samples import MicroBatch
from odb_factory.errors import CollectiveError
from odb_factory.planner import Budget, Collation, Cost

Row = int | Cost | str
"""A sample with this number of tokens or this cost. 0, or the name of a fate (of `toy.Observer`): it is left out."""
LENGTHS = [3 + k * 7 % 23 if k % 11 else 0 for k in range(60)]
KEEP: dict[str, Any] = {"global_batch_size": "keep", "balance": True, "accumulation": 4}
DEFAULTS = {"token_budget": 32, "global_batch_size": "fill", "balance": False}
IGNORE, DUMMY = -100, 999


@dataclass
class Ended:
    """The micro-batches of a rank, the error that ended it, and its last state."""

    items: list[Any] = field(default_factory=list)
    error: Exception | None = None
    state: dict[str, Any] | None = None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro_batch for micro_batch, _, _ in self.items]


class Stream(IterableDataset):
    """A stream that all ranks iterate alike. It has no length."""

    is_split = False

    def __init__(self, rows: Sequence[Any], rank: int, world_size: int):
        self.rows = rows[rank::world_size] if self.is_split else rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class SplitStream(Stream):
    """A stream that gives each rank a different part."""

    is_split = True


class Claims:
    """An order that is longer or shorter than its `__len__`."""

    def __init__(self, order: Sequence[int], length: int):
        self.order, self.length = order, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.order)


def collate(items: list[dict[str, Any]], collation: Collation) -> dict[str, torch.Tensor]:
    """Like LLaMA-Factory's collator: without media the first row gets a masked dummy image."""
    grids = [[1, 1, item["patches"]] for item in items if item["patches"]]
    dummies = [[DUMMY] * (0 if grids or k else collation.dummy_media_tokens) for k in range(len(items))]
    length = max(len(item["input_ids"]) + len(dummy) for item, dummy in zip(items, dummies))
    length = -(-length // collation.pad_to_multiple_of) * collation.pad_to_multiple_of

    def rows(values: list[list[int]], extras: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([own + more + [fill] * (length - len(own + more)) for own, more in zip(values, extras)])

    ids, masked = [item["input_ids"] for item in items], [[0] * len(dummy) for dummy in dummies]
    return {
        "input_ids": rows(ids, dummies, 0),
        "attention_mask": rows([[1] * len(row) for row in ids], masked, 0),
        "labels": rows([item["labels"] for item in items], [[IGNORE] * len(dummy) for dummy in dummies], IGNORE),
        "image_grid_thw": torch.tensor(grids or [[1, 1, collation.dummy_media_patches]]),
    }


def open_loader(rows: Sequence[Row], seat: Seat, *, stream: Any = None, **options: Any) -> Any:
    """stream: the class of a dataset that is iterated. options: of `core_loader`."""
    rows = [(k, 5, row) if isinstance(row, str) else (k, row) for k, row in enumerate(rows)]
    collation = options.get("collation", Collation())
    options = {
        "stream": stream and stream(rows, seat.rank, seat.world_size),
        "collate_fn": functools.partial(collate, collation=collation),
        "on_error": "skip",
        **DEFAULTS,
    } | options
    return core_loader(rows, ranks=seat, **options)


def train(
    rows: Sequence[Row],
    *,
    world_size: int = 1,
    state: dict[str, Any] | None = None,
    stop_after: int | None = None,
    epochs: int = 1,
    leaves: Mapping[int, int] = {},
    **options: Any,
) -> list[Ended]:
    """Train from `state`; returns the result of each rank.

    stop_after: optimizer steps. leaves: {rank: number of optimizer steps after which it leaves}. options: of
    `open_loader`.
    """
    ranks = [Ended() for _ in range(world_size)]

    def drive(seat: Seat) -> None:
        num_steps, rank = 0, ranks[seat.rank]
        with open_loader(rows, seat, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.epoch < epochs:
                for item in loader:
                    rank.items.append(item)
                    if item[0].ends_optimizer_step:
                        loader.consume(item[0].step)
                        num_steps += 1
                        if num_steps in (stop_after, leaves.get(seat.rank)):
                            rank.state = loader.state_dict()
                            return
                loader.set_epoch(loader.epoch + 1)
            rank.state = loader.state_dict()

    for rank, error in zip(ranks, run_ranks(world_size, drive)):
        rank.error = error
    return ranks


def run(rows: Sequence[Row], **options: Any) -> tuple[list[list[MicroBatch]], dict[str, Any]]:
    """`train`, shuffled and without errors: the micro-batches of each rank, and the state, which is the same on all."""
    ranks = train(rows, **{"shuffle": True} | options)
    failed = [rank.error for rank in ranks if rank.error is not None]
    if failed:
        raise next((error for error in failed if str(error) != LOST), failed[0])
    states = [rank.state for rank in ranks]
    assert json.loads(json.dumps(states)) == states == states[:1] * len(ranks), "JSON types, the same on all ranks"
    return [rank.micro_batches for rank in ranks], states[0] or {}


# The checker


def usable(rows: Sequence[Row]) -> Counter[int]:
    return Counter(k for k, row in enumerate(rows) if row and not isinstance(row, str))


def ids_of(taken: Sequence[Sequence[MicroBatch]], epoch: int = 0) -> Counter[int]:
    return Counter(id for rank in taken for batch in rank if batch.step.epoch == epoch for id in batch.ids)


def num_steps(taken: Sequence[Sequence[MicroBatch]]) -> int:
    return sum(batch.ends_optimizer_step for batch in taken[0])


def of_steps(taken: Sequence[Sequence[MicroBatch]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The ids of each optimizer step, on all ranks."""
    steps: dict[tuple[int, int], list[int]] = {}
    for batch in itertools.chain(*taken):
        steps.setdefault((batch.step.epoch, batch.step.index), []).extend(batch.ids)
    return {key: tuple(sorted(ids)) for key, ids in sorted(steps.items())}


def check_epoch(rows: Sequence[Row], ranks: Sequence[Ended], **options: Any) -> None:
    """I1 to I7, I9 of a whole epoch. rows, options: arguments of `train`."""
    costs = {k: cost_of(rows[k]) for k in usable(rows)}  # type: ignore[arg-type]
    options = DEFAULTS | options
    budget = Budget(
        options["token_budget"],
        options.get("max_patches"),
        options.get("collation", Collation()),
        options.get("layout", "padded"),
        row_multiple=options.get("row_multiple", 1),
        pad_to_multiple_of=options.get("pad_to_multiple_of", 1),
    )
    if ranks[0].error is not None:
        assert all(isinstance(rank.error, CollectiveError) and not rank.items for rank in ranks), "all end alike"
        ran_short = options.get("join") is False and _ran_short(rows, Counter(), len(ranks), options)
        assert not costs or ran_short or options.get("drop_last")
        return
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    steps = _optimizer_steps(ranks, costs, budget)
    shares = options["balance"] and len(ranks) > 1
    for number, rank in enumerate(ranks):
        for batch in rank.micro_batches:
            assert shares or all(id % len(ranks) == number for id in batch.ids), "a rank keeps its samples"
            few = shares and batch.totals.active_ranks < len(ranks)
            assert not few or batch.totals.samples == batch.totals.active_ranks, "I7: too few samples for all ranks"
    emitted = ids_of([rank.micro_batches for rank in ranks])
    assert set(emitted.values()) <= {1} and set(emitted) <= set(costs), "I2, I3: no sample twice"
    last = steps[-1][0][0].step
    assert last.overlong == sum(map(budget.overlong, costs.values())) or options.get("join") is False or last.remainder
    assert [of_ranks[0][0].step.last for of_ranks in steps] == [False] * (len(steps) - 1) + [True]
    assert last.epoch_steps == len(steps), "no estimate is left"
    assert last.remainder == len(rows) - len(emitted) - last.rejected.total()
    assert not any(of_ranks[0][0].step.remainder for of_ranks in steps[:-1])
    if options["global_batch_size"] == "fill":
        _check_filled(rows, steps, emitted, options)
    else:
        _check_kept(rows, steps, costs, budget, options)


def _optimizer_steps(ranks: Sequence[Ended], costs: Mapping[int, Cost], budget: Budget) -> list[list[list[MicroBatch]]]:
    """[optimizer step][rank][micro-step]. I1, I4, I6: all ranks have the same steps with the stated number of
    micro-batches and the totals of all ranks, which loss weights depend on; tensors are as planned; an idle micro-batch
    has a real sample."""
    by_rank = [
        [list(group) for _, group in itertools.groupby(rank.micro_batches, lambda one: one.step.index)]
        for rank in ranks
    ]
    steps = list(map(list, zip(*by_rank, strict=True)))
    for of_ranks in steps:
        step = of_ranks[0][0].step
        for own in of_ranks:
            assert all(replace(one.step, stock_input_tokens=step.stock_input_tokens) == step for one in own)
            assert [one.index for one in own] == list(range(step.num_micro_batches)), "I1"
            assert [one.ends_optimizer_step for one in own] == [False] * (len(own) - 1) + [True]
        groups = [[[costs[id] for id in one.ids] for one in own] for own in of_ranks]
        check_groups(groups, budget)
        for k, micro_step in enumerate(zip(*groups)):
            totals = [own[k].totals for own in of_ranks]
            assert totals == totals[:1] * len(ranks), "I6: all ranks plan the same"
            assert replace(totals[0], moved=0) == totals_of(micro_step, budget)
            assert totals[0].samples or not step.samples, "I7: never all at once"
        every = [cost for own in groups for group in own for cost in group]
        assert (step.samples, step.active_ranks) == (len(every), sum(bool(group) for own in groups for group in own))
        assert (step.tokens, step.units) == (sum(one.tokens for one in every), sum(one.units for one in every))
    for rank in ranks:
        for one, measured, batch in rank.items:
            own = [costs[id] for id in one.ids]
            assert one.units == tuple(cost.units for cost in own) and one.tokens == sum(cost.tokens for cost in own)
            assert batch["input_ids"].shape == batch["labels"].shape == (measured.rows, measured.length)
            if own:
                assert (measured.rows, measured.length, measured.patches) == budget.shape(own)
            if measured.segments:
                samples = batch["input_ids"][0].split(measured.segments)
                ends = batch.get("cu_seq_lens_q")
                assert ends is None or ends.diff().tolist() == list(measured.segments)
            else:
                samples = [ids[mask > 0] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
            ids = [int(sample[0]) - 1 for sample in samples[: len(own) or 1]]
            assert all(int(sample[0]) == int(sample[-1]) for sample in samples[: len(own) or 1])
            assert tuple(ids) == one.ids or (one.idle and ids[0] in costs)
            assert [len(sample) for sample in samples[: len(ids)]] == [costs[id].tokens for id in ids]
    return steps


def _check_filled(rows: Sequence[Row], steps: list[Any], emitted: Counter[int], options: Mapping[str, Any]) -> None:
    accumulation, join, world_size = options.get("accumulation", 1), options.get("join", True), len(steps[0])
    is_balanced = options["balance"] and world_size > 1
    sizes = [of_ranks[0][0].step.num_micro_batches for of_ranks in steps]
    assert sizes[:-1] == [accumulation] * (len(steps) - 1), "I1"
    assert sizes[-1] == accumulation or (join and 0 < sizes[-1] < accumulation), "only the last may be smaller"
    for rank in range(world_size):
        idle = [batch.idle for of_ranks in steps for batch in of_ranks[rank]]
        assert join or not any(idle), "I3"
        assert is_balanced or idle == sorted(idle), "I7: a rank idles after its last sample"
    if join:
        assert emitted == usable(rows), "I2"
    else:
        assert _ran_short(rows, emitted, world_size, options), "I3"
    num_emitted = 0
    for index, of_ranks in enumerate(steps):
        step = of_ranks[0][0].step
        num_emitted += step.samples
        is_unknown = options.get("stream") and not step.last and not step.epoch_steps
        assert step.index == index and (step.epoch_steps > index or is_unknown), "a step beyond the estimate"
        assert (step.num_stock_means, step.stock_input_tokens) == (0, None), "no stock step to compare with"
        assert step.done == (len(rows) if step.last else num_emitted + step.rejected.total())
        assert step.progress == (None if options.get("stream") else step.done / len(rows))


def _ran_short(rows: Sequence[Row], emitted: Counter[int], world_size: int, options: Mapping[str, Any]) -> bool:
    """Whether a rank has too few samples left for an optimizer step."""
    left = Counter(id % world_size for id in usable(rows) - emitted)
    return min(left[rank] for rank in range(world_size)) < options.get("accumulation", 1)


def _check_kept(
    rows: Sequence[Row], steps: list[Any], costs: Mapping[int, Cost], budget: Budget, options: Mapping[str, Any]
) -> None:
    """Step t has the samples [tN, (t+1)N) of the order. The batches of stock come from accelerate's own
    `BatchSamplerShard`, which deals them to the ranks."""
    world_size, batch_size = len(steps[0]), options.get("batch_size", 1)
    of_stock = batch_size * world_size * options.get("accumulation", 1)
    size = options["global_batch_size"] if options["global_batch_size"] != "keep" else of_stock
    end = len(rows) - (len(rows) % (batch_size * world_size) if options.get("drop_last") else 0)
    assert len(steps) == -(-end // size)
    rejected, overlong = Counter[str](), 0
    for t, of_ranks in enumerate(steps):
        step, wanted = of_ranks[0][0].step, range(t * size, min((t + 1) * size, end))
        ids = [id for own in of_ranks for one in own for id in one.ids]
        assert sorted(ids) == [id for id in wanted if id in costs], "I2, I9"
        rejected += Counter(_reason(rows[id]) for id in wanted if id not in costs)
        overlong += sum(budget.overlong(costs[id]) for id in ids)
        assert (step.index, step.rejected, step.done, step.overlong) == (t, rejected, wanted.stop, overlong)
        is_known = not options.get("stream")
        assert step.epoch_steps == (len(steps) if is_known or step.last else 0)
        if not ids:
            assert step.num_micro_batches == 1 and step.active_ranks == 0
        for own in of_ranks:
            idle = [batch.idle for batch in own]
            assert idle == sorted(idle), "I7: a rank idles after its last sample of the step"
    if size == of_stock:
        _check_stock(steps, costs, len(rows), options)


def _reason(row: Row) -> str:
    return row if isinstance(row, str) else "invalid"


def _check_stock(steps: list[Any], costs: Mapping[int, Cost], num_rows: int, options: Mapping[str, Any]) -> None:
    """I9: the divisors of stock's means, its padded tokens, its progress."""
    world_size, batch_size, mean = len(steps[0]), options.get("batch_size", 1), options.get("stock_mean")
    accumulation = options.get("accumulation", 1)
    batches = BatchSampler(range(num_rows), batch_size, bool(options.get("drop_last")))
    seen: set[int] = set()
    dealt: list[list[list[int]]] = []
    for micro_step in zip(*(BatchSamplerShard(batches, world_size, rank) for rank in range(world_size))):
        dealt.append([])
        for batch in micro_step:  # without repeated rows and rows that are left out
            dealt[-1].append([k for k in dict.fromkeys(batch) if k not in seen and k in costs])
            seen.update(batch)
    over, counts = ("step", "tokens") if mean is None else (mean.over, mean.counts)
    # A model that takes its own mean shifts the labels first; the Trainer counts them all.
    counted = {id: cost.units + ("labels" in counts and cost.leading_label) for id, cost in costs.items()}
    for t, of_ranks in enumerate(steps):
        micro_steps = dealt[t * accumulation : (t + 1) * accumulation]
        by_rank = [list(itertools.chain(*batches)) for batches in zip(*micro_steps)]
        every_batch = [batch for micro_step in micro_steps for batch in micro_step]
        means = {"step": [list(itertools.chain(*by_rank))], "rank": by_rank, "micro_batch": every_batch}[over]
        divided_by = {id: sum(counted[other] for other in group) for group in means for id in group}
        done = min((t + 1) * accumulation, len(dealt)) / len(dealt)
        for rank, own in enumerate(of_ranks):
            step = own[0].step
            assert step.num_stock_means == sum(bool(group) for group in means)
            if not options.get("stream"):
                assert abs(step.progress - done) < 1e-12
            shapes = [
                shape_of(
                    [costs[id] for id in batches[rank]], Budget(1, collation=options.get("collation", Collation()))
                )
                for batches in micro_steps
                if batches[rank]
            ]
            assert step.stock_input_tokens == sum(num_rows * length for num_rows, length, _ in shapes)
            for one in own:
                assert [sample.stock_units for sample in one.samples] == [divided_by[id] for id in one.ids]
                assert not options.get("equal_weights") or len({sample.stock_units for sample in one.samples}) <= 1
