"""Connect LLaMA-Factory's dataset, collator and trainer to `enable_odb`.

Called by the plugin's hooks and by patched forks (`patches/` in the repository): both do the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from datasets import Dataset
from llamafactory.data.converter import align_dataset, get_dataset_converter
from llamafactory.data.loader import _get_dataset_processor, _get_preprocessed_dataset
from llamafactory.data.mm_plugin import BasePlugin, get_mm_plugin
from llamafactory.train.callbacks import LogCallback
from transformers import TrainerCallback

from odb_factory.config import ODBConfig
from odb_factory.data.worker import Picklable
from odb_factory.errors import ConfigError, DataError
from odb_factory.llamafactory import dataset as dataset_module
from odb_factory.llamafactory import probes
from odb_factory.llamafactory.block import why_not_flat
from odb_factory.llamafactory.dataset import (
    INVALID_ROW,
    IndexedRows,
    OnlineDataset,
    OpenMedia,
    RowObserver,
    TokenizedDataset,
    rows_from,
)
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.online_stream import OnlineStream, StreamObserver, first_rows, is_stream, online_stream
from odb_factory.llamafactory.stages import STAGES, Stage
from odb_factory.log import get_logger
from odb_factory.model.tower import shards_parameters
from odb_factory.training.checks import check_dummy_media
from odb_factory.training.enable import enable_odb

# ----------------------------------------------------------------------------------------------------------------------
# What `odb-factory report` says of a training of LLaMA-Factory's beside its training arguments.

FINETUNING = ("stage", "finetuning_type")
OF_KIND = {"lora": ("lora_rank", "lora_target"), "dpo": ("pref_loss", "pref_beta")}
"""Arguments that mean something with this finetuning_type or stage alone."""
DATA = (
    "template", "cutoff_len", "train_on_prompt", "mask_history", "dataset", "eval_dataset", "mix_strategy",
    "interleave_probs", "max_samples", "val_size", "streaming",
)  # fmt: skip


def about(trainer: Any, dataset: Any) -> dict[str, object]:
    """JSON types, except for `rows_of`. dataset: what it trains on.

    rows_of: the names of several data sets, and of each row the number of its own (int16); see `training.run_log`.
    """
    said = _values(trainer.finetuning_args, FINETUNING)
    for kind in list(said.values()):
        said |= _values(trainer.finetuning_args, OF_KIND.get(str(kind), ()))
    processor = getattr(dataset, "processor", None)
    if processor is not None:
        said |= _values(processor.data_args, DATA)
    if isinstance(dataset, OnlineDataset) and isinstance(dataset.rows, IndexedRows):
        names, numbers = dataset.rows.by_source()
        if len(names) > 1:
            said["rows_of"] = {"names": names, "numbers": numbers}
    return said


def _values(arguments: Any, names: Iterable[str]) -> dict[str, object]:
    """Those that are set."""
    found = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, False, [], "", 0)}


# ----------------------------------------------------------------------------------------------------------------------
# What a run needs to hear of LLaMA-Factory's Trainer: to undo what was changed on it, and to tell its users.

logger = get_logger(__name__)


class Prepared(TrainerCallback):
    """What a stage has changed on the trainer, until the training ends."""

    def __init__(self, undo: Callable[[], None]):
        self.undo = undo

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.undo()


class BeginLog(TrainerCallback):
    """Comes before LLaMA-Factory's log callback, and lets it delete the log of the run before when the first optimizer
    step is done or the first entry is written: by then nothing of this training is refused any more."""

    def __init__(self, begin: Callable[[], None]):
        self._begin: Callable[[], None] | None = begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()

    on_log = on_train_end = on_step_end


class MirrorMaxSteps(TrainerCallback):
    """LLaMA-Factory's log callback reads the number of steps once; keep its copy up to date."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, LogCallback):
                callback.max_steps = state.max_steps


class TellDropped(TrainerCallback):
    """Say once where LLaMA-Factory's own preprocessing drops rows, whose number nobody knows without a pass."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.has_told = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        count = self.trainer.odb.run.loader.rejected[INVALID_ROW]
        if count and not self.has_told:
            self.has_told = True
            logger.info(
                "rows are left out (%d by optimizer step %d) that LLaMA-Factory's preprocessing drops; stock does so "
                "before it shuffles and cuts, so its optimizer steps are others (without shuffling: from here on); set "
                "tokenized_path, or remove such rows, to have exactly its steps",
                count,
                state.global_step,
            )


# ----------------------------------------------------------------------------------------------------------------------
# `include_effective_tokens_per_second`, without the pass over the training data that LLaMA-Factory makes for it.


class TellTokensPerSecond(TrainerCallback):
    """Puts the figure among those of the training: tokens trained on, without padding, a second and rank.

    LLaMA-Factory would preprocess every row once more behind the training, to count them, and is told not to.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        trainer.finetuning_args.include_effective_tokens_per_second = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, logs = self.trainer.odb.run, kwargs["logs"]
        if run is not None and "train_runtime" in logs:
            tokens = run.accounting.since_resume("tokens") / run.loader.world_size
            logs["effective_tokens_per_sec"] = tokens / logs["train_runtime"]


