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
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from distributed.ranks import run_ranks
from support import need, once
from training.cases import Case
from training.reference import Cell, compare, replay

LIMIT_S = 240
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
ZERO_NORM_TOLERANCE = 1e-4
"""DeepSpeed adds up the squares of all gradients in one float32 tensor."""
BF16_TOLERANCE = 3e-2
"""Of bfloat16's 8 bits; rows in other groups are rounded anew. Wrong weights are off by about 1."""
MIN_STEPS = 5
WRONG = 0.1
"""A gradient this far off is another one."""

GAS = (1, 2, 4)
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
MORE_OPTIONS: dict[str, Case] = {
    "label smoothing": Case("text", "float64", 2, arguments={"label_smoothing_factor": 0.1}),
    "lora": Case("text", "float64", 2, lora=True),
    "clipping": Case("text", "float64", 2, arguments={"max_grad_norm": 0.5}),
    "adamw": Case("text", "float64", 2, arguments={"optim": "adamw_torch", "learning_rate": 1e-3}),
}
"""Of the full grid: smoothing, adapters, clipping and AdamW are in `test_same_training.py`, with stock's weights."""
FUSED_LOSS_ONLY = {
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
LIGER = Case("text", "float32", 2, arguments={"use_liger_kernel": True, "liger_kernel_config": FUSED_LOSS_ONLY})
"""The kernel that computes the loss; without a GPU Triton interprets it."""


def plain(dtype: str, *accumulations: int) -> dict[str, Case]:
    return {
        f"{model}-{dtype}-ga{accumulation}": Case(model, dtype, accumulation)
        for model in ("text", "vl")
        for accumulation in accumulations
    }


def zero(*cells: tuple[int, str, int]) -> dict[str, Case]:
    return {
        f"zero{stage}-{model}-ga{accumulation}": Case(model, "float32", accumulation, zero=stage)
        for stage, model, accumulation in cells
    }


ALL_ZERO = [(stage, model, accumulation) for stage in (2, 3) for model in ("text", "vl") for accumulation in GAS]
DEFAULT_ZERO = [(3, "vl", 2)]
SETS: dict[str, tuple[int, dict[str, Case]]] = {
    "1_rank": (1, plain("float64", 2) | {"own loss": OPTIONS["own loss"]}),
    "2_ranks": (2, plain("float64", 2) | OPTIONS),
    "2_ranks_zero": (2, zero(*DEFAULT_ZERO)),
    "1_rank_liger": (1, {"liger": LIGER}),
}
"""Trainings that the same processes run one after the other: starting them costs most."""
FULL_GRID = {
    "1_rank_grid": (1, plain("float64", 1, 4) | plain("float32", *GAS)),
    "2_ranks_grid": (2, plain("float64", 1, 4) | plain("float32", *GAS)),
    "2_ranks_options": (2, MORE_OPTIONS),
    "4_ranks_grid": (4, plain("float64", *GAS) | plain("float32", *GAS)),
    "2_ranks_zero_grid": (2, zero(*(cell for cell in ALL_ZERO if cell not in DEFAULT_ZERO))),
    "4_ranks_zero_grid": (4, zero(*ALL_ZERO)),
}
ELSEWHERE = ("bf16", "approx", "none")
EXACT = [(name, case) for name, (_, cases) in SETS.items() for case in cases if case not in ELSEWHERE]
GRID = [(name, case) for name, (_, cases) in FULL_GRID.items() for case in cases]

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
        world_size, cases = (SETS | FULL_GRID)[name]
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
        world_size, cases = (SETS | FULL_GRID)[name]
        case = cases[training]
        output_dir = run(name) / str(list(cases).index(training))
        cell = compare(output_dir, world_size, functools.partial(replay, case, models[case.model], world_size))
        assert cell.optimizer_steps >= MIN_STEPS
        assert case.keep or all((idle > 0) == (world_size > 1) for idle in cell.idle_steps), cell.idle_steps
        return cell

    with pytest.MonkeyPatch.context() as patch:
        yield measure


def check(measure: Measure, name: str, training: str) -> None:
    cell = measure(name, training)
    case = (SETS | FULL_GRID)[name][1][training]
    tolerance = TOLERANCE[case.dtype]
    assert cell.parameters < tolerance
    assert cell.loss < tolerance
    if case.zero:
        assert cell.gradient is None
        assert cell.grad_norm < ZERO_NORM_TOLERANCE
    else:
        assert cell.gradient < tolerance
        assert cell.grad_norm < tolerance


@pytest.mark.parametrize(("name", "training"), EXACT)
def test_an_optimizer_step_is_that_of_one_process_and_one_batch(measure: Measure, name: str, training: str) -> None:
    check(measure, name, training)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "training"), GRID)
def test_grid(measure: Measure, name: str, training: str) -> None:
    check(measure, name, training)


def test_in_bf16_only_rounding_differs(measure: Measure) -> None:
    cell = measure("2_ranks", "bf16")
    assert cell.gradient < BF16_TOLERANCE
    assert cell.parameters < BF16_TOLERANCE
    assert cell.loss < BF16_TOLERANCE
    assert cell.grad_norm < BF16_TOLERANCE


@pytest.mark.parametrize("training", ["approx", "none"])
def test_other_scalings_give_another_gradient(measure: Measure, training: str) -> None:
    """On the same rows in the same groups, so the other tests would fail if `exact` became one of these."""
    cell = measure("2_ranks", training)
    assert cell.gradient > WRONG
    assert cell.parameters > WRONG
    assert cell.idle_steps == measure("2_ranks", "text-float64-ga2").idle_steps
