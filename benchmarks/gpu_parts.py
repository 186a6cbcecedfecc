"""Time the parts of a model that determine odb's speed, with lower bounds and alternatives; used by `gpu.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa

from odb_factory.model.attention import attend
from odb_factory.model.chunked import weighted_loss_of
from odb_factory.model.flat_row import flat_row
from odb_factory.model.tower import patch_products

Result = dict[str, Any]


def parts(tiny: bool, quick: bool) -> Result:
    """Milliseconds and additional peak memory (GiB), by part and contestant."""
    device = torch.device("cpu" if tiny else "cuda")
    size = 256 if tiny else 8192
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    found: Result = {"product_tflops": 2 * size**3 / timed(device, lambda: square @ square)[0] / 1e9}
    shapes = [(64, 32)] if tiny else [(8192, 2048), (16384, 2048), (8192, 4096)][: 1 if quick else 3]
    words = 512 if tiny else 151936
    for name, part in {
        "patch_embedding": lambda: patch_embedding(device, 64 if tiny else 8192),
        "attention": lambda: attention(device, tiny),
        **{f"head, {tokens} x {width}": partial(head, device, tokens, width, words) for tokens, width in shapes},
    }.items():
        try:
            found[name] = part()
        except Exception as error:  # the other parts are still timed
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return found


def timed(device: Any, run: Callable[[], Any], clear: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """Median time of five runs after two warm-up runs (ms), and peak memory beyond the memory in use before (GiB)."""
    times, held, on_cuda = [], 0, device.type == "cuda"
    for number in range(7 if on_cuda else 1):
        clear()
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        began = time.perf_counter()
        run()
        if on_cuda:
            torch.cuda.synchronize()
        if number >= 2 or not on_cuda:
            times.append(1e3 * (time.perf_counter() - began))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if on_cuda else 0.0
    return statistics.median(times), peak


def compared(device: Any, runs: dict[str, Callable[[], Any]], clear: Callable[[], Any]) -> Result:
    found: Result = {}
    for name, run in runs.items():
        try:
            milliseconds, peak = timed(device, run, clear)
            found[name] = {"ms": round(milliseconds, 3), "GiB": round(peak, 2)}
        except Exception as error:  # e.g. Liger, if it is not installed
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
        clear()
    return found


def patch_embedding(device: Any, patches: int) -> Result:
    """Forward and backward of a Conv3d with kernel = stride, and of odb's matrix product with the same weights."""
    width = 1024 if device.type == "cuda" else 32
    layer = torch.nn.Conv3d(3, width, (2, 16, 16), (2, 16, 16)).to(device, torch.bfloat16)
    pixels = torch.randn(patches, 3, 2, 16, 16, device=device, dtype=torch.bfloat16)

    def run() -> None:
        layer(pixels).sum().backward()

    found = compared(device, {"convolution": run}, layer.zero_grad)
    with patch_products(layer):
        return found | compared(device, {"odb": run}, layer.zero_grad)


def attention(device: Any, tiny: bool) -> Result:
    """Forward and backward of causal attention over 24 samples of uneven lengths: in a flat row, in padded rows, and
    for each sample alone."""
    shares = torch.rand(24, generator=torch.Generator().manual_seed(0)).pow(3)
    lengths = (shares * (20 if tiny else 6000) + 16).int().tolist()
    heads, of_keys, size = (4, 2, 16) if tiny else (16, 8, 128)
    layer: Any = torch.nn.Module()
    layer.num_key_value_groups = heads // of_keys

    def states(rows: int, length: int, of: Iterable[int]) -> list[Any]:
        shape = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        return [torch.randn(rows, count, length, size, **shape) for count in of]

    flat, padded = states(1, sum(lengths), (heads, of_keys, of_keys)), states(24, max(lengths), 3 * [heads])
    alone = [states(1, length, 3 * [heads]) for length in lengths]

    def odb() -> None:
        with flat_row(lengths):
            attend(layer, *flat, None)[0].sum().backward()

    def clear() -> None:
        for one in (*flat, *padded, *(one for sample in alone for one in sample)):
            one.grad = None

    runs = {
        "samples alone": lambda: [sdpa(*one, is_causal=True).sum().backward() for one in alone],
        "odb": odb,
        "padded": lambda: sdpa(*padded, is_causal=True).sum().backward(),
    }
    return {"tokens": sum(lengths)} | compared(device, runs, clear)


def head(device: Any, tokens: int, width: int, vocabulary: int) -> Result:
    """Forward and backward of the output embedding and the loss; every token has a label."""
    layer = torch.nn.Linear(width, vocabulary, bias=False).to(device, torch.bfloat16)
    states = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens), device=device)

    def clear() -> None:
        states.grad = layer.weight.grad = None

    def products() -> None:
        logits = layer(states)
        logits.backward(logits.detach())

    def kept() -> None:
        logits = layer(states).float()
        functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").div(tokens).backward()

    def odb() -> None:
        weighted_loss_of(layer, states, labels, 1 / tokens, tokens - 1).backward()

    def liger() -> None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        (loss(layer.weight, states[0, :-1], labels[0, 1:]) / tokens).backward()

    return compared(device, {"products alone": products, "odb": odb, "Liger": liger, "logits kept": kept}, clear)
