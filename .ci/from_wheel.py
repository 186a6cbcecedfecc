"""What README.md says a loop or Trainer of one's own can do, run from the installed package, in any folder.

The snippets are those of the README that the package carries. `.ci/run` runs this where odb_factory was installed
from its wheel, without LLaMA-Factory and with it.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import odb_factory
from odb_factory import plan_micro_batches, unpad

assert "site-packages" in odb_factory.__file__, f"{odb_factory.__file__}: this is not an installed wheel"
README = metadata("odb_factory")["Description"]
TRAINER, LOOP = re.findall(r"```python\n(.*?)```", README.split("\n## Without LLaMA-Factory\n")[1], re.S)
draw = random.Random(0)
dataset = [{"input_ids": ids, "labels": ids} for ids in ([7] * draw.randint(3, 60) for _ in range(64))]


def new_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
    return Qwen2ForCausalLM(config)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = (
        torch.tensor([row + [fill] * (length - len(row)) for row in found])
        for found, fill in (
            ([row["input_ids"] for row in rows], 0),
            ([row["labels"] for row in rows], -100),
            ([[1] * len(row["input_ids"]) for row in rows], 0),
        )
    )
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train(loop: str) -> torch.nn.Module:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(loop, {"dataset": dataset, "collate": collate, "model": model, "optimizer": optimizer, "unpad": unpad})
    return model


def distance(model: torch.nn.Module, other: torch.nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters()))


# Each micro-batch as one row without padding.
flat_loop = LOOP.replace(") as loader:\n", ', layout="flat") as loader:\n    unpad(model, loader)\n')
assert flat_loop != LOOP
model, flat = train(LOOP), train(flat_loop)
assert distance(model, new_model()) > 1e-3 > 1e-5 > distance(model, flat), "a loop, padded and flat"

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, max_steps=4, report_to="none", save_strategy="no"
    )
    trainer = Trainer(model=new_model(), args=arguments, train_dataset=dataset, data_collator=collate)
    exec(TRAINER, {"trainer": trainer})
    assert trainer.state.global_step == 4
    micro_batches = plan_micro_batches([len(row["input_ids"]) for row in dataset], token_budget=64, ranks=2)
    assert sorted(i for rank in micro_batches for step in rank for i in step) == list(range(64))

print(f"A loop, padded and flat, a Trainer and the planner have run with {odb_factory.__file__}.")
# One line each, whatever is installed: what to install, or that the folder holds no run and the YAML is not there.
for command in (["compare", "none"], ["plan", "none.yaml"]):
    program = str(Path(sys.executable).with_name("odb-factory"))
    ended = subprocess.run([program, *command], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    print(ended.stderr.strip())
