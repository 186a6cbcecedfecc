"""The training rows of a YAML, opened by LLaMA-Factory's own functions, and the layout that they will have."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import datasets
import torch
from accelerate.data_loader import SeedableRandomSampler
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer, loader
from llamafactory.model import load_config, load_tokenizer
from torch.utils.data import Dataset
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from odb_factory.data.observe import ObservedDataset
from odb_factory.data.processes import WorkerDataset
from odb_factory.data.samples import Rejection
from odb_factory.data.serialize import unpack
from odb_factory.errors import DataError, ODBError, one_line
from odb_factory.llamafactory.attach import training_rows
from odb_factory.llamafactory.block import why_not_flat
from odb_factory.llamafactory.dataset import (
    IndexedRows,
    OnlineDataset,
    OnlineStream,
    RowObserver,
    TokenizedDataset,
)
from odb_factory.llamafactory.stages import STAGES, Stage
from odb_factory.model.check import Layout, models_of, resolve_layout
from odb_factory.model.encoder import BY_GRID, BY_IMAGE, cost_of
from odb_factory.plan.arguments import Asked
from odb_factory.planning import Budget, Collation, Cost, EncoderCost

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


class RowReader(WorkerDataset, Dataset[ObservedRow]):
    """Observes rows as a training does, with their data set and their length without cutoff_len."""

    def __init__(self, observed: ObservedDataset, uncut: OnlineDataset | None, cutoff_len: int, source: str):
        self.dataset, self.observed = observed.dataset, observed
        self.uncut, self.cutoff_len, self.source = uncut, cutoff_len, source

    def __getitem__(self, index: int) -> ObservedRow:
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
    if asked.parsed.finetuning.disable_shuffling:
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
    for key in ("adapter_name_or_path", "quantization_bit", "mixture_of_depths"):
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
