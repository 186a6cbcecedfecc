"""Memory, time and gradient of the head at width 2,048 and a vocabulary of 151,936, beside stock's logits.

pytest -s -m full_grid tests/model/test_head_measured.py

Runs take turns, each in a process of its own on one core: on a shared machine the CPU time of two threads has their
waiting for each other in it.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_factory.model.chunked import weighted_loss_of

WIDTH, VOCABULARY = 2048, 151_936
TOKENS = {"exact": 512, "not exact": 2048}
"""Few, where logits gain least and float64 fits into memory; and more."""
ROUNDS = 3
HEAD_MIB = WIDTH * VOCABULARY * 4 / 2**20


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(how: str, kind: str, is_trained: bool, tokens: int, file: str) -> dict[str, float]:
    """One forward and backward of the head in this process. how: "stock", "odb", or "exact" in float64."""
    torch.set_num_threads(1)
    dtype = {"autocast": torch.float32, "bfloat16": torch.bfloat16}[kind]
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype).requires_grad_(is_trained)
    hidden = torch.randn(1, tokens, WIDTH).to(torch.bfloat16)
    labels = torch.randint(0, VOCABULARY, (1, tokens))
    if how == "exact":
        linear, hidden = linear.double(), hidden.double()
    hidden.requires_grad_()
    before, began = peak_mib(), time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast" and how != "exact"):
        if how == "odb":
            loss = weighted_loss_of(linear, hidden, labels, 1 / (tokens - 1), tokens - 1)
        else:
            logits = linear(hidden)
            logits = logits if how == "exact" else logits.float()
            loss = cross_entropy(logits[0, :-1], labels[0, 1:])
            del logits
    loss.backward()
    seconds, peak = time.process_time() - began, peak_mib() - before
    found: dict[str, Tensor] = {"hidden": hidden.grad[0, ::16]}
    if is_trained:
        found["weight"] = linear.weight.grad[::512]
    torch.save({name: one.double() for name, one in found.items()}, file)
    return {"loss": loss.item(), "seconds": seconds, "peak": peak}


@pytest.mark.full_grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tokens", TOKENS.values())
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_head_beside_stock(kind: str, is_trained: bool, tokens: int, tmp_path: Path) -> None:
    """Beside the gradient of a trained head, a quarter of stock's memory; gradients no further from float64."""
    is_exact = tokens == TOKENS["exact"]

    def measured(how: str) -> dict[str, float]:
        command = [sys.executable, __file__, how, kind, str(int(is_trained)), str(tokens), str(tmp_path / how)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures

    rounds = [(measured("odb"), measured("stock")) for _ in range(ROUNDS)]
    ours, stock = ({name: statistics.median(one[name] for one in runs) for name in runs[0]} for runs in zip(*rounds))
    gradient_mib = HEAD_MIB * (1 if kind == "autocast" else 0.5) * is_trained
    print(
        f"\nhead, {kind}, {'trained' if is_trained else 'frozen'}, {tokens:,} tokens: peak {ours['peak']:.0f} against "
        f"{stock['peak']:.0f} MiB (the gradient of the head is {gradient_mib:.0f}), "
        f"CPU {ours['seconds']:.2f} against {stock['seconds']:.2f} s"
    )
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-4)
    assert ours["peak"] - gradient_mib <= (stock["peak"] - gradient_mib) / 4
    assert ours["seconds"] < stock["seconds"]
    if is_exact:
        exact = measured("exact")
        assert ours["loss"] == pytest.approx(exact["loss"], rel=1e-3)
        gradients = {how: torch.load(tmp_path / how) for how in ("exact", "stock", "odb")}
        for name, value in gradients["exact"].items():
            mine, theirs = (float((gradients[how][name] - value).norm() / value.norm()) for how in ("odb", "stock"))
            print(f"error of the gradient of {name}: {mine:.3e} against {theirs:.3e}")
            assert mine <= 1.01 * theirs, "kernels add up in another order: 0.1 % was seen"


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]), sys.argv[5])))
