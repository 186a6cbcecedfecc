"""A loss by stock's logits and without them: width 2,048, the vocabulary of Qwen3, forward and backward of the head.

Each measurement is a process of its own on a CPU: float32 weights under bf16 autocast (full fine-tuning of
LLaMA-Factory) and bf16 weights, the head trained and frozen. Peak: resident memory beyond what the process had before
the forward. The products that no exact gradient can do without, alone, are the last column: two of a frozen head
(logits, gradient of hidden states), three of a trained one.

    python examples/benchmark/head.py                            # about six minutes on two quiet cores
    python examples/benchmark/head.py --tokens 8192 --repeats 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page
import psutil

VOCABULARY, WIDTH = 151_936, 2048
METHODS = ("stock", "odb", "products")
MIB = 2**20


def measure(dtype: str, tokens: int, trained: bool, method: str) -> dict[str, float]:
    """Seconds, and bytes at the peak, of one forward and backward. In a process of its own."""
    import torch
    from torch.nn import functional

    from odb_factory.model.chunked import weighted_loss_of

    torch.manual_seed(0)
    kept = torch.float32 if dtype == "autocast" else torch.bfloat16
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=kept).requires_grad_(trained)
    hidden = torch.randn(1, tokens, WIDTH, dtype=kept, requires_grad=True)
    labels = torch.randint(VOCABULARY, (1, tokens))

    def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            if method == "odb":
                return weighted_loss_of(head, hidden, labels, 1 / tokens)
            targets = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            return functional.cross_entropy(head(hidden)[0].float(), targets, reduction="sum") / tokens

    def products(hidden: torch.Tensor) -> None:
        half, weight = hidden[0].detach().bfloat16(), head.weight.detach().bfloat16()
        logits = half @ weight.T
        _ = logits @ weight
        _ = logits.T @ half if trained else None

    if method == "products":
        products(hidden[:, :4])
        began = time.perf_counter()
        products(hidden)
        return {"seconds": time.perf_counter() - began}
    loss(hidden[:, :4], labels[:, :4]).backward()
    hidden.grad = head.weight.grad = None
    with peak_beyond() as peak:
        began = time.perf_counter()
        found = loss(hidden, labels)
        found.backward()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": peak[0], "loss": found.item()}


@contextlib.contextmanager
def peak_beyond() -> Iterator[list[int]]:
    """The largest growth of resident memory within, bytes; it is looked at every 2 ms."""
    process, ended, peak = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def row(dtype: str, tokens: int, trained: bool, found: dict[str, dict[str, float]]) -> list[str]:
    gradient = VOCABULARY * WIDTH * (4 if dtype == "autocast" else 2) if trained else 0
    stock, odb = found["stock"], found["odb"]
    cells = [f"{found[name]['peak'] / MIB:,.0f} MiB, {found[name]['seconds']:.1f} s" for name in ("stock", "odb")]
    beyond = (odb["peak"] - gradient) / (stock["peak"] - gradient)
    shares = [f"{beyond:.2f}", *(f"{found[name]['seconds'] / stock['seconds']:.2f}" for name in ("odb", "products"))]
    return [dtype, "trained" if trained else "frozen", f"{tokens:,}", *cells, *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_head"), help="(%(default)s)")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        dtype, tokens, trained, method = given.one
        print(json.dumps(measure(dtype, int(tokens), trained == "True", method)))
        return
    figures, rows = [], {dtype: [] for dtype in ("autocast", "bf16")}
    for dtype, tokens, trained in itertools.product(rows, given.tokens, (True, False)):
        found: dict[str, Any] = {}
        for method in METHODS:
            command = [sys.executable, __file__, "--one", dtype, str(tokens), str(trained), method]
            runs = [json.loads(subprocess.check_output(command)) for _ in range(given.repeats)]
            found[method] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        figures.append({"dtype": dtype, "tokens": tokens, "trained": trained, **found})
        rows[dtype].append(row(dtype, tokens, trained, found))
        print(*rows[dtype][-1], file=sys.stderr, sep=", ", flush=True)
    heads = ["weights", "head", "tokens", "stock", "odb", "peak less one gradient", "time", "products alone"]
    autocast, bf16 = (page.table(heads, mine, num_text=2) for mine in rows.values())
    page.write(given.output_dir.resolve(), figures, [bf16], [autocast])


if __name__ == "__main__":
    main()
