"""What a user can get wrong ends in one line that names key, value and way out, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import FinetuningArguments, get_train_args
from support import training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import hooks

BLOCK = {"token_budget": 1024}
COMPILED = {"torch_compile": True}
"""Keeps the logits."""


@pytest.fixture
def config(tiny_text: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_text, data_dir, tmp_path / "out", odb=BLOCK)


def test_optimizer_steps_of_any_size_are_taken(config) -> None:
    parsed = get_train_args(config | {"per_device_train_batch_size": 4, "dataloader_drop_last": True})
    assert parsed[2].per_device_train_batch_size == 4
    assert hooks._active is not None and hooks._active.keeps


@pytest.mark.parametrize(
    ("model", "odb", "changes", "refused"),
    [
        ("tiny_vl", {}, {"use_liger_kernel": True}, False),  # its loss is computed without logits by odb
        ("tiny_vl", {}, {"use_liger_kernel": True} | COMPILED, True),
        ("tiny_vl", {}, {"use_liger_kernel": True, "label_smoothing_factor": 0.1} | COMPILED, False),  # no labels
        (
            "tiny_vl",
            {"global_batch_size": 32},
            {"use_liger_kernel": True, "gradient_accumulation_steps": 1} | COMPILED,
            True,
        ),
        ("tiny_vl", {"loss_scaling": "exact"}, {"use_liger_kernel": True} | COMPILED, False),
        ("tiny_text", {}, {"use_liger_kernel": True} | COMPILED, False),
        ("tiny_text", {}, {"use_liger_kernel": True, "use_asft_loss": True}, True),
        ("tiny_text", {"global_batch_size": "fill"}, {"use_liger_kernel": True} | COMPILED, False),
    ],
)
def test_a_kernel_that_cannot_weigh_samples_is_named_where_they_weigh_differently(
    config, request, model, odb, changes, refused
) -> None:
    """Before the model is loaded; the mean of means that stock takes for models with a processor is such a case."""
    if "use_asft_loss" in changes and not hasattr(FinetuningArguments, "use_asft_loss"):
        pytest.skip("this release has no use_asft_loss")
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    path = request.getfixturevalue(model)
    template = "qwen" if model == "tiny_text" else "qwen3_vl"
    config |= {"model_name_or_path": str(path), "template": template, "odb": BLOCK | odb} | steps | changes
    if not refused:
        get_train_args(config)
        return
    (key, value) = next(iter(changes.items()))
    with pytest.raises(ConfigError) as caught:
        get_train_args(config)
    message = str(caught.value)
    assert message.startswith(f"{key}: {value} computes the loss without logits")
    assert "`loss_scaling: exact`" in message and "\n" not in message


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
