"""`odb-factory demo`: fixed batches, length-grouped batches and odb on the same data, side by side.

Makes a tiny random Qwen3-VL and the built-in MM-Mix, runs LLaMA-Factory's own training on them
three times at equal epochs and equal peak of padded tokens, and shows what came of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_factory.demo.runs import Batch, Run, grouping_by_length, padded_tokens, sft_config, train
from odb_factory.errors import ODBError

CUTOFF_LEN = 2048
TOKEN_BUDGET = 2 * (CUTOFF_LEN + 8)
"""The peak of fixed batches of two: rows of CUTOFF_LEN tokens and the 8 of a fake image in a text-only batch."""


@dataclass(frozen=True)
class Result:
    """What one training came to. Rates count from the begin of the first step to the end of the last."""

    name: str
    samples_per_second: float
    tokens_per_second: float
    padding: float
    steps: int
    peak_padded_tokens: int
    seconds_to_first_step: float
    train_loss: float
    validation_loss: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="odb-factory demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("odb_demo"), help="folder for models, data and results")
    parser.add_argument("--short", action="store_true", help="a fifth of the data, to see that everything works")
    arguments = parser.parse_args(argv)
    folder = arguments.output.resolve()

    from rich.console import Console

    console = Console()
    console.print("[bold]1/3[/] tiny random Qwen3-VL and the built-in MM-Mix (OCR, questions about pictures, captions)")
    model, data, num_samples = _prepare(folder, 120 if arguments.short else 600)
    console.print(f"[bold]2/3[/] LLaMA-Factory trains {num_samples} samples for one epoch, three times")
    runs = {
        "fixed": {"per_device_train_batch_size": TOKEN_BUDGET // CUTOFF_LEN},
        "length-grouped": {"per_device_train_batch_size": TOKEN_BUDGET // CUTOFF_LEN} | grouping_by_length(),
        "odb": {"per_device_train_batch_size": 1, "odb": {"token_budget": TOKEN_BUDGET, "buffer_size": 256}},
    }
    results, batches = [], {}
    for name, changes in runs.items():
        config = sft_config(
            model, data, folder / name, dataset="mm_mix", template="qwen3_vl_nothink", cutoff_len=CUTOFF_LEN
        )
        run = _train(config | changes, num_samples, console, name)
        results.append(_result(name, run))
        (batches[name],) = run.batches
    console.print("[bold]3/3[/] results")
    console.print(_table(results))
    console.print(
        "Equal epochs, equal peak of padded tokens, equal learning rate. Fewer and larger optimizer steps get less far "
        "from random weights; on a CPU a full step costs what its tokens cost, so only padding shows in the speed."
    )
    (folder / "demo.json").write_text(json.dumps([asdict(result) for result in results], indent=2), encoding="utf-8")
    from odb_factory.demo.figure import draw_batches

    draw_batches(batches, TOKEN_BUDGET, folder / "demo.png")
    console.print(f"The batches as they were: {folder / 'demo.png'}; the figures: {folder / 'demo.json'}")
    return 0


def _prepare(folder: Path, samples: int) -> tuple[Path, Path, int]:
    from odb_factory.demo.mm_mix_builtin import build_builtin_mix
    from odb_factory.demo.tiny_model import build_tiny_qwen3_vl

    model = build_tiny_qwen3_vl(folder / "tiny_qwen3_vl")
    data = folder / "mm_mix_data"
    build_builtin_mix(data, samples=samples)
    return model, data, len(json.loads((data / "mm_mix.json").read_text(encoding="utf-8")))


def _train(config: dict[str, Any], num_samples: int, console: Any, name: str) -> Run:
    """With a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    label = TextColumn(f"    {name:<15}")
    columns = (label, BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=num_samples)

        def watch(batches: list[Batch]) -> None:
            progress.update(bar, completed=sum(len(batch["lengths"]) for batch in batches))

        try:
            run = train(config, watch=watch)
        except ODBError as error:
            raise ODBError(f"{name}: {error}") from error
        watch(run.batches[0])
    return run


def _result(name: str, run: Run) -> Result:
    (batches,), history = run.batches, run.history()
    padded = [padded_tokens(batch) for batch in batches]
    real = sum(sum(batch["lengths"]) for batch in batches)
    return Result(
        name=name,
        samples_per_second=sum(len(batch["lengths"]) for batch in batches) / run.seconds,
        tokens_per_second=real / run.seconds,
        padding=1 - real / sum(padded),
        steps=len(batches),
        peak_padded_tokens=max(padded),
        seconds_to_first_step=run.seconds_to_first_step,
        train_loss=[entry["loss"] for entry in history if "loss" in entry][-1],
        validation_loss=[entry["eval_loss"] for entry in history if "eval_loss" in entry][-1],
    )


def _table(results: list[Result]) -> Any:
    from rich.table import Table

    table = Table()
    rows: dict[str, Any] = {
        "samples/s": lambda result: f"{result.samples_per_second:.1f}",
        "real tokens/s": lambda result: f"{result.tokens_per_second:,.0f}",
        "padding": lambda result: f"{result.padding:.1%}",
        "steps": lambda result: str(result.steps),
        "peak padded tokens": lambda result: f"{result.peak_padded_tokens:,}",
        "seconds to first step": lambda result: f"{result.seconds_to_first_step:.1f}",
        "final training loss": lambda result: f"{result.train_loss:.3f}",
        "validation loss": lambda result: f"{result.validation_loss:.3f}",
    }
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    for label, show in rows.items():
        table.add_row(label, *(show(result) for result in results))
    return table
