"""What was planned is what was collated (I1, I2, I4, I8), from the running loaders of two ranks, with media."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thread_ranks import run_ranks
from toy import Observer, core_loader

from odb_factory.errors import CollectiveError
from odb_factory.planner import Collation, Cost

LENGTHS = [2 + k * 7 % 39 for k in range(61)]
DUMMY = Collation(pad_to_multiple_of=4, dummy_media_tokens=3, dummy_media_patches=2)
IGNORE = -100


class MediaObserver(Observer):
    """Every third row brings an image of four patches."""

    def __call__(self, row: tuple[int, int]) -> tuple[dict[str, Any], Cost]:
        features, cost = super().__call__(row)
        if row[0] % 3:
            return features, cost
        return features | {"media": True}, Cost(cost.tokens, 4, cost.units, has_media=True)


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As LLaMA-Factory's collator: without media the first row is given a dummy image, masked, of two patches."""
    grids = [[1, 2, 2] for item in items if "media" in item]
    dummies = [[] if grids or k else [999] * DUMMY.dummy_media_tokens for k in range(len(items))]
    length = max(len(item["input_ids"]) + len(dummy) for item, dummy in zip(items, dummies))
    length = -(-length // DUMMY.pad_to_multiple_of) * DUMMY.pad_to_multiple_of

    def rows(values: list[list[int]], extras: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([own + more + [fill] * (length - len(own + more)) for own, more in zip(values, extras)])

    ids, masked = [item["input_ids"] for item in items], [[0] * len(dummy) for dummy in dummies]
    return {
        "input_ids": rows(ids, dummies, 0),
        "attention_mask": rows([[1] * len(row) for row in ids], masked, 0),
        "labels": rows([item["labels"] for item in items], [[IGNORE] * len(dummy) for dummy in dummies], IGNORE),
        "image_grid_thw": torch.tensor(grids or [[1, 1, 2]]),
    }


MODES: dict[str, dict[str, Any]] = {
    "fill": {"accumulation": 2},
    "keep": {"global_batch_size": "keep", "batch_size": 2, "accumulation": 4, "balance": True},
    "keep, no balance": {"global_batch_size": "keep", "batch_size": 2, "accumulation": 4},
}


@pytest.mark.parametrize(("layout", "round_to"), [("padded", None), ("flat", None), ("flat", 8)])
@pytest.mark.parametrize("mode", MODES)
def test_what_was_planned_is_what_was_collated(mode: str, layout: str, round_to: int | None) -> None:
    """Also of idle micro-batches, and of dummy media, which in a flat row are a segment of their own."""
    is_flat = layout == "flat"
    options = {"observer": MediaObserver(), "collate_fn": collate, "collation": DUMMY, "max_patches": 20, **MODES[mode]}
    options |= {"layout": layout, "pad_to_multiple_of": round_to, "with_boundaries": is_flat}

    def drive(seat: Any) -> list[Any]:
        with core_loader(LENGTHS, ranks=seat, **options) as loader:
            return list(loader)

    mine, theirs = run_ranks(2, drive)
    assert sorted(id for one, _, _ in mine + theirs for id in one.ids) == list(range(61))
    for items in zip(mine, theirs):
        (totals,) = {one.totals for one, _, _ in items}
        sizes = [measured.rows * measured.length for one, measured, _ in items if not one.idle]
        assert (totals.padded_tokens, totals.max_rank_tokens) == (sum(sizes), max(sizes))
        assert totals.patches == sum(measured.patches for one, measured, _ in items if not one.idle)
        for one, measured, batch in items:
            assert batch["input_ids"].shape == batch["labels"].shape == (measured.rows, measured.length)
            assert measured.patches == int(batch["image_grid_thw"].prod(-1).sum())
            if len(one.ids) > 1:
                assert measured.rows * measured.length <= 100 and measured.patches <= 20
            if one.idle:
                continue
            assert (batch["labels"][:, 1:] != IGNORE).sum().item() == one.num_units == measured.units
            if is_flat:
                assert batch["cu_seq_lens_q"].diff().tolist() == list(measured.segments)
                assert measured.rows == 1 and measured.length == sum(measured.segments)
                assert not round_to or measured.length % round_to == 0
                rows = batch["input_ids"][0].split(measured.segments)
                if measured.patches == DUMMY.dummy_media_patches:
                    assert rows[len(one.ids)].tolist() == [999] * 3, "the dummy image"
            else:
                rows = [row[mask > 0] for row, mask in zip(batch["input_ids"], batch["attention_mask"])]
            assert [row.tolist() for row in rows[: len(one.ids)]] == [[k + 1] * LENGTHS[k] for k in one.ids]
        if is_flat:
            squares = [sum(n * n for n in measured.segments) for one, measured, _ in items if not one.idle]
            assert totals.max_rank_attention == max(squares)


def test_ranks_that_lay_out_otherwise_stop() -> None:
    """I11: what each has resolved `layout: auto` to is compared."""

    def drive(seat: Any) -> list[Any]:
        resolved = "flat" if seat.rank == 0 else "padded"
        with core_loader(LENGTHS, ranks=seat, resolved=resolved, collate_fn=collate) as loader:
            return list(loader)

    for ended in run_ranks(2, drive):
        assert isinstance(ended, CollectiveError)
        assert "layout of the micro-batches ('flat' on rank 0; 'padded' on rank 1)" in str(ended)