# ----------------------------------------------------------------------------------------------------------------------


ROWS_TRIED_FOR_EXAMPLE = 16
PADS_TILES = "MllamaPlugin"


def mark_source(dataset: Any, dataset_attr: Any, data_args: Any, training_args: Any) -> Any:
    """In place of LLaMA-Factory's format conversion: an index of the rows, which are converted when they are needed.

    What cannot be converted row by row is converted by its pass over all rows: audio and video columns of `datasets`
    (paths are no such columns), and images that are cast to a mode or nested in lists of lists. A stream stays stock's,
    which converts its rows when they are read.
    Raises `DataError` where no row of the dataset has a column that its converter needs, or where it has no row.
    """
    if not isinstance(dataset, Dataset):
        if not first_rows(dataset):
            raise DataError(
                f"{dataset_attr} yields no row; take it out of `dataset`, or, if it is a local file beside a stream, "
                "set dataloader_num_workers to 1 or more (LLaMA-Factory cuts it into so many shards)."
            )
        stream = align_dataset(dataset, dataset_attr, data_args, training_args)
        dataset_module.keep_first_rows(first_rows(stream))
        return stream
    if not len(dataset):
        raise DataError(f"{dataset_attr} has no row; take it out of `dataset`, or raise max_samples or num_samples.")
    if dataset_module.is_convertible(dataset, dataset_attr):
        converter = get_dataset_converter(dataset_attr.formatting, dataset_attr, data_args)
    else:
        dataset, converter = align_dataset(dataset, dataset_attr, data_args, training_args), None
    source = dataset_module.Source(dataset, dataset_attr, converter)
    source.check_columns()
    if converter is not None:
        one_row = probes.without_processes(data_args)
        probes.check_conversion(
            source.__getitem__, dataset, lambda rows: align_dataset(rows, dataset_attr, one_row, training_args)
        )
    return dataset_module.index_of(source)


def is_online(dataset: Any, data_args: Any, is_eval: bool) -> bool:
    """Whether `online_dataset` stands in for LLaMA-Factory's preprocessing pass: for training data that is not
    to be stored at `tokenized_path`."""
    return (dataset_module.is_index(dataset) or is_stream(dataset)) and not is_eval and data_args.tokenized_path is None


def converted(dataset: Any, data_args: Any, training_args: Any) -> Any:
    """What LLaMA-Factory's preprocessing pass takes: the rows of an index, converted by its own pass."""
    if not dataset_module.is_index(dataset):
        return dataset
    return dataset_module.through_pass(dataset, lambda rows, attr: align_dataset(rows, attr, data_args, training_args))


def online_dataset(
    dataset: Any,
    data_args: Any,
    training_args: Any,
    stage: str,
    template: Any,
    tokenizer: Any,
    processor: Any = None,
    is_eval: bool = False,
    *,
    config: ODBConfig | None = None,
) -> OnlineDataset | OnlineStream:
    """In place of LLaMA-Factory's preprocessing pass: rows are converted and preprocessed when they are needed.

    dataset: an index, or a stream. config: the block, where `data_args` do not hold it as a patched fork's do.
    """
    dataset_processor = _get_dataset_processor(data_args, stage, template, tokenizer, processor)
    rows = dataset_module.first_rows() if is_stream(dataset) else dataset_module.IndexedRows(dataset)
    of_rows = STAGES[stage].of_rows(data_args, len(rows))
    media = _media_of(of_rows, template, tokenizer, processor)
    online = OnlineDataset(rows, dataset_processor, media, of_rows)
    if training_args.should_log:
        _print_example(online)
    one_row = probes.without_processes(data_args)
    probes.check_preprocessing(
        online.__getitem__,
        lambda index: [online.rows[number] for number in of_rows.together(index)],
        len(online),
        lambda rows: _get_preprocessed_dataset(
            rows, one_row, training_args, stage, template, tokenizer, processor, is_eval=False
        ),
    )
    if is_stream(dataset):
        config = config or ODBConfig.from_block(data_args.odb)
        return online_stream(dataset, online, config, data_args, training_args)
    return online


def check_max_patches(online: OnlineDataset | OnlineStream, config: ODBConfig) -> None:
    """Refuse a cap that no micro-batch without media keeps, or that is not kept, before the model is loaded."""
    _check_tiles(config, online.media)
    made_of = online.processor
    template = copy.copy(made_of.template)
    template.mm_plugin = online.media.original
    collator = online.stage.make_collator(template, made_of.tokenizer, made_of.processor)
    check_dummy_media(config, online.stage.collation(collator, online.media.patch_size))


