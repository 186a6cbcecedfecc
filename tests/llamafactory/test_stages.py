"""What the stages pt, rm and dpo refuse and say, and how their rows count; their trainings: `test_same_training.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import get_train_args
from same_training import ODB, Config, configurations, write_rows
from tiny_models import TinyModels

from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES
from odb_factory.planner import Media


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("stages")
    return configurations(TinyModels(tiny_text, tiny_vl, folder), write_rows(folder / "rows"))


# What is refused, and what is said.


def test_documents_stay_whole_and_that_is_said(config_of, tmp_path, caplog) -> None:
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

    def count_media(self, *args: Any) -> Media:
        return Media()

    def has_media(self, *args: Any) -> bool:
        return True


NO_MEDIA = NoMedia()
