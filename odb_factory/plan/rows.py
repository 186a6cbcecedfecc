"""The training rows of a YAML, opened by LLaMA-Factory's own functions: what some of them are, and their layout."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import datasets
import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer, loader
from llamafactory.model import load_config, load_tokenizer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from odb_factory.data.observe import ObservedDataset
from odb_factory.data.pool import Pool, at
from odb_factory.data.samples import Rejection
from odb_factory.data.serialize import unpack
from odb_factory.errors import DataError, ODBError, one_line
from odb_factory.llamafactory.block import why_not_flat
from odb_factory.llamafactory.dataset import (
    IndexedRows,
    OnlineDataset,
    OnlineStream,
    RowObserver,
    TokenizedDataset,
    training_rows,
)
from odb_factory.llamafactory.stages import STAGES, Stage
from odb_factory.model.check import Layout, models_of, resolve_layout
from odb_factory.model.encoder import BY_GRID, BY_IMAGE, cost_of
from odb_factory.plan.arguments import Asked
from odb_factory.planning import Budget, Collation, Cost, EncoderCost, Media, make_metadata

# ----------------------------------------------------------------------------------------------------------------------
# The training rows of a YAML, opened by LLaMA-Factory's own functions, and what one of them turns out to be.

PREPROCESSED_AS = {"dpo": "rm"}
"""What a workflow calls its stage when it asks for a dataset, where that is not its own name."""
NEAR_THE_CUT = 0.9
"""Rows of this share of cutoff_len and more are preprocessed once more without it."""
UNCUT = 1 << 30
NO_ROW = "corresponds to no data"
"""Error of `datasets` for a file without rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRow:
    """A row of the training dataset. source: its data set of the mix.

    cost: None if the row is not trained on, for the `reason` (see `Rejection`), explained in `message`. bytes: of its
    features as they travel. uncut: its tokens without cutoff_len, 0 if it is not cut off.
    """

    index: int
    source: str
    cost: Cost | None = None
    bytes: int = 0
    uncut: int = 0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """Training rows of a YAML. reader: `reader[index]` is an `ObservedRow`. order: of the first epoch; of a stream the
    rows that were read, because its length is unknown. sources: the data sets of the mix. collation: what the collator
    adds. encoder: what a vision patch and a token cost, of a model whose ranks can share its vision tower."""

    reader: RowReader
    order: list[int]
    is_stream: bool
    sources: tuple[str, ...]
    stage: Stage
    collation: Collation
    tokenizer: Any
    encoder: EncoderCost | None


class RowReader:
    """Observes rows as a training does, with their data set and their length without cutoff_len."""

    def __init__(self, observed: ObservedDataset, uncut: OnlineDataset | None, cutoff_len: int, source: str):
        self.dataset, self.observed = observed.dataset, observed
        self.uncut, self.cutoff_len, self.source = uncut, cutoff_len, source

    def read(self, indices: Sequence[int]) -> list[ObservedRow]:
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> ObservedRow:
        at(index)
        row = self.observed[index]
        rows = getattr(self.dataset, "rows", None)
        source = rows.dataset_name(index) if isinstance(rows, IndexedRows) else self.source
        if isinstance(row, Rejection):
            return ObservedRow(index=index, source=source, reason=row.reason, message=row.message)
        features = unpack(row.features)
        return ObservedRow(
            index=index, source=source, cost=row.cost, bytes=len(row.features), uncut=self._uncut(index, features)
        )

    def _uncut(self, index: int, features: Mapping[str, Any]) -> int:
        if self.uncut is None or max(_lengths(features)) < NEAR_THE_CUT * self.cutoff_len:
            return 0
        try:
            whole = self.uncut[index]
        except ValueError:  # the mistake is after the cut
            return self.cutoff_len
        return max(_lengths(whole)) if sum(_lengths(whole)) > sum(_lengths(features)) else 0


def _lengths(features: Mapping[str, Any]) -> list[int]:
    return [len(ids) for key, ids in features.items() if key.endswith("input_ids")]


