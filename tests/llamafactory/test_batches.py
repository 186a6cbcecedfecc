"""Rows observed online: tokenized data, cut placeholders and those written out, media that cannot be read."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from stock import Stock, load_data, load_stock
from support import training_config, write_dataset

from odb_factory.config import ODBConfig
from odb_factory.data.observe import ObservedDataset
from odb_factory.data.samples import Rejection
from odb_factory.data.serialize import unpack
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset, OpenMedia, RowObserver, TokenizedDataset, training_rows
from odb_factory.llamafactory.stages import STAGES
from odb_factory.planner import Budget

pytestmark = pytest.mark.stock

BLOCK = {"token_budget": 1024, "max_patches": 900, "buffer_size": 24}


class Setting:
    """One configuration with real LLaMA-Factory, online; `stock` is loaded when it is asked for."""

    def __init__(self, config: dict[str, Any], **block: Any):
        self.given, self.config = config, ODBConfig.from_block(BLOCK | block)
        self.dataset: OnlineDataset = load_data({**config, "odb": BLOCK | block})["train_dataset"]
        self.observer = RowObserver(self.dataset.media, STAGES["sft"], decode=self.config.on_error == "skip")

    @functools.cached_property
    def stock(self) -> Stock:
        return load_stock(self.given)

    def stock_row(self, index: int) -> dict[str, Any]:
        return dict(self.stock.datasets["train_dataset"][index])

    def observe(self, index: int, tokenized: list[dict[str, Any]] | None = None) -> Any:
        """A row of the dataset, or of one that was tokenized before."""
        rows: Any = self.dataset
        if tokenized is not None:
            rows = TokenizedDataset(datasets.Dataset.from_list(tokenized), rows.media, STAGES["sft"])
        budget = Budget(self.config.token_budget, self.config.max_patches)
        return ObservedDataset(rows, self.observer, self.config, budget)[index]


@pytest.fixture(scope="module")
def vl(tiny_vl, data_dir, tmp_path_factory) -> Setting:
    return Setting(training_config(tiny_vl, data_dir, tmp_path_factory.mktemp("out"), dataset="texts,pictures"))


@pytest.fixture(scope="module")
def text(tiny_text, data_dir, tmp_path_factory) -> Setting:
    return Setting(training_config(tiny_text, data_dir, tmp_path_factory.mktemp("out")))


def test_a_label_on_the_first_token_is_seen(text: Setting, tiny_text, data_dir, tmp_path) -> None:
    """Stock counts it when it takes a mean, though nothing predicts it."""
    assert not any(text.observe(index).cost.leading_label for index in range(3))
    config = training_config(tiny_text, data_dir, tmp_path, train_on_prompt=True)
    assert all(Setting(config).observe(index).cost.leading_label for index in range(3))


def test_cut_placeholders_are_caught_at_observation(tiny_vl, data_dir, tmp_path) -> None:
    config = training_config(tiny_vl, data_dir, tmp_path, dataset="pictures", cutoff_len=48)
    sample = Setting(config).observe(1)
    assert isinstance(sample, Rejection) and sample.fatal and sample.reason == "media_cut"
    for word in ("cutoff_len 48", "row 1 of pictures.json", "picture_1_0.png", "singleton", "overlong: drop"):
        assert word in sample.message
    assert "\n" not in sample.message
    dropped = Setting(config, overlong="drop").observe(1)
    assert not dropped.fatal and "overlong" not in dropped.message, "no advice to set what is set"


def test_cut_placeholders_of_tokenized_data_are_caught_too(vl: Setting) -> None:
    """`tokenized_path`: rows are used as they are, but not one that the model cannot take."""
    cut = {"input_ids": 20, "attention_mask": 20, "labels": 20}
    row = vl.stock_row(49)
    rows = [row, {key: value[: cut[key]] if key in cut else value for key, value in row.items()}]
    whole, part = (vl.observe(index, rows) for index in range(2))
    assert whole.cost == vl.observe(49).cost, part
    assert isinstance(part, Rejection) and part.fatal and part.reason == "media_cut"
    assert "picture_1_0.png" in part.message and "\n" not in part.message


def test_tokenized_data_that_are_packed_are_refused() -> None:
    packed = datasets.Dataset.from_list(
        [{"input_ids": [5, 6, 7, 8], "packing_params": {"sequence_boundaries": [0, 2, 4]}}]
    )
    with pytest.raises(ConfigError, match="^tokenized_path: its rows are packs of several samples .*without packing"):
        training_rows(packed, STAGES["sft"], None, None, None)


def conversation(question: str, images: tuple[str, ...] = (), system: str = "") -> dict[str, Any]:
    said = [("system", system)] if system else []
    said += [("user", question), ("assistant", "an answer of some words")]
    return {"messages": [{"role": role, "content": content} for role, content in said], "images": list(images)}


def test_placeholders_written_out_are_found_at_observation(tiny_vl, tmp_path) -> None:
    """A text with `<|image_pad|>` in it is a bad row, which `on_error` is for; stock would end at collation."""
    Image.new("RGB", (90, 60), "red").save(tmp_path / "red.png")
    rows = [
        conversation("what is <|image_pad|> for"),
        conversation("what is <|video_pad|> for"),
        conversation("<image>what is <|image_pad|> for", ("red.png",)),
        conversation("what?", system="say <|image_pad|>"),
        conversation("what?"),
        conversation("<image>what is <|vision_start|> for", ("red.png",)),
    ]
    config = training_config(tiny_vl, write_dataset(tmp_path, {"mine": rows}), tmp_path / "out", dataset="mine")
    setting = Setting(config, on_error="skip")
    seen = [setting.observe(index) for index in range(len(rows))]
    assert [isinstance(row, Rejection) for row in seen] == [True] * 4 + [False] * 2
    for index, rejection in enumerate(seen[:4]):
        assert (rejection.reason, rejection.fatal) == ("unreadable", False)
        assert f"row {index} of mine.json" in rejection.message and "contains the placeholder" in rejection.message
    assert "<|image_pad|>" in seen[0].message


def test_a_cut_does_not_hide_a_placeholder_written_out(tiny_vl, tmp_path) -> None:
    """Wherever it is cut: as many as the picture takes may be left, one of them written out."""
    Image.new("RGB", (90, 60), "red").save(tmp_path / "red.png")
    rows = [conversation("<|image_pad|> <image>", ("red.png",)), conversation("what?")]
    config = training_config(tiny_vl, write_dataset(tmp_path, {"mine": rows}), tmp_path / "out", dataset="mine")
    setting = Setting(config)
    data_args = setting.dataset.processor.data_args
    for cutoff_len in range(4, len(setting.stock_row(0)["input_ids"]) + 2):
        data_args.cutoff_len = cutoff_len
        assert isinstance(setting.observe(0), Rejection), cutoff_len


def test_placeholders_written_out_in_tokenized_data_are_found_too(vl: Setting) -> None:
    pad = vl.dataset.media._token_ids["<|image_pad|>"]
    rows = [vl.stock_row(index) for index in (0, 49)]
    for row in rows:
        for key, value in (("input_ids", pad), ("attention_mask", 1), ("labels", -100)):
            row[key] = [value, *row[key]]
    for index in range(2):
        row = vl.observe(index, rows)
        assert row.reason == "unreadable" and "contains the placeholder" in row.message, row


@pytest.mark.parametrize("name", ["vl", "text"])
def test_tokenized_data_without_media_columns_are_trained_on(name: str, request: pytest.FixtureRequest) -> None:
    """As stock does: data that were tokenized elsewhere, or of text alone."""
    setting = request.getfixturevalue(name)
    columns = ("input_ids", "attention_mask", "labels")
    rows = [{key: setting.stock_row(index)[key] for key in columns} for index in range(3)]
    collator = setting.stock.collator
    ours = OpenMedia(collator)([unpack(setting.observe(index, rows).features) for index in range(3)])
    stock = collator([dict(row) for row in rows])
    assert ours.keys() == stock.keys() and all(torch.equal(ours[key], stock[key]) for key in columns)


def test_the_collator_answers_as_the_one_it_stands_for(text: Setting) -> None:
    """Callbacks and trainers ask it for its tokenizer; workers get it pickled."""
    collator = text.stock.collator
    ours = OpenMedia(collator)
    assert ours.tokenizer is collator.tokenizer and ours.pad_to_multiple_of == 8
    assert pickle.loads(pickle.dumps(OpenMedia("any"))).collator == "any"
    with pytest.raises(AttributeError):
        ours.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_unreadable_image_names_dataset_row_and_file(tiny_vl, tmp_path, on_error: str) -> None:
    Image.new("RGB", (90, 60), "red").save(tmp_path / "good.png")
    (tmp_path / "not_an_image.png").write_bytes(b"plain text")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut_off.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder.png").mkdir()
    names = ("good.png", "not_an_image.png", "cut_off.png", "folder.png")
    rows = [conversation("<image>what?", (name,)) | {"videos": []} for name in names]
    frames = ["good.png", "gone.png", "good.png", "good.png"]
    rows.append(conversation("<video>what?") | {"videos": [frames]})
    config = training_config(tiny_vl, write_dataset(tmp_path, {"pictures": rows}), tmp_path / "out", dataset="pictures")
    setting = Setting(config, on_error=on_error)
    assert not isinstance(setting.observe(0), Rejection)
    bad = setting.observe(1)
    assert (bad.reason, bad.fatal) == ("unreadable", on_error == "raise")
    for word in ("row 1 of pictures.json", "not_an_image.png"):
        assert word in bad.message
    assert ("on_error: skip" in bad.message) == (on_error == "raise"), "no advice to set what is set"
    # A file that breaks off only shows when it is decoded: in a collate worker, or here if bad rows are skipped.
    assert isinstance(setting.observe(2), Rejection) == (on_error == "skip")
    assert "not a file: folder.png: " in setting.observe(3).message
    assert "no such file: gone.png: ValueError" in setting.observe(4).message


def test_a_row_with_images_and_videos_is_refused_where_ranks_share_parameters(vl: Setting) -> None:
    """Its rank would run the vision tower twice, the others once, and all would hang."""
    features = {"input_ids": [1, 2], "labels": [1, 2], "images": ["one.png"], "videos": ["one.mp4"]}
    observer = RowObserver(
        vl.dataset.media, STAGES["sft"], decode=False, model_type="llava_next_video", shards_parameters=True
    )
    with pytest.raises(ValueError, match="both images and videos.*llava_next_video.*ZeRO-2 or DDP"):
        observer(features)
