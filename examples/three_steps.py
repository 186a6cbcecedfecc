"""Draw three optimizer steps of a finished demo, fixed batches against odb: the picture of README.md.

    odb-factory demo --ranks 1 --output odb_demo
    python examples/three_steps.py odb_demo docs/three_steps.png

A bar is a micro-batch as it was trained on, a box in it a sample; samples of one optimizer step have one colour.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS_SHOWN = 3
COLOURS = ("#2a6f97", "#6a994e", "#bc6c25")
PADDING = "#e3e3e3"


def middle(run: Path) -> list[dict[str, Any]]:
    """The micro-batches of the optimizer steps in the middle of a run on one rank (`odb_factory.demo.recorder`)."""
    batches = [json.loads(line) for line in (run / "batches.jsonl").read_text(encoding="utf-8").splitlines()]
    first = max(0, (batches[-1]["optimizer_step"] + 1 - STEPS_SHOWN) // 2)
    return [batch for batch in batches if first <= batch["optimizer_step"] < first + STEPS_SHOWN]


def padded_tokens(batch: dict[str, Any]) -> int:
    return batch["rows"] * batch["length"]


def draw(axes: plt.Axes, name: str, batches: list[dict[str, Any]]) -> None:
    first = batches[0]["optimizer_step"]
    for x, batch in enumerate(batches):
        bottom = 0
        for length in batch["lengths"]:
            axes.bar(
                x,
                length,
                0.86,
                bottom,
                color=COLOURS[batch["optimizer_step"] - first],
                edgecolor="white",
                linewidth=0.4,
            )
            bottom += length
        axes.bar(x, padded_tokens(batch) - bottom, 0.86, bottom, color=PADDING, edgecolor="#b5b5b5", linewidth=0.4)
    real = sum(sum(batch["lengths"]) for batch in batches)
    padding = 1 - real / sum(map(padded_tokens, batches))
    shown = f"{padding:.0%} padding" if padding >= 0.005 else "no padding"
    samples = sum(len(batch["lengths"]) for batch in batches)
    title = f"{name}: {samples} samples, {STEPS_SHOWN} optimizer steps, {len(batches)} micro-batches, {shown}"
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_ylabel("tokens")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of `odb-factory demo --ranks 1`")
    parser.add_argument("picture", type=Path, help="PNG to write")
    asked = parser.parse_args()
    fixed, odb = (middle(asked.demo / name) for name in ("fixed", "odb"))
    figure, panels = plt.subplots(2, 1, figsize=(11, 5), sharex=True, sharey=True, layout="constrained")
    draw(panels[0], "fixed batches", fixed)
    draw(panels[1], "odb", odb)
    panels[0].set_xlim(-0.6, len(fixed) - 0.4)
    panels[1].set_xlabel(
        "micro-batches, one forward and backward each; a box is a sample, a colour an optimizer step, grey is padding"
    )
    figure.savefig(asked.picture, dpi=110)


if __name__ == "__main__":
    main()
