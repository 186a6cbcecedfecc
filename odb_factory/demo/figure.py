"""Draw micro-batches as they are: every row, its padding, and the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BATCHES_SHOWN = 40


def draw_batches(runs: Mapping[str, Sequence[Mapping[str, Any]]], token_budget: int, path: Path) -> None:
    """Save a PNG with one panel a run; a column is a micro-batch, a box in it a row.

    runs: micro-batches by name, each with `lengths` (real tokens of each row) and `length` (tokens
    of the padded row). The panels show as many batches each, taken from the middle of the run.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(runs), 1, figsize=(11, 2.9 * len(runs)), sharex=True, squeeze=False)
    for axes, (name, batches) in zip(panels[:, 0], runs.items()):
        first = max(0, (len(batches) - BATCHES_SHOWN) // 2)
        real = sum(sum(batch["lengths"]) for batch in batches)
        padded = sum(len(batch["lengths"]) * batch["length"] for batch in batches)
        for column, batch in enumerate(batches[first : first + BATCHES_SHOWN]):
            bottom = 0
            for length in batch["lengths"]:
                axes.bar(column, length, bottom=bottom, width=0.85, color="#2a6f97", edgecolor="white", linewidth=0.3)
                rest = batch["length"] - length
                axes.bar(column, rest, bottom=bottom + length, width=0.85, color="#e9c46a", linewidth=0)
                bottom += batch["length"]
        axes.axhline(token_budget, color="#9b2226", linestyle="--", linewidth=1)
        axes.set_ylim(0, token_budget * 1.08)
        axes.set_ylabel("tokens")
        axes.set_title(f"{name}: {len(batches)} steps, {1 - real / padded:.0%} padding", loc="left", fontsize=10)
        axes.margins(x=0.01)
    panels[-1, 0].set_xlabel(f"{BATCHES_SHOWN} successive micro-batches (blue: rows, yellow: padding, dashed: budget)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
