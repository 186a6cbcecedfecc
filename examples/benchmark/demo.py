"""`odb-factory demo` as a part of the page: its table and its picture.

One training of each contestant, on two processes.

    python examples/benchmark/demo.py --output-dir saves/benchmark_demo
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from odb_factory.demo import demo

SHOWN = {"fixed": "fixed batches", "length-grouped": "length-grouped", "odb": "odb"}
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "optimizer steps": lambda run: f"{run['optimizer_steps']}",
    "final training loss": lambda run: f"{run['train_loss']:.4f}",
    "validation loss": lambda run: f"{run['validation_loss']:.4f}",
    "seconds of training": lambda run: f"{run['seconds']:.1f}",
    "CPU seconds of a rank": lambda run: f"{run['cpu_seconds']:.1f}",
    "padding": lambda run: f"{run['padding']:.1%}",
    "micro-steps": lambda run: f"{run['micro_steps']}",
    "peak tokens of a micro-batch": lambda run: f"{run['peak_padded_tokens']:,}",
}


def table(results: Sequence[dict[str, Any]]) -> str:
    """In Markdown, a column for each contestant that keeps the number of samples of an optimizer step."""
    shown = [run for run in results if run["name"] in SHOWN]
    lines = [f"| | {' | '.join(SHOWN[run['name']] for run in shown)} |", f"|---|{'--:|' * len(shown)}"]
    lines += [f"| {label} | {' | '.join(show(run) for run in shown)} |" for label, show in ROWS.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_demo"), help="(%(default)s)")
    folder = parser.parse_args().output_dir
    with contextlib.redirect_stdout(sys.stderr):
        code = demo.main(["--output", str(folder)])
    if code:
        sys.exit(code)
    print(table(json.loads((folder / "demo.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
