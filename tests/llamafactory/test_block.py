"""What a user can get wrong ends in one line that names key, value and way out, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import get_train_args
from support import training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import hooks

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_text: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_text, data_dir, tmp_path / "out", odb=BLOCK)


def test_optimizer_steps_of_any_size_are_taken(config) -> None:
    parsed = get_train_args(config | {"per_device_train_batch_size": 4, "dataloader_drop_last": True})
    assert parsed[2].per_device_train_batch_size == 4
    assert hooks._active is not None and hooks._active.keeps


def test_a_configuration_of_v1_is_told_so(config) -> None:
    with pytest.raises(ConfigError, match="^train_dataset: a key of LLaMA-Factory's next trainer, which `USE_V1=1"):
        get_train_args(config | {"train_dataset": "data.yaml", "global_batch_size": 16})


def test_neat_packing_is_the_wish_for_flat_micro_batches(config, caplog) -> None:
    """LLaMA-Factory itself must not see it: it would pack the rows before training."""
    given = config | {"neat_packing": True, "packing": True}
    _, data_args, *_ = get_train_args(given)
    assert not data_args.neat_packing and not data_args.packing
    assert hooks._active is not None and hooks._active.layout == "flat"
    assert [message for message in caplog.messages if "neat_packing" in message and "layout: flat" in message]
    assert given["neat_packing"] is True and given["odb"] == BLOCK, "what the user gave is left alone"


def test_a_block_is_kept_for_one_training_only(config) -> None:
    get_train_args(dict(config))
    assert hooks._active is not None and hooks._active.token_budget == 1024
    get_train_args({key: value for key, value in config.items() if key != "odb"})
    assert hooks._active is None
