"""Rows converted and observed one at a time equal the rows of LLaMA-Factory's pass over all rows."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from llamafactory.data.parser import DatasetAttr
from llamafactory.train.kto.trainer import CustomKTOTrainer
from llamafactory.train.tuner import run_exp
from PIL import Image
from same_training import configurations, write_rows
from stock import Stock, load_data, load_stock
from support import noise, training_config, write_dataset
from tiny_models import TinyModels

from odb_factory.config import ODBConfig
from odb_factory.data.observe import ObservedDataset, RowDropped
from odb_factory.data.samples import Rejection, unpack
from odb_factory.errors import ConfigError, DataError
from odb_factory.llamafactory import dataset as dataset_module
from odb_factory.llamafactory.dataset import OnlineDataset, OpenMedia, RowObserver, TokenizedDataset, training_rows
from odb_factory.llamafactory.media import EncodedImage
from odb_factory.llamafactory.stages import STAGES
from odb_factory.planner import Budget

BLOCK = {"token_budget": 1024, "buffer_size": 8}
SHAREGPT_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
NAMES = ("alpaca", "sharegpt", "openai", "pictures")


def _alpaca(k: int) -> dict[str, Any]:
    history = [[f"earlier {k}.{turn}", f"reply {turn}"] for turn in range(k % 3)]
    row = {"instruction": f"do {k}", "input": "with this" if k % 2 else "", "output": f"done {k} " * (k % 5 + 1)}
    return row | {"system": "be brief" if k % 4 == 0 else None, "history": history}


def _sharegpt(k: int) -> dict[str, Any]:
    turns = [("human" if turn % 2 == 0 else "gpt", f"turn {turn} of {k}") for turn in range(2 * (k % 3 + 1))]
    if k % 4 == 1:
        turns = [("system", f"rule {k}"), *turns]
    if k == 6:
        turns = turns[:-1]  # the last turn is no answer: stock drops the row
    tool = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}, "required": []}}
    if k % 4 == 3:
        turns[1:1] = [("function_call", json.dumps({"name": "add", "arguments": {"a": k}})), ("observation", str(k))]
    talk = [{"from": role, "value": text} for role, text in turns]
    return {"conversations": talk, "unused": k, "tools": json.dumps([tool]) if k % 4 == 3 else ""}


def _openai(k: int) -> dict[str, Any]:
    call = [{"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": k})}}]
    turns = [{"role": "user", "content": f"add {k}", "tool_calls": []}]
    if k % 2:
        turns += [{"role": "assistant", "content": "", "tool_calls": call}]
        turns += [{"role": "tool", "content": str(k + part), "tool_calls": []} for part in range(k % 3 + 1)]
    turns += [{"role": "assistant", "content": f"it is {k}", "tool_calls": []}]
    return {"messages": turns}


def _pictures(k: int, folder: Path) -> dict[str, Any]:
    names = [f"{k}_{number}.png" for number in range(k % 3)]
    for number, name in enumerate(names):
        noise((40 + 30 * k, 50 + 20 * number)).convert("RGB").save(folder / name)
    if k == 4:
        names = [str(folder / name) for name in names]  # absolute paths, outside of media_dir
    turns = [{"role": "user", "content": "<image>" * len(names) + "what?"}, {"role": "assistant", "content": f"no {k}"}]
    return {"messages": turns, "images": names}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset for each of `NAMES`; `fewer` and `more` sample one of them. `moved` has its pictures."""
    folder = tmp_path_factory.mktemp("formats")
    rows = {
        "alpaca": [_alpaca(k) for k in range(14)],
        "sharegpt": [_sharegpt(k) for k in range(13)],
        "openai": [_openai(k) for k in range(9)],
        "pictures": [_pictures(k, folder) for k in range(8)],
    }
    for name, all_rows in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(all_rows), encoding="utf-8")
    alpaca = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    openai_tags = SHAREGPT_TAGS | {"observation_tag": "tool", "function_tag": "function", "system_tag": "system"}
    pictures = {"columns": {"messages": "messages", "images": "images"}, "tags": SHAREGPT_TAGS}
    descriptions: dict[str, dict[str, Any]] = {
        "alpaca": {"columns": alpaca},
        "sharegpt": {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}},
        "openai": {"formatting": "openai", "columns": {"messages": "messages"}, "tags": openai_tags},
        "pictures": {"formatting": "sharegpt"} | pictures,
    }
    info = {name: {"file_name": f"{name}.json"} | description for name, description in descriptions.items()}
    info |= {name: info["alpaca"] | {"num_samples": count} for name, count in (("fewer", 9), ("more", 20))}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "moved").mkdir()
    for picture in folder.glob("*.png"):
        shutil.copy(picture, folder / "moved")
    return folder


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    """All rows that are not dropped, without empty values: Arrow stores a missing list of media as None or as empty."""
    rows = []
    for index in range(len(dataset)):
        with contextlib.suppress(RowDropped):
            rows.append({key: value for key, value in dataset[index].items() if value})
    return rows


