"""Connect LLaMA-Factory's dataset, collator and trainer to `enable_odb`.

Called by the plugin's hooks and by patched forks (`patches/` in the repository): both do the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import datasets
from datasets import Dataset
from llamafactory.data.converter import align_dataset, get_dataset_converter
from llamafactory.data.loader import _get_dataset_processor, _get_preprocessed_dataset
from llamafactory.data.mm_plugin import BasePlugin, get_mm_plugin
from llamafactory.train.callbacks import LogCallback
from transformers import TrainerCallback

from odb_factory.accounting.losses import DataSets
from odb_factory.config import CAPS, ODBConfig
from odb_factory.data.serialize import Picklable
from odb_factory.errors import ConfigError, DataError
from odb_factory.llamafactory.block import why_not_flat
from odb_factory.llamafactory.dataset import (
    INVALID_ROW,
    MEDIA_COLUMNS,
    IndexedRows,
    OnlineDataset,
    OnlineStream,
    OpenMedia,
    RowObserver,
    Source,
    TokenizedDataset,
    index_of,
    is_convertible,
    is_index,
    is_stream,
    keep_head,
    kept_head,
    online_stream,
    rows_from,
    settings_of,
    through_pass,
)
from odb_factory.llamafactory.media import EncodedImage, MediaObserver
from odb_factory.llamafactory.stages import STAGES, Stage
from odb_factory.log import get_logger
from odb_factory.model.tower import shards_parameters
from odb_factory.training.checks import check_dummy_media
from odb_factory.training.trainer import enable_odb

# ----------------------------------------------------------------------------------------------------------------------
# What `odb-factory report` shows of a training of LLaMA-Factory beside its training arguments.

FINETUNING = ("stage", "finetuning_type")
OF_KIND = {"lora": ("lora_rank", "lora_target"), "dpo": ("pref_loss", "pref_beta")}
"""Arguments that mean something with this finetuning_type or stage alone."""
DATA = (
    "template", "cutoff_len", "train_on_prompt", "mask_history", "dataset", "eval_dataset", "mix_strategy",
    "interleave_probs", "max_samples", "val_size", "streaming",
)  # fmt: skip


def about(trainer: Any, dataset: Any) -> dict[str, object]:
    """JSON types. dataset: what it trains on."""
    found = _values(trainer.finetuning_args, FINETUNING)
    for kind in list(found.values()):
        found |= _values(trainer.finetuning_args, OF_KIND.get(str(kind), ()))
    processor = getattr(dataset, "processor", None)
    if processor is not None:
        found |= _values(processor.data_args, DATA)
    return found


def data_sets_of(dataset: Any) -> DataSets | None:
    """The data sets that its rows are from, with the names of the YAML if each of these has rows; None where they are
    not known, and for one alone."""
    if not isinstance(dataset, OnlineDataset) or not isinstance(dataset.rows, IndexedRows):
        return None
    names, asked = dataset.rows.dataset_names, dataset.processor.data_args.dataset
    if len(names) < 2:
        return None
    return DataSets(asked if len(asked) == len(names) else names, dataset.rows.source_numbers)


def _values(arguments: Any, names: Iterable[str]) -> dict[str, object]:
    """Those that are set."""
    found = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, False, [], "", 0)}


logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# Callbacks between LLaMA-Factory's Trainer and a run.


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


class HostCallback(TrainerCallback):
    """Keeps what LLaMA-Factory shows of a training up to date, and changes on the trainer what its stage needs while it
    trains."""

    def __init__(self, trainer: Any, stage: Stage, *, keeps: bool):
        self.trainer, self._parts, self._watches_dropped = trainer, stage.parts(trainer), keeps
        # LLaMA-Factory would preprocess every row once more after the training, to count its tokens.
        arguments = trainer.finetuning_args
        self._counts_tokens = stage.name in ("sft", "dpo") and arguments.include_effective_tokens_per_second
        if self._counts_tokens:
            arguments.include_effective_tokens_per_second = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for part in self._parts:
            part.uninstall()  # a training that has failed has left it
            part.install()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, LogCallback):  # it reads the number of steps once
                callback.max_steps = state.max_steps
        count = self.trainer.odb.training.run.step.rejected[INVALID_ROW] if self._watches_dropped else 0
        if count:
            self._watches_dropped = False
            logger.info(
                "rows are left out (%d by optimizer step %d) that LLaMA-Factory's preprocessing drops; stock does so "
                "before it shuffles and cuts, so its optimizer steps are others (without shuffling: from here on); set "
                "tokenized_path, or remove such rows, to have exactly its steps",
                count,
                state.global_step,
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """effective_tokens_per_sec: tokens trained on, without padding, a second and rank."""
        training, logs = self.trainer.odb.training, kwargs["logs"]
        if self._counts_tokens and training is not None and "train_runtime" in logs:
            run = training.run
            tokens = run.accounting.since_resume("tokens") / run.loader.world_size
            logs["effective_tokens_per_sec"] = tokens / logs["train_runtime"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for part in self._parts:
            part.uninstall()


# ----------------------------------------------------------------------------------------------------------------------
# Rows made one at a time must be those of LLaMA-Factory's pass over all rows: tried on a row of the data, because a
# release that means something else by a name would give wrong data in silence. Other assumptions are tried by the
# tests marked `versions`.

ROWS_TRIED = 3


def _compare_with_pass(ours: Callable[[int], Any], stock: Callable[[int], Any], count: int, what: str) -> None:
    """Raise `ConfigError` where the first row that both can make differs; one that cannot be made is for `on_error`.

    ours, stock: make a row (of `count`), one at a time and by the pass.
    """
    shows_bars = not datasets.are_progress_bars_disabled()
    for index in range(min(count, ROWS_TRIED)):
        datasets.disable_progress_bars()
        try:
            own, other = ours(index), stock(index)
        except Exception:
            continue
        finally:
            if shows_bars:
                datasets.enable_progress_bars()
        for name in dict.fromkeys((*own, *other)):
            mine, its = own.get(name), other.get(name)
            if name in MEDIA_COLUMNS:
                mine, its = len(mine or []), len(its or [])
            if mine != its:
                raise ConfigError(
                    f"odb: {what} gives another {name} by row than by its pass over all rows (row {index}), so "
                    "odb_factory would train on wrong data; install a supported release (`odb-factory doctor` names "
                    "them)."
                )
        return


def _one_by_one(data_args: Any) -> Any:
    """The data arguments for a pass over one row."""
    changed = copy.copy(data_args)
    changed.preprocessing_num_workers, changed.overwrite_cache = None, True
    return changed


# ----------------------------------------------------------------------------------------------------------------------
# In place of LLaMA-Factory's passes over the data, and of its `train`.

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
        if next(iter(dataset), None) is None:
            raise DataError(
                f"{dataset_attr} yields no row; take it out of the YAML, or, if it is a local file beside a stream, "
                "set dataloader_num_workers to 1 or more (LLaMA-Factory cuts it into that many shards)."
            )
        stream = align_dataset(dataset, dataset_attr, data_args, training_args)
        keep_head(stream)
        return stream
    if not len(dataset):
        raise DataError(f"{dataset_attr} has no row; take it out of the YAML, or raise max_samples or num_samples.")
    if is_convertible(dataset, dataset_attr):
        converter = get_dataset_converter(dataset_attr.formatting, dataset_attr, data_args)
    else:
        dataset, converter = align_dataset(dataset, dataset_attr, data_args, training_args), None
    source = Source(dataset, dataset_attr, converter)
    try:
        source[0]
    except DataError:
        raise
    except Exception:  # what is wrong with a row is for the policy `on_error`
        pass
    if converter is not None:
        table, one_row = dataset.with_format("arrow"), _one_by_one(data_args)

        def by_pass(index: int) -> Any:  # of a dataset in memory, so that no file is written for it
            row = Dataset(table[index : index + 1], info=datasets.DatasetInfo(features=dataset.features))
            return align_dataset(row, dataset_attr, one_row, training_args)[0]

        _compare_with_pass(source.__getitem__, by_pass, len(dataset), "the conversion of its format")
    return index_of(source)


def is_online(dataset: Any, data_args: Any, is_eval: bool) -> bool:
    """Whether `online_dataset` stands in for LLaMA-Factory's preprocessing pass: for training data that is not
    to be stored at `tokenized_path`."""
    return (is_index(dataset) or is_stream(dataset)) and not is_eval and data_args.tokenized_path is None


def converted(dataset: Any, data_args: Any, training_args: Any) -> Any:
    """What LLaMA-Factory's preprocessing pass takes: the rows of an index, converted by its own pass."""
    if not is_index(dataset):
        return dataset
    return through_pass(dataset, lambda rows, attr: align_dataset(rows, attr, data_args, training_args))


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
    rows = kept_head() if is_stream(dataset) else IndexedRows(dataset)
    of_rows = STAGES[stage].of_rows(data_args, len(rows))
    media = _media_of(of_rows, template, tokenizer, processor)
    online = OnlineDataset(rows, dataset_processor, media, of_rows)
    if training_args.should_log:
        _print_example(online)
    one_row = _one_by_one(data_args)

    def by_pass(index: int) -> Any:
        given = [online.rows[number] for number in of_rows.together(index)]
        if any(row.get(name) for name in ("_videos", "_audios") for row in given):
            raise ValueError("takes long")
        # As they are stored: an encoded cell is what LLaMA-Factory takes for an image, too.
        stored = [
            row | {"_images": [one.cell if isinstance(one, EncodedImage) else one for one in row.get("_images") or []]}
            for row in given
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the row, which we have done
            return _get_preprocessed_dataset(
                Dataset.from_list(stored), one_row, training_args, stage, template, tokenizer, processor, is_eval=False
            )[-1]

    _compare_with_pass(online.__getitem__, by_pass, len(online), "its preprocessing")
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
    keys = [key for key in ("max_patches", *CAPS) if getattr(config, key) is not None]
    if keys and type(media.original).__name__ == PADS_TILES:
        raise ConfigError(
            f"odb.{keys[0]}: the vision tower of mllama computes what pads a batch to the most images and the most "
            "tiles of any row, which is not planned; remove it, and bound micro-batches by token_budget."
        )


def attach_block(trainer: Any, block: Mapping[str, Any]) -> None:
    """What a patched fork calls before training, with the `odb:` block that its arguments hold."""
    attach(trainer, ODBConfig.from_block(block))
    logger.info("online dynamic batching is on; called by the patched workflow of this LLaMA-Factory")


def attach(trainer: Any, config: ODBConfig) -> None:
    """Call `enable_odb` on LLaMA-Factory's trainer with its own collator and an observer for its dataset."""
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
    for key in ("max_patches", *CAPS) if type(rows.media.original) is BasePlugin else ():
        if isinstance(most := getattr(config, key), int):
            logger.info("odb.%s: %d has no effect: template and stage take no images, videos or audio", key, most)
    trainer.data_collator = Picklable(OpenMedia(collator), "data_collator")  # evaluation sends it to workers, too
    sample = rows.head if isinstance(rows, OnlineStream) else rows
    observe = functools.partial(
        RowObserver,
        rows.media,
        stage,
        decode=config.on_error == "skip",
        model_type=trainer.model.config.model_type,
        shards_parameters=shards_parameters(trainer) or (bool(config.balance_encoder) and trainer.args.world_size > 1),
    )
    observer = observe(head=rows.head if isinstance(rows, OnlineStream) else None)

    def eval_rows(stored: Any) -> tuple[TokenizedDataset, RowObserver]:
        return TokenizedDataset(stored, rows.media, stage), observe(decode=False)

    enable_odb(
        trainer,
        config,
        observer=observer,
        collation=stage.collation(collator, rows.media.patch_size),
        patch_size=rows.media.patch_size,
        measure=stage.measure,
        equal_weights=stage.equal_weights,
        agree_on=settings_of(sample, observer),
        rows_from=rows_from(sample, collator.tokenizer, processor),
        eval_rows=eval_rows if stage.evaluates_by_budget else None,
        not_flat=why_not_flat(trainer),
        data_sets=data_sets_of(dataset),
        about=about(trainer, dataset),
    )
    trainer.add_callback(HostCallback(trainer, stage, keeps=config.keeps))
    if not config.keeps and trainer.args.per_device_train_batch_size > 1:
        logger.info(
            "per_device_train_batch_size has no effect with `global_batch_size: fill`, which goes by token_budget"
        )


def training_rows(
    dataset: Any, stage: Stage, template: Any, tokenizer: Any, processor: Any
) -> OnlineDataset | OnlineStream | TokenizedDataset:
    """What is observed of LLaMA-Factory's training dataset: itself, if it is ours, or its rows as tokenized."""
    if isinstance(dataset, OnlineDataset | OnlineStream):
        return dataset
    if "packing_params" in (getattr(dataset, "column_names", None) or ()):
        raise ConfigError(
            "tokenized_path: its rows are packs of several samples (neat_packing); tokenize again without packing, or "
            "train without odb."
        )
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
