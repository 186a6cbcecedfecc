"""Out of memory in a micro-batch: named (`oom: raise`), cut in two with the same gradient (`oom: split`), or left out
(`oom: skip`)."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from same_training import RELATIVE, deviation, read
from support import read_audit
from toy import Rows, a_micro_batch, pad
from training.toy_training import Sequential, arguments
from training.trainings import BLOCK, ODB, SGD, Memory, Training, make_odb

from odb_factory import ConfigError, ODBConfig, ODBDataLoader, ODBError
from odb_factory.data.samples import Measured
from odb_factory.errors import CollectiveError, OutOfMemoryError
from odb_factory.memory import is_out_of_memory
from odb_factory.planner import Budget, Media
from odb_factory.training.oom import MemoryWatch

TEXT = Training(unequal=2, batch=3, arguments=SGD, block={"layout": "padded"}, kinds=(ODB,))
WITHOUT = {
    "text": TEXT,
    "flat": replace(TEXT, block={"layout": "flat"}),
    "images": replace(TEXT, model="vl", rows=44, batch=2),
    "zero": replace(TEXT, zero=1),
    "filled": replace(TEXT, batch=1, block=TEXT.block | {"global_batch_size": "fill", "loss_scaling": "none"}),
}
"""Trainings with enough memory."""


def short(name: str, oom: str, memory: tuple[int, int], phase: str = "forward", **changes: Any) -> Training:
    """memory: tokens that each rank holds."""
    block = WITHOUT[name].block | {"oom": oom}
    return replace(WITHOUT[name], memory=memory, phase=phase, block=block, **changes)


ANY = 10**6
CHECKPOINTING = {"gradient_checkpointing": True}
SPLIT = {
    "text, forward": short("text", "split", (56, ANY)),
    "flat, backward": short("flat", "split", (ANY, 56), "backward"),
    "images, backward": short("images", "split", (60, 70), "backward"),
    "filled, forward": short("filled", "split", (60, 60)),
    "zero, backward": short("zero", "split", (60, 56), "backward"),
    "text, checkpointing": short("text", "split", (60, 56), "backward", arguments=SGD | CHECKPOINTING),
}
SKIP = {
    "skip, text": short("text", "skip", (56, ANY)),
    "skip, images, backward": short("images", "skip", (60, 70), "backward"),
    "skip, zero, backward": short("zero", "skip", (60, 56), "backward"),
}
ENDS = {
    "alone": short("text", "split", (ANY, 40)),
    "most": short("text", "skip", (ANY, 20)),
    "raise": short("text", "raise", (60, ANY)),  # the last: the other rank ends with this one
}
SETS = {"2_ranks": (2, WITHOUT | SPLIT | SKIP | ENDS)}


@pytest.fixture
def two_ranks(trained: Any) -> Any:
    """`two_ranks("text")`: the folder, the end of each rank, the summary, and the audit of each rank."""

    def get(name: str) -> tuple[Path, list[dict[str, Any]], dict[str, Any], list[list[dict[str, Any]]]]:
        path, ends = trained("2_ranks", name)
        folder = path / ODB
        summary = json.loads((folder / "odb_summary.json").read_text())
        return folder, ends, summary, [read_audit(folder, rank) for rank in range(2)]

    return get


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_take_the_same_optimizer_steps(name: str, two_ranks: Any) -> None:
    """The same figures and weights (`fill`: in the first step, because later steps are filled otherwise)."""
    folder, ends, summary, audits = two_ranks(name)
    cell = name.split(",")[0]
    assert {(end["leaked"], end["error"]) for end in ends} == {(0, None)}
    assert summary["oom_cuts"] == sum(end["fails"] for end in ends) > 0
    ours, without = read(folder, 2), read(two_ranks(cell)[0], 2)
    if cell == "filled":
        for figure in ("loss", "grad_norm"):
            assert ours.log[0][figure] == pytest.approx(without.log[0][figure], rel=RELATIVE)
    else:
        differences = deviation(ours, without)
        assert max(differences.loss, differences.weights) < RELATIVE
        assert differences.grad_norm < (1e-4 if SPLIT[name].zero else RELATIVE)  # DeepSpeed sums squares in float32
    rows = Counter(row for audit in audits for line in audit for row in line["ids"])
    assert rows == Counter(dict.fromkeys(range(SPLIT[name].rows), 2))


def test_later_plans_are_lower_on_all_ranks(two_ranks: Any) -> None:
    """Memory was short on rank 0 alone; steps that were planned ahead keep their plan."""
    _, _, summary, audits = two_ranks("text, forward")
    lowered = summary["lowered_to"]["token_budget"]
    assert lowered < BLOCK["token_budget"]
    for rank, audit in enumerate(audits):
        sizes = [line["rows"] * line["length"] for line in audit if len(line["ids"]) > 1]
        assert max(sizes[len(sizes) // 2 :]) <= lowered
        assert rank == 0 or max(sizes) > lowered
        assert {line["parts"] for line in audit} == ({1, 2} if rank == 0 else {1})


@pytest.mark.parametrize("name", SKIP)
def test_a_micro_batch_that_does_not_fit_is_left_out(name: str, two_ranks: Any) -> None:
    """Each row once an epoch, trained on or left out and counted on all ranks; the others weigh as planned."""
    _, ends, summary, audits = two_ranks(name)
    assert {(end["leaked"], end["error"]) for end in ends} == {(0, None)}
    lines = audits[0] + audits[1]
    computed = Counter(row for line in lines for row in line["ids"])
    gone = Counter(dict.fromkeys(range(SKIP[name].rows), 2)) - computed
    assert gone and max(computed.values()) <= 2
    assert summary["left_out"] == {"out_of_memory": gone.total()} and summary["oom_cuts"] == 0
    assert summary["samples"] == computed.total()
    assert summary["idle_micro_batches"] >= sum(end["fails"] for end in ends) > 0
    # They add nothing to the gradient.
    of_step = [line for line in lines if line["optimizer_step"] == 1]
    assert any(line["idle"] for line in of_step) and all(line["weight"] == 0 for line in of_step if line["idle"])


def keys_of(message: str) -> list[str]:
    """The settings that a message advises."""
    assert "\n" not in message
    return re.findall("`(.*?)`", message)


@pytest.mark.parametrize(
    ("name", "rank", "samples", "keys"),
    [
        ("alone", 1, "row 2", ["overlong: drop", "token_budget: 33"]),
        ("raise", 0, "rows 10, 8, 6", ["token_budget: 72", "oom: split"]),
    ],
)
def test_all_ranks_end_with_the_key_to_lower(name: str, rank: int, samples: str, keys: list[str], trained: Any) -> None:
    """In one line: each rank reports the rank that ran out of memory."""
    _, ends = trained("2_ranks", name)
    line = ends[rank]["error"]
    assert ends[rank]["cause"] == "OutOfMemoryError" and keys_of(line) == keys
    assert "micro-batch 1 of 2 of optimizer step 1: " in line and samples in line
    assert f"rank {rank} left the training: {line}" in ends[1 - rank]["error"]


def test_skip_ends_all_ranks_if_an_optimizer_step_would_lose_most_of_its_loss(trained: Any) -> None:
    first, second = (end["error"] for end in trained("2_ranks", "most")[1])
    assert first == second and first.startswith("oom: skip ") and keys_of(first)[0].startswith("token_budget: ")


METHODS = ("gather", "gather_for_metrics", "reduce")


def train_with_a_gathering_loss(rank: int, path: str, output_dir: str) -> list[str]:
    """The errors of a loss that calls methods of accelerate's Accelerator, and of the training."""
    os.environ["LOCAL_RANK"] = str(rank)
    errors: list[str] = []

    class Gathers(Sequential):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            for method in METHODS:
                try:
                    getattr(self.accelerator, method)(loss.detach())
                except ConfigError as error:
                    errors.append(str(error))
                    if method == METHODS[-1]:
                        raise
            return loss

    trainer = make_odb(SPLIT["text, forward"], path, Path(output_dir), Gathers)
    Memory(trainer.model, 56 if rank == 0 else ANY)
    try:
        trainer.train()
    except ODBError as error:
        errors.append(str(error))
    return errors


