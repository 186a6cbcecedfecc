"""Seconds to the first step: stock LLaMA-Factory against odb, as the number of rows grows.

Writes raw alpaca rows (JSON), then runs LLaMA-Factory's own `train` on a tiny random Qwen2 until its first step, each
run with an empty cache: stock, which converts and preprocesses all rows first; stock with `streaming: true`, which
fills a shuffle buffer; and odb. Three phases: start-up (imports, arguments, tokenizer), reading the raw file
(`datasets.load_dataset` alone, inside the run), and the rest: preprocessing before the first step, and the model.

    python examples/benchmark/start.py            # about six minutes on two cores
    python examples/benchmark/start.py --rows 1000 10000 --repeats 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import page

CUTOFF_LEN, BATCH_SIZE = 1024, 4
CONFIG = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "template": "qwen",
    "dataset": "rows",
    "cutoff_len": CUTOFF_LEN,
    "max_steps": 1,
    "dataloader_num_workers": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "per_device_train_batch_size": BATCH_SIZE,
}
RUNS: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock, streaming": {"streaming": True},
    "odb": {"odb": {"token_budget": BATCH_SIZE * CUTOFF_LEN}},
}
CHILD = "--recorded"

Start = dict[str, Any]
"""rows, name, file_mb (10^6 bytes), and seconds: first_step (from the start of the process to the begin of the first
training step) and its phases start_up, reading and rest."""


def write_rows(folder: Path, count: int) -> Path:
    """Alpaca rows of real text; words of an answer lognormal around 80, of a question around 15."""
    rng, words = np.random.default_rng(count), " ".join(topics.values()).split()

    def texts(median: int, longest: int) -> list[str]:
        lengths = np.clip(rng.lognormal(np.log(median), 0.9, count), 2, longest).astype(int)
        starts = rng.integers(0, len(words) - longest, count)
        return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths)]

    pairs, path = zip(texts(15, 100), texts(80, 900)), folder / "rows.json"
    rows = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    path.write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": path.name}}), encoding="utf-8")
    return path


def start(model: Path, data: Path, rows: int, name: str, output: Path) -> Start:
    """Run the command line in a process of its own until it has taken one step. Raises `ODBError` if it fails."""
    from runs import train

    marks = output / "marks.json"
    paths = {"model_name_or_path": str(model), "dataset_dir": str(data.parent), "output_dir": str(output)}
    run = train(CONFIG | paths | RUNS[name], recorder=(__file__, CHILD, str(marks)))
    times = json.loads(marks.read_text(encoding="utf-8"))
    reading, start_up = times["load_dataset"][1] - times["load_dataset"][0], times["get_dataset"][0] - run.started
    first_step = run.seconds_to_first_step
    phases = {"start_up": start_up, "reading": reading, "rest": first_step - start_up - reading}
    return {"rows": rows, "name": name, "file_mb": data.stat().st_size / 1e6, "first_step": first_step} | phases


def recorded(marks: Path, arguments: Sequence[str]) -> None:
    """In the run: be the command line, and record when the data begin and when their file is read."""
    import recorder
    from llamafactory.data import loader
    from llamafactory.train.sft import workflow

    times: dict[str, tuple[float, float]] = {}

    def time_calls(module: Any, name: str) -> None:
        function = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            result = function(*args, **kwargs)
            times[name] = began, time.time()
            marks.write_text(json.dumps(times), encoding="utf-8")
            return result

        setattr(module, name, timed)

    time_calls(workflow, "get_dataset")
    time_calls(loader, "load_dataset")
    sys.argv = [sys.argv[0], *arguments]
    recorder.main()


def table(starts: Sequence[Start]) -> str:
    """The first to begin of each number of rows in bold."""
    stock = {run["rows"]: run["first_step"] for run in starts if run["name"] == "stock"}
    rows = []
    for run in starts:
        size, against = f"{run['rows']:,} ({run['file_mb']:.1f} MB)", ""
        if run["name"] != "stock" and run["rows"] in stock:
            ratio = stock[run["rows"]] / run["first_step"]
            against = f"{ratio:.1f} x sooner" if ratio >= 1 else f"{1 / ratio:.1f} x later"
        first = min(other["first_step"] for other in starts if other["rows"] == run["rows"])
        bold = "**" if run["first_step"] == first else ""
        phases = (f"{run[key]:.1f} s" for key in ("start_up", "reading", "rest"))
        rows.append([size, run["name"], f"{bold}{run['first_step']:.1f} s{bold}", *phases, against])
    heads = ["rows", "", "to the first step", "start-up", "reading the file", "the rest", "against stock"]
    return page.table(heads, rows, num_text=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3, help="of each run; the table has the median one")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_start"), help="(%(default)s)")
    given = parser.parse_args()
    from odb_factory.cli.tiny_model import build_tiny_qwen2

    starts: list[Start] = []
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            model, data = build_tiny_qwen2(Path(folder, "model")), write_rows(Path(folder), rows)
            runs: dict[str, list[Start]] = {name: [] for name in given.runs}
            for repeat, name in itertools.product(range(given.repeats), given.runs):
                runs[name].append(start(model, data, rows, name, Path(folder, f"{name} {repeat}")))
                print(f"{rows:,} rows, {name}: {runs[name][-1]['first_step']:.1f} s", file=sys.stderr)
            starts += [sorted(same, key=lambda run: run["first_step"])[len(same) // 2] for same in runs.values()]
    page.write(given.output_dir, starts, [table(starts)])


if __name__ == "__main__":
    recorded(Path(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == [CHILD] else main()
