"""One CUDA device: fixed batches, length-grouped batches, the package online-dynamic-batching 0.1.2, and odb.

Qwen3-VL-2B and a text model of half a billion weights, made from their configurations with random weights, in bfloat16
with gradient checkpointing and AdamW, train one epoch of the same made-up samples under four profiles of lengths. Each
contestant trains at the largest setting whose hardest micro-batch fits the same cap of memory, found by doubling and
halving. Pixels are random and lie on the device; preprocessing is not part of it. Nothing is downloaded.

    python examples/benchmark/gpu.py                                                  # about nine minutes on an H200
    python examples/benchmark/gpu.py --models qwen3-vl-2b --profiles MM-Mix --memory-gib 40
    python examples/benchmark/gpu.py --device cpu --short                             # tiny, to see that it all works
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # batches have many shapes

import torch
from gpu_bench import Bench, Task
from gpu_contestants import CONTESTANTS, IN_TOKENS, PUBLISHED, pop_loss_scale
from gpu_models import MODELS, Batch, Collator, make_samples, num_patches, padded_tokens, training_flops
from report import COLUMNS, PADDING, SAMPLES, Column, Result, ahead_of_odb, draw, markdown, whole
from simulation import WORKLOADS

VALIDATION_SAMPLES = 32
SHORT_TOKEN_CAP = 2048
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16, by the name of the device."""

OF_LIMIT = Column("of_limit", "of padding-free limit", "{:.0%}".format, "most")
GPU_COLUMNS = (
    Column("setting", "rows or token_budget", whole),
    *(column for column in COLUMNS if column.key != "balance"),
    Column("mfu", "MFU", "{:.1%}".format, "most"),
    OF_LIMIT,
)


class DoesNotFit(Exception):
    """Even the smallest setting is above the cap."""


def hardest(name: str, task: Task, setting: int) -> list[Batch]:
    """Of a whole epoch of this contestant, the micro-batches of most padded tokens and of most patches."""
    found: list[Batch] = []
    with CONTESTANTS[name](task.samples, setting, task.collate, 0) as loader:
        for batch in loader:
            pop_loss_scale(name, batch)
            found = [max([*found[:1], batch], key=padded_tokens), max([*found[1:], batch], key=num_patches)]
    return found


