"""Fixed batches, batches sorted by length, and odb on synthetic samples of very uneven length: a plain PyTorch loop.

    python examples/synthetic_benchmark.py --device auto --num-samples 2048

One epoch of a tiny random Qwen2 for each way, one process. All have at most the padded tokens of a fixed batch of the
longest samples in a micro-batch, and all but `fill` 32 samples an optimizer step, each supervised token weighing the
same. Lengths are lognormal (mean 150, coefficient of variation 1). The loss is that of held-out samples after the
epoch. A check that everything works, and not a benchmark of real models: docs/benchmarks.md has those.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

from odb_factory import ODBDataLoader, pop_step_info, unpad

VOCABULARY = 256
SHORTEST, LONGEST = 16, 1024
ROWS, ACCUMULATION = 4, 8
LEARNT = 0.8
"""The share of tokens that follow from the one before."""
LEARNING_RATE = 3e-3
Batch = dict[str, torch.Tensor]


class Samples(Dataset):
    """Token ids, half of them short: each follows from the one before by a rule, or is drawn at random."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        sigma = math.sqrt(math.log(2))  # coefficient of variation 1
        drawn = torch.randn(count, generator=generator) * sigma + math.log(150) - sigma**2 / 2
        lengths = drawn.exp().clamp(SHORTEST, LONGEST).int()
        lengths[count // 2] = LONGEST
        self.rows = [self._row(int(length), generator) for length in lengths]

    def _row(self, length: int, generator: torch.Generator) -> list[int]:
        drawn = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        follows = (torch.rand(length, generator=generator) < LEARNT).tolist()
        for k in range(1, length):
            if follows[k]:
                drawn[k] = (7 * drawn[k - 1] + 3) % VOCABULARY
        return drawn

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.rows[index]
        return {"input_ids": ids, "labels": [-100, *ids[1:]]}


def collate(samples: list[dict[str, list[int]]]) -> Batch:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ones = [sample | {"attention_mask": [1] * len(sample["labels"])} for sample in samples]
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.tensor([one[key] + [pad] * (longest - len(one[key])) for one in ones]) for key, pad in fill.items()
    }


def stock(data: Samples, **how: Any) -> Iterator[tuple[Batch, float, bool]]:
    """Micro-batches of ROWS samples, what the mean loss of each weighs, and whether it ends an optimizer step."""
    batches = list(DataLoader(data, ROWS, collate_fn=collate, generator=torch.Generator().manual_seed(0), **how))
    for start in range(0, len(batches), ACCUMULATION):
        step = batches[start : start + ACCUMULATION]
        units = [int((batch["labels"] != -100).sum()) for batch in step]
        for k, (batch, own) in enumerate(zip(step, units)):
            yield batch, own / sum(units), k + 1 == len(step)


def online(loader: ODBDataLoader) -> Iterator[tuple[Batch, float, bool]]:
    for batch in loader:
        info = pop_step_info(batch)
        yield batch, info.loss_scale, info.ends_optimizer_step


def train(name: str, data: Samples, held_out: Samples, device: torch.device) -> dict[str, float]:
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    with contextlib.ExitStack() as ends:
        if name == "fixed batches":
            steps = stock(data, shuffle=True)
        elif name == "sorted by length":
            steps = stock(data, sampler=sorted(range(len(data)), key=lambda index: len(data.rows[index])))
        else:
            how = {"gradient_accumulation_steps": ACCUMULATION}
            if name == "odb, fill":
                how = {"global_batch_size": "fill"}
            loader = ODBDataLoader(
                data,
                ROWS,
                shuffle=True,
                generator=torch.Generator().manual_seed(0),
                collate_fn=collate,
                token_budget=ROWS * LONGEST,
                layout="padded" if name == "odb, padded" else "flat",
                **how,
            )
            ends.enter_context(loader)
            if name != "odb, padded":
                unpad(model, loader)
            steps = online(loader)
        computed = micro_batches = optimizer_steps = 0
        began = time.perf_counter()
        for batch, weight, ends_step in steps:
            loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
            (loss * weight).backward()
            computed += batch["input_ids"].numel()
            micro_batches += 1
            if ends_step:
                optimizer.step()
                optimizer.zero_grad()
                optimizer_steps += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    real = sum(map(len, data.rows))
    return {
        "samples/s": len(data) / seconds,
        "real tokens/s": real / seconds,
        "padding, %": 100 * (1 - real / computed),
        "micro-batches": micro_batches,
        "optimizer steps": optimizer_steps,
        "loss": evaluate(model, held_out, device),
    }


@torch.no_grad()
def evaluate(model: Qwen2ForCausalLM, data: Samples, device: torch.device) -> float:
    """Mean over tokens, a sample at a time."""
    rows = [torch.tensor([row], device=device) for row in data.rows]
    total = sum(float(model(ids, torch.ones_like(ids), labels=ids).loss) * (ids.numel() - 1) for ids in rows)
    return total / sum(ids.numel() - 1 for ids in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda (%(default)s)")
    parser.add_argument("--num-samples", type=int, default=2048, help="(%(default)s)")
    given = parser.parse_args()
    if given.num_samples < 1:
        parser.error(f"--num-samples: {given.num_samples}; give a number of at least 1.")
    found_device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found_device if given.device == "auto" else given.device)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    data, held_out = Samples(given.num_samples, 0), Samples(64, 1)
    print(f"{len(data)} samples on {device}, at most {ROWS * LONGEST:,} padded tokens a micro-batch")
    for k, name in enumerate(("fixed batches", "sorted by length", "odb, padded", "odb", "odb, fill")):
        found = train(name, data, held_out, device)
        if not k:
            print(f"{'':<18}" + "".join(f"{label:>17}" for label in found))
        print(
            f"{name:<18}" + "".join(f"{value:>17,.{0 if value >= 100 else 2}f}" for value in found.values()), flush=True
        )


if __name__ == "__main__":
    main()
