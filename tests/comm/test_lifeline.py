"""The tree of all ranks, in one process: who is gone, who has failed and who is behind is known everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from odb_factory.comm.lifeline import ACK_S, Lifeline, Report, merge
from odb_factory.errors import CollectiveError

NUM_RANKS = 80
"""Three levels of eight children each."""
KNOWN_S = 20.0


class Store:
    """That of a process group; counts its calls."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_calls = 0

    def set(self, key: str, value: str) -> None:
        self.num_calls += 1
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.num_calls += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> str:
        self.num_calls += 1
        return self.values[key]


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + KNOWN_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return Store()


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[list[Lifeline]]:
    """All of them connected."""
    lifelines = [Lifeline(rank, NUM_RANKS, store, silence_s=60) for rank in range(NUM_RANKS)]
    for lifeline in lifelines:
        lifeline.enter("planning", "round 1")
        lifeline.start()
    until(lambda: all("planning" in one.all_ranks.streams for one in lifelines), "connected")
    until(lambda: not any(one.all_ranks.missing for one in lifelines), "connected")
    yield lifelines
    for lifeline in reversed(lifelines):
        lifeline.close()


def test_a_rank_that_is_gone_is_known_to_all_without_the_store(ranks: list[Lifeline], store: Store) -> None:
    """A process that is killed closes its connections."""
    num_calls = store.num_calls
    assert num_calls < 40 * NUM_RANKS
    ranks[5].abandon()
    others = ranks[:5] + ranks[6:]
    until(lambda: all(one.failure for one in others), "a failure")
    gone = "rank 5 has ended without a word (last seen in: round 1)"
    assert all(one.failure is not None and one.failure.startswith(gone) for one in others)
    assert store.num_calls == num_calls
    with pytest.raises(CollectiveError, match="rank 5 has ended without a word"):
        ranks[NUM_RANKS - 1].check_wait("planning", None, 0.1)


def test_the_first_failure_stands_and_the_rank_behind_is_known(ranks: list[Lifeline]) -> None:
    for one in ranks[:-1]:
        one.enter("planning", "round 2")
    behind = f"rank {NUM_RANKS - 1}, which is alive (last seen in: round 1"
    until(lambda: all(one.late("planning").startswith(behind) for one in ranks[:-1]), "who is behind")
    assert ranks[-1].late("planning") == ""
    started = time.monotonic()
    ranks[-1].abort("rank 79 left the training: no room")
    assert time.monotonic() - started < ACK_S, "its parent has heard"
    ranks[0].abort("rank 0 left the training: another reason")
    until(lambda: all(one.failure for one in ranks[1:-1]), "a failure")
    assert {one.failure for one in ranks[1:-1]} <= {
        "rank 79 left the training: no room",
        "rank 0 left the training: another reason",
    }
    for one in ranks:
        one.renew()
        one.renew()
    assert not any(one.failure for one in ranks), "the next training begins"


def test_reports_are_merged() -> None:
    """A rank that does not know a stream has made none of its calls."""
    one = Report(3, {"a": [2, 3, 2, 3]}, {"ended": 9, "frozen": 4}, {"3": "x"})
    other = Report(1, {"a": [1, 1, 5, 6], "b": [4, 1, 4, 1]}, {"ended": 7})
    assert merge([one, other]) == Report(
        1, {"a": [1, 1, 5, 6], "b": [0, 3, 4, 1]}, {"ended": 7, "frozen": 4}, {"3": "x"}
    )


def test_a_long_reason_is_cut(ranks: list[Lifeline]) -> None:
    """A line that is longer than any of ours is a stranger's, and ends the connection."""
    ranks[3].abort("rank 3 left the training: rows " + "1234567, " * 200_000)
    until(lambda: all(one.failure for one in ranks[:3] + ranks[4:]), "a failure")
    assert all(str(one.failure).startswith("rank 3 left the training: rows") for one in ranks[:3] + ranks[4:])
