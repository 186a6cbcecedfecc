"""I8 and I9 for the stages pt, rm and dpo: the same YAML with an `odb:` block is the same training as without.

Supervised fine-tuning is `test_same_training.py`'s. The wide grid: `pytest -s -m full_grid`; -s shows how far the
runs differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import FinetuningArguments, get_train_args
from llamafactory.train.tuner import run_exp
from same_training import train
from stage_training import (
    ODB,
    VARIANTS,
    WHOLE,
    Config,
    OneBatch,
    compare_with_one_batch,
    configurations,
    on_ranks,
    same,
    untied,
)
from support import read_jsonl
from transformers import AutoModelForImageTextToText

from odb_factory.errors import ConfigError
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES

GRADIENT, OF_A_TENSOR = 5e-6, 3e-5
"""Largest relative differences: of the norm of the whole gradient, and of that of a tensor, whose parts may cancel. Two
of stock's own cuts of the same pairs differ by up to 4e-6."""
ONE_EPOCH = {"num_train_epochs": 1, "eval_strategy": "no", "max_grad_norm": 1e9}
STAGES_HERE = ("pt", "rm", "dpo")


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return configurations(tiny_text, tmp_path_factory.mktemp("stages"))


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> list[OneBatch]:
    return compare_with_one_batch(monkeypatch)


def check_gradient(name: str, one: OneBatch) -> None:
    print(f"{name}: gradient of an optimizer step {max(one.deviations):.1e}, worst tensor {one.of_a_tensor:.1e}")
    assert one.num_cut and max(one.deviations) < GRADIENT and one.of_a_tensor < OF_A_TENSOR


