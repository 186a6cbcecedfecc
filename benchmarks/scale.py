"""Overhead of odb per optimizer step on many ranks: planning, gather, exchange.

    python benchmarks/scale.py                            # about two minutes
    python benchmarks/scale.py --latency-us 15 --gb-s 10  # message costs of your network
    python benchmarks/scale.py --check 2 4 8              # also time gathers between real local processes

Planning and reading (unpickling the gathered tables) are measured as CPU time of this machine. Gather and exchange are
computed from the cost of a gloo message, latency + bytes / bandwidth, measured between two local processes (a network
adds its own cost):

gather     each rank sends P - 1 messages to its neighbour (gloo's ring all-gather), twice: first the lengths, then the
           tables, padded to the longest
exchange   following the plan, each rank sends a message to every rank that computes samples it holds, and receives
           messages likewise; the time is that of the slowest rank. Samples are pickled lists of token ids and labels

All four run ahead of the training in a background thread: they delay it only if their sum is longer than the optimizer
step. No training on more than 2,000 ranks has been run: those rows are an extrapolation.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
import timeit
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from shared import PROFILES, draw_lengths, in_processes, show

from odb_factory import plan_micro_batches

ROW = np.dtype([(f"column {k}", "<i4") for k in range(6)] + [(f"flag {k}", "u1") for k in range(5)])
"""Row of the gathered table, one for each sample: tokens, patches, units, bytes and so on."""
UNMEASURED = 2000
"""Rows with more ranks than this are marked as unmeasured."""
SMALL, LARGE = 8, 1 << 22
"""Sizes of the measured messages (bytes)."""


@dataclass(frozen=True)
class Message:
    """Cost of a message: latency_s + bytes / bytes_per_s (seconds)."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: float, count: float = 1) -> float:
        return count * self.latency_s + size / self.bytes_per_s


# ----------------------------------------------------------------------------------------------------------------------
# Measurements between local processes.


def ping_pong(rank: int, size: int, count: int) -> float:
    """Seconds per message: the 10 % quantile, to exclude the load of other processes on the machine."""
    tensor, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(count):
        started = time.perf_counter()
        for turn in range(2):
            dist.send(tensor, 1 - rank) if turn == rank else dist.recv(tensor, 1 - rank)
        seconds.append((time.perf_counter() - started) / 2)
    return float(np.quantile(seconds, 0.1))


def measure_message() -> Message:
    small, large = (in_processes(2, ping_pong, size, count)[0] for size, count in ((SMALL, 2000), (LARGE, 50)))
    return Message(small, (LARGE - SMALL) / max(large - small, 1e-9))


def gather_once(rank: int, size: int, count: int) -> float:
    """Seconds of a gather like that of odb_factory: lengths, then tables (10 % quantile)."""
    seconds = []
    for _ in range(count):
        dist.barrier()
        started = time.perf_counter()
        for length in (SMALL, size):
            own = torch.zeros(length, dtype=torch.uint8)
            dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)
        seconds.append(time.perf_counter() - started)
    return float(np.quantile(seconds, 0.1))


# ----------------------------------------------------------------------------------------------------------------------
# The cost model.


def table_of_a_rank(samples: int) -> bytes:
    """A message of the same size as the table that a rank contributes to the gather."""
    return pickle.dumps((np.zeros(samples, ROW), {"rejected": 0, "overlong": 0, "order": 0, "plan": 0}), 5)


def gather_s(ranks: int, samples: int, message: Message) -> float:
    return sum((ranks - 1) * message.seconds(size) for size in (SMALL, len(table_of_a_rank(samples))))


def reading_s(ranks: int, samples: int) -> float:
    """CPU time to unpickle the tables of all ranks."""
    text = table_of_a_rank(samples)
    started = time.process_time()
    for _ in range(ranks):
        pickle.loads(text)
    return time.process_time() - started


def bytes_of_samples(lengths: np.ndarray) -> np.ndarray:
    """Bytes of each sample in the exchange (int64 [n])."""
    ids = np.random.default_rng(0).integers(0, 150_000, 1000).tolist()
    a_token = len(pickle.dumps({"input_ids": ids, "labels": ids[:]}, 5)) / len(ids)
    return (lengths * a_token).astype(np.int64)


