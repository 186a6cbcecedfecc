"""Costs of rows of the stages pt, dpo and kto, and the pairs of kto. Trainings: `test_same_training.py`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llamafactory.train.kto.trainer import CustomKTOTrainer
from llamafactory.train.tuner import run_exp
from same_training import configurations, write_rows
from stock import load_data
from tiny_models import TinyModels

from odb_factory.data.observe import RowDropped
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset
from odb_factory.llamafactory.stages import STAGES

BLOCK = {"token_budget": 512, "audit": True}
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


def rows_of(config: dict[str, Any]) -> Any:
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
    stock, online = rows_of(config), rows_of(config | {"odb": BLOCK})
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
