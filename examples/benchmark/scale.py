"""What planning costs as ranks are added: time on one core and bytes on the wire, a round.

Every rank forms the groups of its own window, sends a few integers a group to all others, reads
theirs and aligns them all. Here all ranks are simulated in one process, one after the other, with
the functions that a training uses; only the network is left out.

    python examples/benchmark/scale.py
    python examples/benchmark/scale.py --ranks 8 64 --window 256 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb_factory.batching import Budget, Cost, Offer, align, make_offer
from odb_factory.data.agreement import Report
from odb_factory.data.exchange import decode, encode

SHORTEST, LONGEST = 16, 16384
"""Lengths are lognormal, around 500 tokens, between these."""


@dataclass(frozen=True)
class Measured:
    """A round of `ranks` ranks, the median over all rounds. Times in seconds of one core.

    groups: that a rank has on offer. steps: that the round takes.
    offer_s: form the groups of one window and encode them. read_s: decode the messages of all ranks.
    align_s: choose the steps. received: bytes from all ranks, as they travel (padded to the longest).
    """

    ranks: int
    groups: float
    steps: float
    offer_s: float
    read_s: float
    align_s: float
    received: float

    @property
    def round_s(self) -> float:
        return self.offer_s + self.read_s + self.align_s


def draw_costs(rng: np.random.Generator, count: int) -> list[Cost]:
    tokens = np.clip(rng.lognormal(np.log(500), 1.1, count), SHORTEST, LONGEST).astype(int).tolist()
    return [Cost(length, 0, length // 2 + 1) for length in tokens]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


def measure(ranks: int, window: int, token_budget: int, num_rounds: int, seed: int = 0) -> Measured:
    """Plan `num_rounds` rounds of `ranks` ranks whose samplers never run dry; windows are refilled between them."""
    rng, budget = np.random.default_rng(seed), Budget(token_budget)
    held = [draw_costs(rng, window) for _ in range(ranks)]
    ages = [[0] * window for _ in range(ranks)]
    rows = []
    for round_index in range(num_rounds):
        formed, messages, offering = [], [], []
        for costs, waited in zip(held, ages):
            (groups, offer), forming_s = timed(lambda: make_offer(costs, waited, dry=False, budget=budget))
            message, encoding_s = timed(lambda: encode(Report(offer, Counter())))
            formed.append(groups)
            messages.append(message)
            offering.append(forming_s + encoding_s)
        reports, read_s = timed(lambda: [decode(message) for message in messages])
        offers: list[Offer] = [report.offer for report in reports]
        plan, align_s = timed(lambda: align(offers, seed=seed, epoch=0, round_index=round_index))
        size = np.dtype(np.int64).itemsize + max(map(len, messages))
        rows.append(
            (
                statistics.mean(len(groups) for groups in formed),
                len(plan.totals),
                statistics.mean(offering),
                read_s,
                align_s,
                ranks * size,
            )
        )
        for rank, (groups, steps) in enumerate(zip(formed, plan.groups)):
            gone = {i for chosen in steps if chosen is not None for i in groups[chosen]}
            kept = [i for i in range(window) if i not in gone]
            held[rank] = [held[rank][i] for i in kept] + draw_costs(rng, len(gone))
            ages[rank] = [ages[rank][i] + 1 for i in kept] + [0] * len(gone)
    return Measured(ranks, *(statistics.median(column) for column in zip(*rows)))


def table(results: Sequence[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        "| ranks | groups a rank | steps a round | form and encode own groups | read all messages | align | "
        "planning a step | received a round |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        lines.append(
            f"| {result.ranks:,} | {result.groups:.0f} | {result.steps:.0f} | {1e3 * result.offer_s:.1f} ms | "
            f"{1e3 * result.read_s:.1f} ms | {1e3 * result.align_s:.1f} ms | "
            f"{1e3 * result.round_s / result.steps:.2f} ms | {result.received / 1024:,.0f} KiB |"
        )
    return "\n".join(lines)


def growth(first: Measured, last: Measured) -> dict[str, float]:
    """By how much time and bytes a rank have grown from one to the other; 1 is linear in ranks, less is better."""
    factor = last.ranks / first.ranks
    return {"time": last.round_s / first.round_s / factor, "bytes": last.received / first.received / factor}


def main(arguments: Sequence[str] | None = None) -> list[Measured]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--window", type=int, default=1024, help="samples a rank holds (buffer_size)")
    parser.add_argument("--token-budget", type=int, default=12288)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    results = [measure(ranks, chosen.window, chosen.token_budget, chosen.rounds) for ranks in chosen.ranks]
    print(f"windows of {chosen.window:,} samples, token_budget {chosen.token_budget:,}; one core\n")
    print(table(results))
    if len(results) > 1:
        grown = growth(results[0], results[-1])
        print(f"\ngrowth, 1.00 being linear in ranks: time {grown['time']:.2f}, bytes {grown['bytes']:.2f}")
    return results


if __name__ == "__main__":
    main()