def open_rows(asked: Asked, samples: int) -> TrainingRows:
    """samples: rows to read of a stream. Raises what a training would raise before it loads the model."""
    model_args, data_args, training_args, finetuning_args = asked.parsed
    name = finetuning_args.stage
    tokenizer_module = load_tokenizer(model_args)
    tokenizer, processor = tokenizer_module["tokenizer"], tokenizer_module["processor"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    stage_of_data = PREPROCESSED_AS.get(name, name)
    printed = contextlib.redirect_stdout(io.StringIO())  # an example
    with _no_evaluation(data_args), printed, _naming(data_args):
        found = get_dataset(template, *asked.parsed[:3], stage=stage_of_data, **tokenizer_module)["train_dataset"]
    stage = STAGES[name].of_training(finetuning_args, tokenizer)
    dataset = training_rows(found, stage, template, tokenizer, processor)
    shards = is_deepspeed_zero3_enabled() or bool(training_args.fsdp)
    model_config = load_config(model_args)
    observer = RowObserver(
        dataset.media,
        stage,
        decode=asked.config.on_error == "skip",
        model_type=model_config.model_type,
        shards_parameters=asked.ranks > 1 and (shards or bool(asked.config.balance_encoder)),
        head=dataset.head if isinstance(dataset, OnlineStream) else None,
    )
    collation = stage.collation(stage.make_collator(template, tokenizer, processor), dataset.media.patch_size)
    if isinstance(dataset, OnlineStream):
        rows: Any = list(itertools.islice(dataset, samples))
        order = list(range(len(rows)))
        uncut: OnlineDataset | None = _uncut(dataset.head, rows)
    else:
        rows, order = dataset, _order(asked, dataset)
        uncut = None if isinstance(dataset, TokenizedDataset) else _uncut(dataset, dataset.rows)
    # Overlong samples are counted for each budget later.
    config = dataclasses.replace(asked.config, overlong="singleton")
    observed = ObservedDataset(rows, observer, config, Budget(asked.config.token_budget))
    whole = ", ".join(data_args.dataset or [str(data_args.tokenized_path)])
    indexed = getattr(dataset, "rows", None)
    return TrainingRows(
        reader=RowReader(observed, uncut, data_args.cutoff_len, whole),
        order=order,
        is_stream=isinstance(dataset, OnlineStream),
        sources=indexed.dataset_names if isinstance(indexed, IndexedRows) else (whole,),
        stage=stage,
        collation=collation,
        tokenizer=tokenizer,
        encoder=_encoder_of(model_config, trains_tower=not finetuning_args.freeze_vision_tower),
    )


def _encoder_of(config: Any, *, trains_tower: bool) -> EncoderCost | None:
    """Linear in patches: the rows are known by the patches of all their images together."""
    config = getattr(config, "thinker_config", config)  # of Qwen-Omni
    if config.model_type not in (*BY_GRID, *BY_IMAGE):
        return None
    _, patch, token = cost_of(config, trains_tower=trains_tower)
    return EncoderCost(pair=0, patch=patch, token=token)


def _order(asked: Asked, dataset: Any) -> list[int]:
    """The order of the first epoch, as the Trainer's sampler and ours have it."""
    in_order = getattr(asked.parsed.training, "train_sampling_strategy", "random") == "sequential"
    if in_order or asked.parsed.finetuning.disable_shuffling:
        order = list(range(len(dataset)))
    else:
        sampler = SeedableRandomSampler(dataset, generator=torch.Generator(), data_seed=asked.seed)
        sampler.set_epoch(0)
        order = [int(index) for index in sampler]
    if not asked.parsed.training.dataloader_drop_last:
        return order
    return order[: len(order) - len(order) % (asked.batch_size * asked.ranks)]


def _uncut(online: OnlineDataset, rows: Any) -> OnlineDataset:
    """These rows as they would be if nothing were cut off."""
    whole = copy.copy(online)
    whole.rows, whole.processor = rows, copy.copy(online.processor)
    whole.processor.data_args = copy.copy(online.processor.data_args)
    whole.processor.data_args.cutoff_len = UNCUT
    return whole


@contextlib.contextmanager
def _no_evaluation(data_args: Any) -> Iterator[None]:
    """Rows that are evaluated are held out and not preprocessed, and nothing is stored at tokenized_path."""
    split = getattr(loader, "split_dataset", None)
    if split is not None:  # else they are preprocessed, as in a training
        loader.split_dataset = lambda *args, **kwargs: (split(*args, **kwargs)[0], {})
    data_args.eval_dataset = None
    path = data_args.tokenized_path
    if path is not None and not os.path.isdir(path):
        data_args.tokenized_path = None
    try:
        yield
    finally:
        if split is not None:
            loader.split_dataset = split


@contextlib.contextmanager
def _naming(data_args: Any) -> Iterator[None]:
    """Name the data sets in an error of `datasets`."""
    try:
        yield
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ODBError):
            raise
        which = f"dataset: {', '.join(data_args.dataset or [])}"
        if NO_ROW in str(error):
            one = "it" if len(data_args.dataset or []) == 1 else "one of them"
            raise DataError(f"{which}: {one} has no row; take it out, or look at its file.") from error
        raise DataError(f"{which}: cannot be read: {one_line(error).rstrip('.')}.") from error