@pytest.mark.versions
@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": ",".join(NAMES)},
        {"dataset": ",".join(NAMES), "mix_strategy": "interleave_under", "interleave_probs": "0.3,0.4,0.1,0.2"},
        {"dataset": "sharegpt,alpaca", "mix_strategy": "interleave_over"},
        {"dataset": "openai,alpaca", "max_samples": 6},
        {"dataset": "fewer,sharegpt,more"},
        {"dataset": ",".join(NAMES), "val_size": 11},
        {"dataset": "alpaca,pictures", "eval_dataset": "sharegpt,pictures", "max_samples": 7},
        {"dataset": "alpaca", "eval_dataset": "fewer,openai", "eval_on_each_dataset": True},
        {"dataset": "pictures", "media_dir": "moved"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_train_and_eval_rows_equal_stock(tiny_vl, formats, tmp_path, changes: dict[str, Any]) -> None:
    config = training_config(tiny_vl, formats, tmp_path / "out", mask_history=True) | changes
    config["media_dir"] = str(formats / config["media_dir"])
    stock, online = load_data(config), load_data(config | {"odb": BLOCK})
    assert isinstance(online["train_dataset"], OnlineDataset)
    assert rows_of(online["train_dataset"]) == rows_of(stock["train_dataset"])
    evaluated = [loaded.get("eval_dataset", {}) for loaded in (online, stock)]
    ours, theirs = (rows if isinstance(rows, dict) else {"": rows} for rows in evaluated)
    assert list(ours) == list(theirs)
    for name, rows in theirs.items():
        assert isinstance(ours[name], datasets.Dataset), "preprocessed by stock"
        assert rows_of(ours[name]) == rows_of(rows)


def test_tokenized_path_stores_what_stock_stores(tiny_text, formats, tmp_path) -> None:
    stored = []
    for name, block in (("stock", {}), ("odb", {"odb": BLOCK})):
        changes = {"dataset": "alpaca,sharegpt", "val_size": 5, "tokenized_path": str(tmp_path / name)} | block
        load_data(training_config(tiny_text, formats, tmp_path / "out", **changes))
        stored.append(datasets.load_from_disk(str(tmp_path / name)))
    assert stored[0].keys() == stored[1].keys()
    assert all(rows_of(stored[0][split]) == rows_of(stored[1][split]) for split in stored[0])


@pytest.mark.parametrize("single", [False, True], ids=["lists", "one-each"])
def test_images_stored_in_the_dataset_have_the_pixels_of_stock(tiny_vl, tmp_path, single: bool) -> None:
    """Stock's two passes encode a JPEG again, which changes its pixels. odb does so when it opens the image."""
    names = ["noise.jpg", "turned.jpg", "grey.png", "colours.gif", "lossy.webp"]
    grey = noise((120, 70))
    colours = Image.merge("RGB", [grey, grey.rotate(180), noise((120, 70), seed=1)])
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in names:
        options = {"exif": exif} if name == "turned.jpg" else {}
        (grey if name == "grey.png" else colours).save(tmp_path / name, **options)
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "noise"}]
    image = datasets.Image() if single else datasets.Sequence(datasets.Image())
    role = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    files = [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in names]
    cells = files if single else [[file] for file in files]
    rows = {"messages": [turns] * len(names), "images": cells}
    features = datasets.Features({"messages": [role], "images": image})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "pictures.parquet")
    info = {"file_name": "pictures.parquet", "formatting": "sharegpt", "tags": SHAREGPT_TAGS}
    info["columns"] = {"messages": "messages", "images": "images"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pictures": info}), encoding="utf-8")
    config = training_config(tiny_vl, tmp_path, tmp_path / "out", dataset="pictures")
    stock, online = load_data(config)["train_dataset"], load_data(config | {"odb": BLOCK})["train_dataset"]
    for name, theirs, index in zip(names, stock, range(len(names))):
        ours = online[index]
        (encoded,), (image,) = ours.pop("images"), theirs.pop("images")
        assert isinstance(encoded, EncodedImage) and encoded.size == image.size
        opened = encoded.open()
        assert (opened.mode, opened.tobytes()) == (image.mode, image.tobytes()), name
        assert opened.convert("RGB").tobytes() == image.convert("RGB").tobytes(), name
        assert {k: v for k, v in ours.items() if v} == {k: v for k, v in theirs.items() if v}
    with Image.open(tmp_path / "noise.jpg") as once:
        assert once.tobytes() != stock[0]["images"][0].tobytes(), "the JPEG should have changed"


def test_sources_that_stock_converts_give_stocks_rows(tiny_vl, formats, tmp_path, monkeypatch) -> None:
    config = training_config(tiny_vl, formats, tmp_path / "out", dataset=",".join(NAMES))
    stock = load_data(config)
    monkeypatch.setattr(dataset_module, "is_convertible", lambda rows, attr: False)
    assert rows_of(load_data(config | {"odb": BLOCK})["train_dataset"]) == rows_of(stock["train_dataset"])


@pytest.mark.parametrize(
    ("column", "feature"),
    [
        ("images", datasets.Image(mode="L")),
        ("images", datasets.Sequence(datasets.Sequence(datasets.Image()))),
        ("videos", datasets.Sequence(datasets.Sequence(datasets.Image()))),
        ("audios", datasets.Audio()),
    ],
    ids=["mode", "nested", "frames", "audio"],
)
def test_media_that_stock_would_encode_again_are_converted_by_its_pass(column: str, feature: Any) -> None:
    rows = datasets.Dataset.from_dict({"media": []}, features=datasets.Features({"media": feature}))
    used, unused = (DatasetAttr("file", dataset_name="rows.json", **columns) for columns in ({column: "media"}, {}))
    assert not dataset_module.is_convertible(rows, used)
    assert dataset_module.is_convertible(rows, unused), "a column that is not used does not matter"


ALPACA, PAIR = (
    {"prompt": "instruction"} | names for names in ({"response": "output"}, {"chosen": "a", "rejected": "b"})
)
ROW = {"instruction": "why", "output": "so"}
SHAREGPT: dict[str, Any] = {"formatting": "sharegpt"}
ASKED = {"from": "human", "value": "why"}
ANSWERED = {"from": "gpt", "value": "so"}
DROPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "number": ("sft", {"columns": ALPACA}, ROW | {"output": 2}, "response 'output'"),
    "label": ("kto", {"columns": ALPACA | {"kto_tag": "label"}}, ROW | {"label": 1}, "kto_tag 'label'"),
    "pair": ("rm", {"ranking": True, "columns": PAIR}, ROW | {"a": "so", "b": 0}, "rejected 'b'"),
    "role": ("sft", SHAREGPT, {"conversations": [ASKED, ANSWERED | {"from": "bot"}]}, "assistant_tag 'gpt'"),
    "tags": ("sft", SHAREGPT | {"tags": SHAREGPT_TAGS}, {"conversations": [ASKED]}, "role_tag 'role'"),
    "no answer": ("sft", SHAREGPT, {"conversations": [ASKED]}, "messages 'conversations'"),
    "no such column": ("sft", {"columns": ALPACA | {"response": "answer"}}, ROW, "not 'answer'.*response 'answer'"),
}
"""Stage, description and row of a dataset, and a pattern of the message."""


