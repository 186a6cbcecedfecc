"""Helpers of the benchmark scripts: sample lengths, local processes as ranks, tables, JSON lines."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SHORTEST, LONGEST = 16, 8192
"""Lengths are clipped to this range (tokens)."""

Draw = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(mean: float, cv: float) -> Draw:
    """Draw lengths with this mean (tokens) and this coefficient of variation."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def mm_mix(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw lengths of MM-Mix: 80 % short answers, 20 % pages."""
    is_page = rng.random(count) < 0.2
    return np.where(is_page, rng.lognormal(np.log(2500), 0.5, count), rng.lognormal(np.log(150), 0.35, count))


PROFILES: dict[str, Draw] = {
    "ultrachat": lognormal(1100, 0.48),
    "llava": lognormal(700, 0.29),
    "sharegpt4o": lognormal(900, 1.00),
    "mm_mix": mm_mix,
}
"""Length distributions modelled on data sets: lognormal by mean (tokens) and coefficient of variation; and MM-Mix."""


def draw_lengths(profile: str, count: int, seed: int = 0) -> np.ndarray:
    """Draw lengths in random order (int64 [count], tokens)."""
    drawn = PROFILES[profile](np.random.default_rng(seed), count)
    return np.clip(drawn, SHORTEST, LONGEST).astype(np.int64)


def in_processes(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` in `ranks` processes connected by gloo; return the results by rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as processes:
        jobs = [processes.submit(_connected, rank, ranks, port, function, *arguments) for rank in range(ranks)]
        return [job.result() for job in jobs]


def _connected(rank: int, ranks: int, port: int, function: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, ranks, is_master=not rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        result = function(rank, *arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def machine() -> str:
    """Name of the processor, number of cores, and load average of the last minute."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], path: Path | None, figures: Sequence[Mapping[str, Any]]):
    """Print a table in Markdown. If `path` is given, write one line of JSON for each of `figures` to it."""
    widths = [max(len(row[k]) for row in (heads, *rows)) for k in range(len(heads))]
    line = "|".join(["", *("-" * (width + 1) + (":" if k else "-") for k, width in enumerate(widths)), ""])
    print(machine(), end="\n\n")
    for number, row in enumerate((heads, *rows)):
        cells = (text.rjust(width) if k else text.ljust(width) for k, (text, width) in enumerate(zip(row, widths)))
        print(f"| {' | '.join(cells)} |")
        if not number:
            print(line)
    if path is not None:
        path.write_text("".join(json.dumps(one) + "\n" for one in figures), encoding="utf-8")
