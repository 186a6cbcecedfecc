"""`streaming: true` trains as stock's stream does, from a local file or from a hub."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.rows import row, write_uneven_rows
from llamafactory.hparams import get_train_args
from llamafactory.train.tuner import run_exp
from same_training import Training, check_same_training, report, train
from support import training_config

from odb_factory.errors import ConfigError, DataError

BLOCK = {"token_budget": 256, "audit": True}
SHARDS = (8, 2, 8, 3, 8, 3)
"""Rows of each file of the stream; no three files have half of the rows."""
STREAM = {"dataset": "shards", "streaming": True, "buffer_size": 8, "max_steps": 7, "dataloader_num_workers": 2}
"""Four optimizer steps of 8 samples an epoch. Stock would carry the gradient of a smaller step into the next epoch."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts`, a local file, and `shards`, a folder that `datasets` streams as it streams from a hub."""
    folder = write_uneven_rows(tmp_path_factory.mktemp("rows"), {"texts": 24})
    (folder / "shards").mkdir()
    number = 0
    for shard, count in enumerate(SHARDS):
        lines = [json.dumps(row(3 + number + k)) for k in range(count)]
        (folder / "shards" / f"{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        number += count
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    columns = {key: value for key, value in info["texts"].items() if key != "file_name"}
    info["shards"] = columns | {"script_url": "shards"}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


@pytest.fixture
def config(tiny_text: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_text, data, tmp_path / "odb", odb=BLOCK)


@pytest.fixture(scope="module")
def stock(tiny_text: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """One rank and one worker: stock's order depends on the number of workers, each of which reads other shards."""
    changes = STREAM | {"dataloader_num_workers": 1, "gradient_accumulation_steps": 8}
    return train(training_config(tiny_text, data, tmp_path_factory.mktemp("stock") / "out", **changes))


def test_stocks_buffer_size_is_not_taken_for_odbs(config, caplog) -> None:
    get_train_args(config | STREAM)
    with pytest.raises(ConfigError, match="^buffer_size: 8 "):
        get_train_args(config | {"buffer_size": 8})
    get_train_args(config | STREAM | {"do_train": False})
    assert any("has no effect: do_train is false" in message for message in caplog.messages)


def test_a_local_file_is_stocks_stream(config, tmp_path) -> None:
    """I9. LLaMA-Factory cuts the file into `dataloader_num_workers` shards."""
    config |= STREAM | {
        "dataset": "texts",
        "dataloader_num_workers": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 5,
    }
    ours = train(config)
    del config["odb"]
    report("local file", check_same_training(ours, train(config | {"output_dir": str(tmp_path / "stock")})))


def test_a_stream_trains_and_resumes_as_in_stock(config, stock, tmp_path) -> None:
    """I9, also in a second epoch with another order, with several workers, and resumed with another number of them."""
    steps = {"gradient_accumulation_steps": 8, "save_strategy": "steps", "save_steps": 5}
    ours = train(config | STREAM | steps)
    assert [len(step) for step in stock.rows] == [8] * 7
    assert stock.rows[:3] != stock.rows[4:], "another order in the second epoch"
    ours.folders.clear()
    report("stream, 1 rank", check_same_training(ours, stock))
    again = config | STREAM | steps | {"output_dir": str(tmp_path / "again"), "dataloader_num_workers": 1}
    again |= {"odb": BLOCK | {"audit": False}, "resume_from_checkpoint": str(tmp_path / "odb" / "checkpoint-5")}
    resumed = train(again)
    assert resumed.rows == ours.rows[5:]
    assert all(torch.equal(tensor, ours.weights[name]) for name, tensor in resumed.weights.items())


def test_two_ranks_share_a_stream(config, stock) -> None:
    """I9: every rank reads the stream, and step t has the same rows as on one rank."""
    ours = train(config | STREAM | {"gradient_accumulation_steps": 4}, num_ranks=2)
    assert ours.rows == stock.rows
    report("stream, 2 ranks", check_same_training(ours, stock))


def test_rows_held_out_of_a_stream_are_never_trained_on(config, caplog) -> None:
    """Stock shuffles again in each epoch, and then holds out other rows."""
    ours = train(config | STREAM | {"val_size": 6, "gradient_accumulation_steps": 10, "max_steps": 9})
    epochs = [Counter(itertools.chain.from_iterable(ours.rows[begin : begin + 3])) for begin in (0, 3, 6)]
    assert epochs[0] == epochs[1] == epochs[2] and epochs[0].total() == sum(SHARDS) - 6
    (message,) = [message for message in caplog.messages if message.startswith("streaming: ")]
    assert "the same in each epoch" in message and "\n" not in message


def test_what_a_stream_cannot_do_is_named_in_one_line(config, tmp_path) -> None:
    """LLaMA-Factory cuts a local file into as many shards as workers: none."""
    with pytest.raises(DataError, match="texts.json yields no row; .*dataloader_num_workers") as caught:
        run_exp(config | STREAM | {"dataset": "shards,texts", "dataloader_num_workers": 0})
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_two_ranks_of_stock_split_a_stream_alike(config, tmp_path) -> None:
    """I9 if each rank reads its own shards, until a rank has no rows left, where stock fails.

    Stock's other way, a rank that reads for all ranks, fails because it joins batches of different lengths.
    """
    config |= STREAM | {"gradient_accumulation_steps": 4, "max_steps": 3, "dataloader_num_workers": 1}
    config["accelerator_config"] = {"dispatch_batches": False}
    ours = train(config, num_ranks=2)
    del config["odb"]
    stock = train(config | {"output_dir": str(tmp_path / "stock")}, num_ranks=2)
    report("stream, shards split", check_same_training(ours, stock))
