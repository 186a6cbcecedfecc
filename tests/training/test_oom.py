"""Out of memory in a micro-batch: named (`oom: raise`), or cut in two with the same gradient (`oom: split`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import run_ranks
from training.cases import TOKEN_BUDGET, Case, make_rows
from training.gradient_ranks import RECORD
from training.oom_ranks import Short, train

LIMIT_S = 300
TOLERANCE = 1e-10
TEXT = Case("text", "float64", 2, keep=3, loss_scaling="stock")
WITHOUT = {
    "text": Short(TEXT),
    "flat": Short(Case("text", "float64", 2, keep=3, layout="flat", loss_scaling="sample")),
    "images": Short(Case("vl", "float64", 2, keep=2, loss_scaling="stock")),
    "filled": Short(Case("text", "float64", 2, loss_scaling="none")),
}
"""Trainings for which there is memory enough."""


def short(name: str, *most: int, phase: str = "forward", **block: Any) -> Short:
    return dataclasses.replace(WITHOUT[name], most=most, phase=phase, world_size=len(most), block=block)


SPLIT = {
    "text": short("text", 56, 0, oom="split"),
    "text, backward": short("text", 60, 56, phase="backward", oom="split"),
    "flat, backward": short("flat", 0, 56, phase="backward", oom="split"),
    "images, backward": short("images", 60, 70, phase="backward", oom="split"),
    "filled": short("filled", 60, 60, oom="split"),
}
"""The same with less memory on one rank or both."""
ENDS = {
    "alone": short("text", 0, 40, oom="split"),
    "raise": short("text", 60, 0),  # the last: the other rank ends with this one
}
TWO_RANKS = WITHOUT | SPLIT | ENDS


@dataclass(frozen=True)
class Trained:
    """folder: of its files; said: by the ranks on their way; ranks: what `oom_ranks.train` has returned on each."""

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
        return [json.loads(line) for line in (self.folder / f"odb_audit_rank{rank}.jsonl").read_text().splitlines()]


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
    assert all(outcome.returncode == 0 for outcome in outcomes), "\n".join(text[-3000:] for text in said)
    found = zip(*(outcome.value for outcome in outcomes))
    return {name: Trained(folder / str(k), said, list(ranks)) for k, (name, ranks) in enumerate(zip(TWO_RANKS, found))}


def check_same(trained: Trained, without: Trained, num_rows: int, *, steps: int | None = None) -> None:
    """The same gradients and parameters after the first so many optimizer steps (None: all), every row once."""
    assert sum(rank["fails"] for rank in trained.ranks) > 0
    assert all(rank["leaked"] == 0 and rank["error"] is None for rank in trained.ranks)
    for kind in ("gradients", "parameters"):
        of_steps = list(zip(trained.record[kind], without.record[kind]))[:steps]
        assert steps or len(of_steps) == len(trained.record[kind]) == len(without.record[kind]) > 3
        for one, other in of_steps:
            assert one.keys() == other.keys()
            assert all(torch.allclose(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE) for name in one)
    lines = [line for rank in range(len(trained.ranks)) for line in trained.audit(rank)]
    assert Counter(row for line in lines for row in line["ids"]) == Counter(dict.fromkeys(range(num_rows), 2))
    assert trained.summary["oom_cuts"] == sum(rank["fails"] for rank in trained.ranks)


def num_rows(one: Short, models: dict[str, str]) -> int:
    return len(make_rows(one.case, models[one.case.model], one.world_size))


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_take_the_same_optimizer_steps(name: str, models, two_ranks) -> None:
    of = name.split(",")[0]
    check_same(two_ranks[name], two_ranks[of], num_rows(SPLIT[name], models), steps=1 if of == "filled" else None)


def test_plans_to_come_are_lower_on_all_ranks() -> None: ...
