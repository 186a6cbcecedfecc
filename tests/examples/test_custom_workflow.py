"""The commands of examples/custom_workflow/README.md, run unchanged from the root of the repository."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import read_jsonl, run_command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_workflow"
LIMIT_S = 150
COMMANDS = re.findall(r"^\| `(.+?)` \|", (EXAMPLE / "README.md").read_text("utf-8"), re.MULTILINE)
ONE_RANK, TWO_RANKS, TRAINER, QWEN_VL, SFT, LIGHTNING, GRPO = COMMANDS


def run(command: str, output: Path, *options: str) -> str:
    """The output of a command. None of its processes outlives the call."""
    words = shlex.split(command)
    if words[0] == "torchrun":  # any free port, so that two runs on one machine do not meet
        words[1:1] = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    return run_command([*words, "--output", str(output), *options], LIMIT_S, ROOT)


def rows_of(*folders: Path) -> Counter:
    """How often each row was trained on, by epoch and row, from the audits of all ranks."""
    audits = [path for folder in folders for path in folder.glob("odb_audit_rank*.jsonl")]
    return Counter((line["epoch"], row) for path in audits for line in read_jsonl(path) for row in line["ids"])


def every_row(num_rows: int, epochs: int = 1) -> Counter:
    return Counter((epoch, row) for epoch in range(epochs) for row in range(num_rows))


def losses(printed: str) -> list[float]:
    """The loss of each optimizer step."""
    return [float(loss) for loss in re.findall(r"^epoch .* loss ([\d.]+)$", printed, re.MULTILINE)]


def shows(printed: str, command: str) -> bool:
    """Whether `printed` has the last output in the README: the last piece of code in the command's table row.

    Numbers may differ: the data are the help topics of the installed Python.
    """
    text = (EXAMPLE / "README.md").read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{command}` |")]
    words = re.split(r"\d+", re.findall(r"`(.+?)`", line)[-1].removesuffix(" ..."))
    return re.search(r"\d+".join(map(re.escape, words)), printed) is not None


def test_a_custom_loop(tmp_path: Path) -> None:
    """I2: every row once per epoch; the loss falls; the output is as in the README."""
    printed = run(ONE_RANK, tmp_path)
    assert shows(printed, ONE_RANK)
    rows = int(re.search(r"samples of (\d+) rows", printed)[1])
    assert rows_of(tmp_path) == every_row(rows, epochs=2)
    logged = losses(printed)
    assert logged[-1] < logged[0] - 0.3
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.nightly
def test_a_loop_on_two_ranks(tmp_path: Path) -> None:
    """I2, I8, I9: with the same global batch one rank and two log the same losses, also with idle micro-batches.

    A resumed loop repeats the losses after the only checkpoint, which is in the middle of an epoch.
    """
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"Count to {k}.", "answer": " ".join(map(str, range(1, k + 1)))} for k in range(1, 60)]
    data.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    options = ["--data", str(data), "--token_budget", "1024", "--gradient_accumulation_steps", "1", "--epochs", "4"]
    options += ["--save_steps", "5"]
    logged, batch_sizes = [], {"one": "58", "two": "29"}
    for command, name in ((ONE_RANK, "one"), (TWO_RANKS, "two")):
        printed = run(command, tmp_path / name, *options, "--batch_size", batch_sizes[name])
        logged.append(losses(printed))
        assert rows_of(tmp_path / name) == every_row(len(lines), epochs=4)
    assert shows(printed, TWO_RANKS)
    first, second = (read_jsonl(path) for path in sorted((tmp_path / "two").glob("*.jsonl")))
    assert len(first) == len(second) > 8, "I1"
    assert sum(line["idle"] for line in [*first, *second]) == 4, "the last step of an epoch has one sample"
    assert len(logged[0]) == 8
    assert logged[0] == pytest.approx(logged[1], abs=1e-4)

    schedule = torch.load(tmp_path / "two" / "checkpoint" / "custom_checkpoint_0.pkl")
    assert schedule["last_epoch"] == 5, "two steps an epoch: amid one"
    rest = losses(run(TWO_RANKS, tmp_path / "two", *options, "--batch_size", "29", "--resume"))
    assert rest == logged[1][5:]


def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    printed = run(TRAINER, tmp_path)
    assert shows(printed, TRAINER)
    emitted = int(re.search(r"done: (\d+) samples", printed)[1])
    assert rows_of(tmp_path) == every_row(emitted // 2, epochs=2)
    first, last = (float(loss) for loss in re.findall(r"'eval_loss': '?([\d.]+)", printed))
    assert last < first


@pytest.mark.parametrize(("command", "package"), [(SFT, "trl"), (LIGHTNING, "lightning")])
def test_other_trainers(command: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    printed = run(command, tmp_path)
    assert shows(printed, command)
    assert rows_of(tmp_path) == every_row(int(re.search(r"(\d+) (?:samples|rows) in", printed)[1]))


@pytest.fixture(scope="module")
def qwen_vl_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("qwen_vl")
    return folder, run(QWEN_VL, folder)


@pytest.mark.nightly
def test_qwen_vl(qwen_vl_run: tuple[Path, str]) -> None:
    """I2, I4."""
    folder, printed = qwen_vl_run
    assert shows(printed, QWEN_VL)
    emitted = int(re.search(r"done: (\d+) samples", printed)[1])
    assert rows_of(folder) == every_row(emitted)
    lines = read_jsonl(folder / "odb_audit_rank0.jsonl")
    assert all(line["rows"] * line["length"] <= 4096 and line["patches"] <= 4096 for line in lines)
    assert min(line["patches"] for line in lines) > 0, "every batch runs the vision tower"


@pytest.mark.nightly
def test_qwen_vl_on_two_ranks(qwen_vl_run: tuple[Path, str], tmp_path: Path) -> None:
    """DDP without find_unused_parameters trains on groups of text rows, whose only pictures have the smallest size."""
    model, data = (str(qwen_vl_run[0] / name) for name in ("tiny_qwen3_vl", "mm_mix_data/mm_mix.json"))
    printed = run(TWO_RANKS.replace("accelerate_loop", "qwen_vl"), tmp_path, "--model", model, "--data", data)
    emitted = int(re.search(r"done: (\d+) samples", printed)[1])
    assert rows_of(tmp_path) == every_row(emitted)
    lines = [line for rank in range(2) for line in read_jsonl(tmp_path / f"odb_audit_rank{rank}.jsonl")]
    assert any(line["patches"] == 4 * line["rows"] for line in lines)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grpo_in_micro_batches_has_the_loss_and_gradient_of_the_batch(tmp_path: Path) -> None:
    """For each of TRL's ways to take the mean, with answers of different lengths and a masked answer."""
    pytest.importorskip("trl")
    trl_grpo = load("trl_grpo")
    trainer = trl_grpo.make(None, tmp_path, max_steps=1)
    trainer.token_budget = 200
    model, batch = trainer.model, trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    batch["completion_mask"] = torch.tril(torch.ones(24, 24, dtype=torch.long))[torch.arange(16) * 3 % 24]
    batch["completion_mask"][5] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    trainer.current_gradient_accumulation_steps = 1
    for trainer.loss_type in ("grpo", "dr_grpo", "bnpo", "dapo"):
        results = []
        for parts in ([(batch, 1.0)], trainer.micro_batches(batch)):
            model.zero_grad()
            total = 0.0
            for part, weight in parts:
                loss = trainer._compute_loss(model, part) * weight
                loss.backward()
                total += loss.item()
            results.append((total, torch.cat([weight.grad.flatten() for weight in model.parameters()])))
        assert len(parts) > 3 and results[0][1].norm() > 0
        assert results[1][0] == pytest.approx(results[0][0], abs=1e-6)
        assert (results[1][1] - results[0][1]).norm() < 1e-5 * results[0][1].norm()


@pytest.mark.nightly
def test_grpo_trains(tmp_path: Path) -> None:
    """Losses and gradient norms equal those of TRL's own step."""
    pytest.importorskip("trl")
    steps = [re.findall(r"^step .*$", run(GRPO, tmp_path, *more), re.MULTILINE) for more in ([], ["--unsplit"])]
    figures = [[float(number) for line in lines for number in re.findall(r"\d\.\d+", line)] for lines in steps]
    assert len(steps[0]) == 4 and figures[0] == pytest.approx(figures[1], abs=2e-5)
