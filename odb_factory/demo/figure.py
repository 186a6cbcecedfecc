"""One picture of several trainings: their micro-batches as they were, and their loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from odb_factory.demo.runs import Batch, Run, padded_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS_SHOWN = 3
REAL, PADDING, WAITING, BUDGET = "#2a6f97", "#e9c46a", "#e5e5e5", "#9b2226"
STYLES = ("#e9c46a", "-", 4.0), ("#6a994e", "-", 1.5), ("#9b2226", "-", 1.5), ("#8d99ae", "--", 1.2)
"""Colour, line style and width of the loss curves; the first is broad, to be seen under one that equals it."""


def draw(runs: Mapping[str, Run], token_budget: int, path: Path) -> None:
    """Save a PNG: on the left a panel of micro-batches for each run, on the right the losses over time and over steps.

    The panels show the same optimizer steps of each run, from the middle of the first one.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 1.9 * len(runs)), layout="constrained")
    grid = figure.add_gridspec(2 * len(runs), 5)
    first_step = max(0, (next(iter(runs.values())).num_optimizer_steps - STEPS_SHOWN) // 2)
    shown = {name: _steps_of(run, first_step) for name, run in runs.items()}
    width = max(len(mine) for batches in shown.values() for mine in batches)
    for row, (name, batches) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[2 * row : 2 * row + 2, :3])
        _draw_micro_batches(axes, name, batches, token_budget)
        axes.set_xlim(-0.5, width - 0.5)
    axes.set_xlabel(
        "micro-steps, a bar for each rank; blue: rows, yellow: padding, grey: waiting, dashed: token_budget"
    )
    over_time = figure.add_subplot(grid[: len(runs), 3:])
    over_steps = figure.add_subplot(grid[len(runs) :, 3:])
    for (name, run), (color, line, weight) in zip(runs.items(), STYLES):
        steps, seconds, losses = zip(*run.losses())
        over_time.plot(seconds, losses, line, color=color, linewidth=weight, label=name)
        over_steps.plot(steps, losses, line, color=color, linewidth=weight, label=name)
    over_time.set_title("training loss over seconds of training", loc="left", fontsize=10)
    over_steps.set_title("training loss over optimizer steps", loc="left", fontsize=10)
    over_time.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _steps_of(run: Run, first: int) -> list[list[Batch]]:
    """The micro-batches of each rank in the optimizer steps from `first` on; the last ones if there are fewer."""
    first = min(first, max(0, run.num_optimizer_steps - STEPS_SHOWN))
    return [[b for b in mine if first <= b["optimizer_step"] < first + STEPS_SHOWN] for mine in run.batches]


def _draw_micro_batches(axes: Axes, name: str, batches: list[list[Batch]], token_budget: int) -> None:
    """batches: of each rank, by micro-step. A bar is a micro-batch, a box in it a sample."""
    share = 0.9 / len(batches)
    for step, of_ranks in enumerate(zip(*batches, strict=True)):
        longest = max(map(padded_tokens, of_ranks))
        for rank, batch in enumerate(of_ranks):
            x, bottom = step - 0.45 + share * (rank + 0.5), 0
            for length in batch["lengths"]:
                is_flat = batch["rows"] < len(batch["lengths"])
                rest = 0 if is_flat else batch["length"] - length
                axes.bar(x, length, share, bottom, color=REAL, edgecolor="white", linewidth=0.3)
                axes.bar(x, rest, share, bottom + length, color=PADDING, linewidth=0)
                bottom += length + rest
            axes.bar(x, padded_tokens(batch) - bottom, share, bottom, color=PADDING, linewidth=0)
            bottom = padded_tokens(batch)
            axes.bar(x, longest - bottom, share, bottom, color=WAITING, linewidth=0)
        if step and of_ranks[0]["optimizer_step"] != batches[0][step - 1]["optimizer_step"]:
            axes.axvline(step - 0.5, color="black", linewidth=1)
    axes.axvline(len(batches[0]) - 0.5, color="black", linewidth=1)
    axes.axhline(token_budget, color=BUDGET, linestyle="--", linewidth=1)
    axes.set_ylim(0, token_budget * 1.08)
    axes.set_ylabel("tokens")
    every = [batch for mine in batches for batch in mine]
    padding = 1 - sum(sum(batch["lengths"]) for batch in every) / sum(map(padded_tokens, every))
    steps, samples = len({batch["optimizer_step"] for batch in every}), sum(len(batch["lengths"]) for batch in every)
    axes.set_title(
        f"{name}: {steps} optimizer steps, {samples} samples in {len(batches[0])} micro-steps, {padding:.0%} padding",
        loc="left",
        fontsize=10,
    )
