"""What the benchmarks train: tiny models, their data, and what each contestant changes in the configuration."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from runs import grouping_by_length
from simulation import Draw, lognormal

from odb_factory.cli.mm_mix import build_builtin_mix
from odb_factory.cli.tiny_model import build_tiny_qwen2, build_tiny_qwen3_vl

FIXED = "fixed batch"
ONE_ROW = "fixed batch, 1 row"
"""Nothing to pad, a quarter or half of the memory, and the most micro-steps."""
GLOBAL_BATCH_SIZE = 32
"""Samples of an optimizer step on all ranks."""
NUM_WORDS, SUCCESSORS = 256, (0.7, 0.2, 0.1)
"""The made-up language: each word is followed by one of three, so a token is worth 0.80 nats once it is learnt."""
PROMPT_WORDS = 8
SHORTEST, LONGEST = 16, 1000
WORDS = lognormal(150, 1.0)
"""Words of a text sample: mean 150 and coefficient of variation 1 (ShareGPT4o's lengths, a sixth)."""
ALIKE_WORDS = 300


@dataclass(frozen=True)
class Workload:
    """samples: of the training split, a multiple of the rows of two ranks, so that fixed batches repeat none.

    row: padded tokens of the longest row, and of every packed one. rows: of a fixed batch. alike: all samples are.
    """

    name: str
    samples: int
    build: Callable[[Path, int], tuple[Path, Path]]
    template: str
    dataset: str
    cutoff_len: int
    row: int
    rows: int
    can_pack: bool = False
    alike: bool = False

    @property
    def token_budget(self) -> int:
        return self.rows * self.row

    def contestants(self, ranks: int) -> dict[str, dict[str, Any]]:
        """What each changes in the configuration."""
        kept, one_row = (
            {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GLOBAL_BATCH_SIZE // (rows * ranks)}
            for rows in (self.rows, 1)
        )
        online = {"token_budget": self.token_budget}
        # Packs hold about an optimizer step's samples. Without evaluation: LLaMA-Factory would pack those samples, too.
        packed = kept | {"gradient_accumulation_steps": 1, "eval_strategy": "no", "eval_dataset": None}
        packing = {"packing": packed | {"packing": True}, "neat packing": packed | {"neat_packing": True}}
        unbalanced = {"odb, balance: false": kept | {"odb": online | {"balance": False}}}
        ours = {"odb": kept | {"odb": online}, "odb, padded": kept | {"odb": online | {"layout": "padded"}}}
        if self.alike:
            return {FIXED: kept, **ours}
        return {
            FIXED: kept,
            ONE_ROW: one_row,
            "length-grouped": kept | grouping_by_length(),
            **(packing if self.can_pack else {}),
            **ours,
            **(unbalanced if ranks > 1 else {}),
            "odb, fill": kept | {"gradient_accumulation_steps": 1, "odb": online | {"global_batch_size": "fill"}},
        }


def forked(work: Callable[[], object], log: Path) -> str | None:
    """Run in a child process that writes to `log`. Its last line if it fails, else None."""
    sys.stdout.flush()
    if not (child := os.fork()):
        with log.open("w", encoding="utf-8") as lines:
            for stream in (1, 2):
                os.dup2(lines.fileno(), stream)
        try:
            work()
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        sys.exit()
    if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return None
    return (log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or ["(it said nothing)"])[-1]


def vocabulary() -> list[str]:
    found = Counter(re.findall(r"\b[a-z]{3,8}\b", " ".join(topics.values())))
    return [word for word, _ in found.most_common(NUM_WORDS)]


def of_tokenizer(words: list[str]) -> str:
    """Text for a tokenizer of these words alone, a token each: tiny models spend their time on the vocabulary."""
    return "\n".join(f" {word}" * 9 for word in words)


def walker(words: list[str], rng: np.random.Generator) -> Callable[[int], list[str]]:
    """A function that makes a walk of so many words through a language of its own."""
    following = np.array([rng.choice(NUM_WORDS, len(SUCCESSORS), replace=False) for _ in words])

    def walk(length: int) -> list[str]:
        steps = [rng.integers(NUM_WORDS)]
        for choice in rng.choice(len(SUCCESSORS), length - 1, p=SUCCESSORS):
            steps.append(following[steps[-1], choice])
        return [words[k] for k in steps]

    return walk


def build_text(folder: Path, samples: int, words_of_all: int | None = None, draw: Draw = WORDS) -> tuple[Path, Path]:
    """A tiny Qwen2 and a data set: walks through a made-up language. words_of_all: every sample has so many."""
    words = vocabulary()
    model = build_tiny_qwen2(folder / "tiny_qwen2", text=of_tokenizer(words))
    data = folder / "text"
    rng = np.random.default_rng(0)
    walk = walker(words, rng)

    def row(length: int) -> dict[str, str]:
        text = walk(length)
        return {"instruction": " ".join(text[:PROMPT_WORDS]), "input": "", "output": " ".join(text[PROMPT_WORDS:])}

    data.mkdir(parents=True, exist_ok=True)
    for name, count in (("text", samples), ("text_val", max(8, samples // 15))):
        lengths = np.clip(draw(rng, count), SHORTEST, LONGEST).astype(int)
        lengths[count // 2] = LONGEST  # the longest there can be is there
        if words_of_all:
            lengths[:] = words_of_all
        (data / f"{name}.json").write_text(json.dumps([row(length) for length in lengths]), encoding="utf-8")
    info = {name: {"file_name": f"{name}.json"} for name in ("text", "text_val")}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return model, data


def build_alike(folder: Path, samples: int) -> tuple[Path, Path]:
    return build_text(folder, samples, ALIKE_WORDS)


def build_vl(folder: Path, samples: int) -> tuple[Path, Path]:
    build_builtin_mix(folder / "mm_mix", samples=samples)
    return build_tiny_qwen3_vl(folder / "tiny_qwen3_vl"), folder / "mm_mix"


WORKLOADS = (
    Workload("text", 1280, build_text, "qwen3_nothink", "text", 1024, row=1024, rows=4, can_pack=True),
    # Rows of the cut-off and the 8 tokens that a fake image adds to a batch of text alone.
    Workload("MM-Mix", 320, build_vl, "qwen3_vl_nothink", "mm_mix", 2048, row=2056, rows=2),
    # Every sample is longer than the cut-off, and cut to it.
    Workload("all alike", 960, build_alike, "qwen3_nothink", "text", 256, row=256, rows=4, alike=True),
)
