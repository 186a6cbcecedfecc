"""examples/paper in its short form, its samplers, its choice likelihood, and examples/synthetic_benchmark.py."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 280


def run(*words: str) -> str:
    """What it prints; none of its processes outlives the call."""
    return run_command([sys.executable, *words], LIMIT_S)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"paper_{name}", EXAMPLES / "paper" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_five_cells(tmp_path: Path, ranks: int) -> None:
    """I9: odb takes the optimizer steps of Standard and comes to its loss; all cells train on all samples."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0")
    words = (str(EXAMPLES / "paper" / "run.py"), "--samples", "128", "--output-dir", str(tmp_path))
    printed = run(*(launch if ranks > 1 else ()), *words)
    folder = tmp_path / "ultrachat_tiny"
    (cells,) = json.loads((folder / "figures.json").read_text("utf-8"))["parts"].values()
    assert [cell["name"] for cell in cells] == ["Standard", "HFG", "GMT (our sampler)", "odb, keep", "odb, fill"]
    of = {cell["name"]: cell for cell in cells}
    fixed, keep = of["Standard"], of["odb, keep"]
    assert fixed["optimizer_steps"] == keep["optimizer_steps"] == 2
    assert keep["last_loss"] == pytest.approx(fixed["last_loss"], rel=1e-5)
    assert keep["padding"] == 0 < of["HFG"]["padding"] < fixed["padding"]
    assert of["GMT (our sampler)"]["padding"] < fixed["padding"] and keep["efficiency"] > fixed["efficiency"]
    for cell in cells:
        assert cell["samples_per_second"] * cell["seconds"] == pytest.approx(128)
        assert cell["peak"] <= 4096 and cell["losses"][-1][1] == 128
    assert (folder / "paper.png").stat().st_size > 10_000
    assert (folder / "tables.md").read_text("utf-8").strip() in printed


def test_samplers() -> None:
    """Every sample once, within the budget, as many batches on each rank; BMT does not look beyond its bucket."""
    samplers, lengths = module("samplers"), np.random.default_rng(0).integers(10, 1000, 500)
    for kind in ("Sorted", "GMT", "BMT"):
        batches = samplers.make(kind, lengths, rows=4, token_budget=4000, mega_bucket=64)
        for dealt in ([batches], samplers.for_ranks(batches, 3)):
            assert len({len(mine) for mine in dealt}) == 1
            assert sorted(k for mine in dealt for batch in mine for k in batch) == list(range(500))
        assert all(max(-(-lengths[k] // 8) * 8 for k in batch) * len(batch) <= 4000 for batch in batches), kind
    ordered = samplers.make("Sorted", lengths, rows=4, token_budget=0, mega_bucket=0)
    assert [lengths[k] for batch in ordered for k in batch] == sorted(lengths)
    few = samplers.make("GMT", lengths, rows=4, token_budget=4000, mega_bucket=64)
    assert len(few) < len(samplers.make("BMT", lengths, rows=4, token_budget=4000, mega_bucket=64))
    with pytest.raises(ValueError, match="take more samples"):
        samplers.for_ranks([[0], [1]], 3)


def test_choice_likelihood(tiny_vl: Path, tmp_path: Path) -> None:
    """The log-probabilities are the model's at the end of the prompt, with a picture and without."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    Image.new("RGB", (96, 64), "red").save(tmp_path / "red.png")
    rows = [
        {"question": "2 + 2?", "choices": ["3", "4", "5"], "answer": "B", "subject": "sums"},
        {"question": "Which colour?", "choices": ["red", "blue"], "answer": 0, "images": ["red.png"]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    scored = module("choice_likelihood")
    score = scored.Scorer(str(tiny_vl), "cpu")
    processor, model = AutoProcessor.from_pretrained(tiny_vl), AutoModelForImageTextToText.from_pretrained(tiny_vl)
    right = []
    for row in scored.read(path):
        images = [Image.open(image) for image in row["images"]] or None
        inputs = processor(text=[score.prompt(row)], images=images, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits[0, -1].log_softmax(-1)
        letters = [processor.tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"[: len(row["choices"])]]
        assert score(row) == pytest.approx(expected[letters].tolist(), abs=1e-5)
        assert all(math.isfinite(value) for value in score(row))
        right.append(int(expected[letters].argmax()) == row["answer"])
    printed = run(str(EXAMPLES / "paper" / "choice_likelihood.py"), str(tiny_vl), str(path), "--device", "cpu")
    assert f"all: {sum(right) / 2:.2%} of 2 " in printed and f"sums: {right[0]:.2%} of 1 " in printed
    path.write_text(json.dumps(rows[0] | {"answer": 3}), "utf-8")
    with pytest.raises(SystemExit, match=r"questions.jsonl, line 1: .* an answer among them"):
        scored.read(path)


@pytest.mark.timeout(LIMIT_S + 20)
def test_the_synthetic_benchmark() -> None:
    """The same loss as fixed batches, fewer micro-batches, no padding."""
    printed = run(str(EXAMPLES / "synthetic_benchmark.py"), "--device", "auto", "--num-samples", "64")
    lines = [re.split(r" {2,}", line) for line in printed.splitlines() if re.match(r"(fixed|sorted|odb)\S* ", line)]
    of = {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in lines}
    assert list(of) == ["fixed batches", "sorted by length", "odb, padded", "odb", "odb, fill"]
    _, _, padding, micro_batches, steps, loss = of["odb"]
    fixed = of["fixed batches"]
    assert padding == 0 and micro_batches < of["odb, padded"][3] < fixed[3] == 16
    assert steps == fixed[4] == 2 and loss == pytest.approx(fixed[5], abs=0.011)
