"""TRL's `DPOTrainer` with `enable_odb_dpo`: the same training."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from distributed.ranks import run_ranks
from packaging.version import Version
from support import read_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from odb_factory import enable_odb
from odb_factory.errors import ConfigError, DataError
from odb_factory.integrations.trl import enable_odb_dpo

trl = pytest.importorskip("trl")

BLOCK = {"token_budget": 640, "audit": True, "layout": "padded"}
FLAT = {"token_budget": 320, "audit": True, "layout": "flat"}
NUM_PAIRS, MAX_LENGTH = 22, 60
HAS_ROWS = Version(trl.__version__).major >= 1
RELATIVE, FIGURES = 1e-5, {"rewards/": 2e-4, "logps/": 2e-3, "num_tokens": 0.5}
"""Largest differences: relative for losses, gradients and weights; absolute for figures."""


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
    policy.warnings_issued = {}  # trl 0.24 reads the attribute, which transformers 5 lacks
    arguments = {"output_dir": str(folder), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    arguments |= {"num_train_epochs": 1, "max_length": MAX_LENGTH, "learning_rate": 3e-4, "max_grad_norm": 1e9}
    arguments |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return trl.DPOTrainer(
        model=policy,
        args=trl.DPOConfig(**(arguments | changes)),
        train_dataset=pairs(),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def compare(ours: list[dict[str, float]], stock: list[dict[str, float]], num_steps: int) -> dict[str, float]:
    """Check each entry of the log; returns the largest differences of losses and gradients (relative) and figures.

    num_steps: optimizer steps whose figures are compared. Stock's figures of the last step of an epoch leave pairs out:
    accelerate's `gather_for_metrics` cuts them to the length of the last micro-batch.
    """
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in stock]
    largest = dict.fromkeys(("loss", "grad_norm", *FIGURES), 0.0)
    for our_entry, stock_entry in zip(ours, stock):
        assert {key for key in our_entry if not key.startswith("odb/")} == set(stock_entry)
        for kind in largest if stock_entry["step"] <= num_steps else ("loss", "grad_norm"):
            for key in stock_entry:
                if key == "rewards/accuracies" and abs(stock_entry["rewards/margins"]) < FIGURES["rewards/"]:
                    continue  # before the first update policy and reference are equal, up to rounding
                if key == kind or (kind in FIGURES and key.startswith(kind)):
                    difference = abs(our_entry[key] - stock_entry[key]) / (1 if kind in FIGURES else stock_entry[key])
                    largest[kind] = max(largest[kind], difference)
    assert all(difference < FIGURES.get(kind, RELATIVE) for kind, difference in largest.items()), largest
    return largest


OF_TOKENS = {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [1.0, 0.5], "use_weighting": True, "ld_alpha": 0.5}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"truncation_mode": "keep_start", "ld_alpha": 0.5},
    {"loss_type": "ipo"} | ({"precompute_ref_log_probs": True} if HAS_ROWS else {"use_logits_to_keep": True}),
    *([OF_TOKENS | {"truncation_mode": "keep_end", "pad_to_multiple_of": 8}] if HAS_ROWS else []),
)


@pytest.mark.parametrize(("layout", "changes"), [("padded", {}), *(("flat", changes) for changes in VARIANTS)])
def test_odb_trains_as_stock(tiny_text: Path, tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    """I8, I9; flat I10: policy and reference compute both answers of a pair in one row, without padding."""
    block = FLAT if layout == "flat" else BLOCK
    stock = make(tiny_text, tmp_path / "stock", **changes)
    stock.train()
    ours = make(tiny_text, tmp_path / "odb", **changes)
    shapes, collator = [], ours.data_collator

    def record_shape(embedding: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if ours.odb.computing is not None:
            shapes.append(tuple(inputs[0].shape))

    ours.model.get_input_embeddings().register_forward_pre_hook(record_shape)
    enable_odb_dpo(ours, **block).train()
    assert {"log", "get_batch_loss_metrics", "_compute_loss"}.isdisjoint(vars(ours)) and ours.data_collator is collator
    differences = compare(ours.state.log_history, stock.state.log_history, 3)
    weights = dict(stock.model.named_parameters())
    norms = [float((p - weights[name]).norm()) for name, p in ours.model.named_parameters()]
    weight_difference = math.hypot(*norms) / math.hypot(*(float(p.norm()) for p in weights.values()))
    print(f"DPOTrainer: {differences}, weights {weight_difference:.1e}")
    assert weight_difference < RELATIVE
    audit = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert [(line["rows"], line["length"]) for line in audit] == shapes, "what was planned is what is computed"
    assert all(line["units"] == len(line["ids"]) for line in audit)
    assert all(line["rows"] * line["length"] <= block["token_budget"] for line in audit if len(line["ids"]) > 1), "I4"
    if layout == "flat":
        assert all(line["rows"] == 1 and len(line["segments"]) == 2 * len(line["ids"]) for line in audit)
        assert all(sum(line["segments"]) == line["length"] for line in audit), "no padding"
        assert any(len(line["ids"]) > 1 for line in audit)
    else:
        assert any(rows > 6 for rows, _ in shapes) and max(length for _, length in shapes) == MAX_LENGTH


@pytest.mark.timeout(600)
def test_an_optimizer_step_that_is_restarted_counts_once(tiny_text: Path, tmp_path: Path) -> None:
    """`oom: split`: the last micro-batch of the second optimizer step runs out of memory; its first is then split."""
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


OF_LOGITS: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "bco_pair"}, "loss_type: 'bco_pair'"),
    ({"loss_type": "aot_pair"}, "loss_type: 'aot_pair'"),
    ({"rpo_alpha": 0.5}, "rpo_alpha: 0.5"),
    ({"use_weighting": True}, "use_weighting: True"),
]
"""With trl 0.24."""


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"loss_type": ["sigmoid", "sft"]}, "loss_type: 'sft'"),
        ({"loss_type": "aot"}, "loss_type: 'aot'"),
        *([] if HAS_ROWS else OF_LOGITS),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused(changes: dict[str, Any], key: str, tiny_text, tmp_path) -> None:
    block = FLAT if "use_weighting" in changes else BLOCK
    with pytest.raises(ConfigError, match=key) as raised:
        enable_odb_dpo(make(tiny_text, tmp_path, **changes), **block).train()
    assert "\n" not in str(raised.value)


def test_the_adapter_and_its_trainer_go_together(tiny_text: Path, tmp_path: Path) -> None:
    other = SimpleNamespace(args=make(tiny_text, tmp_path).args)
    with pytest.raises(ConfigError, match="_compute_loss"):
        enable_odb_dpo(other, **BLOCK)
    with pytest.raises((ConfigError, DataError), match="enable_odb_dpo") as raised:
        enable_odb(make(tiny_text, tmp_path), **BLOCK).train()
    assert "\n" not in str(raised.value)


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
    """The figures include both ranks."""
    ranks = run_ranks(
        "integrations.test_trl_dpo:in_a_rank", tmp_path, limit_s=500, path=str(tiny_text), out=str(tmp_path)
    )
    print("DPOTrainer, 2 ranks:", compare(*ranks[0].value, 2))
