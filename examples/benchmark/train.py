"""The real LLaMA-Factory on a CPU, on one and on two ranks: fixed batches, length-grouped, packed, and odb.

A tiny random Qwen2 on made-up text of very uneven length, and a tiny random Qwen3-VL on the built-in MM-Mix, one epoch
of the same samples each, at the same learning rate, with the same samples in an optimizer step (packing and `fill`
cannot have that) and at most the same peak of memory, in padded tokens of the largest micro-batch.
A fixed batch reaches rows x longest row, whatever the order, and so does a length-grouped one; packed rows are as long
as that longest row, and as many; token_budget is that product.

Each training is run with several seeds, contestants in turn, and has a JSON file: one that has it is not run again.
Where all samples are alike nothing can be won: what odb itself costs shows there.

    python examples/benchmark/train.py                                  # three seeds; about an hour on two cores
    python examples/benchmark/train.py --workloads MM-Mix --ranks 2
    python examples/benchmark/train.py --short                          # to see that everything works
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
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
    draw_losses,
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
ALIKE_WORDS = 240


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
        kept = {
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": GLOBAL_BATCH_SIZE // (self.rows * ranks),
        }
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
            "length-grouped": kept | grouping_by_length(),
            **(packing if self.can_pack else {}),
            **ours,
            **(unbalanced if ranks > 1 else {}),
            "odb, fill": kept | {"gradient_accumulation_steps": 1, "odb": online | {"global_batch_size": "fill"}},
        }


def build_text(folder: Path, samples: int, words_of_all: int | None = None) -> tuple[Path, Path]:
    """A tiny Qwen2 and a data set: walks through a made-up language. words_of_all: every sample has so many."""
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
    # A row has a few tokens of template beside its words; the budget holds four, and not five.
    Workload("all alike", 960, build_alike, "qwen3_nothink", "text", 1024, row=ALIKE_WORDS + 24, rows=4, alike=True),
)
FIXED = "fixed batch"
SHORT = (FIXED, "odb")
SHORT_SAMPLES = 64
OPTIMIZER_STEPS = Column("optimizer_steps", "optimizer steps", whole)
CPU_SECONDS = Column("cpu_seconds", "CPU seconds", "{:.1f}".format, "least")
"""Of the busiest training process: other work on the machine changes them less than the seconds of the clock."""
SPREAD = Column("seconds_spread", "its spread", "{0[0]:.1f} to {0[1]:.1f}".format)
VALIDATION_SPREAD = Column("validation_loss_spread", "its spread", "{0[0]:.3f} to {0[1]:.3f}".format)
TRAIN_COLUMNS = [OPTIMIZER_STEPS]
for known in COLUMNS:
    TRAIN_COLUMNS.append(known)
    TRAIN_COLUMNS += [SPREAD, CPU_SECONDS] if known is SECONDS else [VALIDATION_SPREAD] if known is VALIDATION else []


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
        "ends": [end for _, end, _ in run.losses()],
        "real_tokens": real_tokens,
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


def mean_of(runs: list[Result]) -> Result:
    """Of one contestant's trainings, a seed each: means, the least and the most of seconds and validation losses."""
    mean = dict(runs[0])
    for key, value in runs[0].items():
        if isinstance(value, int | float):
            mean[key] = statistics.mean(run[key] for run in runs)
    for key in ("seconds", "validation_loss"):
        mean[f"{key}_spread"] = min(run[key] for run in runs), max(run[key] for run in runs)
    return mean | {"runs": runs}