def _check_tiles(config: ODBConfig, media: MediaObserver) -> None:
    if config.max_patches is not None and type(media.original).__name__ == PADS_TILES:
        raise ConfigError(
            "odb.max_patches: the vision tower of mllama computes what pads a batch to the most images and the most "
            "tiles of any row, which is not planned; remove it, and bound micro-batches by token_budget."
        )


def attach_block(trainer: Any, block: Mapping[str, Any]) -> None:
    """What a patched fork calls before training, with the `odb:` block that its arguments hold."""
    attach(trainer, ODBConfig.from_block(block))
    logger.info("online dynamic batching is on; called by the patched workflow of this LLaMA-Factory")


def attach(trainer: Any, config: ODBConfig) -> None:
    """Call `enable_odb` on LLaMA-Factory's trainer with its own collator and an observer for its dataset."""
    probes.check_images()
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, LogCallback):
            probes.check_progress(callback)
    collator = trainer.data_collator
    tokenizer = getattr(collator, "tokenizer", trainer.processing_class)
    stage = STAGES[trainer.finetuning_args.stage].of_training(trainer.finetuning_args, tokenizer)
    dataset = trainer.train_dataset
    if is_stream(dataset):
        raise ConfigError(
            "streaming: True does not go with a patched LLaMA-Factory alone, which has tokenized the stream already; "
            "let odb_factory come in by itself (unset ODB_FACTORY_DISABLE), or set it to false."
        )
    template, processor = (getattr(collator, name, None) for name in ("template", "processor"))
    trainer.train_dataset = rows = training_rows(dataset, stage, template, tokenizer, processor)
    _check_tiles(config, rows.media)
    if isinstance(config.max_patches, int) and type(rows.media.original) is BasePlugin:
        logger.info(
            "odb.max_patches: %d has no effect: template and stage take no images, videos or audio", config.max_patches
        )
    trainer.data_collator = Picklable(OpenMedia(collator), "data_collator")  # evaluation sends it to workers, too
    observer = RowObserver(
        rows.media,
        stage,
        decode=config.on_error == "skip",
        model_type=trainer.model.config.model_type,
        shards_parameters=shards_parameters(trainer),
    )
    enable_odb(
        trainer,
        config,
        observer=StreamObserver(observer, dataset.head) if isinstance(dataset, OnlineStream) else observer,
        collation=stage.collation(collator, rows.media.patch_size),
        patch_size=rows.media.patch_size,
        measure=stage.measure,
        equal_weights=stage.equal_weights,
        agree_on=dataset_module.settings_of(
            dataset.head if isinstance(dataset, OnlineStream) else trainer.train_dataset, observer
        ),
        rows_from=rows_from(
            dataset.head if isinstance(dataset, OnlineStream) else trainer.train_dataset, collator.tokenizer, processor
        ),
        not_flat=why_not_flat(trainer),
        about=about(trainer, dataset),
    )
    trainer.add_callback(Prepared(stage.prepare(trainer)))
    trainer.add_callback(MirrorMaxSteps(trainer))
    if stage.name == "sft" and trainer.finetuning_args.include_effective_tokens_per_second:
        trainer.add_callback(TellTokensPerSecond(trainer))
    if config.keeps:
        trainer.add_callback(TellDropped(trainer))
    elif trainer.args.per_device_train_batch_size > 1:
        logger.info(
            "per_device_train_batch_size has no effect with `global_batch_size: fill`, which goes by token_budget"
        )


def training_rows(
    dataset: Any, stage: Stage, template: Any, tokenizer: Any, processor: Any
) -> OnlineDataset | OnlineStream | TokenizedDataset:
    """What is observed of LLaMA-Factory's training dataset: itself, if it is ours, or its rows as tokenized."""
    if isinstance(dataset, OnlineDataset | OnlineStream):
        return dataset
    return TokenizedDataset(dataset, _media_of(stage, template, tokenizer, processor), stage)


def _media_of(stage: Stage, template: Any, tokenizer: Any, processor: Any) -> MediaObserver:
    """Where the stage (pre-training) or the collator (of the user's own, without a template) takes no media, what is
    written like one is text."""
    plugin = template.mm_plugin if stage.takes_media and template is not None else get_mm_plugin("base")
    return MediaObserver(plugin, tokenizer, processor)


def _print_example(dataset: OnlineDataset) -> None:
    """Show one training row, as LLaMA-Factory does; rows that fail are the loader's to report."""
    for index in range(min(len(dataset), ROWS_TRIED_FOR_EXAMPLE)):
        try:
            example = dataset[index]
        except Exception:
            continue
        print("training example:")
        dataset.processor.print_data_example(example)
        return
