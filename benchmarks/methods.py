"""Compare methods that cut the samples of an epoch into micro-batches: efficiency, padding, optimizer steps kept, time.

    python benchmarks/methods.py                                   # 8 ranks, 256 samples an optimizer step, MM-Mix
    python benchmarks/methods.py --profile ultrachat --methods standard hfg odb --ranks 1 --batch-size 64
    python benchmarks/methods.py --lengths lengths.txt             # one number of tokens a line

All methods get the same samples in the same random order. A method whose package is not installed is skipped with a
message. `standard`, `sorted`, `hfg`, `gmt` and `bmt` are the baselines of "Online Dynamic Batching with Formal
Guarantees for LLM Training" (arXiv 2606.19989); sorted, gmt and bmt are implemented here from its description. Methods
with a fixed number of rows run with each value of `--rows`; the table shows the best result.

efficiency   real tokens / (ranks x sum over micro-steps of (largest padded tokens of any rank + 500)): the share of the
             time spent on real tokens, if time is linear in tokens and a micro-step costs 500 tokens more
padding      padding tokens / computed tokens
balance      mean load of the ranks / load of the busiest rank
micro-steps  micro-steps per optimizer step
N            samples per optimizer step, mean
stock's      share of the optimizer steps with exactly the samples of a stock optimizer step
peak         padded tokens of the largest micro-batch
ms           CPU time to cut one optimizer step (whole loaders: -)

To time whole trainings, use `odb-factory demo` (CPU) or benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import PROFILES, draw_lengths, in_processes, show
from torch.nn.utils.rnn import pad_sequence

from odb_factory import ODBDataLoader, plan_micro_batches, pop_step_info

FIXED_COST = 500
"""Assumed overhead of a micro-step (tokens)."""
MULTIPLE = 8
"""LLaMA-Factory's collator pads rows to a multiple of this number of tokens; gmt and bmt count padded rows."""
MEGA_BUCKET = 4096
"""Number of samples that bmt sorts at a time."""
PREPROCESSED_TOGETHER = 1000
"""Number of samples that LLaMA-Factory (`preprocessing_batch_size`) and TRL (`datasets.map`) pack at a time."""
REBALANCE_STEPS = 4
"""Optimizer steps for batch_rebalance: few, because every rank computes the batches of all ranks, which is slow."""
DYNABATCH_SAMPLES = 2048
"""Samples for dynabatch: few, because it evaluates a model for the size of each batch."""

MicroStep = list[Sequence[int]]
"""For each rank, the samples of its micro-batch."""
Cut = list[list[MicroStep]]
"""For each optimizer step, its micro-steps."""


@dataclass(frozen=True)
class Work:
    """lengths (tokens [n]): in stock's training order. batch_size: samples per optimizer step, all ranks.

    token_budget: tokens per micro-batch. rows: rows per fixed micro-batch. buffer_size: samples that online loaders
    group at once.
    """

    lengths: np.ndarray
    ranks: int
    batch_size: int
    token_budget: int
    rows: int
    buffer_size: int
    seed: int

    def steps(self) -> Iterator[np.ndarray]:
        """Yield the samples of each stock optimizer step."""
        for start in range(0, len(self.lengths) - self.batch_size + 1, self.batch_size):
            yield np.arange(start, start + self.batch_size)


class Skipped(Exception):
    """The method was not run; the message gives the reason."""


def deal(batches: Sequence[Sequence[int]], ranks: int, micro_steps: int) -> Cut:
    """Deal batches to the ranks in turn, like accelerate; an optimizer step has `micro_steps` micro-steps."""
    steps = [list(batches[k : k + ranks]) for k in range(0, len(batches) - ranks + 1, ranks)]
    return [steps[k : k + micro_steps] for k in range(0, len(steps) - micro_steps + 1, micro_steps)]


# ----------------------------------------------------------------------------------------------------------------------
# Fixed number of rows: an optimizer step has `batch_size` samples.


def micro_steps_of(work: Work) -> int:
    """Micro-steps per optimizer step. Raises `Skipped` if rows x ranks does not divide `batch_size`."""
    micro_steps, rest = divmod(work.batch_size, work.rows * work.ranks)
    if rest:
        raise Skipped(f"{work.batch_size} samples are not a multiple of {work.rows} rows on {work.ranks} ranks")
    return micro_steps


