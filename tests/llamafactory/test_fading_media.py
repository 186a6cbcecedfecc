"""`on_error` also decides about images that fail at collation, after they were observed (I2, I9)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed.invariants import check_books, losses, read_audits
from distributed.rows import row
from PIL import Image
from same_training import launch
from same_training import train as train_stock
from support import shimmed, training_config, write_dataset

pytestmark = pytest.mark.timeout(600)

NUM_ROWS, ACCUMULATION = 32, 4
FADING = {5: "gone.png", 22: "cut.png", 26: "once.png"}
LOST = {5: 2, 22: 6}
"""Optimizer step of each row that is left out."""


def configured(tiny_vl: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """The learning rate is almost 0, so that the loss of an optimizer step depends only on its rows."""
    folder.mkdir(parents=True)
    for name in {"fine.png", *FADING.values()}:
        Image.radial_gradient("L").resize((64, 96)).convert("RGB").save(folder / name)
    if folder.name == "odb":
        (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:200])
    rows = [row(3 + (k * 11) % 38, [FADING.get(k, "fine.png")]) for k in range(NUM_ROWS)]
    write_dataset(folder, {"rows": rows})
    block = {"token_budget": 256, "audit": True, "on_error": "skip"}
    settings = {"learning_rate": 1e-12, "gradient_accumulation_steps": ACCUMULATION, "disable_shuffling": True}
    return training_config(tiny_vl, folder, folder / "out", dataset="rows", odb=block, **settings | changes)


def test_an_image_that_fails_after_it_was_observed_is_left_out(tiny_vl, tmp_path) -> None:
    num_ranks = 2
    config = configured(tiny_vl, tmp_path / "odb", gradient_accumulation_steps=ACCUMULATION // num_ranks)
    folder = Path(config["output_dir"])
    ended = launch([config | {"ddp_backend": "gloo"}], folder.parent, num_ranks, env=shimmed("fading_pictures"))
    audits = read_audits(folder, num_ranks)
    ids = Counter(id for audit in audits for line in audit for id in line["ids"])
    assert ids == Counter(set(range(NUM_ROWS)) - LOST.keys()), "I2"
    check_books(folder, audits, left_out={"collation": 2})
    assert sum(rank.output.count("left out (collation): ") for rank in ended) == 2
    # The other optimizer steps are stock's.
    stock = configured(tiny_vl, tmp_path / "stock")
    del stock["odb"]
    train_stock(stock)
    odb_losses, stock_losses = (losses(Path(run["output_dir"])) for run in (config, stock))
    for step, (odb_loss, stock_loss) in enumerate(zip(odb_losses, stock_losses, strict=True), 1):
        if step not in LOST.values():
            assert odb_loss == pytest.approx(stock_loss, rel=1e-4), step
