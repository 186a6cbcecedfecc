"""Rows that cannot be laid flat: `layout: auto` pads them and trains as stock (I9, I10), `flat` is refused.

The check before training reads 16 rows. A later row that cannot be laid flat pads only its own micro-batch.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from data.layout_models import picture_row, vision_model
from distributed.ranks import run_ranks
from toy import Rows
from training.flat_models import make_model
from training.toy_training import Sequential, audit, collate, ids, losses, train
from transformers import Trainer

from odb_factory.data.collate import ROWS_TRIED
from odb_factory.errors import ConfigError, DataError

NUM_ROWS, LATE = 28, ROWS_TRIED + 5


def row(k: int) -> dict[str, Any]:
    """5 to 44 tokens, of which all but the first are supervised."""
    tokens = [1 + (k * 31 + j * 7) % 90 for j in range(5 + k * 7 % 40)]
    return {"k": k, "input_ids": tokens, "labels": [-100, *tokens[1:]], "attention_mask": [1] * len(tokens)}


def masked(row: dict[str, Any], *places: int) -> dict[str, Any]:
    mask = row["attention_mask"]
    for place in places:
        mask[place] = 0
    return row


def skips_positions(rows: list[dict[str, Any]], first: int) -> dict[str, torch.Tensor]:
    """The rows from `first` on skip positions."""
    batch = collate(rows)
    positions = torch.arange(batch["input_ids"].shape[1]).repeat(len(rows), 1)
    for place, row in enumerate(rows):
        positions[place, 3:] += 100 * (row["k"] >= first)
    return {**batch, "position_ids": positions}


def sorts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate(sorted(rows, key=lambda row: -len(row["input_ids"])))


def with_bools(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "attention_mask": batch["attention_mask"].bool()}


class Case(NamedTuple):
    """is_late: the check before training does not read the rows that cannot be laid flat."""

    row: Callable[[int], dict[str, Any]] = row
    collate: Callable[..., dict[str, torch.Tensor]] = collate
    is_late: bool = False
    model: Callable[[], Any] = functools.partial(make_model, "llama")


CASES = {
    "positions": Case(collate=lambda rows: skips_positions(rows, 0)),
    "late positions": Case(collate=lambda rows: skips_positions(rows, LATE), is_late=True),
    "labels on masked tokens": Case(lambda k: masked(row(k), *[-1] * (k % 3 == 0))),
    "late labels on masked tokens": Case(lambda k: masked(row(k), *[-1] * (k == LATE)), is_late=True),
    "holes": Case(lambda k: masked(row(k), *[2] * (k == 9))),
    "late holes": Case(lambda k: masked(row(k), *[2] * (k >= LATE)), is_late=True),
    "late holes in a mask of bools": Case(lambda k: masked(row(k), *[2] * (k >= LATE)), with_bools, is_late=True),
    "a collator that sorts": Case(collate=sorts),
}


def run(case: Case, folder: Path, layout: str, on_error: str = "raise", **changes: Any) -> Trainer:
    """layout: "stock" trains without odb."""
    block = {"token_budget": 128, "layout": layout, "on_error": on_error, "audit": True}
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
    return train(
        case.model(),
        folder,
        Rows(case.row, NUM_ROWS),
        block=None if layout == "stock" else block,
        collate=case.collate,
        trainer_class=Sequential,
        **cut | changes,
    )


@pytest.mark.stock
@pytest.mark.parametrize("name", CASES)
def test_auto_trains_as_stock(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    expected = pytest.approx(losses(run(case, tmp_path / "stock", "stock")), rel=1e-5)
    assert losses(run(case, tmp_path / "padded", "padded")) == expected
    for on_error in ("raise", "skip"):
        folder = tmp_path / on_error
        caplog.clear()
        assert losses(run(case, folder, "auto", on_error)) == expected
        assert ids(folder) == Counter(range(NUM_ROWS)), "no row is left out"
        lines = audit(folder)
        assert any(line["segments"] for line in lines) == case.is_late
        assert any(len(line["ids"]) > 1 for line in lines if not line["segments"])
        logged = [message for message in caplog.messages if message.startswith("layout: ")]
        assert len(logged) == 1 + case.is_late and all("Error" not in message for message in logged)


@pytest.mark.parametrize("name", [name for name in CASES if name != "a collator that sorts"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_flat_names_the_row(name: str, on_error: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises((ConfigError, DataError)) as refused:
        run(case, tmp_path, "flat", on_error)
    message = str(refused.value)
    assert "odb.layout" in message and "row " in message and "on_error" not in message and "\n" not in message
    if case.is_late:
        assert f"row {LATE}: " in message


def train_on_two_ranks(rank: int, output_dir: str, name: str, num_workers: int) -> dict[str, list[float]]:
    os.environ["LOCAL_RANK"] = str(rank)
    changes = {"per_device_train_batch_size": 1, "dataloader_num_workers": num_workers}
    kinds = ("stock", "auto")
    return {kind: losses(run(CASES[name], Path(output_dir, kind), kind, **changes)) for kind in kinds}


@pytest.mark.stock
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_late_row_pads_one_micro_batch_of_its_rank(num_workers: int, tmp_path: Path) -> None:
    """Both ranks have the same number of micro-batches (I1), and no sample is lost (I2)."""
    options = {"output_dir": str(tmp_path), "name": "late labels on masked tokens", "num_workers": num_workers}
    outcomes = run_ranks("training.test_layout_falls_back:train_on_two_ranks", tmp_path, limit_s=120, **options)
    for outcome in outcomes:
        assert outcome.value["auto"] == pytest.approx(outcome.value["stock"], rel=1e-5)
    lines = [audit(tmp_path / "auto", rank) for rank in range(2)]
    assert sum((ids(tmp_path / "auto", rank) for rank in range(2)), Counter()) == Counter(range(NUM_ROWS))
    assert len(lines[0]) == len(lines[1])
    padded = [LATE in line["ids"] for of_rank in lines for line in of_rank if not line["segments"]]
    assert padded == [True]


# Positions of images, which a model derives from padded rows


@pytest.mark.stock
@pytest.mark.parametrize("num_workers", [0, 1])
def test_positions_of_images_are_those_of_the_model(num_workers: int, tmp_path: Path) -> None:
    """Without `mm_token_type_ids`, so newer releases of transformers take image tokens for text. With them:
    test_same_training.py."""
    case = Case(picture_row, model=vision_model)
    auto, stock = (
        losses(run(case, tmp_path / layout, layout, dataloader_num_workers=num_workers)) for layout in ("auto", "stock")
    )
    assert auto == pytest.approx(stock, rel=1e-5)
    assert all(line["segments"] for line in audit(tmp_path / "auto"))