def in_rows(work: Work, order: Sequence[int] | np.ndarray) -> Cut:
    micro_steps = micro_steps_of(work)
    whole = len(order) // work.rows * work.rows
    return deal(np.asarray(order)[:whole].reshape(-1, work.rows).tolist(), work.ranks, micro_steps)


def standard(work: Work) -> Cut:
    return in_rows(work, np.arange(len(work.lengths)))


def sorted_(work: Work) -> Cut:
    """All samples sorted, shortest first."""
    return in_rows(work, np.argsort(work.lengths, kind="stable"))


def hfg(work: Work) -> Cut:
    """`group_by_length`, with the sampler of transformers."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(work.seed)
    grouped = work.batch_size // work.ranks
    return in_rows(work, list(LengthGroupedSampler(grouped, lengths=work.lengths.tolist(), generator=generator)))


def batch_rebalance(work: Work) -> Cut:
    """`train_sampling_strategy: batch_rebalance`, with the sampler of transformers."""
    import transformers
    from transformers import trainer_pt_utils

    if not hasattr(trainer_pt_utils, "BatchRebalanceSampler"):
        raise Skipped(f"transformers {transformers.__version__} has no BatchRebalanceSampler (5.23 and newer have it)")
    micro_steps = micro_steps_of(work)
    lengths = work.lengths[: REBALANCE_STEPS * work.batch_size].tolist()
    options = {"effective_batch_size": work.batch_size, "dp_size": work.ranks, "grad_accum": micro_steps}
    ranks = [
        list(trainer_pt_utils.BatchRebalanceSampler(lengths, **options, shuffle=False, rank=rank))
        for rank in range(work.ranks)
    ]
    steps = [list(batches) for batches in zip(*ranks)]
    return [steps[k : k + micro_steps] for k in range(0, len(steps), micro_steps)]


# ----------------------------------------------------------------------------------------------------------------------
# Sorted samples cut by a token budget: an optimizer step has one batch per rank.


def within_budget(order: np.ndarray, work: Work) -> list[list[int]]:
    """Begin a new batch when the padded batch would exceed the budget."""
    batches: list[list[int]] = []
    longest = 0
    for index in order.tolist():
        row = -(-int(work.lengths[index]) // MULTIPLE) * MULTIPLE
        longest = max(longest, row)
        if not batches or longest * (len(batches[-1]) + 1) > work.token_budget:
            batches.append([])
            longest = row
        batches[-1].append(index)
    return batches


def shuffled(batches: list[Any], work: Work) -> Cut:
    order = np.random.default_rng(work.seed).permutation(len(batches)).tolist()
    return deal([batches[k] for k in order], work.ranks, 1)


def gmt(work: Work) -> Cut:
    """All samples are sorted and cut by the budget; batches are shuffled (fairseq's `batch_by_size`)."""
    return shuffled(within_budget(np.argsort(work.lengths, kind="stable"), work), work)


def bmt(work: Work) -> Cut:
    """Like gmt, within buckets of `MEGA_BUCKET` samples."""
    batches: list[list[int]] = []
    for start in range(0, len(work.lengths), MEGA_BUCKET):
        order = np.argsort(work.lengths[start : start + MEGA_BUCKET], kind="stable")
        batches += within_budget(start + order, work)
    return shuffled(batches, work)


def dynabatch(work: Work) -> Cut:
    """All samples are sorted; a memory model sets the number of rows of each batch; batches are shuffled."""
    DynaBatchSampler = installed("dynabatch.sampler").DynaBatchSampler
    tokens = work.lengths[:DYNABATCH_SAMPLES]
    with contextlib.redirect_stderr(io.StringIO()):  # the sampler's progress bars
        sampler = DynaBatchSampler(
            token_lengths=tokens.tolist(),
            word_lengths=(tokens * 0.75).astype(int).tolist(),
            char_lengths=(tokens * 4.5).astype(int).tolist(),
            min_batch_size=max(1, work.token_budget // int(tokens.max())),
            threshold=0.9,
            shuffle=True,
        )
    return deal(list(sampler), work.ranks, 1)


def lhotse(work: Work) -> Cut:
    """`DynamicBucketingSampler` with a `TokenConstraint` and 30 buckets, on text examples."""
    sampling, text = installed("lhotse.dataset.sampling"), installed("lhotse.cut.text")
    TokenConstraint = installed("lhotse.dataset.sampling.base").TokenConstraint
    nothing = np.zeros(int(work.lengths.max()), np.int8)  # shared by all examples: only the number of tokens counts
    examples = [text.TextExample(str(k), nothing[:length]) for k, length in enumerate(work.lengths.tolist())]
    ranks = []
    for rank in range(work.ranks):
        sampler = sampling.DynamicBucketingSampler(
            examples,
            constraint=TokenConstraint(max_tokens=work.token_budget),
            num_buckets=30,
            buffer_size=min(20_000, len(examples)),
            shuffle=False,
            drop_last=False,
            world_size=work.ranks,
            rank=rank,
            seed=work.seed,
        )
        ranks.append([[int(example.text) for example in batch] for batch in sampler])
    return [[list(batches)] for batches in zip(*ranks)]


# ----------------------------------------------------------------------------------------------------------------------
# Packing: an optimizer step has one pack per rank.


def neat_packing(work: Work) -> Cut:
    """LLaMA-Factory's `packing` and `neat_packing`: packs are padded to `cutoff_len` + 1, which is the budget here."""
    greedy_knapsack = installed("llamafactory.data.processor.processor_utils").greedy_knapsack
    packs = []
    for start in range(0, len(work.lengths), PREPROCESSED_TOGETHER):
        lengths = work.lengths[start : start + PREPROCESSED_TOGETHER].tolist()
        places: dict[int, list[int]] = {}
        for place, length in enumerate(lengths):
            places.setdefault(length, []).append(start + place)
        for pack in greedy_knapsack(list(lengths), work.token_budget - 1):
            packs.append([places[length].pop() for length in pack])
    return shuffled(packs, work)


def bfd(work: Work) -> Cut:
    """TRL's `packing_strategy: bfd`, padding-free."""
    pack_dataset = installed("trl").pack_dataset
    import datasets
    import pyarrow

    datasets.disable_progress_bar()
    numbers = np.repeat(np.arange(len(work.lengths), dtype=np.int32), work.lengths)  # each token is its row's number
    ids = pyarrow.ListArray.from_arrays(np.concatenate([[0], work.lengths.cumsum()]), numbers)
    packed = pack_dataset(datasets.Dataset(pyarrow.table({"input_ids": ids})), work.token_budget, "bfd")
    return shuffled([np.unique(pack).tolist() for pack in packed.with_format("numpy")["input_ids"]], work)


def installed(name: str) -> Any:
    """Import a module. Raises `Skipped` if it is not installed or cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{name} cannot be imported ({error})") from None


# ----------------------------------------------------------------------------------------------------------------------
# odb with kept optimizer steps (`keep`): calls the planner of the loader.


def odb(work: Work, layout: str = "flat", balance: bool = True) -> Cut:
    cut = []
    for samples in work.steps():
        options = {} if balance else {"owners": np.arange(len(samples)) % work.ranks}
        ranks = plan_micro_batches(
            work.lengths[samples],
            token_budget=work.token_budget,
            ranks=work.ranks,
            layout=layout,
            overlong="singleton",
            **options,
        )
        cut.append([[samples[batch].tolist() for batch in micro_step] for micro_step in zip(*ranks)])
    return cut


# ----------------------------------------------------------------------------------------------------------------------
# Whole loaders, with one process per rank, connected by gloo: an optimizer step has one batch per rank.


class Rows(torch.utils.data.Dataset):
    """Rows with the given lengths. Every token of a row is the number of the row."""

    def __init__(self, lengths: np.ndarray, numbers: np.ndarray | None = None):
        self.lengths, self.numbers = lengths, np.arange(len(lengths)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [int(self.numbers[index])] * int(self.lengths[index])
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def collate(items: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: pad_sequence([torch.as_tensor(item[key]) for item in items], batch_first=True, padding_value=filler)
        for key, filler in fillers.items()
    }


def odb_fill(work: Work, rank: int, layout: str = "flat") -> Iterator[list[int]]:
    options = {"layout": layout, "global_batch_size": "fill", "buffer_size": work.buffer_size}
    with ODBDataLoader(
        Rows(work.lengths), token_budget=work.token_budget, collate_fn=collate, num_workers=1, **options
    ) as loader:
        for batch in loader:
            yield list(pop_step_info(batch).ids)


def online_dynamic_batching(work: Work, rank: int, no_warmup: bool = False) -> Iterator[list[int]]:
    """no_warmup: switch off the slow growth of the loader's windows."""
    package = installed("odb")
    numbers = np.arange(rank, len(work.lengths), work.ranks)
    for batch in package.ODBDataLoader(
        Rows(work.lengths[numbers], numbers),
        token_budget=work.token_budget,
        buffer_size=work.buffer_size,
        num_workers=1,
        prefetch_factor=work.buffer_size,
        collate_fn=collate,
        loss_scaling="exact",
        no_warmup=no_warmup,
    ):
        info = package.pop_step_info(batch, loss_scaling="exact")
        yield batch["input_ids"][:, 0].tolist() if info.loss_scale else []


def run_rank(rank: int, work: Work, name: str) -> list[list[int]]:
    """Run the loader of one rank, in a separate process; return its batches."""
    return list(LOADERS[name](work, rank))


def run_loader(work: Work, name: str) -> Cut:
    """Run a loader on all ranks. Raises `RuntimeError` if samples are lost; errors of a rank pass through."""
    ranks = in_processes(work.ranks, run_rank, work, name)
    emitted = sum(len(batch) for batches in ranks for batch in batches)
    if emitted != len(work.lengths):
        raise RuntimeError(f"{name}: {emitted} samples came out of {len(work.lengths)}")
    longest = max(map(len, ranks))
    padded = [batches + [[]] * (longest - len(batches)) for batches in ranks]
    return [[list(micro_step)] for micro_step in zip(*padded)]


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """layout: `padded`, `flat` (no padding), or `full` (each micro-batch is padded to the budget)."""

    cut: Callable[[Work], Cut]
    layout: str = "padded"
    has_rows: bool = False


LOADERS: dict[str, Callable[[Work, int], Iterator[list[int]]]] = {
    "online-dynamic-batching": online_dynamic_batching,
    "online-dynamic-batching, no_warmup": partial(online_dynamic_batching, no_warmup=True),
    "odb, fill": odb_fill,
    "odb, fill, padded": partial(odb_fill, layout="padded"),
}
METHODS: dict[str, Method] = {
    "standard": Method(standard, has_rows=True),
    "sorted": Method(sorted_, has_rows=True),
    "hfg": Method(hfg, has_rows=True),
    "batch_rebalance": Method(batch_rebalance, has_rows=True),
    "gmt": Method(gmt),
    "bmt": Method(bmt),
    "dynabatch": Method(dynabatch),
    "lhotse": Method(lhotse),
    "neat_packing": Method(neat_packing, "full"),
    "trl bfd packing": Method(bfd, "flat"),
    "odb": Method(odb, "flat"),
    "odb, padded": Method(partial(odb, layout="padded")),
    "odb, balance: false": Method(partial(odb, balance=False), "flat"),
    **{name: Method(partial(run_loader, name=name), "flat" if name == "odb, fill" else "padded") for name in LOADERS},
}


def figures(work: Work, cut: Cut, layout: str) -> dict[str, float]:
    """Figures for the columns of the table."""
    micro_steps = [micro_step for step in cut for micro_step in step]
    sizes = np.array([[padded_tokens(work, batch, layout) for batch in micro_step] for micro_step in micro_steps])
    chosen = [index for micro_step in micro_steps for batch in micro_step for index in batch]
    tokens, busiest = int(work.lengths[chosen].sum()), sizes.max(axis=1)
    stock = {samples.tobytes() for samples in work.steps()}
    kept = [np.sort([index for step in steps for batch in step for index in batch]).tobytes() in stock for steps in cut]
    return {
        "efficiency": tokens / (work.ranks * float((busiest + FIXED_COST).sum())),
        "padding": 1 - tokens / float(sizes.sum()),
        "balance": float(sizes.sum() / (work.ranks * busiest.sum())),
        "micro_steps": len(micro_steps) / len(cut),
        "samples_a_step": len(chosen) / len(cut),
        "stock_steps": sum(kept) / len(cut),
        "peak": float(busiest.max()),
    }


def padded_tokens(work: Work, batch: Sequence[int], layout: str) -> int:
    lengths = work.lengths[list(batch)]
    if not len(lengths):
        return 0
    if layout == "full":
        return max(work.token_budget, int(lengths.sum()))
    return int(lengths.sum()) if layout == "flat" else int(lengths.max()) * len(lengths)


def bound(work: Work) -> float:
    """Upper bound of the efficiency of any cut of stock's optimizer steps: the busiest rank has at least the mean load
    or the longest sample, and a micro-step has at most the budget."""
    tokens = seconds = 0.0
    for samples in work.steps():
        lengths = work.lengths[samples]
        load = max(lengths.sum() / work.ranks, lengths.max())
        tokens += lengths.sum() / work.ranks
        seconds += load + FIXED_COST * np.ceil(load / max(work.token_budget, lengths.max()))
    return float(tokens / seconds)


# ----------------------------------------------------------------------------------------------------------------------


def measure(work: Work, name: str) -> dict[str, Any]:
    method = METHODS[name]
    started = time.process_time()
    cut = method.cut(work)
    spent = time.process_time() - started
    if not cut:
        raise Skipped(f"{len(work.lengths)} samples are too few")
    row = {"method": name, "rows": work.rows if method.has_rows else None, **figures(work, cut, method.layout)}
    return row | {"cut_ms": None if name in LOADERS else 1e3 * spent / len(cut)}


def best_of_rows(work: Work, name: str, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Figures for each number of rows, sorted by efficiency, best first. Raises `Skipped`."""
    measured, reason = [], ""
    for count in rows if METHODS[name].has_rows else [1]:
        try:
            measured.append(measure(replace(work, rows=count), name))
        except Skipped as why:
            reason = str(why)
        except Exception as error:
            if name.startswith("odb"):
                raise
            reason = f"{type(error).__name__}: {error}"
    if not measured:
        raise Skipped(reason)
    return sorted(measured, key=lambda row: -row["efficiency"])


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "efficiency": ("efficiency", "{:.3f}".format),
    "padding": ("padding", "{:.1%}".format),
    "balance": ("balance", "{:.3f}".format),
    "micro_steps": ("micro-steps", "{:.1f}".format),
    "samples_a_step": ("N", "{:,.0f}".format),
    "stock_steps": ("stock's", "{:.0%}".format),
    "peak": ("peak", "{:,.0f}".format),
    "cut_ms": ("ms", "{:.1f}".format),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--profile", choices=PROFILES, default="mm_mix")
    parser.add_argument("--lengths", type=Path, help="a file with the number of tokens of a sample on each line")
    parser.add_argument("--samples", type=int, default=16_384, help="of the epoch (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of an optimizer step, all ranks")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="of a fixed micro-batch")
    parser.add_argument("--buffer-size", type=int, default=1024, help="samples that online loaders group at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write one line of JSON for each method")
    arguments = parser.parse_args()
    lengths = draw_lengths(arguments.profile, arguments.samples, arguments.seed)
    if arguments.lengths is not None:
        real = np.array(arguments.lengths.read_text(encoding="utf-8").split(), np.int64)
        lengths = np.random.default_rng(arguments.seed).choice(real, arguments.samples)

    options = (arguments.ranks, arguments.batch_size, arguments.token_budget, 1, arguments.buffer_size, arguments.seed)
    work = Work(lengths, *options)
    rows: list[dict[str, Any]] = []
    cells = []
    for name in arguments.methods:
        try:
            rows += (measured := best_of_rows(work, name, arguments.rows))
        except Skipped as why:
            print(f"{name}: skipped: {why}", file=sys.stderr, flush=True)
            continue
        best = measured[0]
        label = name if best["rows"] is None else f"{name}, {best['rows']} row{'s' * (best['rows'] > 1)}"
        cells.append([label, *("-" if best[key] is None else form(best[key]) for key, (_, form) in COLUMNS.items())])
        print(f"{label}: {best['efficiency']:.3f}", file=sys.stderr, flush=True)
    rows.append({"method": "bound", "efficiency": bound(work)})
    cells.append(["bound of stock's steps", f"{bound(work):.3f}", *["-"] * (len(COLUMNS) - 1)])
    title = f"{arguments.profile}, {arguments.ranks} ranks, N = {arguments.batch_size}"
    show([title, *(head for head, _ in COLUMNS.values())], cells, arguments.json, rows)


if __name__ == "__main__":
    main()
