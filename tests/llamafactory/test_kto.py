"""Stage kto: pairs are stock's, several ranks train as stock does on one; one by one: `test_same_training.py`."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from distributed.rows import WORDS
from llamafactory.train.kto.trainer import CustomKTOTrainer
from llamafactory.train.tuner import run_exp
from same_training import check_same_training, report, train
from stock import load_data
from support import training_config

from odb_factory.data.observe import RowDropped
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset
from odb_factory.llamafactory.stages import STAGES

BLOCK = {"token_budget": 512, "audit": True}
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
NUM_ROWS = {"feedback": 22, "odd": 21, "whole": 24}


def feedback(number: int, rng: random.Random) -> dict[str, Any]:
    question, answer = (" ".join(rng.choice(WORDS) for _ in range(n)) for n in (2 + number % 5, 3 + number * 23 % 97))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "label": rng.random() < 0.6}


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`feedback`, `odd` and `whole`; `dropped`, of which LLaMA-Factory drops row 4, and `broken`,
    where it fails at row 2 because row 1 has no answer."""
    folder, info = tmp_path_factory.mktemp("feedback"), {}
    rng = random.Random(5)
    rows = {name: [feedback(number, rng) for number in range(count)] for name, count in NUM_ROWS.items()}
    rows["dropped"] = [feedback(number, rng) | ({"label": None} if number == 4 else {}) for number in range(9)]
    rows["broken"] = [feedback(number, rng) for number in range(4)]
    rows["broken"][1]["messages"].pop()
    for name in rows:
        (folder / f"{name}.json").write_text(json.dumps(rows[name]), encoding="utf-8")
        columns = {"messages": "messages", "kto_tag": "label"}
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns, "tags": TAGS}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def config_of(model: Path, rows_dir: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Two epochs; the gradient checkpoints of stock need another forward."""
    config = training_config(model, rows_dir, output_dir, stage="kto", dataset="feedback", num_train_epochs=2)
    return config | {"learning_rate": 2e-4, "logging_steps": 2, "disable_gradient_checkpointing": True} | changes


# The pairs


def rows_of(config: dict[str, Any]) -> Any:
    return load_data(config, stage="kto")["train_dataset"]


@pytest.mark.parametrize(
    "changes",
    [
        {"preprocessing_batch_size": 4, "val_size": 3},
        {"dataset": "dropped, odd", "preprocessing_batch_size": 7},
        {"dataset": "odd", "preprocessing_batch_size": 4, "preprocessing_num_workers": 2},
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
    config = {"dataset": "whole", "gradient_accumulation_steps": 2, "logging_steps": 1}
    two = {"per_device_train_batch_size": 2, "odb": BLOCK | {"token_budget": 256}}
    ours = train(config_of(tiny_text, rows_dir, tmp_path / "odb", **config, **two), 2)
    stock = train(config_of(tiny_text, rows_dir, tmp_path / "stock", **config, per_device_train_batch_size=4))
    report("kto, 2 ranks", check_same_training(ours, stock, counts_other_tokens=True))


def test_another_loss_is_refused(
    tiny_text: Path, rows_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# The wide grid.
