"""`odb-factory plan`: plan a sample of the training data under five token budgets. No weights are loaded."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from odb_factory import plan_micro_batches
from odb_factory.cli.compare import print_table
from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError, DataError, ODBError, one_line

BUDGETS = (0.25, 0.5, 1, 2, 4)
"""Budgets of the table, as multiples of the YAML's budget."""
SECONDS, MOST_WORKERS, ROWS_A_WORKER = 60, 8, 64
"""Limits of the observation; when the time is over, the rows observed so far are planned."""
NOT_PLANNED = (
    "tf32", "ddp_backend", "pure_bf16", "deepspeed", "fsdp", "fsdp_config",
    "eval_dataset", "val_size", "eval_strategy", "load_best_model_at_end",
)  # fmt: skip
"""Keys that do not affect a plan and that need an accelerator, several processes or a second data set."""
QUIET = {"LLAMAFACTORY_VERBOSITY": "ERROR", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
FOOTNOTE = """\
  K: micro-batches of an optimizer step on each rank, mean and most. fill: computed tokens by budget. largest: tokens
  of a micro-batch. memory: GiB of a rank, an estimate from the model's config (weights, gradients, AdamW, activations
  of the language model) that counts no offloading and no fragmentation; nothing is measured.\
"""


def run(arguments: argparse.Namespace) -> int:
    """Observe rows, plan, print. Raises `ODBError` if a training would refuse the YAML."""
    from odb_factory.llamafactory.uncaught import TRACEBACK, shows_tracebacks

    png: Path | None = arguments.png
    if png is not None and (png.suffix != ".png" or not png.absolute().parent.is_dir()):
        raise ConfigError(f"--png: {png} is not a .png file in a folder that exists; name another file.")
    os.environ.update(QUIET)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # LLaMA-Factory prints an example row
            training = read(arguments.config, arguments.overrides, arguments.ranks)
            sample, memory = observe(training, arguments.samples), memory_of(training)
    except Exception as error:
        if isinstance(error, ODBError) or shows_tracebacks():
            raise
        raise ODBError(f"{one_line(error)} ({TRACEBACK}=1 shows where)") from None
    rows = [planned(training, sample, memory, int(training.token_budget * factor) or 1) for factor in BUDGETS]
    stock, recommendation = stock_batches(training, sample, memory), recommended(rows)
    if arguments.json:
        content = {
            "yaml": str(training.path), "ranks": training.ranks, "global_batch_size": training.step_size,
            "layout": training.layout, "observed": len(sample.rows) + len(sample.left_out), "of": sample.population,
            "resampled": sample.resampled, "lengths": sample.lengths(),
            "left_out": sample.left_out, "stock": stock._asdict(),
            "budgets": [row._asdict() for row in rows], "recommended": recommendation,
        }  # fmt: skip
        print(json.dumps(content, indent=2))
    else:
        show(training, sample, [stock, *rows], recommendation)
    if png is not None:
        draw(training, rows, png)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Read the YAML like a training, but in one process and without an accelerator.


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training that a YAML configures.

    keys: content of the YAML. config: its `odb:` block, without budgets set to `auto`. token_budget: the YAML's budget;
    if the YAML has none, the tokens of a stock micro-batch. arguments: LLaMA-Factory's arguments for model, data,
    training and finetuning. step_size: samples per optimizer step, all ranks; None: `fill`. layout: `auto` counts as
    flat, because only a training can try the model. row_multiple (tokens): the collator pads rows to a multiple of it.
    """

    path: Path
    keys: dict[str, Any]
    config: ODBConfig
    token_budget: int
    arguments: tuple[Any, Any, Any, Any]
    ranks: int
    batch_size: int
    accumulation: int
    step_size: int | None
    layout: str
    row_multiple: int


def read(path: Path, overrides: Sequence[str] = (), ranks: int | None = None) -> Training:
    """Read the training of a YAML. ranks: data-parallel ranks (None: as many as a training started here would have).

    Raises `ConfigError` if a training would refuse the YAML; errors of LLaMA-Factory pass through. The hooks of
    odb_factory must be active (`activation.activate()`).

        training = read(Path("my.yaml"), ["odb.token_budget=8192"], ranks=8)
    """
    from odb_factory.llamafactory.block import checked, is_enabled, is_given, without_null
    from odb_factory.llamafactory.hooks import arguments_of

    # Errors in the YAML are reported before the slow imports.
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        why = "not a YAML file" if path.exists() else "there is no such file"
        raise ConfigError(f"{path}: {why}; give the YAML that you train with.")
    keys = arguments_of(str(path), overrides)
    if is_given(without_null(keys)):
        checked(keys)
    if not keys.get("do_train"):
        raise ConfigError(f"{path}: do_train is not true, so it trains nothing; give the YAML that you train with.")
    from llamafactory.extras.misc import get_device_count
    from llamafactory.hparams.parser import get_train_args

    # Leave out budgets that the training chooses, and keys that do not affect a plan.
    block = dict(keys.get("odb") or {})
    if is_open := not isinstance(block.setdefault("token_budget", "auto"), int):
        block = {key: value for key, value in block.items() if key != "memory_fraction"} | {"token_budget": 1}
    block |= {"max_patches": None} if block.get("max_patches") == "auto" else {}
    plannable = {key: value for key, value in keys.items() if key not in NOT_PLANNED}
    plannable |= {"odb": block, "use_cpu": True, "overwrite_output_dir": True}
    # torchrun sets the number of ranks (WORLD_SIZE); without torchrun, LLaMA-Factory starts a rank per device.
    world_size, *_ = [os.environ.pop(name, "") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    devices, launched = get_device_count(), int(os.environ.get("NNODES") or 1)
    launched *= int(os.environ.get("NPROC_PER_NODE") or devices or 1)
    ranks = ranks or int(world_size or (launched if devices > 1 or is_enabled("FORCE_TORCHRUN") else 1))
    model, data, training, finetuning, _ = get_train_args(plannable)
    config = ODBConfig.from_block(block)
    batch_size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    size, stock_size = config.global_batch_size, batch_size * accumulation * ranks
    return Training(
        path=path,
        keys=keys,
        config=config,
        token_budget=batch_size * data.cutoff_len if is_open else int(config.token_budget),
        arguments=(model, data, training, finetuning),
        ranks=ranks,
        batch_size=batch_size,
        accumulation=accumulation,
        step_size=stock_size if size == "keep" else None if size == "fill" else int(size),
        layout="padded" if config.layout == "padded" else "flat",
        row_multiple=1 if finetuning.stage == "pt" else 8,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Observe whole optimizer steps, spread over an epoch, in worker processes.


class Row(NamedTuple):
    """A row of the training dataset: its data set, its cost (`odb_factory.Cost`) or None, and why it cannot be used."""

    source: str
    cost: Any
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """rows: usable rows. left_out: the problem of each unusable row. steps: for each optimizer step, the indices of its
    samples in `rows`. population: rows of an epoch (None: the dataset is a stream). resampled: the steps are drawn with
    replacement, because fewer samples were observed than a step has."""

    rows: list[Row]
    left_out: list[str]
    steps: list[np.ndarray]
    population: int | None
    resampled: bool

    def column(self, name: str) -> np.ndarray:
        """int64[rows], by sample: `tokens`, `padded` (tokens of its collated row or rows) or `patches`."""
        return np.array([getattr(row.cost, name) for row in self.rows], np.int64)

    def lengths(self) -> list[dict[str, Any]]:
        """Mean, percentiles and maximum of tokens and patches, for all samples and for each data set of a mix."""
        sources, table = np.array([row.source for row in self.rows]), []
        names = list(dict.fromkeys(sources.tolist()))
        for name in ["all", *names] if len(names) > 1 else ["all"]:
            for measure in ("tokens", "patches"):
                values = self.column(measure)[slice(None) if name == "all" else sources == name]
                if values.any():
                    marks = np.percentile(values, [50, 90, 99, 100], method="higher").tolist()
                    spread = {"mean": float(values.mean()), **dict(zip(("p50", "p90", "p99", "max"), marks))}
                    table.append({"data": name, "samples": len(values), "of": measure, **spread})
        return table


def observe(training: Training, samples: int) -> Sample:
    """Observe about `samples` rows of the dataset, with a progress bar. Raises `DataError` if no row can be used."""
    from rich.console import Console
    from rich.progress import track

    num_rows, is_stream = open_rows(training, samples)
    order, size = np.arange(num_rows), training.step_size or int(training.config.buffer_size) * training.ranks
    is_ordered = getattr(training.arguments[2], "train_sampling_strategy", "") == "sequential"
    if not (is_stream or is_ordered or training.arguments[3].disable_shuffling):
        order = np.random.default_rng(0).permutation(num_rows)
    if num_rows > samples:  # take whole optimizer steps, or single rows if a step is larger than `samples`
        block = size if size <= samples else 1
        firsts = np.linspace(0, num_rows // block - 1, max(samples // block, 1)).astype(int)
        order = np.concatenate([order[first * block :][:block] for first in firsts])
    rows: list[Row] = []
    end, workers = time.monotonic() + SECONDS, min(os.cpu_count() or 1, MOST_WORKERS, len(order) // ROWS_A_WORKER)
    with contextlib.ExitStack() as stack:
        results: Iterable[Row] = map(observe_row, order.tolist())
        if workers > 1:
            pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            results = pool.map(observe_row, order.tolist(), chunksize=8)
        for row in track(results, "observing rows", len(order), console=Console(stderr=True), transient=True):
            rows.append(row)
            if time.monotonic() > end:
                break
    is_usable = np.array([row.cost is not None for row in rows])
    if not is_usable.any():
        raise DataError(f"no row of the training dataset can be trained on; {rows[0].problem if rows else 'no row'}")
    position = np.cumsum(is_usable) - 1
    blocks = [np.arange(first, min(first + size, len(rows))) for first in range(0, len(rows), size)]
    is_epoch = len(rows) == num_rows and not is_stream
    steps = [position[block[is_usable[block]]] for block in blocks if is_epoch or len(block) == size]
    if resampled := not any(map(len, steps)):
        rng = np.random.default_rng(0)
        steps = [rng.integers(is_usable.sum(), size=size) for _ in range(max(2 * len(rows) // size, 2))]
    return Sample(
        rows=[row for row in rows if row.cost is not None],
        left_out=[row.problem for row in rows if row.cost is None],
        steps=[step for step in steps if len(step)],
        population=None if is_stream else num_rows,
        resampled=resampled,
    )


_opened: Any = None
"""(rows, function that makes features of a row, stage, media), inherited by the forked worker processes."""


def open_rows(training: Training, samples: int) -> tuple[int, bool]:
    """Open the rows for `observe_row`. Returns the number of rows, and whether the dataset is a stream."""
    global _opened
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.model import load_tokenizer

    from odb_factory.llamafactory.dataset import training_rows
    from odb_factory.llamafactory.stages import STAGES

    model, data, _, finetuning = training.arguments
    if data.tokenized_path is not None and not os.path.isdir(data.tokenized_path):
        data.tokenized_path = None  # a training would write its rows to this folder
    modules = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(modules["tokenizer"], data)
    name = "rm" if finetuning.stage == "dpo" else finetuning.stage
    loaded = get_dataset(template, *training.arguments[:3], stage=name, **modules)["train_dataset"]
    stage = STAGES[finetuning.stage].of_training(finetuning, modules["tokenizer"])
    dataset = training_rows(loaded, stage, template, modules["tokenizer"], modules["processor"])
    head = getattr(dataset, "head", None)  # None unless the dataset is a stream
    rows: Any = dataset if head is None else list(itertools.islice(iter(dataset), samples))
    _opened = rows, None if head is None else head.features_of, stage, dataset.media
    return len(rows), head is not None


def observe_row(index: int) -> Row:
    """Apply template, tokenizer and media plugin to a row, and compute its cost."""
    rows, features_of, stage, media = _opened
    name_of = getattr(getattr(rows, "rows", None), "dataset_name", None)
    source = name_of(index) if name_of else "all"
    try:
        cost = stage.cost(rows[index] if features_of is None else features_of([rows[index]]), media)
        return Row(source, cost) if cost.units else Row(source, None, f"row {index}: no label carries loss")
    except Exception as error:  # e.g. unreadable, dropped by LLaMA-Factory, media cut off
        return Row(source, None, f"row {index}: {one_line(error)}")


# ----------------------------------------------------------------------------------------------------------------------
# Plan the observed optimizer steps, and estimate the memory.


class Figures(NamedTuple):
    """Figures of the observed optimizer steps under a budget, or in stock batches if token_budget is None.

    k, most_k: micro-batches per optimizer step and rank, mean and maximum. fill: computed tokens / budget. padding:
    padding tokens / computed tokens. most_tokens: computed tokens of the largest micro-batch. oversized: number of
    samples larger than the budget. memory_gib: estimated memory of a rank; None: unknown.
    """

    token_budget: int | None
    max_patches: int | None
    k: float
    most_k: int
    fill: float | None
    padding: float
    most_tokens: int
    oversized: int
    memory_gib: float | None


Memory = tuple[float, float, float]
"""Bytes on a rank: for weights, gradients and optimizer; per token of a micro-batch; per token for stock's logits."""


def planned(training: Training, sample: Sample, memory: Memory | None, token_budget: int) -> Figures:
    """Plan the observed steps under `token_budget`; `max_patches` is scaled with the budget."""
    config, is_padded, ranks = training.config, training.layout == "padded", training.ranks
    multiple = config.pad_to_multiple_of or (training.row_multiple if is_padded else 1)
    tokens, patches = sample.column("tokens"), sample.column("patches")
    lengths = -(-sample.column("padded") // multiple) * multiple if is_padded else tokens
    max_patches = int(config.max_patches or 0) * token_budget // training.token_budget or None
    limits = {"token_budget": token_budget // multiple * multiple or 1, "max_patches": max_patches}
    is_oversized = (lengths > limits["token_budget"]) | (patches > (max_patches or patches.max()))
    computed, real, counts = [], 0, []
    for step in sample.steps:
        step = step if config.overlong == "singleton" else step[~is_oversized[step]]
        if len(step):
            owners = np.arange(len(step)) % ranks if config.balance is False else None
            shared: dict[str, Any] = {"ranks": ranks, "owners": owners, "layout": training.layout, **limits}
            plan = plan_micro_batches(lengths[step], patches=patches[step], overlong="singleton", **shared)
            groups = [lengths[step[group]] for of_rank in plan for group in of_rank]
            computed += [len(group) * group.max(initial=0) if is_padded else group.sum() for group in groups]
            real += tokens[step].sum()
            counts.append(len(plan[0]))
    total, max_tokens = int(sum(computed)), int(max(computed, default=0))
    return Figures(
        token_budget=token_budget,
        max_patches=max_patches,
        k=float(np.mean(counts or [0])),
        most_k=max(counts, default=0),
        fill=total / (max(len(computed), 1) * token_budget),
        padding=(total - int(real)) / max(total, 1),
        most_tokens=max_tokens,
        oversized=int(is_oversized.sum()),
        memory_gib=memory and (memory[0] + max_tokens * memory[1]) / 2**30,
    )


def stock_batches(training: Training, sample: Sample, memory: Memory | None) -> Figures:
    """Figures of the same steps in stock batches: `per_device_train_batch_size` rows each, in order."""
    lengths, computed = -(-sample.column("padded") // training.row_multiple) * training.row_multiple, []
    for step in sample.steps:
        batches = [lengths[step[first:][: training.batch_size]] for first in range(0, len(step), training.batch_size)]
        computed += [len(batch) * int(batch.max()) for batch in batches]
    k, max_tokens = training.accumulation, max(computed)
    real = int(sample.column("tokens")[np.concatenate(sample.steps)].sum())
    estimate = memory and (memory[0] + max_tokens * (memory[1] + memory[2])) / 2**30
    return Figures(None, None, k, k, None, 1 - real / sum(computed), max_tokens, 0, estimate)


def memory_of(training: Training) -> Memory | None:
    """Estimate memory from the model's config; None for an unknown kind of model.

    LLaMA-Factory keeps trained parameters in fp32 unless `pure_bf16`; ZeRO and FSDP shard them. For each token a layer
    keeps about 6 values per unit of its MLP and 12 per unit of its width; with checkpointing one layer at a time does.
    """
    import torch
    import transformers
    from llamafactory.model import load_config

    keys, ranks, finetuning = training.keys, training.ranks, training.arguments[3]
    try:
        config = load_config(training.arguments[0])
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        text = config.get_text_config()
        layers, vocabulary = text.num_hidden_layers, text.vocab_size
        width, mlp = text.hidden_size, text.intermediate_size
        zero = json.loads(Path(keys["deepspeed"]).read_text("utf-8")) if keys.get("deepspeed") else {}
    except Exception:  # an unknown kind of model, or a file that a training would reject
        return None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if finetuning.finetuning_type == "full":
        trained = sum(size for name, size in sizes.items() if not (finetuning.freeze_vision_tower and "vis" in name))
    else:  # adapters of all linear layers
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        trained = sum(finetuning.lora_rank * (module.in_features + module.out_features) for module in linear)
    stage = 3 if keys.get("fsdp") else int(zero.get("zero_optimization", {}).get("stage", 0))
    value = 2 if any(keys.get(key) for key in ("bf16", "fp16", "pure_bf16")) else 4  # bytes
    of_trained = (2, 2, 4) if keys.get("pure_bf16") else (4, 4, 8)  # weights, gradients, AdamW
    of_trained_here = sum(size / (ranks if stage >= min_stage else 1) for size, min_stage in zip(of_trained, (3, 2, 1)))
    of_frozen = (keys.get("quantization_bit") or 8 * value) / 8 / (ranks if stage == 3 else 1)
    fixed = max(sum(sizes.values()) - trained, 0) * of_frozen + trained * of_trained_here + 4 * vocabulary * width
    layer, inputs = value * (6 * mlp + 12 * width), value * width * layers
    a_token = layer * layers if keys.get("disable_gradient_checkpointing") else layer + inputs
    return fixed, a_token, vocabulary * (value + 8)


def recommended(rows: Sequence[Figures]) -> dict[str, Any]:
    """The smallest budget of the table that needs no more micro-batches than the largest budget."""
    last = rows[-1]
    row = next(row for row in rows if round(row.k, 1) <= round(last.k, 1) and row.oversized == last.oversized)
    reason = "no larger budget needs fewer micro-batches"
    if row is last and row.k > 1:
        reason = "micro-batches become fewer up to this largest of the table: take the largest that fits in memory"
    return {"token_budget": row.token_budget, "max_patches": row.max_patches, "reason": reason}


# ----------------------------------------------------------------------------------------------------------------------
# Show the result.


def show(training: Training, sample: Sample, rows: Sequence[Figures], recommendation: dict[str, Any]) -> None:
    """Print lengths, a table row for stock and each budget, the recommendation and the number of rows left out."""
    observed, of = len(sample.rows) + len(sample.left_out), sample.population or "a stream"
    steps = f"{training.step_size or 'a buffer of'} samples an optimizer step"
    print(f"{training.path}: {observed} of {of} rows, ranks: {training.ranks}, {steps}, layout {training.layout}\n")
    if sample.resampled:
        print("Fewer samples were observed than an optimizer step has: steps are drawn from them, with replacement.\n")
    columns, table = ("data", "samples", "of", "mean", "p50", "p90", "p99", "max"), []
    for line in sample.lengths():
        table.append([f"{line[name]:,.0f}" if name in columns[3:] else str(line[name]) for name in columns])
    print_table([columns, *table])
    print()
    table = [["token_budget", "max_patches", "K", "most", "fill", "padding", "largest", "oversized", "memory"]]
    for row in rows:
        name = f"stock, {training.batch_size} rows" if row.token_budget is None else f"{row.token_budget:,}"
        name += " *" * (row.token_budget == training.token_budget)
        patches, memory = f"{row.max_patches or 0:,}", f"~{row.memory_gib or 0:.2f}"
        table.append([name, patches if row.max_patches else "", f"{row.k:.1f}", str(row.most_k)])
        table[-1] += [f"{row.fill:.0%}" if row.fill else "", f"{row.padding:.0%}", f"{row.most_tokens:,}"]
        table[-1] += [str(row.oversized), memory if row.memory_gib else "?"]
    print_table(table)
    print(FOOTNOTE)
    keys = [f"{key}: {recommendation[key]}" for key in ("token_budget", "max_patches") if recommendation[key]]
    print(f"Recommended: {', '.join(keys)} ({recommendation['reason']})")
    if sample.left_out:
        print(f"Left out: {len(sample.left_out)} of {observed} rows; the first is {sample.left_out[0]}")


def draw(training: Training, rows: Sequence[Figures], path: Path) -> None:
    """Save a PNG with fill, padding, K and memory for each budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(ylim=(0, 1.1), title=f"{training.path.name}, {training.layout}", xlabel="token_budget")
    axes.plot([row.fill or 0.0 for row in rows], "o-", label="fill")
    axes.plot([row.padding for row in rows], "s--", label="padding")
    for place, row in enumerate(rows):
        axes.annotate(f"K {row.k:.1f}", (place, row.fill or 0), (0, 7), textcoords="offset points", ha="center")
    memory = ["" if row.memory_gib is None else f"\n~{row.memory_gib:.2f} GiB" for row in rows]
    axes.set_xticks(range(len(rows)), [f"{row.token_budget:,}{text}" for row, text in zip(rows, memory)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
