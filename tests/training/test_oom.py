"""Out of memory in a micro-batch: named (`oom: raise`), or cut in two with the same gradient (`oom: split`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from support import read_audit
from toy import Rows, a_micro_batch, pad
from training.cases import TOKEN_BUDGET, Case, make_rows
from training.gradient_ranks import RECORD, zero
from training.oom_ranks import RESULTS, Short

from odb_factory import ConfigError, ODBConfig, ODBDataLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import CollectiveError, OutOfMemoryError
from odb_factory.memory import is_out_of_memory
from odb_factory.planner import Budget, Cost, Media
from odb_factory.training.oom import MemoryWatch, cut

LIMIT_S = 300
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
TEXT = Case("text", "float64", 2, keep=3, loss_scaling="stock")
ZERO = {"deepspeed": zero(1), "use_cpu": False}

WITHOUT = {
    "text": Short(TEXT),
    "flat": Short(Case("text", "float64", 2, keep=3, layout="flat", loss_scaling="stock")),
    "images": Short(Case("vl", "float64", 2, keep=2, loss_scaling="stock")),
    "filled": Short(Case("text", "float64", 2, loss_scaling="none")),
    "float32": Short(dataclasses.replace(TEXT, dtype="float32")),
}
"""Trainings for which there is memory enough."""


def short(name: str, *most: int, phase: str = "forward", arguments: Any = None, **block: Any) -> Short:
    return dataclasses.replace(WITHOUT[name], most=most, phase=phase, block=block, arguments=arguments or {})


SPLIT = {
    "text": short("text", 56, 0, oom="split"),
    "text, backward": short("text", 60, 56, phase="backward", oom="split"),
    "flat, backward": short("flat", 0, 56, phase="backward", oom="split"),
    "images, backward": short("images", 60, 70, phase="backward", oom="split"),
    "filled": short("filled", 60, 60, oom="split"),
    "float32, zero": short("float32", 60, 56, phase="backward", arguments=ZERO, oom="split"),
    "float32, checkpointing": short(
        "float32", 60, 56, phase="backward", arguments={"gradient_checkpointing": True}, oom="split"
    ),
}
"""The same with less memory on one rank or both."""
SKIP = {
    "text": short("text", 56, 0, oom="skip"),
    "flat, backward": short("flat", 0, 56, phase="backward", oom="skip"),
    "images, backward": short("images", 60, 70, phase="backward", oom="skip"),
    "float32, zero": short("float32", 60, 56, phase="backward", arguments=ZERO, oom="skip"),
}
"""What does not fit is left out."""
ENDS = {
    "alone": short("text", 0, 40, oom="split"),
    "most": short("text", 0, 20, oom="skip"),
    "raise": short("text", 60, 0),  # the last: the other rank ends with this one
}
TWO_RANKS = WITHOUT | SPLIT | {f"skip, {name}": one for name, one in SKIP.items()} | ENDS


@dataclass(frozen=True)
class Trained:
    """folder: of its files; ranks: what `oom_ranks.train` has returned on each; said: by all ranks, of all."""

    folder: Path
    said: list[str]
    ranks: list[dict[str, Any]]

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        return torch.load(self.folder / RECORD)

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "odb_summary.json").read_text())

    def audit(self, rank: int) -> list[dict[str, Any]]:
        return read_audit(self.folder, rank)


@pytest.fixture(scope="module")
def models(tiny_text, tiny_vl) -> dict[str, str]:
    return {"text": str(tiny_text), "vl": str(tiny_vl)}


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("oom")
    shorts = [dataclasses.asdict(one) for one in TWO_RANKS.values()]
    arguments = {"shorts": shorts, "models": models, "output_dir": str(folder)}
    outcomes = run_ranks("training.oom_ranks:train_all", folder, limit_s=LIMIT_S, **arguments)
    said = [outcome.said for outcome in outcomes]
    results = [json.loads((folder / RESULTS.format(rank=rank)).read_text()) for rank in range(2)]
    return {name: Trained(folder / str(k), said, ranks) for k, (name, *ranks) in enumerate(zip(TWO_RANKS, *results))}


def num_rows(one: Short, models: dict[str, str]) -> int:
    return len(make_rows(one.case, models[one.case.model], one.world_size))


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_take_the_same_optimizer_steps(name: str, models, two_ranks) -> None:
    """The same gradients and parameters (of `fill` in the first step, as later ones are filled otherwise)."""
    of = name.split(",")[0]
    trained, without = two_ranks[name], two_ranks[of]
    fails = sum(rank["fails"] for rank in trained.ranks)
    assert {(rank["leaked"], rank["error"]) for rank in trained.ranks} == {(0, None)}
    assert trained.summary["oom_cuts"] == fails > 0
    tolerance = TOLERANCE[SPLIT[name].case.dtype]
    # DeepSpeed takes its step before the Trainer could show gradients.
    for kind in ("parameters",) if "deepspeed" in SPLIT[name].arguments else ("gradients", "parameters"):
        of_steps = list(zip(trained.record[kind], without.record[kind], strict=of != "filled"))
        assert len(of_steps) > 3
        for one, other in of_steps[: 1 if of == "filled" else None]:
            assert one.keys() == other.keys()
            assert all(torch.allclose(one[name], other[name], rtol=tolerance, atol=tolerance) for name in one)
    rows = Counter(row for rank in range(2) for line in trained.audit(rank) for row in line["ids"])
    assert rows == Counter(dict.fromkeys(range(num_rows(SPLIT[name], models)), 2))


def test_plans_to_come_are_lower_on_all_ranks(two_ranks) -> None:
    """Memory was short on rank 0 alone; what had been planned ahead kept its plan."""
    trained = two_ranks["text"]
    lowered = trained.summary["lowered_to"]["token_budget"]
    assert lowered < TOKEN_BUDGET
    for rank in range(2):
        sizes = [line["rows"] * line["length"] for line in trained.audit(rank) if len(line["ids"]) > 1]
        assert max(sizes[len(sizes) // 2 :]) <= lowered
        assert rank == 0 or max(sizes) > lowered
    assert any(line["parts"] == 2 for line in trained.audit(0))
    assert all(line["parts"] == 1 for line in trained.audit(1))


@pytest.mark.parametrize("name", SKIP)
def test_a_micro_batch_that_does_not_fit_is_left_out(name: str, models, two_ranks) -> None:
    """Each row once an epoch, trained on or left out, named and counted on all ranks; the others weigh as planned."""
    trained, short = two_ranks[f"skip, {name}"], SKIP[name]
    assert {(rank["leaked"], rank["error"]) for rank in trained.ranks} == {(0, None)}
    lines = [line for rank in range(2) for line in trained.audit(rank)]
    computed = Counter(row for line in lines for row in line["ids"])
    gone = Counter(dict.fromkeys(range(num_rows(short, models)), 2)) - computed
    assert gone and max(computed.values()) <= 2
    assert trained.summary["left_out"] == {"out_of_memory": gone.total()} and trained.summary["oom_cuts"] == 0
    assert trained.summary["samples"] == computed.total()
    assert trained.summary["idle_micro_batches"] >= sum(rank["fails"] for rank in trained.ranks) > 0
    assert any("left out (out_of_memory)" in said for said in trained.said)
    # Nothing of it is in the gradient: that of the first step is the mean over its other rows.
    of_step = [line for line in lines if line["optimizer_step"] == 1]
    assert any(line["idle"] for line in of_step) and all(line["weight"] == 0 for line in of_step if line["idle"])
    assert any("oom: skip: it is left out" in said for said in trained.said)


@pytest.mark.parametrize(
    ("name", "rank", "samples", "keys"),
    [
        ("alone", 1, "2", ["token_budget 96", "`overlong: drop`", "`token_budget: 33`"]),
        ("raise", 0, "10, 8, 6", ["token_budget 96", "`token_budget: 72`", "`oom: split`"]),
    ],
)
def test_all_ranks_end_and_say_what_to_lower(name: str, rank: int, samples: str, keys: list[str], two_ranks) -> None:
    """In one line, on each rank that of the one that ran out."""
    ranks = two_ranks[name].ranks
    line = ranks[rank]["error"].removeprefix("ODBError: ")
    assert ranks[rank]["cause"] == "OutOfMemoryError" and "\n" not in line
    assert "micro-batch 1 of 2 of optimizer step 1: " in line and f"samples {samples}; " in line
    assert all(key in line for key in keys)
    assert f"rank {rank} left the training: {line}" in ranks[1 - rank]["error"]


def test_skip_ends_all_ranks_where_an_optimizer_step_would_lose_most_of_its_loss(two_ranks) -> None:
    first, second = two_ranks["most"].ranks
    assert first["error"] == second["error"] and first["error"].startswith("ODBError: oom: skip has left out ")
    assert " of the loss of optimizer step 1, and at most 50% may be lost; set `token_budget: " in first["error"]
    assert "\n" not in first["error"]


def test_a_loss_that_gathers_over_ranks_is_refused_before_it_waits(models, tmp_path) -> None:
    """A rank that restarts its step would gather alone, while the others wait for the step to end."""
    methods = ["gather", "gather_for_metrics", "reduce"]
    arguments = {"path": models["text"], "output_dir": str(tmp_path), "methods": methods}
    outcomes = run_ranks("training.oom_ranks:train_with_a_gathering_loss", tmp_path, limit_s=120, **arguments)
    for *asked, ending in (outcome.value for outcome in outcomes):
        assert len(asked) in (0, len(methods)), "a rank may learn it from the other, before its own loss asks"
        for line, method in zip([*asked, ending], [*methods[: len(asked)], methods[-1]], strict=True):
            assert "odb.oom: 'split'" in line and f"accelerator.{method}," in line and "\n" not in line
    assert any(len(outcome.value) > 1 for outcome in outcomes)


# Its pieces


def sample(number: int, tokens: int, patches: int = 0) -> Sample:
    return Sample(number, Cost(tokens, patches, units=tokens - 1, has_media=patches > 0), b"")


def measured(rows: int, length: int, patches: int) -> Measured:
    return Measured(rows, length, Media(patches), units=1)


@pytest.mark.parametrize(
    ("samples", "layout", "cut_at"),
    [
        ([sample(k, 10) for k in range(6)], "padded", 3),
        ([sample(0, 30), sample(1, 10), sample(2, 10), sample(3, 10)], "flat", 1),
        ([sample(0, 30), sample(1, 10), sample(2, 10), sample(3, 10)], "padded", 1),
        ([sample(0, 10), sample(1, 10, 40), sample(2, 10, 40), sample(3, 10)], "flat", 2),
        ([sample(0, 10, 90), sample(1, 10, 3), sample(2, 10, 3), sample(3, 10)], "flat", 1),
    ],
)
def test_the_larger_part_is_as_small_as_can_be(samples: list[Sample], layout: str, cut_at: int) -> None:
    whole = a_micro_batch(**{key: tuple(range(len(samples))) for key in ("ids", "lengths", "units", "stock_units")})
    parts = cut(replace(whole, light=samples), Budget(1000, layout=layout))
    assert [part.light for part in parts] == [samples[:cut_at], samples[cut_at:]]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_rank_that_encodes_images_of_others_is_told_so(num_samples: int) -> None:
    """It holds text alone; without max_patches, and with micro-batches that memory has held."""
    for held in ([], [900]):
        watch = MemoryWatch(ODBConfig(token_budget=1000), Budget(1000), torch.device("cpu"), advises_split=False)
        for watch.encoded in held:
            watch.held(measured(1, 900, 0))
        watch.encoded = 4000
        error = watch.error(a_micro_batch(ids=tuple(range(num_samples))), measured(1, 500, 0), 7)
        assert ", 4000 patches of all ranks encoded here, samples 0" in str(error)
        assert "; set `max_patches: 3000` or less." in str(error)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (CollectiveError("rank 1 left the training: out of memory in micro-batch 1"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


@pytest.mark.parametrize(
    ("block", "held", "failed", "num_samples", "advice"),
    [
        ({}, [], (4, 250, 0), 4, "set `token_budget: 750` or less, or `oom: split`"),
        ({"oom": "split"}, [], (4, 250, 0), 4, "set `token_budget: 750` or less"),
        ({}, [(4, 250, 400)], (4, 240, 4000), 4, "set `max_patches: 3000` or less, or `oom: split`"),
        ({}, [(4, 250, 4000)], (4, 500, 4100), 4, "set `token_budget: 1500` or less, or `oom: split`"),
        ({"max_patches": 400}, [], (1, 100, 400), 2, "set `max_patches: 300` or less, or `oom: split`"),
        ({}, [], (1, 2000, 0), 1, "lower cutoff_len to 1500, or set `overlong: drop` with `token_budget: 1500` to"),
        (
            {},
            [],
            (2, 1000, 0),
            1,
            "lower cutoff_len to 750, or set `overlong: drop` with `token_budget: 1500` to leave",
        ),
        ({"overlong": "drop"}, [], (1, 900, 0), 1, "lower cutoff_len to 675, or set `token_budget: 675` to leave out"),
        ({}, [(1, 900, 100)], (1, 900, 800), 1, "lower image_max_pixels or video_max_pixels by a quarter, or set"),
    ],
)
def test_advice(block: dict[str, Any], held: list, failed: tuple, num_samples: int, advice: str) -> None:
    """Of (rows, length, patches)."""
    config = ODBConfig(**{"token_budget": 1000, **block})
    budget = Budget(config.token_budget, config.max_patches)
    watch = MemoryWatch(config, budget, torch.device("cpu"), advises_split=config.oom == "raise")
    for shape in held:
        watch.held(measured(*shape))
    of = a_micro_batch(ids=tuple(range(num_samples)))
    with pytest.raises(OutOfMemoryError, match="out of memory in micro-batch 1 of 1 of optimizer step 7: ") as caught:
        with watch.named(of, measured(*failed), optimizer_step=7):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert advice in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_custom_loop_refuses_split() -> None:
    with pytest.raises(ConfigError, match=r"odb.oom: 'split' takes .* which a custom loop does by itself"):
        ODBDataLoader(Rows(), token_budget=64, collate_fn=pad, oom="split")  # type: ignore[call-arg]
