"""Ranks that fail in a toy training of gloo processes: nobody is left waiting, everybody learns the first cause."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import GROUP_TIMEOUT, run_ranks, toy_loader

from odb_factory.data.ranks import BEAT_S, Ranks
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


RANK_1_FAILS = ("rank 1 left the training: ValueError: rank 1 cannot go on", "rank 1 cannot go on")
KEEP = {"global_batch_size": "keep", "batch_size": 3, "balance": True, "layout": "flat", "world_size": 5}
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # The other rank waits in a collective of the training meanwhile, its planner with nothing to plan.
    "a row cannot be collated": ({"bad": 201}, ("rank 1 left the training: row 201", "row 201")),
    "an early row cannot be collated": ({"bad": 61}, ("rank 1 left the training: row 61", "row 61")),
    # A rank that hangs in its own data is alive: it is waited for as long as the process group's timeout says.
    "a row never comes": ({"hangs": (201, 0), "timeout_s": 3}, ("ddp_timeout",) * 2),
    "a row of the first round never comes": ({"hangs": (1, 0), "timeout_s": 3}, ("ddp_timeout",) * 2),
    # Every epoch has one round: all are in round 0, of different epochs.
    "a row of another epoch never comes": (
        {"hangs": (201, 1), "timeout_s": 3, "buffer_size": NUM_ROWS},
        ("ddp_timeout",) * 2,
    ),
    # Whatever the planners are about at that step.
    **{f"step {k} raises": ({"failing": [1], "fails_at": k}, RANK_1_FAILS) for k in range(20, 28)},
    # The last one to look still finds the cause, not the errors that followed from it.
    **{
        f"rank {k} of three raises": ({"failing": [k], "world_size": 3}, (f"rank {k} cannot go on",) * 3)
        for k in range(3)
    },
    # Ranks that are no neighbours learn of it too: in the training, while rows are collated, while samples travel.
    "one of five raises": ({"failing": [3], "fails_at": 5, **KEEP}, ("cannot go on",) * 5),
    "one of five cannot collate": ({"bad": 101, **KEEP}, ("row 101",) * 5),
    "one of five cannot send": ({"cannot_redistribute": 2, **KEEP}, ("no room",) * 5),
    # The others are in the collective already, where no metadata reach them.
    "one of two cannot send": (
        {"cannot_redistribute": 1, "balance": True},
        ("rank 1 left the training: redistributing samples: MemoryError: no room", "MemoryError: no room"),
    ),
    # Nobody listens to the others; nobody waits long for it.
    "all raise": ({"failing": [0, 1]}, ("", "")),
    # The collective that its planner is in never ends, for rank 1 hangs in its own data; the process ends all the same,
    # and so frees rank 1 from a collective of the training.
    "one raises while its planner waits": (
        {"failing": [0], "fails_at": 1, "hangs": (161, 0), "pause_s": 3},
        ("rank 0 cannot go on", "rank 0 left the training: ValueError: rank 0 cannot go on"),
    ),
}
"""The arguments of `train`, and what each rank ends with."""
SLOW = {"an early row cannot be collated", "a row never comes", "a row of the first round never comes"}
SLOW |= {*(f"step {k} raises" for k in range(22, 28)), "rank 0 of three raises", "rank 2 of three raises"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in FAULTS])
def test_nobody_is_left_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each rank ends far below the timeout of its collectives, and says the first cause."""
    options, texts = FAULTS[name]
    if "timeout_s" in options:
        monkeypatch.setenv(GROUP_TIMEOUT, "15")
    ended = run_ranks("distributed.test_failing_ranks:train", tmp_path, limit_s=LIMIT_S, may_fail=True, **options)
    assert all(outcome.value and outcome.value != "done" for outcome in ended), ended
    for rank, (outcome, text) in enumerate(zip(ended, texts, strict=True)):
        assert text in outcome.said + outcome.value, (rank, outcome)
        assert len(ended) < 5 or outcome.returncode == 0, (rank, outcome)


def lives_on(rank: int) -> float:
    """Rank 1 fails and stays alive; how long rank 0 waits for it (seconds). No worker, so that it waits itself."""
    started = time.monotonic()
    with toy_loader(NUM_ROWS, timeout_s=50, num_workers=0) as loader:
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


def ends_after_a_pause(rank: int, first: int, fails: bool) -> None:
    with toy_loader(100) as loader:
        list(loader)
        if rank != first:
            time.sleep(3 * BEAT_S)
            if fails:
                loader.abort("cannot save")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_rank_may_end_before_the_other(first: int, fails: bool, tmp_path: Path) -> None:
    """Rank 0 serves a store that the other asks now and then."""
    for outcome in run_ranks("distributed.test_failing_ranks:ends_after_a_pause", tmp_path, first=first, fails=fails):
        assert "Exception" not in outcome.said and "[odb]" not in outcome.said
