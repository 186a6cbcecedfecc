"""What an optimizer step costs as ranks are added: planning (seconds of one core), and what the ranks tell each other.

The exchange of all ranks runs in this process: the product's planner, messages and exchanges (`comm/gloo.py`), with
queues in the place of gloo. Messages and bytes are counted; seconds are those of a model of the network.

    python examples/benchmark/scale.py
    python examples/benchmark/scale.py --ranks 8 64 --samples-a-rank 8
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import socket
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import page
import psutil
import torch.distributed as dist
from contestants import CUTTERS, cut_by
from simulation import FIXED_COST, PROFILES, Epoch, bound

from odb_factory.comm.gloo import Exchange, Exchanges, Group, Turn
from odb_factory.comm.ranks import RankMetadata, Sums, decode, encode
from odb_factory.data.samples import Sample
from odb_factory.data.serialize import redistribute
from odb_factory.data.step_agreement import merge_messages
from odb_factory.planning import Budget, BufferMetadata, Cost, Plan, plan_optimizer_step
from odb_factory.planning.keep import GroupOutline, agreed_plans, steps_to_reach

PROFILE, PROFILE_OF_GROUPS = "ShareGPT4o", "UltraChat"
"""With UltraChat's lengths ranks wait for the fullest rank, not for the longest sample: there groups cost most."""
NODE = 8
STEP_S, STEPS_EXCHANGED = 2.0, 2
"""Seconds of an optimizer step that the exchange is compared with; steps of the exchange: in the second one all know
how long messages are."""
BYTES_A_TOKEN = 4
"""Of a sample that travels."""
INSIDE_S, BETWEEN_S, BYTES_S = 10e-6, 50e-6, 1e9
"""Seconds of a message within a node of `NODE` ranks, and between nodes; bytes a second of a process."""
SLOWER = (1, 4)
"""The model is run with networks so many times as slow."""


