"""The real LLaMA-Factory on a CPU, on one and on two ranks: fixed batches, length-grouped, packed, and odb.

A tiny random Qwen2 on made-up text of very uneven length, and a tiny random Qwen3-VL on the built-in MM-Mix, one epoch
of the same samples each, at the same learning rate, with the same samples in an optimizer step (packing and `fill`
cannot have that) and at most the same peak of memory, in padded tokens of the largest micro-batch.
A fixed batch reaches rows x longest row, whatever the order, and so does a length-grouped one; packed rows are as long
as that longest row, and as many; token_budget is that product.

    python examples/benchmark/train.py                  # about ten minutes on two cores
    python examples/benchmark/train.py --short          # to see that everything works
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from report import (
    COLUMNS,
    PADDING,
    SAMPLES,
    SECONDS,
    VALIDATION,
    Column,
    Result,
    ahead_of_odb,
    balance,
    draw,
    markdown,
    whole,
)
from simulation import lognormal

from odb_factory.demo.mm_mix_builtin import build_builtin_mix
from odb_factory.demo.runs import Run, grouping_by_length, padded_tokens, run_llamafactory, sft_config, train
from odb_factory.demo.tiny_model import build_tiny_qwen2, build_tiny_qwen3_vl

GLOBAL_BATCH_SIZE = 32
"""Samples of an optimizer step on all ranks."""
NUM_WORDS, SUCCESSORS = 256, (0.7, 0.2, 0.1)
"""The made-up language: each word is followed by one of three, so a token is worth 0.80 nats once it is learnt."""
PROMPT_WORDS = 8
SHORTEST, LONGEST = 16, 1000
"""Words of a text sample: lognormal, mean 150 and coefficient of variation 1 (ShareGPT4o's lengths, a sixth)."""


@dataclass(frozen=True)
class Workload:
    """samples: of the training split, a multiple of the rows of two ranks, so that fixed batches repeat none.

    row: padded tokens of the longest row, and of every packed one. rows: of a fixed batch. short_ranks: what `--short`
    runs on.
    """

    name: str
    samples: int
    short_samples: int
    short_ranks: int
    build: Callable[[Path, int], tuple[Path, Path]]
    template: str
    dataset: str
    cutoff_len: int
    row: int
    rows: int
    can_pack: bool

    @property
    def token_budget(self) -> int:
        return self.rows * self.row

    def contestants(self, ranks: int) -> dict[str, dict[str, Any]]:
        """What each changes in the configuration."""
        kept = {
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": GLOBAL_BATCH_SIZE // (self.rows * ranks),
        }
        online = {"token_budget": self.token_budget}
        # Packs hold about an optimizer step's samples. Without evaluation: LLaMA-Factory would pack those samples, too.
        packed = kept | {"gradient_accumulation_steps": 1, "eval_strategy": "no", "eval_dataset": None}
        packing = {"packing": packed | {"packing": True}, "neat packing": packed | {"neat_packing": True}}
        unbalanced = {"odb, balance: false": kept | {"odb": online | {"balance": False}}}
        return {
            FIXED: kept,
            "length-grouped": kept | grouping_by_length(),
            **(packing if self.can_pack else {}),
            "odb": kept | {"odb": online},
            **(unbalanced if ranks > 1 else {}),
            "odb, fill": kept | {"gradient_accumulation_steps": 1, "odb": online | {"global_batch_size": "fill"}},
        }


def build_text(folder: Path, samples: int) -> tuple[Path, Path]:
    """A tiny Qwen2 and a data set: walks through a made-up language."""
    found = Counter(re.findall(r"\b[a-z]{3,8}\b", " ".join(topics.values())))
    words = [word for word, _ in found.most_common(NUM_WORDS)]
    # A tokenizer that knows no more than these words, each a token: tiny models spend their time on the vocabulary.
    model = build_tiny_qwen2(folder / "tiny_qwen2", text="\n".join(f" {word}" * 9 for word in words))
    data = folder / "text"
    rng = np.random.default_rng(0)
    following = np.array([rng.choice(NUM_WORDS, len(SUCCESSORS), replace=False) for _ in words])

    def row(length: int) -> dict[str, str]:
        walk = [rng.integers(NUM_WORDS)]
        for choice in rng.choice(len(SUCCESSORS), length - 1, p=SUCCESSORS):
            walk.append(following[walk[-1], choice])
        text = [words[k] for k in walk]
        return {"instruction": " ".join(text[:PROMPT_WORDS]), "input": "", "output": " ".join(text[PROMPT_WORDS:])}

    data.mkdir(parents=True, exist_ok=True)
    for name, count in (("text", samples), ("text_val", max(8, samples // 15))):
        lengths = np.clip(lognormal(150, 1.0)(rng, count), SHORTEST, LONGEST).astype(int)
        lengths[count // 2] = LONGEST  # the longest there can be is there
        (data / f"{name}.json").write_text(json.dumps([row(length) for length in lengths]), encoding="utf-8")
    info = {name: {"file_name": f"{name}.json"} for name in ("text", "text_val")}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return model, data


def build_vl(folder: Path, samples: int) -> tuple[Path, Path]:
    build_builtin_mix(folder / "mm_mix", samples=samples)
    return build_tiny_qwen3_vl(folder / "tiny_qwen3_vl"), folder / "mm_mix"


WORKLOADS = (
    Workload("text", 1280, 80, 1, build_text, "qwen3_nothink", "text", 1024, row=1024, rows=4, can_pack=True),
    # Rows of the cut-off and the 8 tokens that a fake image adds to a batch of text alone.
    Workload("MM-Mix", 320, 40, 2, build_vl, "qwen3_vl_nothink", "mm_mix", 2048, row=2056, rows=2, can_pack=False),
)
FIXED = "fixed batch"
SHORT = (FIXED, "packing", "odb")
OPTIMIZER_STEPS = Column("optimizer_steps", "optimizer steps", whole)
CPU_SECONDS = Column("cpu_seconds", "CPU seconds", "{:.1f}".format, "least")
"""Of the busiest training process: other work on the machine changes them less than the seconds of the clock."""
TRAIN_COLUMNS = [OPTIMIZER_STEPS]
for known in COLUMNS:
    TRAIN_COLUMNS += (known, CPU_SECONDS) if known is SECONDS else (known,)


def result(name: str, run: Run, samples: int, real_tokens: int, validation_loss: float) -> Result:
    """samples, real_tokens: of the data set, each once; whatever else was computed is padding, for everyone alike."""
    padded = [[padded_tokens(batch) for batch in mine] for mine in run.batches]
    computed = sum(map(sum, padded))
    return {
        "name": name,
        "samples_per_second": samples / run.seconds,
        "tokens_per_second": real_tokens / run.seconds,
        "padded_tokens_per_second": computed / run.seconds,
        "padding": 1 - real_tokens / computed,
        "balance": balance(padded) if len(padded) > 1 else None,
        "optimizer_steps": run.num_optimizer_steps,
        "steps": max(map(len, padded)),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "seconds_to_first_step": run.seconds_to_first_step,
        "peak_padded_tokens": max(map(max, padded)),
        "peak_memory": max(mine[-1]["peak_memory"] for mine in run.batches),
        # Over the last tenth of the epoch.
        "train_loss": float(np.mean([e["loss"] for e in run.history() if "loss" in e and e["epoch"] > 0.9])),
        "validation_loss": validation_loss,
        "losses": [loss for _, _, loss in run.losses()],
    }


def validation_loss(config: dict[str, Any], run: Run) -> float:
    """Mean over the validation samples: at the end of the training, or of what it has saved."""
    for entry in run.history():
        if "eval_loss" in entry:
            return entry["eval_loss"]
    trained = {"model_name_or_path": config["output_dir"], "output_dir": f"{config['output_dir']}/validation"}
    again = config | trained | {"do_train": False, "do_eval": True, "eval_strategy": "no"}
    run_llamafactory(again, record=run.output / "none.jsonl")
    return json.loads((run.output / "validation" / "all_results.json").read_text(encoding="utf-8"))["eval_loss"]


def same_training(results: list[Result]) -> str:
    """How far the losses of odb are from those of fixed batches, optimizer step by optimizer step."""
    fixed, ours = (next(result for result in results if result["name"] == name) for name in (FIXED, "odb"))
    furthest = max(abs(a - b) / b for a, b in zip(ours["losses"], fixed["losses"], strict=True))
    return (
        f"odb and fixed batches: {len(fixed['losses'])} optimizer steps each, whose training losses differ by "
        f"{furthest:.1e} at most, relatively; in {ours['seconds'] / fixed['seconds']:.0%} of the time."
    )


def compare(workload: Workload, folder: Path, ranks: int, is_short: bool) -> list[Result]:
    """The results of all contestants, fixed batches first."""
    model, data = workload.build(folder, workload.short_samples if is_short else workload.samples)
    samples = len(json.loads((data / f"{workload.dataset}.json").read_text(encoding="utf-8")))
    results: list[Result] = []
    for name, changes in workload.contestants(ranks).items():
        if is_short and name not in SHORT:
            continue
        output = folder / f"{workload.dataset}_{ranks}_{name}".replace(", ", "_").replace(" ", "_")
        shared = {"dataset": workload.dataset, "template": workload.template, "cutoff_len": workload.cutoff_len}
        config = sft_config(model, data, output, **shared)
        run = train(config | changes, ranks=ranks)
        if not results:
            real_tokens = sum(sum(batch["lengths"]) for mine in run.batches for batch in mine)
        results.append(result(name, run, samples, real_tokens, validation_loss(config, run)))
        print(f"{workload.name}, {ranks} rank(s), {name}: {run.seconds:.1f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_train"), help="(%(default)s)")
    parser.add_argument("--short", action="store_true", help="a tenth of the data, to see that everything works")
    given = parser.parse_args()
    folder = given.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} cores, one epoch, {GLOBAL_BATCH_SIZE} samples an optimizer step;", end=" ")
    print("rows of a fixed batch and token_budget:", end=" ")
    print("; ".join(f"{w.name} {w.rows} x {w.row:,} = {w.token_budget:,}" for w in WORKLOADS))
    tables: dict[str, list[Result]] = {}
    for workload in WORKLOADS:
        for ranks in (workload.short_ranks,) if given.short else (1, 2):
            title = f"{workload.name}, {ranks} rank{'s' * (ranks > 1)}"
            results = tables[title] = compare(workload, folder, ranks, given.short)
            print(f"\n{markdown(title, results, TRAIN_COLUMNS)}\n")
            print(f"{same_training(results)} {ahead_of_odb(results, TRAIN_COLUMNS)}\n", flush=True)
    (folder / "train.json").write_text(json.dumps(tables, indent=2), encoding="utf-8")
    draw(tables, [SAMPLES, CPU_SECONDS, PADDING, VALIDATION], folder / "train.png")
    print(f"\nThe figures: {folder / 'train.json'}, {folder / 'train.png'}")


if __name__ == "__main__":
    main()
