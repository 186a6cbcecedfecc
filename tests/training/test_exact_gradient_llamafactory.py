"""I8 through LLaMA-Factory's own SFT workflow: its template, collator, trainer and losses, on two ranks.

Its collator adds a fake image to groups without one; the reference batch, collated by stock from stock's
own rows, has none of its own. `use_dft_loss` replaces the model's loss with a function of the trainer's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks
from distributed.rows import row
from stock import load_stock
from support import noise, training_config, write_dataset
from training.reference import Cell, compare, dynamic, mean_of, token_loss, train_in_batches

WORLD_SIZE, ACCUMULATION = 2, 2
TOLERANCE = 1e-5
LIMIT_S = 200
LOSSES = {"LLaMA-Factory": token_loss, "use_dft_loss": dynamic}
LEARNING_RATES = {"LLaMA-Factory": 0.05, "use_dft_loss": 50.0}
"""The second loss weighs a token by its probability, which is 1 / 4096 at first: with less no parameter would move."""


@pytest.fixture(scope="module")
def configs(tiny_text, tiny_vl, tmp_path_factory) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of 3 to 70 words, of the pictures none, one or two; the rows of rank 1 are short and it runs dry."""
    folder = tmp_path_factory.mktemp("rows")
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        noise(size).convert("RGB").save(folder / f"{name}.png")
    pictures = [[], [], ["wide.png"], ["tall.png"], [], [], ["wide.png", "tall.png"]]
    words = [(3 + k * 13 % 67) // (1 + 3 * (k % 2)) for k in range(20)]
    rows = [row(count, pictures[k % 7]) for k, count in enumerate(words)]
    write_dataset(folder, {"vl": rows, "text": [row(count) for count in words]})

    def config(loss: str, model: str) -> dict[str, Any]:
        return training_config(
            tiny_vl if model == "vl" else tiny_text,
            folder,
            tmp_path_factory.mktemp("out"),
            dataset=model,
            gradient_accumulation_steps=ACCUMULATION,
            num_train_epochs=2,
            disable_shuffling=True,
            dataloader_num_workers=0,
            freeze_vision_tower=False,
            freeze_multi_modal_projector=False,
            optim="sgd",
            learning_rate=LEARNING_RATES[loss],
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            use_dft_loss=loss == "use_dft_loss",
        )

    return {(loss, model): config(loss, model) for loss in LOSSES for model in ("text", "vl")}


@pytest.fixture(scope="module")
def cells(configs, tmp_path_factory) -> dict[tuple[str, str], Cell]:
    odb = {"token_budget": 256, "max_patches": 120, "buffer_size": 8, "global_batch_size": "fill", "audit": True}
    odb |= {"balance": False, "layout": "padded"}
    run_ranks(
        "training.gradient_ranks:train_llamafactory",
        tmp_path_factory.mktemp("ranks"),
        world_size=WORLD_SIZE,
        limit_s=LIMIT_S,
        configs=[config | {"odb": odb} for config in configs.values()],
    )
    found = {}
    for (loss, model), config in configs.items():
        replayed = functools.partial(replay, config, LOSSES[loss])
        found[loss, model] = compare(Path(config["output_dir"]), WORLD_SIZE, replayed)
    return found


def replay(config: dict[str, Any], loss: Any, folder: Path, batches: list[list[int]]) -> dict[str, Any]:
    """Stock rows, stock collator, one batch an optimizer step; the loss is that of the definition."""
    stock = load_stock(config | {"disable_gradient_checkpointing": True})
    rows, rate = stock.datasets["train_dataset"], config["learning_rate"]
    return train_in_batches(stock.model, rows, stock.collator, batches, folder, mean_of(loss), learning_rate=rate)


@pytest.mark.parametrize("model", ["text", "vl"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_optimizer_step_is_that_of_one_process_and_one_batch(cells, loss: str, model: str) -> None:
    cell = cells[loss, model]
    assert cell.optimizer_steps >= 5
    assert all(cell.idle_steps)
    assert cell.gradient < TOLERANCE
    assert cell.parameters < TOLERANCE
    assert cell.loss < TOLERANCE
    assert cell.grad_norm < TOLERANCE