@dataclass
class Network:
    """Runs the exchanges of ranks in this process, counts messages and bytes, and models the seconds.

    sent: messages of each rank. received: its bytes. clocks: its seconds, for each network of `SLOWER`.
    """

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    clocks: list[Counter[int]] = field(default_factory=lambda: [Counter() for _ in SLOWER])

    def run(self, exchanges: Mapping[int, Exchange[Any]]) -> dict[int, Any]:
        """What the exchange of each rank returns. Raises `RuntimeError` where ranks wait for each other for ever."""
        arrived: defaultdict[tuple[int, int], deque[tuple[bytes, list[float]]]] = defaultdict(deque)
        waiting: dict[int, Turn] = {}
        results: dict[int, Any] = {}
        ready: deque[tuple[int, list[bytes] | None]] = deque((rank, None) for rank in exchanges)
        while ready:
            rank, received = ready.popleft()
            try:
                turn = next(exchanges[rank]) if received is None else exchanges[rank].send(received)
            except StopIteration as end:
                results[rank] = end.value
                continue
            for to, text in turn.sends:
                arrived[rank, to].append((text, self._send(rank, to, len(text))))
            waiting[rank] = turn
            for one in (rank, *(to for to, _ in turn.sends)):
                sources = [source for source, _ in waiting[one].receives] if one in waiting else ()
                if one in waiting and all(arrived[source, one] for source in sources):
                    del waiting[one]
                    ready.append((one, [self._receive(one, *arrived[source, one].popleft()) for source in sources]))
        if waiting:
            raise RuntimeError(f"ranks {sorted(waiting)[:8]} wait for ever")
        return results

    def _send(self, rank: int, to: int, size: int) -> list[float]:
        """When the message arrives."""
        seconds = (INSIDE_S if to // NODE == rank // NODE else BETWEEN_S) + size / BYTES_S
        for clock, slower in zip(self.clocks, SLOWER):
            clock[rank] += slower * seconds
        self.sent[rank] += 1
        self.received[to] += size
        return [clock[rank] for clock in self.clocks]

    def _receive(self, rank: int, text: bytes, arrives: Sequence[float]) -> bytes:
        for clock, one in zip(self.clocks, arrives):
            clock[rank] = max(clock[rank], one)
        return text


class World:
    """The exchange of all ranks in kept optimizer steps: the turns of `Ranks`, in its order.

    run: moves what the exchanges send (`Network.run`, or gloo). planning_s: of the slowest group; reading_s: of what a
    rank reads of the others (CPU seconds).
    """

    def __init__(self, ranks: int, group_size: int, budget: Budget, run: Callable[..., dict[int, Any]]):
        def exchanges() -> list[Exchanges]:
            return [Exchanges(rank, ranks, min(group_size, ranks)) for rank in range(ranks)]

        self.planning, self.steps, self.run, self.budget = exchanges(), exchanges(), run, budget
        self.groups = [self.planning[leader].group for leader in self.planning[0].leaders]
        self.planning_s = self.reading_s = 0.0

    @property
    def sockets(self) -> int:
        """Of a rank that leads a group."""
        return len(self.groups[0]) + len(self.groups) - 2

    def plan(self, buffers: Sequence[BufferMetadata]) -> list[Plan]:
        """The plan of each group, after all have agreed. buffers: of all ranks."""
        texts = [encode(RankMetadata(buffer, Counter())) for buffer in buffers]
        gathered, planning_s, asked = [], [0.0] * len(self.groups), 0
        for group in self.groups:
            told = self.run({rank: self.planning[rank].gather(texts[rank]) for rank in group})
            assert all(told[rank] == told[group.start] for rank in group)
            messages, seconds = timed(lambda told=told[group.start]: [decode(text) for text in told])
            gathered.append([one.buffer for one in messages if isinstance(one, RankMetadata)])
        self.reading_s = seconds

        def make(number: int, least_steps: int) -> Plan:
            options = {"balance": True, "least_steps": least_steps}
            plan, seconds = timed(lambda: plan_optimizer_step(gathered[number], self.budget, **options))
            planning_s[number] += seconds
            return plan

        def exchange(plans: Sequence[Plan], _: GroupOutline) -> GroupOutline:
            nonlocal asked
            sums = {}
            for group, plan, held in zip(self.groups, plans, gathered):
                units, checksum = sum(int(one.rows["units"].sum()) for one in held), plan.checksum()
                for rank in group:
                    sums[rank] = Sums(plans=[(group.start, checksum, rank)])
                order = [(checksum, group.start, group.stop - 1)] if len(self.groups) == 1 else []
                mine = {"exhausted": False, "means": Counter({0: units}), "orders": order}
                sums[group.start] = replace(sums[group.start], outline=GroupOutline.of(plan, asked), **mine)
            texts = {rank: one.encode() for rank, one in sums.items()}
            told = self.run({rank: self.planning[rank].reduce(text, Sums.merge) for rank, text in texts.items()})
            _, seconds = timed(lambda: Sums.merge([texts[group.start] for group in self.groups]))
            self.reading_s += seconds
            found = Sums.decode(told[0])
            assert len(set(told.values())) == 1 and found.failure is None and found.outline is not None
            asked = steps_to_reach(found.outline)
            return found.outline

        plans = agreed_plans([functools.partial(make, number) for number in range(len(self.groups))], exchange)
        self.planning_s = max(planning_s)
        self.run({rank: one.reduce(b"", merge_messages) for rank, one in enumerate(self.steps)})
        return plans

    def redistribute(self, plans: Sequence[Plan], buffers: Sequence[BufferMetadata]) -> None:
        """Samples travel, each named by its rank and number; raises `AssertionError` where one does not arrive."""
        for group, plan in zip(self.groups, plans):
            swaps: dict[int, Exchange[Any]] = {}

            def samples_of(rank: int, swap: Any, group: range = group, plan: Plan = plan) -> dict[int, Sample]:
                held = [
                    Sample(number, Cost(tokens), bytes(1 + BYTES_A_TOKEN * tokens), rank)
                    for number, tokens in enumerate(buffers[rank].rows["tokens"].tolist())
                ]
                return redistribute(plan, group, rank, held, swap)

            def note(rank: int, given: Mapping[int, bytes], sources: Sequence[int], swaps: Any = swaps) -> Any:
                swaps[rank] = self.planning[rank].swap(given, sources)
                raise InterruptedError

            for rank in group:
                with contextlib.suppress(InterruptedError):
                    samples_of(rank, functools.partial(note, rank))
            told = self.run(swaps)
            for rank in group:
                samples = samples_of(rank, lambda given, sources, rank=rank, told=told: told[rank])
                for row in itertools.chain.from_iterable(plan.groups[rank - group.start]):
                    owner = bisect.bisect_right(plan.starts, row) - 1
                    found = samples[row].content, samples[row].id
                    assert found == (group.start + owner, row - plan.starts[owner])


def counted(rank: int, exchange: Exchange[Any], network: Network) -> Exchange[Any]:
    """The exchange of a rank, whoever runs it, counted as `Network.run` counts."""
    received = None
    while True:
        try:
            turn = next(exchange) if received is None else exchange.send(received)
        except StopIteration as end:
            return end.value
        for to, text in turn.sends:
            network.sent[rank] += 1
            network.received[to] += len(text)
        received = yield turn


def real_steps(rank: int, port: int, ranks: int, held: int, count: int, results: Any) -> None:
    """One process of `--gloo`: the agreements of optimizer steps, over the product's connections."""
    started = time.perf_counter()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    group = Group(None, 60, "the benchmark")
    (buffers,) = buffers_of(PROFILE_OF_GROUPS, ranks, held * ranks, 1)
    text, begun = encode(RankMetadata(buffers[rank], Counter())), time.perf_counter()
    seconds = []
    for _ in range(count):
        group.reduce(b"", merge_messages, "a start at the same time")
        before = time.perf_counter()
        group.gather(text, "metadata")
        group.reduce(Sums(plans=[(0, 0, rank)]).encode(), Sums.merge, "the plans")
        group.reduce(b"", merge_messages, "the optimizer step")
        seconds.append(time.perf_counter() - before)
    memory = psutil.Process().memory_full_info().uss / 2**20
    group.close()
    group.lifeline.close()
    dist.destroy_process_group()
    results.put((begun - started, statistics.median(seconds), memory))


def over_gloo(ranks: int, held: int, count: int) -> list[str]:
    """Cells of a row: start-up, agreement as measured and by the model, memory of a rank."""
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), free_port()
    processes = [
        context.Process(target=real_steps, args=(rank, port, ranks, held, count, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    begun, seconds, memory = zip(*(results.get(timeout=300) for _ in processes))
    for process in processes:
        process.join(60)
    ended = Counter(process.exitcode for process in processes)
    return [
        f"{ranks}",
        f"{max(begun):.1f} s",
        f"{1e3 * statistics.median(seconds):.1f} ms",
        f"{max(memory):.0f} MiB",
        f"{dict(ended)}",
    ]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its CPU seconds, without a collection of the objects of all ranks and of torch: the process
    that plans has none of them to look through."""
    gc.freeze()
    started = time.process_time()
    result = function()
    seconds = time.process_time() - started
    gc.unfreeze()
    return result, seconds


def buffers_of(profile: str, ranks: int, batch_size: int, count: int) -> list[list[BufferMetadata]]:
    """Of `count` optimizer steps the samples of each rank."""
    epoch = Epoch(profile, ranks, size=count * batch_size // ranks)
    steps = epoch.optimizer_steps(batch_size, count)
    return [[BufferMetadata(rows, exhausted=False) for rows in shares] for shares in steps]


def exchanged(ranks: int, group_size: int, samples_a_rank: int, token_budget: int, count: int) -> dict[str, float]:
    """Optimizer steps of these ranks: medians; messages and bytes are those of the rank with most in the last step, in
    which all know how long messages are."""
    budget, found = Budget(token_budget, layout="flat"), []
    world = World(ranks, group_size, budget, lambda exchanges: network.run(exchanges))
    for buffers in buffers_of(PROFILE_OF_GROUPS, ranks, samples_a_rank * ranks, count):
        for rank, one in enumerate(buffers):
            one.rows["bytes"] = one.rows["tokens"] * BYTES_A_TOKEN
            one.rows["position"] = rank + ranks * np.arange(len(one.rows))
        network = Network()
        plans = world.plan(buffers)
        figures: dict[str, float] = {"sent": max(network.sent.values()), "received": max(network.received.values())}
        agreement_s = [max(clock.values()) for clock in network.clocks]
        network = Network()
        world.redistribute(plans, buffers)
        for slower, clock, seconds in zip(SLOWER, network.clocks, agreement_s):
            figures |= {f"agreement_s_{slower}": seconds, f"samples_s_{slower}": max(clock.values(), default=0.0)}
        totals = plans[0].totals
        waited = ranks * sum(FIXED_COST + one.max_rank_tokens for one in totals)
        figures |= {"efficiency": sum(one.tokens for one in totals) / waited, "micro_steps": len(totals)}
        found.append(figures | {"planning_s": world.planning_s, "reading_s": world.reading_s})
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    epoch = Epoch(PROFILE_OF_GROUPS, ranks, size=count * samples_a_rank)
    most = {key: found[-1][key] for key in ("sent", "received")} | {"sockets": world.sockets}
    return medians | most | {"bound": bound(epoch, samples_a_rank * ranks, count)["efficiency"]}


def whole(ranks: int, batch_size: int, budget: Budget, balance: bool, count: int) -> dict[str, float]:
    """All ranks plan together: medians."""
    found = []
    for buffers in buffers_of(PROFILE, ranks, batch_size, count):
        plan, seconds = timed(functools.partial(plan_optimizer_step, buffers, budget, balance=balance))
        found.append((len(plan.totals), seconds))
    return dict(zip(("micro_steps", "plan_s"), map(statistics.median, zip(*found))))


def beside(ranks: int, batch_size: int, token_budget: int, count: int) -> tuple[list[dict[str, Any]], str]:
    """Ways to cut a list of lengths by a token budget: figures, and their table."""
    figures, cells = [], []
    epochs = {profile: Epoch(profile, ranks, size=count * batch_size // ranks) for profile in PROFILES}
    for name, cutter in CUTTERS.items():
        row = [name]
        for profile, epoch in epochs.items():
            cut, seconds = cut_by(cutter, epoch, batch_size, count, token_budget)
            found = cut.figures()
            figures.append({"ranks": ranks, "name": name, "profile": profile, "plan_s": seconds} | found)
            row.append(f"{found['micro_steps']:.1f}, {found['efficiency']:.3f}, {found['peak'] / token_budget:.0%}")
        mean = statistics.mean(one["plan_s"] for one in figures if one["name"] == name)
        cells.append([*row, f"{1e3 * mean:.0f} ms"])
    bounds = [f"{bound(epoch, batch_size, count, token_budget)['efficiency']:.3f}" for epoch in epochs.values()]
    cells.append(["what no cut can exceed", *bounds, ""])
    return figures, page.table([f"{ranks:,} ranks, N = {batch_size:,}", *PROFILES, "time"], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps; the figures are their medians")
    parser.add_argument("--samples-a-rank", type=int, default=8, help="of an optimizer step")
    parser.add_argument(
        "--exchange", type=int, nargs="*", default=[8, 64, 512, 1024, 4096, 16384], help="ranks that tell each other"
    )
    parser.add_argument("--group-size", type=int, default=256, help="balance_group_size")
    parser.add_argument("--held", type=int, default=61, help="samples a rank and optimizer step of the exchange")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_scale"), help="(%(default)s)")
    parser.add_argument("--beside", action="store_true", help="the planner beside other partitions, and nothing else")
    parser.add_argument("--gloo", type=int, nargs="*", help="processes that agree over gloo here, and nothing else")
    given = parser.parse_args(arguments)
    if given.gloo:
        cells = [over_gloo(ranks, given.held, 20) for ranks in given.gloo]
        print(page.table(["processes", "start", "agreement", "memory of a rank", "exit codes"], cells, num_text=0))
        return
    if given.beside:
        sizes = [(ranks, given.samples_a_rank * ranks, given.token_budget, given.steps) for ranks in given.ranks]
        parts = [beside(*size) for size in sizes]
        first, *more = [table for _, table in parts]
        page.write(given.output_dir, [one for found, _ in parts for one in found], [first], more)
        return
    figures, rows = [], []
    for layout, balance, ranks in itertools.product(("flat", "padded"), (True, False), given.ranks):
        batch_size, budget = given.samples_a_rank * ranks, Budget(given.token_budget, layout=layout)
        row = whole(ranks, batch_size, budget, balance, given.steps)
        figures.append({"ranks": ranks, "samples": batch_size, "layout": layout, "balance": balance} | row)
        plan = f"{1e3 * row['plan_s']:.0f} ms"
        rows.append([layout, str(balance).lower(), f"{ranks:,}", f"{batch_size:,}", f"{row['micro_steps']:.0f}", plan])
    tables = [page.table(["layout", "balance", "ranks", "samples", "micro-steps", "plan"], rows, num_text=2)]
    rows = []
    for ranks in given.exchange:
        row = exchanged(ranks, given.group_size, given.held, given.token_budget, STEPS_EXCHANGED)
        figures.append({"ranks": ranks, "group_size": given.group_size} | row)
        seconds = [[row[f"{name}_s_{slower}"] for slower in SLOWER] for name in ("agreement", "samples")]
        times = [", ".join(f"{1e3 * one:.1f}" for one in both) for both in seconds]
        plan = f"{1e3 * row['planning_s']:.0f} + {1e3 * row['reading_s']:.0f}"
        share = [(row["planning_s"] + row["reading_s"] + sum(one)) / STEP_S for one in zip(*seconds)]
        efficiency = f"{row['efficiency']:.4f} ({row['bound']:.4f})"
        counts = [f"{ranks:,}", efficiency, f"{row['sent']:.0f}", f"{row['received'] / 1024:,.0f}"]
        rows.append([*counts, f"{row['sockets']}", *times, plan, ", ".join(f"{one:.1%}" for one in share)])
    heads = [
        "ranks",
        "step efficiency (bound)",
        "messages",
        "KiB",
        "sockets",
        "agree (ms)",
        "samples (ms)",
        "CPU (ms)",
        "of 2 s",
    ]
    page.write(given.output_dir, figures, [*tables, page.table(heads, rows, num_text=0)])


if __name__ == "__main__":
    main()
