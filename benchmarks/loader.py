"""Compare odb's loader with a torch DataLoader that has as many workers, and measure the overhead in the Trainer.

    python benchmarks/loader.py                              # about ten minutes on two idle cores
    python benchmarks/loader.py --parts text pictures --workers 4
    python benchmarks/loader.py --short                      # checks that everything runs

Each measurement runs in a separate process; in each round, all contestants run in turn. The table has medians over the
rounds, and ratios are medians of the ratios within a round. Text: rows as lists of token ids. Pictures: image files for
Qwen-VL's image processor. Light rows: two tokens each, so that only the loader's own work is measured.

samples/s     over an epoch, with a consumer that takes no time
CPU           milliseconds per sample, of the training process alone, and including its workers
first batch   seconds from creating the loader to its first batch
resume        seconds from creating a loader to its first batch, with the state after 90 % of the epoch
processes     processes of the loader, in addition to the training process
Trainer       CPU milliseconds of the main thread per micro-batch outside the model's forward and backward, between an
              optimizer step's begin and its update; plain: the Trainer without odb
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from shared import show
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from odb_factory import ODBDataLoader, enable_odb, pop_step_info

BATCH_SIZE, ACCUMULATION = 8, 8
"""Rows per plain batch, and plain batches per optimizer step."""
VOCABULARY = IMAGE_TOKEN = 32_000
PATCH_SIZE, MERGE_SIZE = 16, 2
"""Pixels along the edge of a patch, and patches along the edge of an image token."""
FILLERS = {"input_ids": 0, "attention_mask": 0, "labels": -100}
CONTESTANTS = ("plain", "keep", "fill")
Item = dict[str, Any]

# ----------------------------------------------------------------------------------------------------------------------
# The rows and their collator.


class Text(Dataset):
    """Tokenized rows with lognormal lengths; the first third of a row is not supervised."""

    def __init__(self, num_rows: int, median: float = 200, longest: int = 2048, vocabulary: int = VOCABULARY):
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(median), 0.9, num_rows), 8, longest).astype(int)
        self.ends = np.cumsum(lengths)
        self.ids = rng.integers(0, vocabulary, self.ends[-1], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Item:
        return self.row(index)

    def row(self, index: int, image_tokens: int = 0) -> Item:
        start = self.ends[index - 1] if index else 0
        ids = [IMAGE_TOKEN] * image_tokens + self.ids[start : self.ends[index]].tolist()
        prompt = image_tokens + (len(ids) - image_tokens) // 3
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * prompt + ids[prompt:]}


class Pictures(Text):
    """Rows with a picture and some text. A row has the path of its picture; the collator makes the pixels."""

    def __init__(self, num_rows: int, folder: Path, num_files: int = 64):
        super().__init__(num_rows, median=50, longest=512)
        rng = np.random.default_rng(1)
        self.files = [folder / f"{k}.{'jpg' if k % 2 else 'png'}" for k in range(num_files)]
        for path in self.files:
            size = tuple(int(edge) for edge in rng.integers(128, 448, 2))
            Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize(size).save(path)
        self.processor = image_processor()

    def __getitem__(self, index: int) -> Item:
        path = self.files[index % len(self.files)]
        with Image.open(path) as picture:  # reads only the header
            width, height = picture.size
        patches = self.processor.get_number_of_image_patches(height, width, {})
        return self.row(index, patches // MERGE_SIZE**2) | {"image": str(path), "odb_n_patches": patches}


class LightRows(Dataset):
    """Rows of two tokens."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Item:
        ids = [index % VOCABULARY, 1]
        return {"input_ids": ids, "attention_mask": [1, 1], "labels": ids}


def image_processor() -> Any:
    from transformers import Qwen2VLImageProcessor

    sizes = {"shortest_edge": 64 * 64, "longest_edge": 384 * 384}
    return Qwen2VLImageProcessor(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, size=sizes)


class Collator:
    """Pad the rows, and make the pixels of their pictures."""

    def __init__(self, rows: Dataset):
        self.processor = getattr(rows, "processor", None)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Item:
        batch = {
            key: pad_sequence([torch.as_tensor(item[key]) for item in items], batch_first=True, padding_value=filler)
            for key, filler in FILLERS.items()
        }
        if self.processor is not None:
            pictures = [Image.open(item["image"]).convert("RGB") for item in items]
            made = self.processor(images=pictures, return_tensors="pt")
            batch |= {key: made[key] for key in ("pixel_values", "image_grid_thw")}
        return batch


