"""Flat micro-batches from the running loader: what was planned is what was collated, on several ranks, with media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from data.test_loader import (
    COLLATION,
    IGNORE,
    KEEP,
    EpochOrder,
    Row,
    ToyObserver,
    all_ids,
    open_loader,
    run,
    toy_rows,
)
from thread_ranks import run_ranks

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule
from odb_factory.errors import CollectiveError
from odb_factory.planning import Collation, Cost

pytestmark = pytest.mark.timeout(60)

DUMMY = Collation(pad_to_multiple_of=4, dummy_media_tokens=3, dummy_media_patches=2)


class MediaObserver(ToyObserver):
    """Every third row brings an image of four patches."""

    def __call__(self, row: Row) -> tuple[dict[str, Any], Cost]:
        features, cost = super().__call__(row)
        if row.index % 3:
            return features, cost
        return features | {"media": True}, Cost(cost.tokens, 4, cost.units, has_media=True)


def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As LLaMA-Factory's collator: without media the first row is given a dummy image, masked, of two patches."""
    grids = [[1, 2, 2] for feature in features if "media" in feature]
    dummies = [[] if grids or k else [999] * DUMMY.dummy_media_tokens for k in range(len(features))]
    length = max(len(feature["input_ids"]) + len(dummy) for feature, dummy in zip(features, dummies))
    length = -(-length // DUMMY.pad_to_multiple_of) * DUMMY.pad_to_multiple_of

    def rows(values: list[list[int]], extras: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([own + more + [fill] * (length - len(own + more)) for own, more in zip(values, extras)])

    ids = [feature["input_ids"] for feature in features]
    ones, zeros = [[1] * len(row) for row in ids], [[0] * len(dummy) for dummy in dummies]
    unlabelled = [[IGNORE] * len(dummy) for dummy in dummies]
    return {
        "input_ids": rows(ids, dummies, 0),
        "attention_mask": rows(ones, zeros, 0),
        "labels": rows([feature["labels"] for feature in features], unlabelled, IGNORE),
        "image_grid_thw": torch.tensor(grids or [[1, 1, 2]]),
    }


MODES: dict[str, dict[str, Any]] = {
    "fill": {"global_batch_size": "fill", "accumulation": 2},
    "keep": KEEP,
    "keep, no balance": {**KEEP, "balance": False},
}


@pytest.mark.parametrize("round_to", [None, 8])
@pytest.mark.parametrize("mode", MODES)
def test_what_was_planned_is_what_was_collated(mode: str, round_to: int | None) -> None:
    """I1, I2, I4 on two ranks; also of idle micro-batches, and of dummy media, which are a segment of their own."""
    rows = toy_rows(61)

    def drive(seat: Any) -> list[Any]:
        with open_loader(
            rows,
            ranks=seat,
            observer=MediaObserver(),
            collate_fn=collate,
            collation=DUMMY,
            layout="flat",
            pad_to_multiple_of=round_to,
            max_patches=20,
            **MODES[mode],
        ) as loader:
            assert loader.layout == "flat"
            return run(loader)

    mine, theirs = run_ranks(2, drive)
    assert sorted(all_ids(mine) + all_ids(theirs)) == list(range(61))
    lone = 0
    for items in zip(mine, theirs):
        (totals,) = {one.totals for one, _, _ in items}
        busy = [(one, measured) for one, measured, _ in items if not one.idle]
        assert totals.padded_tokens == sum(measured.length for _, measured in busy)
        assert totals.max_rank_tokens == max(measured.length for _, measured in busy)
        assert totals.patches == sum(measured.patches for _, measured in busy)
        assert totals.max_rank_attention == max(sum(n * n for n in measured.segments) for _, measured in busy)
        for one, measured, batch in items:
            assert set(batch) == {"input_ids", "labels", "position_ids", "image_grid_thw"}
            assert measured.rows == 1 and measured.length == batch["input_ids"].numel() == sum(measured.segments)
            has_media = measured.patches != DUMMY.dummy_media_patches
            parts = batch["input_ids"][0].split(measured.segments)
            if not has_media:
                assert parts[len(one.ids) or 1].tolist() == [999] * 3, "the dummy image"
            if one.idle:
                continue
            assert [set(part.tolist()) for part in parts[: len(one.ids)]] == [{k + 1} for k in one.ids]
            assert [len(part) for part in parts[: len(one.ids)]] == [rows[k].tokens for k in one.ids]
            assert sum(measured.segments[: len(one.ids)]) == one.tokens
            assert measured.units == one.num_units
            if round_to:
                assert measured.length % round_to == 0
            if len(one.ids) > 1:
                assert measured.length <= 100 and measured.patches <= 20
            lone += len(one.ids) == 1
    assert lone < len(mine), "samples share micro-batches"


def test_ranks_that_lay_out_otherwise_stop() -> None:
    """I11: what each has resolved `layout: auto` to is compared."""

    def drive(seat: Any) -> list[Any]:
        loader = ODBLoader(
            DataLoaderParts(dataset=toy_rows(), sampler=EpochOrder(60), collate_fn=collate),
            ODBConfig(token_budget=100),
            observer=ToyObserver(),
            layout="flat" if seat.rank == 0 else "padded",
            rule=OptimizerStepRule(),
            ranks=seat,
        )
        return run(loader)

    for ended in run_ranks(2, drive):
        assert isinstance(ended, CollectiveError)
        assert "differ in layout of the micro-batches ('flat' on rank 0; 'padded' on rank 1); give" in str(ended)


def test_boundaries_are_computed_in_the_worker_where_they_are_wanted() -> None:
    with open_loader(toy_rows(), (1, 1), layout="flat", with_boundaries=True, **KEEP) as loader:
        items = run(loader)
    for _, measured, batch in items:
        assert isinstance(batch, Mapping)
        assert batch["cu_seq_lens_q"].diff().tolist() == list(measured.segments)
        assert batch["max_length_k"] == max(measured.segments)


def test_a_flat_micro_batch_holds_more_than_a_padded_one() -> None:
    """The budget bounds real tokens: as many micro-batches as they need, whatever their lengths."""
    numbers = {}
    for layout in ("padded", "flat"):
        with open_loader(toy_rows(), layout=layout, collation=COLLATION, buffer_size=60, accumulation=1) as loader:
            items = run(loader)
        numbers[layout] = len(items)
        tokens = sum(one.tokens for one, _, _ in items)
    assert -(-tokens // 100) <= numbers["flat"] < numbers["padded"]
