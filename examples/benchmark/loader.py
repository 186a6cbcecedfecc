"""How fast the loader alone is: odb_factory, a plain torch DataLoader and the package `online-dynamic-batching`.

All take the same rows, in the same run: text (lists of token ids) and pictures (files, through Qwen-VL's image
processor). Each has processes of its own and is measured in turn with the others, several times; the table has medians.

    python examples/benchmark/loader.py           # about nine minutes on two cores
    python examples/benchmark/loader.py --short

samples/s, tokens/s: of an epoch for a consumer that takes no time, from the making of the loader to the last batch.
first batch: seconds from the making of the loader.
blocked: share of the time after the first batch that a consumer spends in `next()`, if it takes 1.25 times as long for
    the samples of a batch as the loader took in the run before: workers can keep up with it. It sleeps, as a training
    process that waits for its accelerator does.
CPU: milliseconds of processor time a sample, in the training process and all workers.
memory: peak in that second run, proportional set size of the training process and all workers, with tensors in
    transit from one to another (MiB).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import page
import psutil
import torch
from PIL import Image
from rivals import make_processes
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2VLImageProcessor

from odb_factory import ODBDataLoader, pop_step_info

SLOWER = 1.25
PUBLISHED = "online-dynamic-batching"
BATCH_SIZE = 8
"""Of the plain DataLoader; the online loaders have a token budget of about what its largest batches take."""
WATCH_S = 0.5
"""Interval of looks at the memory; it takes the time of the consumer, not of the loader."""
Item = dict[str, Any]
FILLERS = {"input_ids": 0, "attention_mask": 0, "labels": -100}
PIXEL_KEYS = ("pixel_values", "image_grid_thw")
VOCABULARY = IMAGE_TOKEN = 32000
PATCH_SIZE, MERGE_SIZE = 16, 2
"""Pixels of a patch's edge, patches of an image token's edge."""
PICTURE_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 384 * 384}

# ----------------------------------------------------------------------------------------------------------------------
# The rows and their collator.


class TextRows(Dataset):
    """Rows as a tokenizer gives them: lists of ints, lengths lognormal, the first third not supervised."""

    def __init__(self, num_rows: int, *, median: float, longest: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(median), 0.9, num_rows), 8, longest).astype(int)
        self.ends = np.cumsum(lengths)
        self.ids = rng.integers(0, VOCABULARY, self.ends[-1], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Item:
        return self.row(index)

    def row(self, index: int, image_tokens: int = 0) -> Item:
        start = self.ends[index - 1] if index else 0
        ids = [IMAGE_TOKEN] * image_tokens + self.ids[start : self.ends[index]].tolist()
        prompt = image_tokens + (len(ids) - image_tokens) // 3
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * prompt + ids[prompt:]}


class ImageRows(TextRows):
    """A picture and some text: light items, in which the picture is its path and its patches are counted."""

    def __init__(self, num_rows: int, pictures: Sequence[Path], **kwargs: Any):
        super().__init__(num_rows, **kwargs)
        self.pictures = pictures
        self.processor = make_processor()
        process(self.processor, [self[0]])  # what it imports at its first use, it imports before workers are forked

    def __getitem__(self, index: int) -> Item:
        path = self.pictures[index % len(self.pictures)]
        with Image.open(path) as picture:  # the header is read, no pixel
            width, height = picture.size
        patches = self.processor.get_number_of_image_patches(height, width, {})
        return self.row(index, patches // MERGE_SIZE**2) | {"image": str(path), "odb_n_patches": patches}


class ProcessedRows(Dataset):
    """The same rows as finished samples: every value a tensor, the pixels made."""

    def __init__(self, rows: TextRows):
        self.rows, self.processor = rows, getattr(rows, "processor", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        row = self.rows[index]
        item = {key: torch.tensor(row[key]) for key in FILLERS}
        if self.processor is not None:
            item |= process(self.processor, [row]) | {"odb_n_patches": row["odb_n_patches"]}
        return item


class Collator:
    """Pad a group; make its pixels, or put together those that its items bring."""

    def __init__(self, rows: TextRows):
        self.processor = getattr(rows, "processor", None)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Item:
        batch = {
            key: pad_sequence([torch.as_tensor(item[key]) for item in items], batch_first=True, padding_value=filler)
            for key, filler in FILLERS.items()
        }
        if "image" in items[0]:
            batch |= process(self.processor, items)
        elif "pixel_values" in items[0]:
            batch |= {key: torch.cat([item[key] for item in items]) for key in PIXEL_KEYS}
        return batch


def make_processor() -> Qwen2VLImageProcessor:
    """Qwen-VL's own, made from its configuration."""
    return Qwen2VLImageProcessor(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, size=PICTURE_PIXELS)