# ----------------------------------------------------------------------------------------------------------------------
# The measurements; each runs in a separate process.


@dataclass(frozen=True)
class Work:
    """rows: the dataset. name: contestant. step_samples: samples per optimizer step."""

    rows: Any
    name: str
    workers: int
    token_budget: int
    layout: str = "padded"
    step_samples: int = BATCH_SIZE * ACCUMULATION

    def loader(self) -> Any:
        """The loader, as a context manager."""
        common = {"num_workers": self.workers, "collate_fn": Collator(self.rows), "shuffle": True}
        if self.name == "plain":
            return nullcontext(DataLoader(self.rows, batch_size=BATCH_SIZE, **common))
        global_batch_size = "fill" if self.name == "fill" else self.step_samples
        options = {"layout": self.layout, "global_batch_size": global_batch_size}
        return ODBDataLoader(self.rows, token_budget=self.token_budget, **options, **common)


def epoch_of(loader: Any) -> Iterator[int]:
    """Yield the number of samples of each batch of an epoch."""
    for batch in loader:
        yield pop_step_info(batch).samples if isinstance(loader, ODBDataLoader) else len(batch["input_ids"])


def epoch(work: Work) -> dict[str, float]:
    mine, all_of_us = cpu_s(), cpu_s(workers=True)
    started, first, samples = time.perf_counter(), 0.0, 0
    with work.loader() as loader:
        for number in epoch_of(loader):
            first = first or time.perf_counter() - started
            samples += number
            if samples == number:
                processes = len(psutil.Process().children(recursive=True))
        seconds = time.perf_counter() - started
    if samples != len(work.rows):
        raise RuntimeError(f"{work.name} gave {samples} samples of {len(work.rows)}")
    row = {"samples_per_s": samples / seconds, "cpu_ms": 1e3 * (cpu_s() - mine) / samples}
    row["all_cpu_ms"] = 1e3 * (cpu_s(workers=True) - all_of_us) / samples
    return row | {"first_batch_s": first, "processes": processes}


def cpu_s(*, workers: bool = False) -> float:
    """CPU seconds of this process. workers: include its workers that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)[: 1 + workers]
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, who))


def start(work: Work) -> dict[str, float]:
    started = time.perf_counter()
    with work.loader() as loader:
        next(epoch_of(loader))
        return {"first_batch_s": time.perf_counter() - started}


def resume(work: Work) -> dict[str, float]:
    """Time a resume with the state of another loader that has yielded 90 % of the epoch."""
    samples = 0
    with work.loader() as loader:
        for number in epoch_of(loader):
            samples += number
            if samples >= 0.9 * len(work.rows):
                break
        state = loader.state_dict()
    started = time.perf_counter()
    with work.loader() as loader:
        loader.load_state_dict(state)
        next(epoch_of(loader))
        return {"resume_s": time.perf_counter() - started}


TINY = {"vocab_size": 512, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


def trainer(work: Work) -> dict[str, float]:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model, seconds = Qwen3ForCausalLM(Qwen3Config(**TINY)), list[float]()

    def start(*_: Any, **__: Any) -> None:
        seconds.append(-time.thread_time())

    def stop(*_: Any, **__: Any) -> None:
        seconds.append(time.thread_time())

    class Clock(TrainerCallback):
        on_step_begin, on_pre_optimizer_step = start, stop

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # what odb tries before is not counted
            model.register_forward_pre_hook(stop, prepend=True)
            model.register_forward_hook(start)
            backward = training.accelerator.backward
            training.accelerator.backward = lambda loss, **more: (stop(), backward(loss, **more), start())

    with tempfile.TemporaryDirectory() as folder:
        batch = {"per_device_train_batch_size": BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION}
        options = {"max_grad_norm": 0, "num_train_epochs": 1, "dataloader_num_workers": work.workers, "use_cpu": True}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
        arguments = TrainingArguments(folder, **batch, **options, **quiet)
        parts = {"train_dataset": work.rows, "data_collator": Collator(work.rows), "callbacks": [Clock()]}
        training = Trainer(model, arguments, **parts)
        if work.name == "keep":
            enable_odb(training, token_budget=work.token_budget, layout=work.layout)
        training.train()
    # An optimizer step starts and stops once more than its micro-batches, each of which does so twice.
    return {"overhead_ms": 1e3 * sum(seconds) / (len(seconds) / 4 - training.state.global_step / 2)}


def alone(function: Any, *arguments: Any) -> dict[str, float]:
    """Call `function` in a separate process, forked so that it shares the rows."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(function, *arguments).result()