def test_a_loss_that_gathers_over_ranks_is_refused_before_it_waits(models: dict[str, str], tmp_path: Path) -> None:
    """A rank that restarts its step would gather alone, while the others wait for the step to end."""
    options = {"path": models["text"], "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_oom:train_with_a_gathering_loss", tmp_path, limit_s=120, **options)
    for *asked, ending in (outcome.value for outcome in outcomes):
        assert len(asked) in (0, len(METHODS)), "the other rank may report it before the own loss calls"
        for line, method in zip([*asked, ending], [*METHODS[: len(asked)], METHODS[-1]], strict=True):
            assert "odb.oom: 'split'" in line and f"accelerator.{method}," in line and "\n" not in line
    assert any(len(outcome.value) > 1 for outcome in outcomes)


def test_errors_that_report_a_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    for message in ("NPU out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"):
        assert is_out_of_memory(RuntimeError(f"an error: {message} when calling"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_out_of_memory(CollectiveError("rank 1 left the training: out of memory in micro-batch 1"))
    assert not is_out_of_memory(MemoryError("out of memory"))


@pytest.mark.parametrize(
    ("block", "held", "failed", "num_samples", "advice"),
    [
        ({}, [], (4, 250, 0), 4, ["token_budget: 750", "oom: split"]),
        ({"oom": "split"}, [], (4, 250, 0), 4, ["token_budget: 750"]),
        ({}, [(4, 250, 400)], (4, 240, 4000), 4, ["max_patches: 3000", "oom: split"]),
        ({}, [(4, 250, 4000)], (4, 500, 4100), 4, ["token_budget: 1500", "oom: split"]),
        ({}, [(4, 250, 0)], (4, 240, 400), 4, ["max_patches: 300", "oom: split"]),
        ({"max_patches": 400}, [], (1, 100, 400), 2, ["max_patches: 300", "oom: split"]),
        ({}, [], (1, 2000, 0), 1, ["cutoff_len", "overlong: drop", "token_budget: 1500"]),
        ({}, [(1, 900, 100)], (1, 900, 800), 1, ["image_max_pixels", "overlong: drop", "max_patches: 600"]),
        ({"balance_encoder": True}, [(1, 900, 100)], (1, 900, 800), 3, ["max_patches: 600", "balance_encoder: false"]),
    ],
)
def test_advice(
    tmp_path: Path, block: dict[str, Any], held: list, failed: tuple, num_samples: int, advice: list[str]
) -> None:
    """held, failed: (rows, length, patches) of a micro-batch."""
    config = ODBConfig(**{"token_budget": 1000, **block})
    watch = MemoryWatch(config, Budget(config.token_budget, config.max_patches), arguments(tmp_path))

    def measured(rows: int, length: int, patches: int) -> Measured:
        return Measured(rows, length, Media(patches), units=1)

    for shape in held:
        watch.held(measured(*shape))
    with pytest.raises(OutOfMemoryError, match="micro-batch 1 of 1 of optimizer step 7: ") as caught:
        with watch.named(a_micro_batch(ids=tuple(range(num_samples))), measured(*failed), optimizer_step=7):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert keys_of(str(caught.value)) == [key for key in advice if ":" in key]
    assert all(key in str(caught.value) for key in advice)


def test_a_custom_loop_refuses_split() -> None:
    with pytest.raises(ConfigError, match="^odb.oom: 'split' "):
        ODBDataLoader(Rows(), token_budget=64, collate_fn=pad, oom="split")  # type: ignore[call-arg]
