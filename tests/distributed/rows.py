"""Rows of the small data sets that several ranks train on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from support import noise, write_dataset

WORDS = ["red", "round", "seven", "cats", "under", "a", "bridge"]
INVALID = {"messages": [{"role": "user", "content": "nobody answers"}], "images": []}
"""A row that LLaMA-Factory drops."""
PICTURES = ([], ["wide.png"], ["tall.png"], [], ["wide.png", "tall.png"])


def row(words: int, images: list[str] | None = None, videos: list[list[str]] | None = None) -> dict[str, Any]:
    """A question about `images` and `videos` (the files of their frames), and an answer of `words` words."""
    rng = random.Random(words)
    answer = " ".join(rng.choice(WORDS) for _ in range(words))
    question = "<image>" * len(images or []) + "<video>" * len(videos or []) + "what is it?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images or []} | ({} if videos is None else {"videos": videos})


def write_uneven_rows(folder: Path, num_rows: dict[str, int]) -> Path:
    """Rows of 3 to 100 words, all different in a dataset; some of `mixed` and `pictures` have one or two pictures."""
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        noise(size).convert("RGB").save(folder / f"{name}.png")
    rows = {
        name: [row(3 + (k * 23) % 97, PICTURES[k % 5] if name in ("mixed", "pictures") else []) for k in range(count)]
        for name, count in num_rows.items()
    }
    return write_dataset(folder, rows)
