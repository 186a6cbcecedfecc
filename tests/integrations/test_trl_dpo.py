"""TRL's `DPOTrainer` with `enable_odb_dpo`: the same training, and the gradient of one batch of each optimizer step."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from distributed.ranks import run_ranks
from support import read_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from odb_factory import enable_odb
from odb_factory.errors import ConfigError, DataError
from odb_factory.integrations.trl import enable_odb_dpo

trl = pytest.importorskip("trl")

BLOCK = {"token_budget": 640, "audit": True, "layout": "padded"}
FLAT = {"token_budget": 320, "audit": True, "layout": "flat"}
NUM_PAIRS, MAX_LENGTH = 22, 60
GRADIENT, RELATIVE, FIGURES = 5e-6, 1e-5, {"rewards/": 2e-4, "logps/": 2e-3}
"""Largest differences: of the norm of the gradient, of losses and weights, and of figures, themselves."""


def pairs() -> datasets.Dataset:
    rng = random.Random(5)

    def words(count: int) -> str:
        return " ".join(rng.choices(["the", "model", "reads", "a", "long", "line", "of", "words"], k=count))

    rows = [
        {"prompt": words(3 + k % 9), "chosen": words(2 + k * 13 % 61), "rejected": words(2 + k * 29 % 53)}
        for k in range(NUM_PAIRS)
    ]
    return datasets.Dataset.from_list(rows)


def make(model: Path, folder: Path, **changes: Any) -> Any:
    policy: Any = AutoModelForCausalLM.from_pretrained(model)
    policy.warnings_issued = {}  # trl 0.24 looks for it, and transformers 5 has none
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "max_length": MAX_LENGTH,
        "learning_rate": 3e-4,
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "bf16": False,
    }
    return trl.DPOTrainer(
        model=policy,
        args=trl.DPOConfig(**(arguments | changes)),
        train_dataset=pairs(),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


class Seen(TrainerCallback):
    """The shapes that the model was trained on, and each gradient beside that of one batch of the same pairs."""

    def __init__(self, trainer: Any):
        self.trainer, self.shapes, self.deviations = trainer, [], []
        trainer.model.get_input_embeddings().register_forward_pre_hook(self.see)

    def see(self, embedding: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if self.trainer.odb.computing is not None:
            self.shapes.append(tuple(inputs[0].shape))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        lines = read_jsonl(Path(args.output_dir, "odb_audit_rank0.jsonl"))
        ids = [id for line in lines if line["optimizer_step"] == state.global_step + 1 for id in line["ids"]]
        if len(ids) % args.per_device_train_batch_size:
            return  # a mean of means of unlike micro-batches, which one batch does not have
        stored = {key: list(values) for key, values in self.trainer._stored_metrics["train"].items()}
        ours = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        rows = [{key: self.trainer.train_dataset[k][key] for key in self.trainer.train_dataset.features} for k in ids]
        self.trainer.compute_loss(model, self.trainer._prepare_inputs(self.trainer.data_collator(rows))).backward()
        differences = [float((ours[name] - p.grad).norm()) for name, p in model.named_parameters()]
        norms = [float(p.grad.norm()) for p in model.parameters()]
        self.deviations.append(math.hypot(*differences) / math.hypot(*norms))
        for name, p in model.named_parameters():
            p.grad = ours[name]
        self.trainer._stored_metrics["train"].clear()
        self.trainer._stored_metrics["train"].update(stored)


def compare(ours: list[dict[str, float]], stock: list[dict[str, float]], num_steps: int) -> dict[str, float]:
    """Checks each entry of the log; returns the largest differences of losses (relative) and figures.

    num_steps: of optimizer steps whose figures are compared. In the last one of an epoch stock's leave pairs out: they
    are cut to the length of its last micro-batch (accelerate's `gather_for_metrics`).
    """
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in stock]
    found = dict.fromkeys(("loss", *FIGURES), 0.0)
    for mine, its in zip(ours, stock):
        assert {key for key in mine if not key.startswith("odb/")} == set(its)
        for kind in found if its["step"] <= num_steps else ("loss",):
            for key in its:
                if key == kind or (kind != "loss" and key.startswith(kind)):
                    found[kind] = max(found[kind], abs(mine[key] - its[key]) / (its["loss"] if kind == "loss" else 1))
    assert found["loss"] < RELATIVE and all(found[kind] < limit for kind, limit in FIGURES.items()), found
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "keep_start, ld_alpha": {"truncation_mode": "keep_start", "ld_alpha": 0.5},
    "ipo, logits_to_keep": {"loss_type": "ipo", "use_logits_to_keep": True},
}


@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_same_training(tiny_text: Path, tmp_path: Path, layout: str, variant: str) -> None:
    """I8, I9; flat I10: policy and reference compute both answers of a pair in one row, without padding."""
    if layout == "padded" and variant:
        pytest.skip("the trainer's own code")
    changes, block = VARIANTS[variant], FLAT if layout == "flat" else BLOCK
    stock = make(tiny_text, tmp_path / "stock", **changes)
    stock.train()
    ours = make(tiny_text, tmp_path / "odb", **changes)
    seen = Seen(ours)
    collator = ours.data_collator
    enable_odb_dpo(ours, **block).add_callback(seen)
    ours.train()
    assert {"log", "get_batch_loss_metrics"}.isdisjoint(vars(ours)) and ours.data_collator is collator
    found = compare(ours.state.log_history, stock.state.log_history, 3)
    weights = dict(stock.model.named_parameters())
    squares = [float((p - weights[name]).norm()) for name, p in ours.model.named_parameters()]
    worst = math.hypot(*squares) / math.hypot(*(float(p.norm()) for p in weights.values()))
    print(f"DPOTrainer: {found}, weights {worst:.1e}, gradient {max(seen.deviations):.1e}")
    assert worst < RELATIVE and len(seen.deviations) == 3 and max(seen.deviations) < GRADIENT
    audit = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert [(line["rows"], line["length"]) for line in audit] == seen.shapes, "what was planned is what is computed"
    assert all(line["units"] == len(line["ids"]) for line in audit)
    assert all(line["rows"] * line["length"] <= block["token_budget"] for line in audit if len(line["ids"]) > 1), "I4"
    if layout == "flat":
        assert all(line["rows"] == 1 and len(line["segments"]) == 2 * len(line["ids"]) for line in audit)
        assert all(sum(line["segments"]) == line["length"] for line in audit), "no padding"
        assert any(len(line["ids"]) > 1 for line in audit)
    else:
        assert any(rows > 6 for rows, _ in seen.shapes) and max(length for _, length in seen.shapes) == MAX_LENGTH


@pytest.mark.timeout(600)
def test_an_optimizer_step_that_is_restarted_counts_once(tiny_text: Path, tmp_path: Path) -> None:
    """`oom: split`: memory ends in the last micro-batch of the second optimizer step, whose first is then cut."""
    logs = []
    for fails in (False, True):
        trainer = make(tiny_text, tmp_path / str(fails), max_steps=2)
        enable_odb_dpo(trainer, **BLOCK | {"token_budget": 300, "oom": "split"})
        failed: list[int] = []

        def fail_once(*_: Any, trainer: Any = trainer, failed: list[int] = failed) -> None:
            computing, step = trainer.odb.computing, trainer.state.global_step
            if computing is not None and step == 1 and computing.micro_batch.ends_optimizer_step and not failed:
                failed.append(step)
                raise torch.OutOfMemoryError("as of an accelerator")

        if fails:
            trainer.model.register_forward_pre_hook(fail_once)
        trainer.train()
        assert len(failed) == fails
        history = trainer.state.log_history
        logs.append([{key: entry[key] for key in entry if not key.startswith("odb/")} for entry in history])
    compare(logs[1], logs[0], 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": ["sigmoid", "sft"]}, "loss_type: 'sft' adds a loss of the chosen answers"),
        ({"loss_type": "bco_pair"}, "loss_type: 'bco_pair' goes by a mean"),
        ({"rpo_alpha": 0.5}, "rpo_alpha: 0.5 adds a loss"),
        ({"max_steps": 1}, "has no get_batch_loss_metrics"),
        ({"layout": "flat", "use_weighting": True}, "use_weighting: True reads the whole distribution"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(
    changes: dict[str, Any], words: str, tiny_text: Path, tmp_path: Path
) -> None:
    block = BLOCK | {key: changes.pop(key) for key in ("layout",) if key in changes}
    trainer = make(tiny_text, tmp_path, **changes)
    if "max_steps" in changes:
        trainer = _Plain(trainer)
    with pytest.raises(ConfigError, match=words) as raised:
        enable_odb_dpo(trainer, **block).train()
    assert "\n" not in str(raised.value)


class _Plain:
    """A trainer of another kind."""

    def __init__(self, trainer: Any):
        self.args: TrainingArguments = trainer.args


def test_without_the_adapter_one_line_names_it(tiny_text: Path, tmp_path: Path) -> None:
    trainer = enable_odb(make(tiny_text, tmp_path), **BLOCK)
    with pytest.raises(DataError, match="enable_odb_dpo .* no other trainer of TRL for preferences") as raised:
        trainer.train()
    assert "\n" not in str(raised.value)


SCRIPT = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from odb_factory.integrations.trl import enable_odb_dpo
from trl import DPOConfig, DPOTrainer

path, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path)
model.warnings_issued = {}
rows = [{"prompt": "one two", "chosen": "three four", "rejected": "five"}] * 8
arguments = DPOConfig(output_dir=folder, max_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
tokenizer = AutoTokenizer.from_pretrained(path)
trainer = DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
enable_odb_dpo(trainer, token_budget=8192)
trainer.train()
assert trainer.state.global_step == 2 and "llamafactory" not in sys.modules
"""


def test_a_script_as_the_docs_have_it(tiny_text: Path, tmp_path: Path) -> None:
    """A process of its own, in which nothing has imported LLaMA-Factory: that corrects transformers for trl, too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny_text), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def in_a_rank(rank: int, path: str, out: str) -> list[list[dict[str, float]]]:
    os.environ["LOCAL_RANK"] = str(rank)
    logs = []
    for name in ("odb", "stock"):
        trainer = make(Path(path), Path(out, name), per_device_train_batch_size=2, dataloader_drop_last=True)
        if name == "odb":
            enable_odb_dpo(trainer, **BLOCK)
        trainer.train()
        logs.append(trainer.state.log_history)
    return logs


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_ranks(tiny_text: Path, tmp_path: Path) -> None:
    """The figures are those of both ranks."""
    ranks = run_ranks(
        "integrations.test_trl_dpo:in_a_rank", tmp_path, limit_s=500, path=str(tiny_text), out=str(tmp_path)
    )
    print("DPOTrainer, 2 ranks:", compare(*ranks[0].value, 2))