def largest_setting(name: str, bench: Bench, task: Task) -> tuple[int, Batch]:
    """Rows, or tokens to a sixteenth; and the micro-batch of most padded tokens they lead to."""
    longest = max(len(sample["input_ids"]) for sample in task.samples)
    low, high = 0, longest if name in IN_TOKENS else 1
    everything, best = high * len(task.samples), {}

    def fits(setting: int) -> bool:
        nonlocal best
        batches = hardest(name, task, setting)
        if all(map(bench.fits, batches)):
            best = batches[0]
            return True
        return False

    while high <= everything and fits(high):
        low, high = high, 2 * high
    while low and high - low > max(1, low // 16 if name in IN_TOKENS else 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise DoesNotFit(f"a sample of {longest:,} tokens alone is above the cap of memory")
    return low, best


def run_epoch(name: str, setting: int, hard: Batch, bench: Bench, task: Task) -> Result:
    """hard: the micro-batch to warm up with. Raises `torch.OutOfMemoryError` where an epoch takes more than the cap."""
    bench.limit_memory(1.0)
    for _ in range(2):  # kernels are chosen, optimizer states are made
        bench.step(hard)
    bench.restart()
    losses, supervised, padded, real, rows = [], [], [], 0, 0
    opened = time.perf_counter()
    with CONTESTANTS[name](task.samples, setting, task.collate, task.workers) as loader:
        for batch in loader:
            if not losses:
                bench.synchronize()
                started = time.perf_counter()
            loss_scale = pop_loss_scale(name, batch)
            rows += len(batch["input_ids"])
            real += int(batch["attention_mask"].sum())
            padded.append(padded_tokens(batch))
            supervised.append(int((batch["labels"] != -100).sum()))
            losses.append(bench.step(batch, loss_scale))
        bench.synchronize()
        seconds = time.perf_counter() - started
    if rows != len(task.samples):
        print(f"{name}: trained on {rows} of {len(task.samples)} samples")
    last = range(len(losses) - max(1, len(losses) // 10), len(losses))
    flops = task.flops * real / task.real_tokens
    return {
        "name": name,
        "setting": setting,
        "samples_per_second": rows / seconds,
        "tokens_per_second": real / seconds,
        "padded_tokens_per_second": sum(padded) / seconds,
        "padding": 1 - real / sum(padded),
        "balance": 1.0,  # one device
        "steps": len(losses),
        "seconds": seconds,
        "seconds_to_first_step": started - opened,
        "peak_padded_tokens": max(padded),
        "peak_memory": bench.peak_memory(),
        "train_loss": sum(float(losses[k]) * supervised[k] for k in last) / sum(supervised[k] for k in last),
        "validation_loss": bench.validation_loss(task),
        "mfu": flops / seconds / task.peak_flops if task.peak_flops else None,
    }


def padding_free_rate(bench: Bench, task: Task) -> float:
    """Tokens a second in full micro-batches of equal rows: of the samples of median and of mean length, the better."""
    lengths = [len(sample["input_ids"]) for sample in task.samples]
    rates = []
    for typical in (statistics.median(lengths), statistics.mean(lengths)):
        sample = min(task.samples, key=lambda sample: abs(len(sample["input_ids"]) - typical))
        rows = max(tokens for tokens, _ in bench.fitting) // len(sample["input_ids"])
        batch = task.collate([sample] * rows)
        while not bench.fits(batch):
            rows -= max(1, rows // 16)
            batch = task.collate([sample] * rows)
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])  # the few tokens to a multiple of eight too
        bench.limit_memory(1.0)
        bench.step(batch)
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            bench.step(batch)
        bench.synchronize()
        rates.append(3 * padded_tokens(batch) / (time.perf_counter() - started))
    return max(rates)


def compare(profile: str, bench: Bench, given: argparse.Namespace, peak_flops: float | None) -> list[Result]:
    config = bench.model.config
    samples = make_samples(profile, given.samples, config, 0, given.short)
    task = Task(
        samples=samples,
        validation=make_samples(profile, VALIDATION_SAMPLES, config, 1, given.short),
        collate=Collator(has_grid_positions=hasattr(config, "vision_config")),
        flops=training_flops(bench.model, samples),
        peak_flops=peak_flops,
        workers=0 if given.short else 4,
    )
    results: list[Result] = []
    for name in CONTESTANTS:
        if name == PUBLISHED and find_spec("odb") is None:
            continue
        setting, hard = largest_setting(name, bench, task)
        result = None
        while result is None:
            try:
                result = run_epoch(name, setting, hard, bench, task)
            except torch.OutOfMemoryError:
                print(f"{name}: {setting:,} fitted, but not in an epoch of many shapes", file=sys.stderr)
            if result is None:
                bench.optimizer.zero_grad(set_to_none=True)
                setting -= max(1, setting // 16)
            if not setting:
                raise DoesNotFit(f"{name} does not fit")
        print(f"{profile}, {name}: {setting:,}, {result['seconds']:.1f} s", file=sys.stderr)
        results.append(result)
    rate = padding_free_rate(bench, task)
    return [result | {"of_limit": result["tokens_per_second"] / rate} for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--profiles", nargs="+", choices=WORKLOADS, help="(all; with --short MM-Mix)")
    parser.add_argument("--samples", type=int, help="of an epoch (512; with --short 48)")
    parser.add_argument("--memory-gib", type=float, default=75, help="the cap of device memory (%(default)g)")
    parser.add_argument("--minutes", type=float, default=9, help="begin nothing that would take longer (%(default)g)")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of a device whose peak is not known here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--short", action="store_true", help="tiny models and samples, to see that everything works")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_gpu"), help="(%(default)s)")
    given = parser.parse_args()
    if given.device == "cpu" and not given.short:
        parser.error("--device cpu is for --short: these models need a GPU.")
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu.py: no CUDA device here. It needs one with {given.memory_gib:g} GiB of free memory, and would train "
            f"{', '.join(given.models)} (random weights) on {', '.join(given.profiles or WORKLOADS)} with "
            f"{', '.join(CONTESTANTS)}, each at the largest setting that fits, for about {given.minutes:g} minutes. "
            "`--device cpu --short` goes the same way with tiny models.",
            file=sys.stderr,
        )
        return 2
    device = torch.device(given.device)
    given.samples = given.samples or (48 if given.short else 512)
    profiles = given.profiles or (["MM-Mix"] if given.short else list(WORKLOADS))
    hardware, cap, peak_tflops = f"{os.cpu_count()} CPU cores", SHORT_TOKEN_CAP, given.peak_tflops
    said = f"{cap:,} padded tokens of a micro-batch (a CPU has no allocator to ask)"
    if given.device == "cuda":
        hardware = torch.cuda.get_device_name()
        cap = int(min(given.memory_gib * 2**30, 0.95 * torch.cuda.mem_get_info()[0]))
        said = f"{cap / 2**30:.1f} GiB of device memory"
        known = [tflops for name, tflops in PEAK_TFLOPS.items() if name in hardware]
        peak_tflops = peak_tflops or (known[0] if known else None)
    print(f"{hardware}; cap: {said}; {given.samples} samples; torch {torch.__version__}", flush=True)
    if find_spec("odb") is None:
        print(f'{PUBLISHED} is left out: it is not installed (pip install ".[bench]")')
    if peak_tflops is None:
        print("no MFU: the peak of this device is not known here; give --peak-tflops")

    given.output_dir.mkdir(parents=True, exist_ok=True)
    begun, slowest, tables = time.monotonic(), 0.0, {}
    for model_name in given.models:
        try:
            bench = Bench(model_name, device, cap, given.short)
        except torch.OutOfMemoryError:
            print(f"{model_name}: weights, gradients and optimizer alone are above the cap; not run")
            continue
        for profile in profiles:
            title, started = f"{model_name}, {profile}", time.monotonic()
            if started - begun + slowest > 60 * given.minutes:
                print(f"{title}: not run, there is no time left; choose it with --models and --profiles")
                continue
            try:
                tables[title] = compare(profile, bench, given, peak_tflops and 1e12 * peak_tflops)
            except DoesNotFit as error:
                print(f"{title}: {error}; not run")
                continue
            slowest = max(slowest, time.monotonic() - started)
            print(f"\n{markdown(title, tables[title], GPU_COLUMNS)}\n")
            print(f"{ahead_of_odb(tables[title], GPU_COLUMNS)}\n", flush=True)
            output = {"hardware": hardware, "cap": said, "tables": tables}
            (given.output_dir / "gpu.json").write_text(json.dumps(output, indent=2), encoding="utf-8")
        del bench
    if tables:
        draw(tables, [SAMPLES, PADDING, OF_LIMIT], given.output_dir / "gpu.png")
    return 0 if tables else 1


if __name__ == "__main__":
    sys.exit(main())
