"""Rows of the small data sets that several ranks train on."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["red", "round", "seven", "cats", "under", "a", "bridge"]
INVALID = {"messages": [{"role": "user", "content": "nobody answers"}], "images": []}
"""A row that LLaMA-Factory drops."""


def row(words: int, images: list[str] | None = None) -> dict[str, Any]:
    """A question about `images` and an answer of so many words."""
    rng = random.Random(words)
    answer = " ".join(rng.choice(WORDS) for _ in range(words))
    question = "<image>" * len(images or []) + "what is it?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": images or []}
