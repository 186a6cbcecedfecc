"""Seconds to the first step: stock LLaMA-Factory against odb, as the number of rows grows.

Writes raw alpaca rows (JSON), then runs LLaMA-Factory's own `train` on a tiny random Qwen2 until its first step, each
run with an empty cache: stock, which converts and preprocesses all rows first; stock with `streaming: true`, which
fills a shuffle buffer; and odb, which fills a window (1,024 samples). Three stretches of time are told apart: the
start-up (imports, arguments, tokenizer), reading the raw file (`datasets.load_dataset` alone, inside the run), and the
rest: what is done to the rows before the first step, and loading the model. Prints a Markdown table.

    python examples/benchmark/start.py            # about six minutes on two cores
    python examples/benchmark/start.py --rows 1000 10000 --repeats 1 --output-dir results
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

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
}
RUNS: dict[str, dict[str, Any]] = {
    "stock": {"per_device_train_batch_size": BATCH_SIZE},
    "stock, streaming": {"per_device_train_batch_size": BATCH_SIZE, "streaming": True},
    "odb": {"per_device_train_batch_size": 1, "odb": {"token_budget": BATCH_SIZE * CUTOFF_LEN}},
}
CHILD = "--recorded"


@dataclass(frozen=True)
class Start:
    """One run. Seconds; `first_step` is from the start of the process to the begin of its first training step.

    start_up: until LLaMA-Factory begins with the data. reading: the raw file. file_mb: its size (10^6 bytes).
    """

    rows: int
    name: str
    file_mb: float
    first_step: float
    start_up: float
    reading: float

    @property
    def rest(self) -> float:
        return self.first_step - self.start_up - self.reading


def write_rows(folder: Path, count: int) -> Path:
    """Alpaca rows of real text; words of an answer lognormal around 80, of a question around 15."""
    rng, words = np.random.default_rng(count), " ".join(topics.values()).split()

    def texts(median: int, longest: int) -> list[str]:
        lengths = np.clip(rng.lognormal(np.log(median), 0.9, count), 2, longest).astype(int)
        starts = rng.integers(0, len(words) - longest, count)
        return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths)]

    asked, path = zip(texts(15, 100), texts(80, 900)), folder / "rows.json"
    rows = [{"instruction": question, "input": "", "output": answer} for question, answer in asked]
    path.write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": path.name}}), encoding="utf-8")
    return path


def start(model: Path, data: Path, rows: int, name: str, output: Path) -> Start:
    """Run the command line in a process of its own until it has taken one step. Raises `ODBError` if it fails."""
    from odb_factory.demo.demo import train

    marks = output / "marks.json"
    paths = {"model_name_or_path": str(model), "dataset_dir": str(data.parent), "output_dir": str(output)}
    run = train(CONFIG | paths | RUNS[name], recorder=(__file__, CHILD, str(marks)))
    times = json.loads(marks.read_text(encoding="utf-8"))
    began, ended_reading = times["load_dataset"]
    start_up = times["get_dataset"][0] - run.started
    return Start(rows, name, data.stat().st_size / 1e6, run.seconds_to_first_step, start_up, ended_reading - began)


def recorded(marks: Path, arguments: Sequence[str]) -> None:
    """In the run: be the command line, and write down when the data are begun and when their file is read."""
    from llamafactory.data import loader
    from llamafactory.train.sft import workflow

    from odb_factory.demo import recorder

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


def table(starts: list[Start]) -> str:
    lines = ["| rows | | to the first step | start-up | reading the file | the rest | against stock |"]
    lines.append("|--:|---|--:|--:|--:|--:|---|")
    stock: dict[int, float] = {run.rows: run.first_step for run in starts if run.name == "stock"}
    for run in starts:
        size = f"{run.rows:,} ({run.file_mb:.1f} MB)" if run.name == "stock" else ""
        ratio = stock[run.rows] / run.first_step
        against = "" if run.name == "stock" else f"{ratio:.1f} x sooner" if ratio >= 1 else f"{1 / ratio:.1f} x later"
        bold = "**" if run.first_step == min(other.first_step for other in starts if other.rows == run.rows) else ""
        parts = f"{bold}{run.first_step:.1f} s{bold} | {run.start_up:.1f} s | {run.reading:.1f} s | {run.rest:.1f} s"
        lines.append(f"| {size} | {run.name} | {parts} | {against} |")
    return "\n".join(lines)


def draw(starts: list[Start], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.5 * len(starts) + 1.2), layout="constrained")
    labels, left = [f"{run.rows:,} rows, {run.name}" for run in starts], np.zeros(len(starts))
    for key, colour in (("start_up", "#bbbbbb"), ("reading", "#e9c46a"), ("rest", "#2a6f97")):
        seconds = np.array([getattr(run, key) for run in starts])
        axes.barh(labels, seconds, left=left, color=colour, label=key.replace("_", "-"))
        left += seconds
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first step")
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> list[Start]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3, help="of each run; the one in the middle is shown")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--output-dir", type=Path, default=Path("start_benchmark"), help="for start.json and start.png")
    given = parser.parse_args(argv)
    from odb_factory.demo.tiny_model import build_tiny_qwen2

    starts = []
    for rows in given.rows:
        with tempfile.TemporaryDirectory() as folder:
            model, data = build_tiny_qwen2(Path(folder, "model")), write_rows(Path(folder), rows)
            runs: dict[str, list[Start]] = {name: [] for name in given.runs}
            for repeat, name in itertools.product(range(given.repeats), given.runs):
                runs[name].append(start(model, data, rows, name, Path(folder, f"{name} {repeat}")))
                print(f"{rows:,} rows, {name}: {runs[name][-1].first_step:.1f} s", file=sys.stderr)
            starts += [sorted(of_one, key=lambda run: run.first_step)[len(of_one) // 2] for of_one in runs.values()]
    given.output_dir.mkdir(parents=True, exist_ok=True)
    figures = [asdict(run) | {"rest": run.rest} for run in starts]
    (given.output_dir / "start.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    draw(starts, given.output_dir / "start.png")
    print(table(starts))
    return starts


if __name__ == "__main__":
    recorded(Path(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == [CHILD] else main()