# ----------------------------------------------------------------------------------------------------------------------
# Which layout the run would have: asked of the rules of a training, with the model's class and no weights.

ACCELERATOR = torch.device("cuda")
"""Device of the training, unless its YAML sets `use_cpu`."""


def layout_of(asked: Asked, rows: TrainingRows) -> Layout:
    """As resolved before training; what the check of a few real samples finds is not known.

    Raises `ConfigError` where `layout: flat` is refused.
    """
    if asked.config.layout == "padded":
        return resolve_layout([], "padded", None)
    try:
        model = _without_weights(asked, rows.tokenizer)
    except Exception as error:  # custom model code, or a release that builds it otherwise
        name: Literal["flat", "padded"] = "flat" if asked.config.layout == "flat" else "padded"
        return Layout(name, f"taken for granted, for the model cannot be built without its weights: {one_line(error)}")
    trainer = SimpleNamespace(
        model=model,
        finetuning_args=asked.parsed.finetuning,
        args=SimpleNamespace(
            device=torch.device("cpu") if asked.uses_cpu else ACCELERATOR,
            label_smoothing_factor=asked.parsed.training.label_smoothing_factor,
            bf16=asked.parsed.training.bf16,
            fp16=asked.parsed.training.fp16,
        ),
    )
    layout = resolve_layout(
        models_of(trainer),
        asked.config.layout,
        trainer.args,
        refused=why_not_flat(trainer),
        is_stream=rows.is_stream,
    )
    layout.undo()
    return layout


def _without_weights(asked: Asked, tokenizer: Any) -> Any:
    """The base model as LLaMA-Factory builds it from its config, on torch's meta device."""
    from llamafactory.model import load_model

    model_args, finetuning_args = copy.copy(asked.parsed.model), copy.copy(asked.parsed.finetuning)
    model_args.train_from_scratch = True  # from the config
    for key in ("adapter_name_or_path", "quantization_bit"):
        setattr(model_args, key, None)
    model_args.enable_liger_kernel = model_args.print_param_status = False
    finetuning_args.finetuning_type = "full"
    deepspeed = getattr(asked.parsed.training, "hf_deepspeed_config", None)
    unset_hf_deepspeed_config()  # with ZeRO-3 weights would be dealt out to ranks as they are made
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what is logged now concerns no training
    try:
        with torch.device("meta"):
            return load_model(tokenizer, model_args, finetuning_args, is_trainable=True)
    finally:
        logging.disable(before)
        if deepspeed is not None:
            set_hf_deepspeed_config(deepspeed)


# ----------------------------------------------------------------------------------------------------------------------
# Observe whole optimizer steps, spread over the first epoch, in worker processes and a bounded time.

