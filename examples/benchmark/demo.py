"""`odb-factory demo` as a part of the page: its table and its picture.

One training of each contestant, on two processes.

    python examples/benchmark/demo.py --output-dir saves/benchmark_demo
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from odb_factory.demo import demo

SHOWN = {"fixed": "fixed batches", "length-grouped": "length-grouped", "odb": "odb"}
LEFT_OUT = ("samples/s", "real tokens/s", "seconds to first step")
"""Rows of the command's own table that say again what others say."""


def table(results: Sequence[dict[str, Any]]) -> str:
    """In Markdown, a column for each contestant that keeps the number of samples of an optimizer step."""
    shown = [demo.Result(**run) for run in results if run["name"] in SHOWN]
    lines = [f"| | {' | '.join(SHOWN[run.name] for run in shown)} |", f"|---|{'--:|' * len(shown)}"]
    for label, text in demo.ROW_TEXTS.items():
        if label not in LEFT_OUT:
            lines.append(f"| {label} | {' | '.join(map(text, shown))} |")
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