def exchange(rank_of: np.ndarray, samples: int, sizes: np.ndarray, ranks: int, message: Message) -> dict[str, float]:
    """rank_of [n]: the rank that computes each sample. Rank r holds the r-th block of `samples` samples."""
    holder = np.arange(len(rank_of)) // samples
    moved = np.flatnonzero(holder != rank_of)
    pairs = np.unique(np.stack((holder[moved], rank_of[moved])), axis=1)
    messages = np.bincount(pairs.ravel(), minlength=ranks)
    traffic = np.bincount(holder[moved], sizes[moved], ranks) + np.bincount(rank_of[moved], sizes[moved], ranks)
    seconds = max(map(message.seconds, traffic.tolist(), messages.tolist()))
    return {"exchange_s": seconds, "messages": int(messages.max()), "moved": len(moved) / len(rank_of)}


def optimizer_step(ranks: int, samples: int, arguments: argparse.Namespace, message: Message) -> dict[str, Any]:
    lengths = draw_lengths(arguments.profile, ranks * samples)
    options = {"token_budget": arguments.token_budget, "ranks": ranks, "layout": arguments.layout}
    plans: list[Any] = []
    planning = timeit.Timer(
        lambda: plans.append(plan_micro_batches(lengths, **options, overlong="singleton")), timer=time.process_time
    )
    seconds = planning.repeat(arguments.repeats, number=1)
    rank_of = np.zeros(len(lengths), np.int64)
    for rank, micro_batches in enumerate(plans[0]):
        rank_of[[index for micro_batch in micro_batches for index in micro_batch]] = rank
    row = {"ranks": ranks, "samples": samples, "micro_steps": len(plans[0][0]), "plan_s": statistics.median(seconds)}
    row |= {"gather_s": gather_s(ranks, samples, message), "reading_s": reading_s(ranks, samples)}
    row |= exchange(rank_of, samples, bytes_of_samples(lengths), ranks, message)
    return row | {"is_measured": ranks <= UNMEASURED}


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["8x256", *(f"{ranks}x32" for ranks in (16, 64, 256, 1024, 2048, 4096))]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="RANKSxSAMPLES of a rank (%(default)s)")
    parser.add_argument("--profile", choices=PROFILES, default="mm_mix")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--layout", choices=("flat", "padded"), default="flat")
    parser.add_argument("--repeats", type=int, default=3, help="of a plan; the table has the median")
    parser.add_argument("--latency-us", type=float, help="of a message; measured if not given")
    parser.add_argument("--gb-s", type=float, help="bandwidth of a rank; measured if not given")
    parser.add_argument("--check", type=int, nargs="+", default=[], metavar="RANKS", help="real local processes")
    parser.add_argument("--json", type=Path, help="write one line of JSON for each row of the table")
    arguments = parser.parse_args()
    message = measure_message()
    if arguments.latency_us is not None:
        message = Message(arguments.latency_us / 1e6, message.bytes_per_s)
    if arguments.gb_s is not None:
        message = Message(message.latency_s, arguments.gb_s * 1e9)
    print(f"a message: {1e6 * message.latency_s:.0f} us, {message.bytes_per_s / 1e9:.2f} GB/s", file=sys.stderr)
    figures: list[dict[str, Any]] = [{"message": asdict(message)}]
    cells = []
    for ranks, samples in (map(int, size.split("x")) for size in arguments.sizes):
        row = optimizer_step(ranks, samples, arguments, message)
        figures.append(row)
        times = (f"{1e3 * row[key]:,.1f}" for key in ("plan_s", "gather_s", "reading_s", "exchange_s"))
        mark = "" if row["is_measured"] else " (unmeasured)"
        cells.append([f"{ranks:,} x {samples}{mark}", f"{row['micro_steps']}", *times, f"{row['messages']:,}"])
        cells[-1].append(f"{row['moved']:.0%}")
    for ranks in arguments.check:
        seconds = statistics.median(in_processes(ranks, gather_once, len(table_of_a_rank(32)), 20))
        figures.append({"ranks": ranks, "real_gather_s": seconds, "gather_s": gather_s(ranks, 32, message)})
        cells.append([f"{ranks:,} x 32, real processes", "-", "-", f"{1e3 * seconds:,.1f}", *["-"] * 4])
    heads = ["ranks x samples", "micro-steps", "plan, ms", "gather, ms", "reading, ms", "exchange, ms", "messages"]
    show([*heads, "moved"], cells, arguments.json, figures)


if __name__ == "__main__":
    main()
