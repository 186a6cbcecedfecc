"""Stage kto: pairs are stock's, several ranks train as stock does on one; one by one: `test_same_training.py`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from llamafactory.train.kto.trainer import CustomKTOTrainer
from llamafactory.train.tuner import run_exp
from same_training import check_same_training, report, train, write_rows
from stock import load_data
from support import training_config

from odb_factory.data.observe import RowDropped
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset
from odb_factory.llamafactory.stages import STAGES

BLOCK = {"token_budget": 512, "audit": True}


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`judged`; `dropped`, of which LLaMA-Factory drops row 4; `broken`, where it fails at row 2 because row 1 has no
    answer."""
    folder = write_rows(tmp_path_factory.mktemp("judged") / "rows")
    rows = json.loads((folder / "judged.json").read_text(encoding="utf-8"))
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    changed = {"dropped": [*rows[:4], rows[4] | {"good": None}, *rows[5:9]], "broken": rows[:4]}
    changed["broken"][1] = rows[1] | {"conversations": rows[1]["conversations"][:1]}
    for name, of_set in changed.items():
        (folder / f"{name}.json").write_text(json.dumps(of_set), encoding="utf-8")
        info[name] = info["judged"] | {"file_name": f"{name}.json"}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def config_of(model: Path, rows_dir: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Two epochs; the gradient checkpoints of stock need another forward."""
    config = training_config(model, rows_dir, output_dir, stage="kto", dataset="judged", num_train_epochs=2)
    return config | {"learning_rate": 2e-4, "logging_steps": 2, "disable_gradient_checkpointing": True} | changes


# The pairs


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
def test_the_pairs_are_those_of_a_pass(tiny_text: Path, rows_dir: Path, tmp_path: Path, changes: dict) -> None:
    config = config_of(tiny_text, rows_dir, tmp_path, **changes)
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


def test_a_partner_without_an_answer_is_told(tiny_text: Path, rows_dir: Path, tmp_path: Path) -> None:
    online = rows_of(config_of(tiny_text, rows_dir, tmp_path, dataset="broken", odb=BLOCK))
    with pytest.raises(ValueError, match="paired with the answer of the row before it, which has none"):
        online[2]


# The training


def test_two_ranks_train_as_stock_does_on_one(tiny_text: Path, rows_dir: Path, tmp_path: Path) -> None:
    """Stock's micro-step is 2 x 2 rows on two ranks and 4 rows on one: the same estimates, losses, weights. The figures
    are those of both ranks."""
    config = {"max_samples": 24, "gradient_accumulation_steps": 2, "logging_steps": 1}
    two = {"per_device_train_batch_size": 2, "odb": BLOCK | {"token_budget": 256}}
    ours = train(config_of(tiny_text, rows_dir, tmp_path / "odb", **config, **two), 2)
    stock = train(config_of(tiny_text, rows_dir, tmp_path / "stock", **config, per_device_train_batch_size=4))
    report("kto, 2 ranks", check_same_training(ours, stock, counts_other_tokens=True))


def test_another_loss_is_refused(tiny_text, rows_dir, tmp_path, monkeypatch) -> None:
    """A release whose loss is no function of the log-ratio less the estimate."""
    loss = CustomKTOTrainer.kto_loss

    @functools.wraps(loss)
    def another(trainer: Any, chosen: Any, rejected: Any, kl: Any, *reference: Any) -> Any:
        return loss(trainer, chosen, rejected, 2 * kl, *reference)

    monkeypatch.setattr(CustomKTOTrainer, "kto_loss", another)
    with pytest.raises(ConfigError, match="kto_loss is no loss of the log-ratios less the KL estimate"):
        run_exp(config_of(tiny_text, rows_dir, tmp_path, odb=BLOCK))


def test_rows_with_videos_are_refused() -> None:
    features = {"input_ids": [1, 2], "kl_input_ids": [1, 2, 3], "videos": ["one.mp4"]}
    with pytest.raises(ValueError, match="it has videos, which LLaMA-Factory's trainer for KTO does not hand"):
        STAGES["kto"].cost(features, None)  # type: ignore[arg-type]