def process(processor: Qwen2VLImageProcessor, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Decode the pictures of `items` and make their patches: `pixel_values` [patches, values of a patch]."""
    pictures = [Image.open(item["image"]).convert("RGB") for item in items]
    made = processor(images=pictures, return_tensors="pt")
    return {key: made[key] for key in PIXEL_KEYS}


def write_pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Smooth coloured pictures of 128 to 448 pixels an edge, PNG and JPEG in turn."""
    rng = np.random.default_rng(seed)
    paths = [folder / f"{number}.{'jpg' if number % 2 else 'png'}" for number in range(count)]
    for path in paths:
        size = tuple(int(edge) for edge in rng.integers(128, 448, 2))
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize(size).save(path)
    return paths


# ----------------------------------------------------------------------------------------------------------------------
# The loaders, and what is measured while one epoch of theirs is taken.

Batches = Iterator[tuple[dict[str, torch.Tensor], int, int]]
"""What a training step takes, its samples, and their tokens without padding."""


@dataclass(frozen=True)
class Workload:
    """median, longest: tokens of the text of a row. pictures: files that its rows take in turn."""

    name: str
    num_rows: int
    median: int
    longest: int
    token_budget: int
    max_patches: int | None = None
    pictures: tuple[Path, ...] = ()

    @functools.cached_property
    def rows(self) -> TextRows:
        lengths = {"median": self.median, "longest": self.longest}
        return (
            ImageRows(self.num_rows, self.pictures, **lengths) if self.pictures else TextRows(self.num_rows, **lengths)
        )


@dataclass(frozen=True)
class Contestant:
    """workers: `num_workers` of the loader; collating: worker processes beside them. layout: of its micro-batches."""

    name: str
    run: Callable[[Workload, Contestant], Batches]
    workers: int
    collating: int = 0
    layout: str = "padded"


def plain(workload: Workload, how: Contestant) -> Batches:
    for batch in DataLoader(
        workload.rows,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=how.workers,
        collate_fn=Collator(workload.rows),
    ):
        yield _counted(batch)


def _counted(batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int, int]:
    return batch, len(batch["input_ids"]), int(batch["attention_mask"].sum())


def odb_factory(workload: Workload, how: Contestant) -> Batches:
    """Light items: a picture is its path, the collator makes its pixels."""
    with ODBDataLoader(
        workload.rows,
        token_budget=workload.token_budget,
        max_patches=workload.max_patches,
        shuffle=True,
        num_workers=how.workers,
        collate_fn=Collator(workload.rows),
        layout=how.layout,
        global_batch_size="fill",
    ) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            yield batch, info.samples, info.tokens


def published(workload: Workload, how: Contestant, *, light: bool = False) -> Batches:
    """As its README has it: items are finished samples, 64 a worker are prefetched. light: the items that ours gets."""
    import odb

    for batch in odb.ODBDataLoader(
        workload.rows if light else ProcessedRows(workload.rows),
        token_budget=workload.token_budget,
        max_patches=workload.max_patches,
        shuffle=True,
        num_workers=how.workers,
        prefetch_factor=64,
        collate_fn=Collator(workload.rows),
        loss_scaling="exact",
    ):
        odb.pop_step_info(batch, loss_scaling="exact")
        yield _counted(batch)


published_light = functools.partial(published, light=True)


def consume(how: Contestant, workload: Workload, pace: float = 0.0, watched: bool = False) -> dict[str, float]:
    """Take one epoch, `pace` seconds a sample. watched: note the peak of memory, too."""
    len(workload.rows)  # made before the clock starts
    samples = real = padded = 0
    waited = peak = looked = 0.0
    cpu, started = _cpu_s(), time.perf_counter()
    batches = how.run(workload, how)
    asked = started
    while (item := next(batches, None)) is not None:
        batch, own, tokens = item
        last = time.perf_counter()
        if samples == 0:
            first = last
        else:
            waited += last - asked
        samples, real, padded = samples + own, real + tokens, padded + batch["input_ids"].numel()
        if watched and last - looked > WATCH_S:
            peak, looked = max(peak, memory_mib()), last
        time.sleep(max(0.0, last + pace * own - time.perf_counter()))
        asked = time.perf_counter()
    if samples != workload.num_rows:
        raise RuntimeError(f"{how.name} gave {samples} samples of {workload.num_rows}")
    return {
        "seconds": last - started,
        "samples_per_second": samples / (last - started),
        "real_tokens_per_second": real / (last - started),
        "padded_tokens_per_second": padded / (last - started),
        "padding": 1 - real / padded,
        "first_batch_s": first - started,
        "blocked": waited / (asked - first),
        "cpu_ms_a_sample": (_cpu_s() - cpu) / samples * 1000,
        "peak_mib": peak,
    }


def _cpu_s() -> float:
    """Processor time of this process and those of its workers that have ended."""
    return sum(os.times()[:4])


def memory_mib() -> float:
    """Of this process and its workers: anonymous and file pages by their share in them, shared memory once.

    Tensors wait in shared memory that no process has mapped while they are on their way; whoever sent or holds them
    has a file open.
    """
    pages, shared = 0, {}
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        try:
            fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            pages += sum(int(kib) for name, kib, _ in fields if name in ("Pss_Anon:", "Pss_File:")) * 1024
            for link in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(link.path).startswith("/dev/shm/"):
                    found = link.stat()
                    shared[found.st_dev, found.st_ino] = found.st_blocks * 512
        except OSError:  # ended, or closed, in the meantime
            continue
    return (pages + sum(shared.values())) / 2**20


def contestants(workers: int) -> list[Contestant]:
    """The plain DataLoader, then those with the same `num_workers`, or as many worker processes."""
    lineup = [
        Contestant("plain DataLoader", plain, workers),
        Contestant("odb_factory", odb_factory, workers),
        Contestant("odb_factory", odb_factory, workers, layout="flat"),
    ]
    if importlib.util.find_spec("odb") is None:
        print(f"{PUBLISHED} is not installed and left out; it comes with `pip install -e .[bench]`", file=sys.stderr)
        return lineup
    for run, name in ((published, PUBLISHED), (published_light, f"{PUBLISHED}, light items")):
        lineup += [Contestant(name, run, workers - 1, 1), Contestant(name, run, workers, 1)]
    return lineup


Lineup = dict[Contestant, ProcessPoolExecutor]


def compare(lineup: Lineup, workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """One after the other in every round; medians over the rounds."""
    runs: dict[Contestant, list[dict[str, float]]] = {how: [] for how in lineup}
    for _ in range(repeats):
        for how, home in lineup.items():
            free = home.submit(consume, how, workload).result()
            pace = SLOWER * free["seconds"] / workload.num_rows
            paced = home.submit(consume, how, workload, pace, watched=True).result()
            runs[how].append(free | {key: paced[key] for key in ("blocked", "peak_mib")})
    baseline = next(iter(runs.values()))
    return [
        {"workload": workload.name, "loader": how.name, "layout": how.layout, "num_workers": how.workers}
        | {"collating": how.collating}
        | {key: statistics.median(run[key] for run in mine) for key in baseline[0]}
        | {
            "of_plain": statistics.median(
                own["samples_per_second"] / plain["samples_per_second"] for own, plain in zip(mine, baseline)
            ),
        }
        for how, mine in runs.items()
    ]


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "loader": lambda row: row["loader"],
    "layout": lambda row: row["layout"],
    "worker processes": lambda row: " + ".join(str(row[key]) for key in ("num_workers", "collating") if row[key]),
    "samples/s": lambda row: f"{row['samples_per_second']:,.0f}",
    "of plain": lambda row: f"{row['of_plain']:.2f}",
    "real tokens/s": lambda row: f"{row['real_tokens_per_second']:,.0f}",
    "padded tokens/s": lambda row: f"{row['padded_tokens_per_second']:,.0f}",
    "padding": lambda row: f"{row['padding']:.1%}",
    "first batch": lambda row: f"{row['first_batch_s']:.2f} s",
    "blocked": lambda row: f"{row['blocked']:.1%}",
    "CPU": lambda row: f"{row['cpu_ms_a_sample']:.2f} ms",
    "memory": lambda row: f"{row['peak_mib']:,.0f}",
}


def table(rows: list[dict[str, Any]]) -> str:
    head, *others = COLUMNS
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    return page.table([f"{rows[0]['workload']}: {head}", *others], cells, num_text=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the plain DataLoader, two or more")
    parser.add_argument("--short", action="store_true", help="few samples, once: shows that it runs, not how fast")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_loader"), help="(%(default)s)")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shared = stack.enter_context(make_processes(1)) if given.short else None
        lineup = {how: shared or stack.enter_context(make_processes(1)) for how in contestants(given.workers)}
        for ready in [home.submit(memory_mib) for home in lineup.values()]:  # imports done, together
            ready.result()
        pictures = tuple(write_pictures(Path(folder), 16 if given.short else 256))
        text = Workload("text", 400 if given.short else 10_000, 200, 2048, BATCH_SIZE * 2048)
        images = Workload("images", 48 if given.short else 1_024, 40, 512, BATCH_SIZE * 512, BATCH_SIZE * 576, pictures)
        for workload in (text, images):
            results.append(compare(lineup, workload, repeats=1 if given.short else 3))
    of_text, of_images = map(table, results)
    page.write(given.output_dir, [row for rows in results for row in rows], [of_text], [of_images])


if __name__ == "__main__":
    main()