def same_training(fixed: Result, ours: Result) -> str:
    """How far the losses of odb are from those of fixed batches, optimizer step by optimizer step, of all seeds."""
    pairs = list(zip(fixed["runs"], ours["runs"], strict=True))
    losses = [pair for a, b in pairs for pair in zip(a["losses"], b["losses"], strict=True)]
    furthest = max(abs(a - b) / a for a, b in losses)
    shares = [ours["seconds"] / fixed["seconds"] for fixed, ours in pairs]
    cpu = statistics.median(ours["cpu_seconds"] / fixed["cpu_seconds"] for fixed, ours in pairs)
    return (
        f"{ours['name']} and fixed batches: {len(fixed['losses'])} optimizer steps each, whose training losses differ "
        f"by {furthest:.1e} at most, relatively; in {statistics.median(shares):.1%} of the time ({min(shares):.1%} to "
        f"{max(shares):.1%}; {cpu:.1%} of the CPU time)."
    )


def compare(workload: Workload, folder: Path, ranks: int, seeds: int, is_short: bool) -> list[Result]:
    """The results of all contestants, fixed batches first."""
    place = folder / f"{workload.name}_{ranks}".replace(" ", "_")
    model, data = workload.build(place, SHORT_SAMPLES if is_short else workload.samples)
    samples = len(json.loads((data / f"{workload.dataset}.json").read_text(encoding="utf-8")))
    runs: dict[str, list[Result]] = {}
    for seed in range(seeds):
        for name, changes in workload.contestants(ranks).items():
            if is_short and name not in SHORT:
                continue
            output = place / f"{name}_{seed}".replace(", ", "_").replace(": ", "_").replace(" ", "_")
            saved = output / "result.json"
            if not saved.exists():
                shared = {"dataset": workload.dataset, "template": workload.template, "cutoff_len": workload.cutoff_len}
                config = sft_config(model, data, output, **shared) | changes | {"seed": seed}
                run = train(config, ranks=ranks)
                if name == FIXED:
                    real_tokens = sum(sum(batch["lengths"]) for mine in run.batches for batch in mine)
                else:
                    real_tokens = runs[FIXED][seed]["real_tokens"]
                found = result(name, run, samples, real_tokens, validation_loss(config, run))
                saved.write_text(json.dumps(found, indent=2), encoding="utf-8")
                for weights in output.glob("**/*.safetensors"):
                    weights.unlink()
                print(f"{workload.name}, {ranks} rank(s), {name}, seed {seed}: {run.seconds:.1f} s", file=sys.stderr)
            runs.setdefault(name, []).append(json.loads(saved.read_text(encoding="utf-8")))
    return [mean_of(mine) for mine in runs.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_train"), help="(%(default)s)")
    parser.add_argument("--short", action="store_true", help="text on one rank, a few samples: shows that it works")
    given = parser.parse_args()
    if given.short:
        given.workloads, given.ranks, given.seeds = ["text"], [1], 1
    folder = given.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [workload for workload in WORKLOADS if workload.name in given.workloads]
    print(f"One epoch, {GLOBAL_BATCH_SIZE} samples an optimizer step, mean of {given.seeds} seed(s);", end=" ")
    print("rows of a fixed batch and token_budget:", end=" ")
    print("; ".join(f"{w.name} {w.rows} x {w.row:,} = {w.token_budget:,}" for w in chosen))
    tables: dict[str, list[Result]] = {}
    for workload in chosen:
        for ranks in given.ranks:
            title = f"{workload.name}, {ranks} rank{'s' * (ranks > 1)}"
            results = tables[title] = compare(workload, folder, ranks, given.seeds, given.short)
            of = {result["name"]: result for result in results}
            print(f"\n{markdown(title, results, TRAIN_COLUMNS)}\n")
            print(*(same_training(of[FIXED], of[name]) for name in ("odb", "odb, padded") if name in of), end=" ")
            print(f"{ahead_of_odb(results, TRAIN_COLUMNS)}", flush=True)
    (folder / "train.json").write_text(json.dumps(tables, indent=2), encoding="utf-8")
    draw(tables, [SAMPLES, CPU_SECONDS, PADDING, VALIDATION], folder / "train.png")
    draw_losses(tables, folder / "losses.png")


if __name__ == "__main__":
    main()
