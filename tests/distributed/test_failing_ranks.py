"""Ranks that fail in a toy training of gloo processes: nobody is left waiting, everybody learns the first cause."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import GROUP_TIMEOUT, Outcome, run_ranks, toy_loader

from odb_factory.data.ranks import Ranks
from odb_factory.ending import ending

NUM_ROWS = 400
FAILS_AT = 20
LIMIT_S = 60
"""Far below the 300 s of the process group: whoever ends by then has not waited for that."""


def train(
    rank: int,
    *,
    failing: tuple[int, ...] = (),
    fails_at: int = FAILS_AT,
    cannot_redistribute: int | None = None,
    pause_s: float = 0,
    timeout_s: float = 300,
    **rows: Any,
) -> str:
    """Optimizer steps that end in a collective of all ranks, as those of a training do; how it ended for this rank."""
    if rank == cannot_redistribute:
        Ranks.exchange = _no_room
    with toy_loader(NUM_ROWS, timeout_s=timeout_s, **rows) as loader:
        try:
            for epoch in range(2):
                loader.set_epoch(epoch)
                for number, _ in enumerate(loader):
                    if number == fails_at and rank in failing:
                        time.sleep(pause_s)
                        raise ValueError(f"rank {rank} cannot go on")
                    if number % 2:
                        dist.all_reduce(torch.ones(1))
        except Exception as error:  # as the `with` of a loop does
            cause = ending(error)
            loader.abort(f"{type(cause).__name__}: {cause}")
            return str(cause)
    return "done"


def _no_room(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def run(folder: Path, **kwargs: Any) -> list[Outcome]:
    ended = run_ranks("distributed.test_failing_ranks:train", folder, limit_s=LIMIT_S, may_fail=True, **kwargs)
    assert all(outcome.value and outcome.value != "done" for outcome in ended), str(ended)
    return ended


@pytest.mark.parametrize("bad", [pytest.param(61, marks=pytest.mark.nightly), 201])
def test_a_row_that_cannot_be_collated(tmp_path, bad: int) -> None:
    """The other rank waits in a collective of the training meanwhile, its planner with nothing to plan."""
    first, second = run(tmp_path, bad=bad)
    assert f"row {bad}" in second.value and "truncated" in second.value
    assert f"rank 1 left the training: row {bad}" in first.value


@pytest.mark.parametrize(
    ("hangs", "options"),
    [
        pytest.param((201, 0), {}, marks=pytest.mark.nightly),
        pytest.param((1, 0), {}, marks=pytest.mark.nightly),  # in the first round
        ((201, 1), {"buffer_size": NUM_ROWS}),  # every epoch has one round: all are in round 0, of different epochs
    ],
)
def test_a_row_that_never_comes(tmp_path, monkeypatch, hangs: tuple[int, int], options: dict[str, Any]) -> None:
    """A rank that hangs in its own data is alive: it is waited for as long as the process group's timeout says. Then
    both ranks end."""
    monkeypatch.setenv(GROUP_TIMEOUT, "15")
    first, second = run(tmp_path, hangs=hangs, timeout_s=3, **options)
    for outcome in (first, second):
        assert "ddp_timeout" in outcome.value, outcome


@pytest.mark.parametrize("fails_at", [20, 21, *(pytest.param(k, marks=pytest.mark.nightly) for k in range(22, 28))])
def test_a_step_that_raises(tmp_path, fails_at: int) -> None:
    """Whatever the planners are about at that step."""
    first, second = run(tmp_path, failing=[1], fails_at=fails_at)
    assert second.value == "rank 1 cannot go on"
    assert "rank 1 left the training: ValueError: rank 1 cannot go on" in first.value


@pytest.mark.parametrize("failing", [*(pytest.param(k, marks=pytest.mark.nightly) for k in (0, 2)), 1])
def test_one_of_three_fails(tmp_path, failing: int) -> None:
    """The last one to look still finds the cause, not the errors that followed from it."""
    ended = run(tmp_path, world_size=3, failing=[failing])
    for rank, outcome in enumerate(ended):
        assert f"rank {failing} cannot go on" in outcome.said + outcome.value, (rank, outcome)


KEEP = {"global_batch_size": "keep", "batch_size": 3, "balance": True, "layout": "flat"}


@pytest.mark.parametrize("how", [{"failing": [3], "fails_at": 5}, {"bad": 101}, {"cannot_redistribute": 2}])
def test_one_of_five_fails(tmp_path, how: dict[str, Any]) -> None:
    """Ranks that are no neighbours learn of it too: in the training, while rows are collated, while samples travel."""
    ended = run(tmp_path, world_size=5, **how, **KEEP)
    for rank, outcome in enumerate(ended):
        said = outcome.said + outcome.value
        assert any(text in said for text in ("cannot go on", "row 101", "no room")), (rank, outcome)
        assert outcome.returncode == 0, (rank, outcome)


def test_one_fails_while_its_planner_waits(tmp_path) -> None:
    """The collective that its planner is in never ends, for rank 1 hangs in its own data; the process ends all the
    same, and so frees rank 1 from a collective of the training."""
    first, second = run(tmp_path, failing=[0], fails_at=1, hangs=(161, 0), pause_s=3)
    assert first.value == "rank 0 cannot go on"
    assert "rank 0 left the training: ValueError: rank 0 cannot go on" in second.said + second.value


def lives_on(rank: int) -> float:
    """Rank 1 fails and stays alive; how long rank 0 waits for it (seconds). No worker, so that it waits itself."""
    started = time.monotonic()
    with toy_loader(NUM_ROWS, timeout_s=50, workers=(0, 0)) as loader:
        try:
            for number, _ in enumerate(loader):
                if number == FAILS_AT and rank == 1:
                    raise ValueError("rank 1 cannot go on")
        except Exception as error:
            loader.abort(str(error))
    ended = time.monotonic() - started
    dist.barrier()
    return ended


def test_a_failed_rank_that_lives_on_is_not_waited_for(tmp_path) -> None:
    """Once it has said why it ends, nobody waits for its answer."""
    first, _ = run_ranks("distributed.test_failing_ranks:lives_on", tmp_path, limit_s=LIMIT_S, may_fail=True)
    assert first.value < 40, first


def test_all_fail_at_once(tmp_path) -> None:
    """Nobody listens to the others; nobody waits long for it."""
    run(tmp_path, failing=[0, 1])


def test_a_rank_that_fails_while_it_hands_samples_over(tmp_path) -> None:
    """The others are in the collective already, where no metadata reach them."""
    first, second = run(tmp_path, cannot_redistribute=1, balance=True)
    assert "rank 1 left the training: redistributing samples: MemoryError: no room" in first.value
    assert "MemoryError: no room" in second.value
