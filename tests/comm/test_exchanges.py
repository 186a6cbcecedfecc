"""Exchanges of ranks: everyone gets everything, in few messages; gloo moves what the benchmark counts."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo

from odb_factory.comm.gloo import Connections, Exchange, Exchanges
from odb_factory.planning import Budget

EXAMPLES = Path(__file__).parents[2] / "examples" / "benchmark"


@pytest.fixture(scope="module")
def scale() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("scale")


def joined(messages: Any) -> bytes:
    return b" ".join(sorted(b" ".join(messages).split()))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=40), st.integers(1, 17), st.integers(1, 3))
def test_every_rank_learns_the_same(scale: Any, texts: list[bytes], group_size: int, times: int) -> None:
    """Whatever the number of ranks, the size of groups and of messages; no message is left behind."""
    world = [Exchanges(rank, len(texts), group_size) for rank in range(len(texts))]
    for _ in range(times):  # what is learnt of the sizes of messages never changes what arrives
        found = scale.Network().run({one.rank: one.gather(texts[one.rank]) for one in world})
        assert all(found[one.rank] == [texts[rank] for rank in one.group] for one in world)
        found = scale.Network().run({one.rank: one.gather_all(texts[one.rank]) for one in world})
        assert all(answers == texts for answers in found.values())
        numbers = [b"%d" % rank * (rank % 5 + 1) for rank in range(len(texts))]
        found = scale.Network().run({one.rank: one.reduce(numbers[one.rank], joined) for one in world})
        assert set(found.values()) == {joined(numbers)}
        given = {
            one.rank: {other: texts[one.rank] + b"%d" % other for other in one.group if (one.rank + other) % 3 == 1}
            for one in world
        }
        sources = {one.rank: [other for other in one.group if one.rank in given[other]] for one in world}
        found = scale.Network().run({one.rank: one.swap(given[one.rank], sources[one.rank]) for one in world})
        assert found == {rank: {other: given[other][rank] for other in sources[rank]} for rank in sources}


@pytest.mark.parametrize("ranks", [8, 256, 1000, 2048])
def test_messages_grow_with_the_logarithm_of_the_ranks(scale: Any, ranks: int) -> None:
    """And the sockets with a group and the number of groups."""
    world = [Exchanges(rank, ranks, 256) for rank in range(ranks)]
    for _ in range(2):
        network = scale.Network()
        network.run({one.rank: one.gather(b"x" * 100) for one in world})
        network.run({one.rank: one.reduce(b"y" * 100, lambda messages: messages[0]) for one in world})
    assert max(network.sent.values()) <= (min(ranks, 256) - 1).bit_length() + (-(-ranks // 256) - 1).bit_length() + 5
    assert max(network.received.values()) < 104 * (min(ranks, 256) + -(-ranks // 256) + 8)


class Gloo:
    """Real connections of ranks that are threads of this process."""

    def __init__(self, ranks: int, group_size: int):
        self.connections: dict[int, Connections] = {}
        self.stores: dict[Any, HashStore] = {}
        self.lock = threading.Lock()
        self.all(
            lambda rank: self.connections.update({rank: self._connect(Exchanges(rank, ranks, group_size))}),
            range(ranks),
        )

    def all(self, function: Any, ranks: Any) -> None:
        threads = [threading.Thread(target=function, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _connect(self, exchanges: Exchanges) -> Connections:
        leaders = exchanges.leaders if exchanges.rank == exchanges.leader else range(0)
        return Connections(exchanges, *(self._backend(exchanges.rank, ranks) for ranks in (exchanges.group, leaders)))

    def _backend(self, rank: int, ranks: range) -> ProcessGroupGloo | None:
        if len(ranks) < 2:
            return None
        with self.lock:
            store = self.stores.setdefault(ranks, HashStore())
        return ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=60))

    def run(self, exchanges: Mapping[int, Exchange[Any]]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        self.all(lambda rank: results.update({rank: self.connections[rank].run(exchanges[rank], 0)}), list(exchanges))
        return results


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group_size", [16, 6])
def test_gloo_moves_what_the_benchmark_counts(scale: Any, group_size: int) -> None:
    """The same optimizer steps of 16 ranks, in one group and in groups of 6, 6 and 4: messages and bytes by rank."""
    gloo, tallies = Gloo(16, group_size), []
    for is_real in (True, False):
        network = scale.Network()

        def run(exchanges: Any, network: Any = network, is_real: bool = is_real) -> Any:
            if not is_real:
                return network.run(exchanges)
            return gloo.run({rank: scale.counted(rank, one, network) for rank, one in exchanges.items()})

        world = scale.World(16, group_size, Budget(4096, layout="flat"), run)
        for buffers in scale.buffers_of("ShareGPT4o", 16, 16 * 8, 2):
            world.redistribute(world.plan(buffers), buffers)
        tallies.append((network.sent, network.received))
    assert tallies[0] == tallies[1] and sum(tallies[0][0].values()) > 16 * 20


@pytest.mark.timeout(60)
def test_a_rank_that_waits_can_be_freed() -> None:
    """Before the process ends: a thread in gloo would abort it."""
    gloo, ended = Gloo(2, 2), threading.Event()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            gloo.connections[1].run(Exchanges(1, 2, 2).gather(b"in vain"), 0)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not ended.wait(0.5)
    gloo.connections[1].cancel()
    assert ended.wait(10)
