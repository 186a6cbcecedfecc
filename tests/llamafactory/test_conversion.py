"""Rows converted one at a time equal the rows of LLaMA-Factory's pass over all rows."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
from llamafactory.data.parser import DatasetAttr
from PIL import Image
from stock import load_data
from support import noise, training_config

from odb_factory.config import ODBConfig
from odb_factory.data.observe import ObservedDataset, RowDropped
from odb_factory.errors import DataError
from odb_factory.llamafactory import dataset as dataset_module
from odb_factory.llamafactory.dataset import OnlineDataset, RowObserver
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


def test_sources_that_stock_converts_give_stocks_rows(tiny_vl, formats, tmp_path, monkeypatch) -> None:
    config = training_config(tiny_vl, formats, tmp_path / "out", dataset=",".join(NAMES))
    stock = load_data(config)
    monkeypatch.setattr(dataset_module, "is_convertible", lambda rows, attr: False)
    assert rows_of(load_data(config | {"odb": BLOCK})["train_dataset"]) == rows_of(stock["train_dataset"])


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
    "no label": ("kto", {"columns": ALPACA}, ROW, "kto_tag None"),
    "pair": ("rm", {"ranking": True, "columns": PAIR}, ROW | {"a": "so", "b": 0}, "rejected 'b'"),
    "role": ("sft", SHAREGPT, {"conversations": [ASKED, ANSWERED | {"from": "bot"}]}, "assistant_tag 'gpt'"),
    "tags": ("sft", SHAREGPT | {"tags": SHAREGPT_TAGS}, {"conversations": [ASKED]}, "role_tag 'role'"),
    "no answer": ("sft", SHAREGPT, {"conversations": [ASKED]}, "messages 'conversations'"),
    "text": ("sft", SHAREGPT | {"columns": {"messages": "text"}}, {"text": "why? so"}, "messages 'text'"),
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


@pytest.mark.parametrize("case", ["role", "no answer"])
def test_a_dropped_row_is_reported_with_its_description(tiny_text, tmp_path, case: str) -> None:
    """Other rows are good, so the dataset itself is not refused."""
    _, description, row, names = DROPPED[case]
    good = {"conversations": [ASKED, ANSWERED]}
    write_described(tmp_path, [good, row, good], description)
    online = load_data(training_config(tiny_text, tmp_path, tmp_path / "out", dataset="rows", odb=BLOCK))
    with pytest.raises(RowDropped, match=names):
        online["train_dataset"][1]
    assert online["train_dataset"][0] == online["train_dataset"][2]


def test_a_dataset_without_rows_is_refused(tiny_text, formats, tmp_path) -> None:
    config = training_config(tiny_text, formats, tmp_path / "out", dataset="alpaca", odb=BLOCK, max_samples=0)
    with pytest.raises(DataError, match="alpaca.json has no row"):
        load_data(config)