def rounds(function: Any, work: Work, names: Sequence[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Figures of each contestant, one entry per round."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(repeats):
        for name in names:
            runs[name].append(alone(function, replace(work, name=name)))
            print(f"{function.__name__}, round {number + 1}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return runs


# ----------------------------------------------------------------------------------------------------------------------

COLUMNS = {
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "cpu_ms": ("CPU of the training process, ms", "{:.3f}"),
    "all_cpu_ms": ("CPU with workers, ms", "{:.3f}"),
    "first_batch_s": ("first batch, s", "{:.2f}"),
    "resume_s": ("resume at 90 %, s", "{:.2f}"),
    "processes": ("processes", "{:.0f}"),
    "overhead_ms": ("a micro-batch outside the model, ms", "{:.2f}"),
}


def rows_of_table(part: str, runs: dict[str, list[dict[str, float]]]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Cells and figures of the table, with a row for each measure."""
    cells, figures = [], []
    for key, (label, form) in COLUMNS.items():
        if key not in next(iter(runs["keep"])):
            continue
        row: dict[str, Any] = {"part": part, "measure": key}
        for name, mine in runs.items():
            row[name] = statistics.median(one[key] for one in mine)
        if "plain" in runs:
            for name in runs.keys() - {"plain"}:
                ratios = [own[key] / max(plain[key], 1e-9) for own, plain in zip(runs[name], runs["plain"])]
                row[f"{name} / plain"] = statistics.median(ratios)
        shown = [form.format(row[name]) if name in row else "-" for name in CONTESTANTS]
        shown += [f"{row[name]:.2f}" if name in row else "-" for name in ("keep / plain", "fill / plain")]
        cells.append([f"{part}: {label}", *shown])
        figures.append(row)
    return cells, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("text", "pictures", "start", "resume", "trainer")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--workers", type=int, default=2, help="num_workers of every loader (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--layout", choices=("padded", "flat"), default="padded")
    parser.add_argument("--text-rows", type=int, default=12_000)
    parser.add_argument("--picture-rows", type=int, default=1_500)
    parser.add_argument("--light-rows", type=int, default=1_000_000, help="of start and resume (%(default)s)")
    parser.add_argument("--short", action="store_true", help="one round of few rows: checks that everything runs")
    parser.add_argument("--json", type=Path, help="write one line of JSON for each row of the table")
    arguments = parser.parse_args()
    if arguments.short:
        vars(arguments).update(repeats=1, text_rows=400, picture_rows=60, light_rows=4_000)
    torch.set_num_threads(1)
    cells, figures = [], []

    def measure(part: str, function: Any, work: Work, names: Sequence[str], repeats: int) -> None:
        shown, found = rows_of_table(part, rounds(function, work, names, repeats))
        cells.extend(shown)
        figures.extend(found)

    with tempfile.TemporaryDirectory() as folder:
        common = {"name": "", "workers": arguments.workers, "layout": arguments.layout}
        if "text" in arguments.parts:
            text = Work(Text(arguments.text_rows), token_budget=BATCH_SIZE * 1024, **common)
            measure("text", epoch, text, CONTESTANTS, arguments.repeats)
        if "pictures" in arguments.parts:
            pictures = Work(Pictures(arguments.picture_rows, Path(folder)), token_budget=BATCH_SIZE * 256, **common)
            measure("pictures", epoch, pictures, CONTESTANTS, arguments.repeats)
        light = Work(LightRows(arguments.light_rows), token_budget=8192, **common)
        size = f"{arguments.light_rows:,} light rows"
        if "start" in arguments.parts:
            measure(size, start, light, CONTESTANTS, arguments.repeats)
        if "resume" in arguments.parts:
            few_steps = replace(light, step_samples=max(64, arguments.light_rows // 250))
            measure(size, resume, few_steps, ("keep", "fill"), 1)
        if "trainer" in arguments.parts:
            short = Text(arguments.text_rows // 10, median=80, longest=256, vocabulary=TINY["vocab_size"])
            measure("Trainer", trainer, Work(short, token_budget=512, **common), ("plain", "keep"), arguments.repeats)
    heads = [f"{arguments.workers} workers", *CONTESTANTS, "keep / plain", "fill / plain"]
    show(heads, cells, arguments.json, figures)


if __name__ == "__main__":
    main()