def write_described(folder: Path, rows: list[dict[str, Any]], description: dict[str, Any]) -> None:
    """Write a dataset `rows` to the folder."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    info = {"rows": {"file_name": "rows.jsonl"} | description}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


@pytest.mark.parametrize("case", DROPPED)
def test_a_dataset_without_a_usable_row_is_refused(tiny_text, tmp_path, case: str) -> None:
    """Before a model is loaded, with any `on_error`."""
    stage, description, row, names = DROPPED[case]
    write_described(tmp_path, [row] * 3, description)
    stages = {"stage": stage} if stage == "kto" else {}
    config = training_config(tiny_text, tmp_path, tmp_path / "out", dataset="rows", **stages)
    with pytest.raises(DataError, match=f"dataset_info.json: .*{names}") as caught:
        load_data(config | {"odb": BLOCK | {"on_error": "skip"}}, stage)
    assert "\n" not in str(caught.value)


def test_a_dataset_without_rows_is_refused(tiny_text, formats, tmp_path) -> None:
    config = training_config(tiny_text, formats, tmp_path / "out", dataset="alpaca", odb=BLOCK, max_samples=0)
    with pytest.raises(DataError, match="alpaca.json has no row"):
        load_data(config)


def test_a_row_that_cannot_be_converted_is_named(tiny_text, formats, tmp_path) -> None:
    rows = [_openai(k) for k in range(4)]
    rows[2]["messages"][-1]["role"] = "developer"
    (tmp_path / "openai.json").write_text(json.dumps(rows), encoding="utf-8")
    shutil.copy(formats / "dataset_info.json", tmp_path)
    online = load_data(training_config(tiny_text, tmp_path, tmp_path / "out", dataset="openai", odb=BLOCK))
    observer = RowObserver(online["train_dataset"].media, STAGES["sft"])
    observed = ObservedDataset(online["train_dataset"], observer, ODBConfig.from_block(BLOCK), Budget(1024))
    assert observed[2].reason == "unreadable" and observed[1].cost.tokens > 0
    assert observed[2].message.startswith("row 2 of the training dataset (row 2 of openai.json): KeyError")


OBSERVED = {"token_budget": 1024, "max_patches": 900, "buffer_size": 24}


class Setting:
    """A configuration of real LLaMA-Factory with a block; `stock` is loaded when it is used."""

    def __init__(self, config: dict[str, Any], **block: Any):
        self.stock_config, self.config = config, ODBConfig.from_block(OBSERVED | block)
        self.dataset: OnlineDataset = load_data({**config, "odb": OBSERVED | block})["train_dataset"]
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


@pytest.mark.stock
def test_cut_placeholders(tiny_vl, data_dir, tmp_path) -> None:
    config = training_config(tiny_vl, data_dir, tmp_path, dataset="pictures", cutoff_len=16)
    sample = Setting(config).observe(1)
    assert isinstance(sample, Rejection) and sample.fatal and sample.reason == "media_cut"
    for word in ("cutoff_len 16", "row 1 of pictures.json", "wide.png", "overlong: drop"):
        assert word in sample.message
    assert "\n" not in sample.message
    dropped = Setting(config, overlong="drop").observe(1)
    assert not dropped.fatal and "overlong" not in dropped.message, "no advice to set what is set"


@pytest.mark.stock
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


@pytest.mark.stock
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


@pytest.mark.stock
def test_tokenized_rows_without_media_columns(vl: Setting) -> None:
    """As in stock: data that were tokenized elsewhere, or text alone."""
    columns = ("input_ids", "attention_mask", "labels")
    rows = [{key: vl.stock_row(index)[key] for key in columns} for index in range(3)]
    collator = vl.stock.collator
    ours = OpenMedia(collator)([unpack(vl.observe(index, rows).features) for index in range(3)])
    stock = collator([dict(row) for row in rows])
    assert ours.keys() == stock.keys() and all(torch.equal(ours[key], stock[key]) for key in columns)


def test_a_row_with_images_and_videos_is_refused_if_ranks_share_parameters(vl: Setting) -> None:
    """Its rank would run the vision tower twice, the others once, and all ranks would hang."""
    features = {"input_ids": [1, 2], "labels": [1, 2], "images": ["one.png"], "videos": ["one.mp4"]}
    shared = {"model_type": "llava_next_video", "shards_parameters": True}
    with pytest.raises(ValueError, match="both images and videos.*llava_next_video"):
        RowObserver(vl.dataset.media, STAGES["sft"], **shared)(features)


def test_tokenized_rows_that_are_packed_are_refused() -> None:
    packed = datasets.Dataset.from_list([{"input_ids": [5, 6], "packing_params": {"sequence_boundaries": [0, 1, 2]}}])
    with pytest.raises(ConfigError, match="^tokenized_path: "):
        training_rows(packed, STAGES["sft"], None, None, None)


TIGHT = {"token_budget": 512, "audit": True}
NO_MEDIA: Any = SimpleNamespace(cost_of=lambda *args: {})


def test_a_pad_token_inside_a_document_carries_no_loss() -> None:
    """The collator masks every end-of-text token if the tokenizer pads with it."""
    tokenizer: Any = SimpleNamespace(pad_token_id=2)
    cost = STAGES["pt"].of_training(None, tokenizer).cost({"input_ids": [2, 5, 2, 7, 2]}, NO_MEDIA)
    assert (cost.tokens, cost.units, cost.leading_label) == (5, 2, False)


@pytest.mark.parametrize(
    ("pref_loss", "pref_ftx", "units"),
    [("sigmoid", 0.0, [1, 1]), ("sigmoid", 0.5, [0, 1]), ("ipo", 0.0, [0, 0]), ("simpo", 0.0, [0, 0])],
)
def test_an_empty_answer_is_left_out_if_the_loss_divides_by_its_length(pref_loss, pref_ftx, units) -> None:
    arguments: Any = SimpleNamespace(pref_loss=pref_loss, pref_ftx=pref_ftx)
    stage = STAGES["dpo"].of_training(arguments, None)
    empty, answer = ([1, 1], [-100, -100]), ([1, 1, 4], [-100, -100, 4])
    counted = []
    for chosen, rejected in ((empty, answer), (answer, empty)):
        features = {"chosen_input_ids": chosen[0], "chosen_labels": chosen[1]}
        features |= {"rejected_input_ids": rejected[0], "rejected_labels": rejected[1]}
        cost = stage.cost(features, NO_MEDIA)
        assert (cost.tokens, cost.row_tokens) == (5, 6)
        counted.append(cost.units)
    assert counted == units


def test_rows_of_kto_with_videos_are_refused() -> None:
    features = {"input_ids": [1, 2], "kl_input_ids": [1, 2, 3], "videos": ["one.mp4"]}
    with pytest.raises(ValueError, match="it has videos"):
        STAGES["kto"].cost(features, NO_MEDIA)


@pytest.fixture(scope="module")
def kto(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`kto(output_dir, ...)`: a configuration. Datasets: `judged`, and `dropped`, whose row 4 LLaMA-Factory drops."""
    folder = tmp_path_factory.mktemp("stages")
    rows_dir = write_rows(folder / "rows")
    rows = json.loads((rows_dir / "judged.json").read_text(encoding="utf-8"))
    info = json.loads((rows_dir / "dataset_info.json").read_text(encoding="utf-8"))
    dropped = [*rows[:4], rows[4] | {"good": None}, *rows[5:9]]
    (rows_dir / "dropped.json").write_text(json.dumps(dropped), encoding="utf-8")
    info["dropped"] = info["judged"] | {"file_name": "dropped.json"}
    (rows_dir / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    config_of = configurations(TinyModels(tiny_text, tiny_vl, folder), rows_dir)
    return functools.partial(config_of, "kto", model="tied", val_size=0, eval_strategy="no")


def rows_of_kto(config: dict[str, Any]) -> Any:
    return load_data(config, stage="kto")["train_dataset"]


@pytest.mark.parametrize(
    "changes",
    [
        {"preprocessing_batch_size": 4, "val_size": 3},
        {"dataset": "dropped, judged", "preprocessing_batch_size": 7, "max_samples": 21},
        {"max_samples": 21, "preprocessing_batch_size": 4, "preprocessing_num_workers": 2},
    ],
    ids=["split", "two datasets, one row dropped", "two processes"],
)
def test_the_pairs_are_those_of_a_pass(kto, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = kto(tmp_path, **changes)
    stock, online = rows_of_kto(config), rows_of_kto(config | {"odb": TIGHT})
    assert isinstance(online, OnlineDataset)
    kept = []
    for number in range(len(online)):
        try:
            kept.append(online[number])
        except RowDropped:
            continue
    assert kept == [dict(row) for row in stock]
    assert len(online) - len(kept) == ("dropped" in config["dataset"])


def test_another_loss_of_kto_is_refused(kto, tmp_path: Path, monkeypatch) -> None:
    """A loss that is no function of the log-ratio minus the estimate."""
    loss = CustomKTOTrainer.kto_loss

    @functools.wraps(loss)
    def another(trainer: Any, chosen: Any, rejected: Any, kl: Any, *reference: Any) -> Any:
        return loss(trainer, chosen, rejected, 2 * kl, *reference)

    monkeypatch.setattr(CustomKTOTrainer, "kto_loss", another)
    with pytest.raises(ConfigError, match="kto_loss"):
        run_exp(kto(tmp_path, odb=BLOCK))
