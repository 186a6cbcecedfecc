"""I8: with `loss_scaling: exact` an optimizer step is that of one process and one batch.

Real `transformers.Trainer`s with `enable_odb`, on 1, 2 and 4 ranks, train two epochs on rows of unequal length with
unequal shares of supervised tokens. With `fill`, ranks other than the first end early and take idle micro-batches. Then
stock's Trainer in a single process (`reference.py`) takes the same samples of each optimizer step, as the audit files
name them, as ONE batch: the sum of the cross entropy of all supervised tokens over their number. Gradients (each
parameter tensor by itself), parameters after every step, and the logged loss and grad_norm are the same, to 1e-10 in
float64 and 1e-5 in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from distributed.ranks import run_ranks
from support import need, once
from training.cases import Case
from training.reference import Cell, compare

LIMIT_S = 240
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
ZERO_NORM_TOLERANCE = 1e-4
"""DeepSpeed adds up the squares of all gradients in one float32 tensor."""
BF16_TOLERANCE = 3e-2
"""Of bfloat16's 8 bits; rows in other groups are rounded anew. Wrong weights are off by about 1."""
MIN_STEPS = 5
WRONG = 0.1
"""A gradient this far off is another one."""

PLAIN = {"text": Case("text", "float64", 2), "vl": Case("vl", "float64", 2)}
OPTIONS: dict[str, Case] = {
    "gradient checkpointing": Case("text", "float32", 2, arguments={"gradient_checkpointing": True}),
    "bf16": Case("text", "float32", 2, arguments={"bf16": True}),
    "own loss": Case("text", "float64", 2, own_loss="divides"),
    "own mean": Case("text", "float64", 2, own_loss="means"),
    "kept": Case("text", "float64", 2, keep=3),
    "kept, own loss": Case("text", "float64", 2, own_loss="divides", keep=3),
    "flat": Case("text", "float64", 2, keep=3, layout="flat"),
    "approx": Case("text", "float64", 2, loss_scaling="approx"),
    "none": Case("text", "float64", 2, loss_scaling="none"),
}
FUSED_LOSS_ONLY = {
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
LIGER = Case("text", "float32", 2, arguments={"use_liger_kernel": True, "liger_kernel_config": FUSED_LOSS_ONLY})
"""The kernel that computes the loss; without a GPU Triton interprets it."""


SETS: dict[str, tuple[int, dict[str, Case]]] = {
    "1_rank": (1, PLAIN | {"own loss": OPTIONS["own loss"]}),
    "2_ranks": (2, PLAIN | OPTIONS),
    "2_ranks_zero": (2, {"zero3": Case("vl", "float32", 2, zero=3)}),
    "1_rank_liger": (1, {"liger": LIGER}),
    "4_ranks": (4, {"text": Case("text", "float64", 4), "vl": Case("vl", "float32", 1)}),
}
"""Trainings that the same processes run one after the other: starting them costs most."""
EXACT = [
    pytest.param(name, case, marks=pytest.mark.nightly if name == "4_ranks" else [])
    for name, (_, cases) in SETS.items()
    for case in cases
    if case not in ("approx", "none")
]

Measure = Callable[[str, str], Cell]


@pytest.fixture(scope="module")
def measure(tiny_text, tiny_vl, tmp_path_factory) -> Iterator[Measure]:
    """`measure("2_ranks", "lora")` compares one training of a set, which is run once."""
    models = {"text": str(tiny_text), "vl": str(tiny_vl)}

    @once
    def run(name: str) -> Path:
        if "zero" in name:
            need("deepspeed")
        if "liger" in name:
            need("liger_kernel")
            if not torch.cuda.is_available():
                patch.setenv("TRITON_INTERPRET", "1")
        world_size, cases = SETS[name]
        folder = tmp_path_factory.mktemp("ranks")
        run_ranks(
            "training.gradient_ranks:train_all",
            folder,
            world_size=world_size,
            limit_s=LIMIT_S,
            cases=[dataclasses.asdict(case) for case in cases.values()],
            models=models,
            output_dir=str(folder),
        )
        return folder

    def measure(name: str, training: str) -> Cell:
        world_size, cases = SETS[name]
        case = cases[training]
        output_dir = run(name) / str(list(cases).index(training))
        cell = compare(case, models[case.model], world_size, output_dir)
        assert cell.optimizer_steps >= MIN_STEPS
        assert case.keep or all((idle > 0) == (world_size > 1) for idle in cell.idle_steps), cell.idle_steps
        return cell

    with pytest.MonkeyPatch.context() as patch:
        yield measure


@pytest.mark.parametrize(("name", "training"), EXACT)
def test_an_optimizer_step_is_that_of_one_process_and_one_batch(measure: Measure, name: str, training: str) -> None:
    cell = measure(name, training)
    case = SETS[name][1][training]
    tolerance = BF16_TOLERANCE if case.arguments.get("bf16") else TOLERANCE[case.dtype]
    assert cell.parameters < tolerance
    assert cell.loss < tolerance
    if case.zero:
        assert cell.gradient is None
        assert cell.grad_norm < ZERO_NORM_TOLERANCE
    else:
        assert cell.gradient < tolerance
        assert cell.grad_norm < tolerance


@pytest.mark.parametrize("training", ["approx", "none"])
def test_other_scalings_give_another_gradient(measure: Measure, training: str) -> None:
    """On the same rows in the same groups, so the other tests would fail if `exact` became one of these."""
    cell = measure("2_ranks", training)
    assert cell.gradient > WRONG
    assert cell.parameters > WRONG
    assert cell.idle_steps == measure("2_ranks", "text").idle_steps