@pytest.mark.parametrize("stage", STAGES_HERE)
def test_a_stage_is_the_same_training_on_one_rank(
    stage: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    budget = ODB if stage != "pt" else ODB | {"token_budget": 128}
    ours = train(config_of(stage, tmp_path / "odb", odb=budget, max_grad_norm=1e9))
    stock = train(config_of(stage, tmp_path / "stock", max_grad_norm=1e9, **WHOLE.get(stage, {})))
    times = 1 if stage == "pt" else 2
    assert [len(step) // times for step in stock.rows] == [6, 6, 6, 4] * 2
    same(stage, ours, stock)
    check_gradient(stage, one_batch[0])
    audit = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert all(line["rows"] == 1 and len(line["segments"]) >= times * len(line["ids"]) for line in audit), "flat"
    assert all(line["units"] == len(line["ids"]) for line in audit if stage != "pt")


@pytest.mark.parametrize("stage", ["dpo", pytest.param("rm", marks=pytest.mark.full_grid)])
def test_pairs_with_images_are_the_same_training(
    stage: str, config_of: Config, tiny_vl: Path, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    """Both answers bring the images of their row; where no pair of a micro-batch has one, the fake image comes once."""
    model = tiny_vl if stage == "dpo" else untied(tiny_vl, tmp_path / "model", AutoModelForImageTextToText)
    changes = {"model_name_or_path": str(model), "template": "qwen3_vl", "dataset": "pictures"}
    changes |= ONE_EPOCH | {"per_device_train_batch_size": 2, "freeze_vision_tower": False}
    budget = {"token_budget": 500, "max_patches": 300, "audit": True}
    ours = train(config_of(stage, tmp_path / "odb", odb=budget, **changes))
    same(f"{stage} with images", ours, train(config_of(stage, tmp_path / "stock", **changes)))
    check_gradient(f"{stage} with images", one_batch[0])
    trainer = one_batch[0].trainer
    settings = trainer.odb.settings
    for line in read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl"):
        costs = [settings.observer(trainer.train_dataset[id])[1] for id in line["ids"]]
        dummy_tokens, dummy_patches = settings.collation.dummies(
            sum(cost.has_media for cost in costs), sum(cost.has_audio for cost in costs)
        )
        assert line["patches"] == sum(cost.patches for cost in costs) + dummy_patches <= 300
        assert line["rows"] * line["length"] == sum(cost.tokens for cost in costs) + dummy_tokens, "no padding"


@pytest.mark.parametrize("variant", ["orpo", "simpo", "ipo"])
def test_losses_over_pairs_have_the_gradient_of_one_batch(
    variant: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    run_exp(config_of("dpo", tmp_path / "out", odb=ODB, **(VARIANTS[variant] | ONE_EPOCH)))
    check_gradient(variant, one_batch[0])


def test_stages_are_the_same_training_on_two_ranks(config_of: Config, tmp_path: Path) -> None:
    stages = {stage: (stage, {"num_train_epochs": 1}) for stage in STAGES_HERE}
    stages["pt_padded"] = ("pt", {"num_train_epochs": 1, "odb": ODB | {"layout": "padded"}})
    if hasattr(FinetuningArguments, "use_asft_loss"):  # stock cannot evaluate with it
        stages["asft"] = ("sft", {"num_train_epochs": 1, "use_asft_loss": True, "eval_strategy": "no"})
    for stage, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages).items():
        times = 2 if stage in ("rm", "dpo") else 1
        assert [len(step) // times for step in stock.rows] == [8, 8, 4], stage
        same(f"{stage}, 2 ranks", ours, stock)


# What is refused, and what is said.


def test_keys_that_a_stage_cannot_have_are_refused_in_one_line(config_of: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row_multiple: 64 .* stage 'rm' .* leave it out") as caught:
        get_train_args(config_of("rm", tmp_path, odb=ODB | {"row_multiple": 64}))
    assert "\n" not in str(caught.value)


def test_documents_stay_whole_and_that_is_said(
    config_of: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = config_of("pt", tmp_path, odb=ODB)
    assert get_train_args(given)[1].packing is False and "packing" not in given
    assert len([message for message in caplog.messages if "documents stay whole" in message]) == 1
    assert get_train_args(config_of("pt", tmp_path))[1].packing is True, "without the block it is stock's"


# Pairs and tokens as they are counted.


class Pad:
    pad_token_id = 2


def test_a_pad_token_inside_a_document_carries_no_loss() -> None:
    """Where a tokenizer pads with its end-of-text token the collator masks every one of them."""
    cost = STAGES["pt"].of_training(None, Pad()).cost({"input_ids": [2, 5, 2, 7, 2]}, None)  # type: ignore[arg-type]
    assert (cost.tokens, cost.units, cost.leading_label) == (5, 2, False)


@pytest.mark.parametrize(
    ("pref_loss", "pref_ftx", "units"),
    [("sigmoid", 0.0, (1, 1)), ("sigmoid", 0.5, (0, 1)), ("ipo", 0.0, (0, 0)), ("simpo", 0.0, (0, 0))],
)
def test_an_empty_answer_is_left_out_where_the_loss_divides_by_its_length(
    pref_loss: str, pref_ftx: float, units: tuple[int, int]
) -> None:
    class Arguments:
        pass

    arguments = Arguments()
    arguments.pref_loss, arguments.pref_ftx = pref_loss, pref_ftx  # type: ignore[attr-defined]
    stage = STAGES["dpo"].of_training(arguments, None)
    empty, answer = ([1, 1], [-100, -100]), ([1, 1, 4], [-100, -100, 4])

    def units_of(chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]) -> int:
        features = {"chosen_input_ids": chosen[0], "chosen_labels": chosen[1]}
        features |= {"rejected_input_ids": rejected[0], "rejected_labels": rejected[1]}
        cost = stage.cost(features, NO_MEDIA)
        assert (cost.tokens, cost.row_tokens) == (5, 6)
        return cost.units

    assert (units_of(empty, answer), units_of(answer, empty)) == units


class NoMedia(MediaObserver):
    def __init__(self) -> None:
        pass

    def count_patches(self, *args: Any) -> int:
        return 0

    def has_media(self, *args: Any) -> bool:
        return True


NO_MEDIA = NoMedia()


# The wide grid.


@pytest.mark.full_grid
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_dpo(variant: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path) -> None:
    changes = VARIANTS[variant] | {"max_grad_norm": 1e9}
    ours = train(config_of("dpo", tmp_path / "odb", odb=ODB, **changes))
    stock = train(config_of("dpo", tmp_path / "stock", **changes))
    same(variant, ours, stock)
    check_gradient(variant, one_batch[0])