MOST_SECONDS = 60.0
"""Observation ends then; what it has seen by then is planned."""
CHUNK = 8
ROWS_A_WORKER = 64
MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step: where it begins in the order of the epoch, and its samples there, as `ROW`."""

    start: int
    rows: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows of the first epoch. steps: optimizer steps that are planned. population: rows of the epoch, None: of a
    stream. resampled: why the steps are drawn from what was seen, with replacement; "": they are those of the training.
    """

    seen: list[ObservedRow]
    steps: list[Step]
    population: int | None
    resampled: str
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether every row of the epoch was seen, so that the plan is that of its first epoch."""
        return not self.resampled and self.population == len(self.seen)


def observe(rows: TrainingRows, step_size: int, samples: int, *, seconds: float = MOST_SECONDS) -> Sample:
    """About `samples` rows, at least one optimizer step; all rows where there are no more.

    step_size: samples of an optimizer step. Raises what a worker raises.
    """
    start = time.perf_counter()
    chosen = chosen_positions(len(rows.order), step_size, samples)
    # In another order: if the time is over before the end, what was seen is spread as well.
    blocks = [list(block) for block in chosen]
    random.Random(0).shuffle(blocks)
    positions = list(itertools.chain.from_iterable(blocks))
    found: dict[int, ObservedRow] = {}
    for position, seen in zip(positions, _read(rows, [rows.order[position] for position in positions])):
        found[position] = seen
        if time.perf_counter() - start > seconds:
            break
    is_all = len(found) == len(rows.order) and not (rows.is_stream and len(rows.order) >= samples)
    complete = [block for block in chosen if found.keys() >= set(block) and (is_all or len(block) == step_size)]
    steps = [Step(start=block[0], rows=_table(block, found)) for block in complete]
    steps = [step for step in steps if len(step.rows)]
    resampled = ""
    if not is_all and not steps:
        resampled = f"an optimizer step has {step_size} samples, and {len(found)} were observed"
        steps = _resampled(_table(sorted(found), found), step_size)
    return Sample(
        seen=[found[position] for position in sorted(found)],
        steps=steps,
        population=None if rows.is_stream else len(rows.order),
        resampled=resampled,
        seconds=time.perf_counter() - start,
    )


def chosen_positions(num_rows: int, step_size: int, samples: int) -> list[range]:
    """Positions in the order of an epoch: whole optimizer steps, evenly spread; all where there are no more rows.

    Where an optimizer step has more than `samples` they are single rows.

        >>> chosen_positions(100, 10, 30)
        [range(0, 10), range(50, 60), range(90, 100)]
    """
    steps = [range(start, min(start + step_size, num_rows)) for start in range(0, num_rows, step_size)]
    if num_rows <= samples:
        return steps
    if step_size > samples:
        spread = np.linspace(0, num_rows - 1, samples).round().astype(int).tolist()
        return [range(position, position + 1) for position in dict.fromkeys(spread)]
    whole = [step for step in steps if len(step) == step_size]
    spread = np.linspace(0, len(whole) - 1, samples // step_size).round().astype(int).tolist()
    return [whole[number] for number in dict.fromkeys(spread)]


def _read(rows: TrainingRows, indices: Sequence[int]) -> Iterator[ObservedRow]:
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS, len(indices) // ROWS_A_WORKER)
    chunks = (indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK))
    with contextlib.closing(Pool(rows.reader, workers)) as pool:
        pool.start()
        for batch in pool.map("read", (((chunk,), chunk) for chunk in chunks), 4 * workers):
            yield from batch


def _table(positions: Sequence[int], found: dict[int, ObservedRow]) -> np.ndarray:
    """The samples among these rows, as `ROW`, with their positions after the first."""
    kept = [(position - positions[0], found[position]) for position in positions if found[position].cost is not None]
    costs = [seen.cost for _, seen in kept if seen.cost is not None]
    sizes = [seen.bytes for _, seen in kept]
    return make_metadata(costs, [0] * len(kept), False, sizes, [position for position, _ in kept]).rows


def _resampled(table: np.ndarray, step_size: int) -> list[Step]:
    """Optimizer steps as likely as any, of samples drawn with replacement; about two times what was seen."""
    if not len(table):
        return []
    rng = np.random.default_rng(0)
    steps = []
    for number in range(max(2 * len(table) // step_size, 2)):
        rows = table[rng.integers(len(table), size=step_size)]
        rows["position"] = np.arange(step_size)
        steps.append(Step(start=number * step_size, rows=rows))
    return steps


# ----------------------------------------------------------------------------------------------------------------------
# How long the samples are: tokens, patches and units of each data set of a mix, and what is wrong with its rows.

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, percentiles and maximum of a measure over samples."""

    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that were seen of one data set. rows: all; samples: those that can be trained on.

    media: by modality. cut_off: samples of which cutoff_len cuts tokens off; longest_uncut: tokens of the longest of
    them without it, 0 where there is none. left_out: rows that are no samples, by reason.
    """

    name: str
    rows: int
    samples: int
    tokens: Spread
    patches: Spread
    media: dict[str, Spread]
    units: Spread
    cut_off: int
    longest_uncut: int
    left_out: dict[str, int]


def parts_of(seen: Sequence[ObservedRow], sources: Sequence[str]) -> list[Part]:
    """All rows as one part, then the parts of a mix of several data sets."""
    whole = part_of(ALL, seen)
    if len(sources) < 2:
        return [whole]
    return [whole, *(part_of(name, [row for row in seen if row.source == name]) for name in dict.fromkeys(sources))]


def part_of(name: str, rows: Sequence[ObservedRow]) -> Part:
    costs = [row.cost for row in rows if row.cost is not None]
    uncut = [row.uncut for row in rows if row.uncut]
    return Part(
        name=name,
        rows=len(rows),
        samples=len(costs),
        tokens=spread([cost.tokens for cost in costs]),
        patches=spread([cost.patches for cost in costs]),
        media={name: spread([getattr(cost.by_modality, name) for cost in costs]) for name in Media._fields},
        units=spread([cost.units for cost in costs]),
        cut_off=len(uncut),
        longest_uncut=max(uncut, default=0),
        left_out=dict(Counter(row.reason for row in rows if row.cost is None)),
    )


def spread(amounts: Sequence[int]) -> Spread:
    if not amounts:
        return Spread()
    p50, p90, p99 = (int(found) for found in np.percentile(amounts, [50, 90, 99], method="higher"))
    return Spread(mean=float(np.mean(amounts)), p50=p50, p90=p90, p99=p99, most=int(max(amounts)))
