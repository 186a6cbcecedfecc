"""What is learnt: fixed batches, length-grouped batches and odb side by side.

A tiny random Qwen2 learns real text (CPython's help topics, cut into pieces of very uneven length) with AdamW and
a linear schedule. odb keeps the optimizer steps of fixed batches. Filled batches (`global_batch_size: fill`) hold
several times their samples, so at equal epochs there are fewer optimizer steps, and at equal optimizer steps more
epochs. The table says what each costs and what it learns.

    python examples/benchmark/learning.py                  # three seeds; twenty minutes on one core
    python examples/benchmark/learning.py --seeds 1 --samples 400
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainingArguments

from odb_factory import enable_odb
from odb_factory.demo.demo import grouping_by_length
from odb_factory.demo.tiny_model import build_tiny_qwen2

BATCH_SIZE, EPOCHS, LEARNING_RATE = 8, 2, 2e-3
VALIDATION_SAMPLES = 200
LONGEST = 512
"""Tokens of the longest piece; the budget of odb is what a fixed batch of the longest pieces takes."""
FILL: dict[str, Any] = {"global_batch_size": "fill"}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fixed batch": ({}, None),
    "length-grouped": ({"group": True}, None),
    "odb": ({}, {}),
    "odb, fill, equal epochs": ({}, FILL),
    "odb, fill, equal epochs, lr_scale sqrt": ({}, FILL | {"lr_scale": "sqrt", "lr_reference_samples": BATCH_SIZE}),
    "odb, fill, equal epochs, lr_scale linear": ({}, FILL | {"lr_scale": "linear", "lr_reference_samples": BATCH_SIZE}),
    "odb, fill, equal optimizer steps": ({"equal_steps": True}, FILL),
}


def make_samples(ids: list[int], count: int, rng: np.random.Generator) -> list[dict[str, list[int]]]:
    """Pieces of a text, their lengths lognormal around 64 tokens."""
    lengths = np.clip(rng.lognormal(np.log(64), 1.0, count), 8, LONGEST).astype(int)
    starts = rng.integers(0, len(ids) - LONGEST, count)
    pieces = [ids[start : start + length] for start, length in zip(starts, lengths)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([sample[key] + [filler] * (length - len(sample[key])) for sample in samples])

    labels = rows("labels", -100)
    return {"input_ids": rows("input_ids", 0), "labels": labels, "attention_mask": (labels != -100).long()}


@torch.no_grad()
def validation_loss(model: Any, samples: list[dict[str, list[int]]]) -> float:
    """Mean over all tokens."""
    model.eval()
    total = tokens = 0.0
    for start in range(0, len(samples), BATCH_SIZE):
        batch = pad(samples[start : start + BATCH_SIZE])
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += float(model(**batch).loss) * count
        tokens += count
    return total / tokens


def train(model_path: Path, samples: Any, validation: Any, seed: int, name: str, equal_steps: int) -> dict[str, float]:
    how, block = RUNS[name]
    arguments: dict[str, Any] = {"max_steps": equal_steps} if "equal_steps" in how else {"num_train_epochs": EPOCHS}
    if "group" in how:
        arguments |= grouping_by_length()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(model_path),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                seed=seed,
                per_device_train_batch_size=BATCH_SIZE,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="linear",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=50,
                **arguments,
            ),
            train_dataset=samples,
            data_collator=pad,
        )
        trainer.remove_callback(PrinterCallback)
        if block is not None:
            enable_odb(trainer, token_budget=BATCH_SIZE * LONGEST, **block)
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started  # everything runs in this process
        return {
            "optimizer steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "CPU seconds": seconds,
            "validation loss": validation_loss(trainer.model, validation),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=3, help="repetitions; the table gives means")
    parser.add_argument("--output-dir", type=Path, help="write learning.json there")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would count as CPU seconds
    results: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        model_path = build_tiny_qwen2(Path(folder) / "model")
        ids = AutoTokenizer.from_pretrained(model_path)(" ".join(topics.values()))["input_ids"]
        seen, unseen = ids[: len(ids) * 4 // 5], ids[len(ids) * 4 // 5 :]
        for seed in range(given.seeds):
            rng = np.random.default_rng(seed)
            samples, validation = make_samples(seen, given.samples, rng), make_samples(unseen, VALIDATION_SAMPLES, rng)
            for name in RUNS:
                steps = int(results["fixed batch"][-1]["optimizer steps"]) if results["fixed batch"] else 0
                results[name].append(train(model_path, samples, validation, seed, name, steps))
                print(f"seed {seed}, {name}", file=sys.stderr)
    print("| | optimizer steps | epochs | CPU seconds | validation loss (spread) |\n|---|--:|--:|--:|--:|")
    for name, runs in results.items():
        mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        losses = [run["validation loss"] for run in runs]
        print(
            f"| {name} | {mean['optimizer steps']:.0f} | {mean['epochs']:.1f} | {mean['CPU seconds']:.0f} | "
            f"{mean['validation loss']:.3f} ({min(losses):.3f} to {max(losses):.3f}) |"
        )
    if given.output_dir:
        given.output_dir.mkdir(parents=True, exist_ok=True)
        (given.output_dir / "learning.json").write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
