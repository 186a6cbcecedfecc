"""Rows observed online: placeholders that are cut or part of the text, unreadable media, tokenized data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from stock import Stock, load_data, load_stock
from support import training_config, write_dataset

from odb_factory.config import ODBConfig
from odb_factory.data.observe import ObservedDataset
from odb_factory.data.samples import Rejection, unpack
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset, OpenMedia, RowObserver, TokenizedDataset, training_rows
from odb_factory.llamafactory.stages import STAGES
from odb_factory.planner import Budget

pytestmark = pytest.mark.stock

BLOCK = {"token_budget": 1024, "max_patches": 900, "buffer_size": 24}


class Setting:
    """A configuration of real LLaMA-Factory with a block; `stock` is loaded when it is used."""

    def __init__(self, config: dict[str, Any], **block: Any):
        self.stock_config, self.config = config, ODBConfig.from_block(BLOCK | block)
        self.dataset: OnlineDataset = load_data({**config, "odb": BLOCK | block})["train_dataset"]
        self.observer = RowObserver(self.dataset.media, STAGES["sft"])

    @functools.cached_property
    def stock(self) -> Stock:
        return load_stock(self.stock_config)

    def stock_row(self, index: int) -> dict[str, Any]:
        return dict(self.stock.datasets["train_dataset"][index])

    def observe(self, index: int, tokenized: list[dict[str, Any]] | None = None) -> Any:
        """Observe a row of the dataset, or of tokenized rows."""
        rows: Any = self.dataset
        if tokenized is not None:
            rows = TokenizedDataset(datasets.Dataset.from_list(tokenized), rows.media, STAGES["sft"])
        budget = Budget(self.config.token_budget, self.config.max_patches)
        return ObservedDataset(rows, self.observer, self.config, budget)[index]


@pytest.fixture(scope="module")
def vl(tiny_vl, data_dir, tmp_path_factory) -> Setting:
    return Setting(training_config(tiny_vl, data_dir, tmp_path_factory.mktemp("out"), dataset="texts,pictures"))


def conversation(question: str, images: tuple[str, ...] = (), system: str = "") -> dict[str, Any]:
    turns = [("system", system)] if system else []
    turns += [("user", question), ("assistant", "an answer of some words")]
    return {"messages": [{"role": role, "content": content} for role, content in turns], "images": list(images)}


def setting_of(rows: list[dict[str, Any]], model: Path, folder: Path, **block: Any) -> Setting:
    """The setting of a dataset `mine` with these rows."""
    return Setting(
        training_config(model, write_dataset(folder, {"mine": rows}), folder / "out", dataset="mine"), **block
    )


def test_cut_placeholders(tiny_vl, data_dir, tmp_path) -> None:
    config = training_config(tiny_vl, data_dir, tmp_path, dataset="pictures", cutoff_len=16)
    sample = Setting(config).observe(1)
    assert isinstance(sample, Rejection) and sample.fatal and sample.reason == "media_cut"
    for word in ("cutoff_len 16", "row 1 of pictures.json", "wide.png", "overlong: drop"):
        assert word in sample.message
    assert "\n" not in sample.message
    dropped = Setting(config, overlong="drop").observe(1)
    assert not dropped.fatal and "overlong" not in dropped.message, "no advice to set what is set"


def test_placeholders_written_out(tiny_vl, tmp_path) -> None:
    """A text with `<|image_pad|>` is a bad row, for `on_error`; stock fails when it collates the row."""
    Image.new("RGB", (90, 60), "red").save(tmp_path / "red.png")
    rows = [
        conversation("what is <|image_pad|> for"),
        conversation("what is <|video_pad|> for"),
        conversation("<image>what is <|image_pad|> for", ("red.png",)),
        conversation("what?", system="say <|image_pad|>"),
        conversation("<|image_pad|> <image>", ("red.png",)),
        conversation("what?"),
        conversation("<image>what is <|vision_start|> for", ("red.png",)),
    ]
    setting = setting_of(rows, tiny_vl, tmp_path, on_error="skip")
    for index in range(len(rows)):
        sample = setting.observe(index)
        if index > 4:
            assert not isinstance(sample, Rejection)
            continue
        assert (sample.reason, sample.fatal) == ("unreadable", False)
        assert f"row {index} of mine.json" in sample.message and "contains the placeholder" in sample.message
    # Also if truncation leaves as many placeholders as the picture needs.
    data_args = setting.dataset.processor.data_args
    for data_args.cutoff_len in range(4, len(setting.stock_row(4)["input_ids"]) + 2):
        assert isinstance(setting.observe(4), Rejection), data_args.cutoff_len


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_media_that_cannot_be_read(tiny_vl, tmp_path, on_error: str) -> None:
    Image.new("RGB", (90, 60), "red").save(tmp_path / "good.png")
    (tmp_path / "not_an_image.png").write_bytes(b"plain text")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut_off.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder.png").mkdir()
    names = ("good.png", "not_an_image.png", "cut_off.png", "folder.png")
    rows = [conversation("<image>what?", (name,)) | {"videos": []} for name in names]
    rows.append(conversation("<video>what?") | {"videos": [["good.png", "gone.png", "good.png", "good.png"]]})
    good, not_an_image, cut_off, folder, gone = map(
        setting_of(rows, tiny_vl, tmp_path, on_error=on_error).observe, range(len(rows))
    )
    assert not isinstance(good, Rejection)
    assert (not_an_image.reason, not_an_image.fatal) == ("unreadable", on_error == "raise")
    assert "row 1 of mine.json" in not_an_image.message and "not_an_image.png" in not_an_image.message
    assert ("on_error: skip" in not_an_image.message) == (on_error == "raise"), "no advice to set what is set"
    assert not isinstance(cut_off, Rejection), "the error occurs when the image is decoded, in a collate worker"
    assert "no such file: folder.png: " in folder.message
    assert "no such file: gone.png: ValueError" in gone.message


def test_a_row_with_images_and_videos_is_refused_if_ranks_share_parameters(vl: Setting) -> None:
    """Its rank would run the vision tower twice, the others once, and all ranks would hang."""
    features = {"input_ids": [1, 2], "labels": [1, 2], "images": ["one.png"], "videos": ["one.mp4"]}
    shared = {"model_type": "llava_next_video", "shards_parameters": True}
    with pytest.raises(ValueError, match="both images and videos.*llava_next_video"):
        RowObserver(vl.dataset.media, STAGES["sft"], **shared)(features)


# Rows of a `tokenized_path`


def test_tokenized_rows_that_are_packed_are_refused() -> None:
    packed = datasets.Dataset.from_list([{"input_ids": [5, 6], "packing_params": {"sequence_boundaries": [0, 1, 2]}}])
    with pytest.raises(ConfigError, match="^tokenized_path: "):
        training_rows(packed, STAGES["sft"], None, None, None)


def test_tokenized_rows_without_media_columns(vl: Setting) -> None:
    """As in stock: data that were tokenized elsewhere, or text alone."""
    columns = ("input_ids", "attention_mask", "labels")
    rows = [{key: vl.stock_row(index)[key] for key in columns} for index in range(3)]
    collator = vl.stock.collator
    ours = OpenMedia(collator)([unpack(vl.observe(index, rows).features) for index in range(3)])
    stock = collator([dict(row) for row in rows])
    assert ours.keys() == stock.keys() and all(torch.equal(ours[key], stock[key]) for key in columns)
