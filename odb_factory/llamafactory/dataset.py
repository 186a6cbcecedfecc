"""LLaMA-Factory's training data, converted and preprocessed one row at a time, without a pass before training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from llamafactory.data.converter import align_dataset, get_dataset_converter
from llamafactory.data.loader import _get_dataset_processor, _get_preprocessed_dataset
from llamafactory.data.mm_plugin import get_mm_plugin
from torch.utils.data import Dataset, IterableDataset

from odb_factory.config import ODBConfig
from odb_factory.data.observe import MediaCut, RowDropped
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.llamafactory.media import EncodedImage, MediaObserver, decoded
from odb_factory.llamafactory.stages import MEDIA, STAGES, Stage
from odb_factory.log import get_logger
from odb_factory.model.tower import TWICE, takes_both
from odb_factory.planner import VIDEO, Cost

logger = get_logger(__name__)

# Stock converts all rows of a dataset to its common format in a pass before training. Here an *index* replaces the
# dataset while LLaMA-Factory merges, samples and splits it: an ordinary `datasets.Dataset` with the source of every row
# and its number there. LLaMA-Factory's own converter is then called on each row when a worker needs it. Evaluation data
# still go through stock's pass (`converted`).

SOURCE, SOURCE_ROW = "_odb_source", "_odb_row"
"""Columns of an index: the number of the source, in the order of loading, and the number of the row there."""
_PLACE = ("load_from", "dataset_name", "subset", "split", "folder", "num_samples", "ranking")
"""Fields of LLaMA-Factory's `DatasetAttr` that name neither the format nor a column or tag."""
_DECODED_IN_TIME = (datasets.Audio, getattr(datasets, "Video", datasets.Audio))


class StoredRows:
    """Rows of a `datasets.Dataset` without decoding: cells of the column `images` become `EncodedImage`s.

    encodings: see `EncodedImage`.
    """

    def __init__(self, rows: datasets.Dataset, images: str | None, encodings: int):
        feature = _image(rows.features.get(images))
        self._images = images if feature is not None and feature.decode else None
        self._rows, self._encodings = rows.with_format("arrow"), encodings

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: column[0] for name, column in self._rows[index].to_pydict().items()}
        if self._images and row[self._images]:
            cell = row[self._images]
            cells = cell if isinstance(cell, list) else [cell]
            images = [EncodedImage(image["bytes"], image["path"], self._encodings) for image in cells]
            row[self._images] = images if isinstance(cell, list) else images[0]
        return row


def stored(rows: datasets.Dataset, images: str, encodings: int) -> StoredRows | datasets.Dataset:
    """`StoredRows`, or the rows themselves if they have audio or video columns, which are rare."""
    decoded = any(_holds(feature, _DECODED_IN_TIME) for feature in rows.features.values())
    return rows if decoded else StoredRows(rows, images, encodings)


class Source:
    """A dataset: `source[row]` is a converted row.

    rows: the loaded rows, or converted rows if `converter` is None. attr: LLaMA-Factory's description of the dataset.
    Raises `DataError` if the converter reads a column that the dataset does not have, and the converter's own errors.
    """

    def __init__(self, rows: datasets.Dataset, attr: Any, converter: Callable[[Any], dict[str, Any]] | None):
        self.rows, self.attr, self.converter = rows, attr, converter
        self.name = f"{attr}{' as sampled by num_samples' if attr.num_samples is not None else ''}"
        # Stock encodes images again when it converts the format and when it preprocesses.
        self._stored = stored(rows, "_images", 1) if converter is None else StoredRows(rows, attr.images, 2)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.converter is None:
            return self._stored[row]
        return self.converter(_Columns(self._stored[row], self))

    @property
    def description(self) -> str:
        """The format, columns and tags that dataset_info.json gives, for a message."""
        is_alpaca = self.attr.formatting == "alpaca"  # which has no tags of messages
        fields = {
            key: value
            for key, value in vars(self.attr).items()
            if key == "kto_tag" or not (value is None or key in _PLACE or (is_alpaca and key.endswith("_tag")))
        }
        return f"dataset_info.json gives {', '.join(f'{key} {value!r}' for key, value in fields.items())}"


class _Columns(dict):
    def __init__(self, row: dict[str, Any], source: Source):
        super().__init__(row)
        self._source = source

    def __missing__(self, column: str) -> Any:
        raise DataError(
            f"dataset_info.json: {self._source.name} has the columns {', '.join(self)}, but not {column!r}; "
            f"{self._source.description}; correct `formatting` or `columns` there."
        )


_sources: list[Source] = []
"""The datasets of this process's training; the numbers in an index are positions here."""
_head: list[dict[str, Any]] = []
"""The first converted rows of the first stream, before mixing and shuffling."""


def forget() -> None:
    """Release the datasets of the previous training."""
    _sources.clear()
    _head.clear()


def is_convertible(rows: datasets.Dataset, attr: Any) -> bool:
    """Whether rows can be converted one at a time: they hold no media that the pass would decode and encode again,
    except in an ordinary column of images."""
    image = _image(rows.features.get(attr.images))
    plain = attr.images if image is not None and image.mode is None else None
    used = {attr.images, attr.videos, attr.audios} & rows.features.keys() - {plain}
    return not any(_holds(rows.features[column], (datasets.Image, *_DECODED_IN_TIME)) for column in used)


def is_index(dataset: Any) -> bool:
    return isinstance(dataset, datasets.Dataset) and SOURCE in dataset.column_names


class IndexedRows:
    """`rows[i]`: the converted row of line i of an index. source_of, row_of: int[lines]."""

    def __init__(self, index: datasets.Dataset):
        self.source_of, self.row_of = (index.data.column(name).to_numpy() for name in (SOURCE, SOURCE_ROW))
        if index._indices is not None:  # `datasets` would gather row by row, at 0.8 KB a row
            lines = index._indices.column(0).to_numpy()
            self.source_of, self.row_of = self.source_of[lines], self.row_of[lines]
        self.sources = {number: _sources[number] for number in np.unique(self.source_of)}

    def __len__(self) -> int:
        return len(self.row_of)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, row = self.find(index)
        return source[row]

    def find(self, index: int) -> tuple[Source, int]:
        """The source of line `index`, and the row there."""
        return self.sources[self.source_of[index]], int(self.row_of[index])

    def dataset_name(self, index: int) -> str:
        return self.find(index)[0].name


def converted(dataset: Any, data_args: Any, training_args: Any) -> Any:
    """The rows of an index, in its order, converted by LLaMA-Factory's own pass; other datasets are returned as they
    are."""
    if not is_index(dataset):
        return dataset
    index, parts, places = IndexedRows(dataset), [], []
    for number, source in index.sources.items():
        lines = np.flatnonzero(index.source_of == number)
        rows = source.rows.select(index.row_of[lines])
        if source.converter is not None:
            rows = align_dataset(rows, source.attr, data_args, training_args)
        parts.append(rows)
        places.append(lines)
    return datasets.concatenate_datasets(parts).select(np.argsort(np.concatenate(places)))


def _image(feature: Any) -> datasets.Image | None:
    """The image type of a column of images or of lists of images; None for other columns."""
    if isinstance(feature, list):
        feature = feature[0]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, datasets.Image) else None


def _holds(feature: Any, kind: tuple[type, ...]) -> bool:
    """Whether a column has values of `kind`, maybe in lists."""
    if isinstance(feature, list):
        return any(_holds(item, kind) for item in feature)
    return isinstance(feature, kind) or _holds(getattr(feature, "feature", []), kind)


# Each converted row is preprocessed when a worker needs it.

MEDIA_OF_ROW = ("_images", "_videos", "_audios")
"""Columns of a converted row."""
MEDIA_COLUMNS = (*MEDIA_OF_ROW, *MEDIA)
MAX_FILES_NAMED = 3
INVALID_ROW = "invalid"
"""The reason under which rows that LLaMA-Factory drops are counted."""


class OnlineDataset(Dataset):
    """`dataset[i]`: a converted row, preprocessed by LLaMA-Factory's own dataset processor.

    The features are those that stock's preprocessing stores: token ids, labels and attention mask as lists of int,
    media as references. Raises `RowDropped` if stock drops the row, `MediaCut` if truncation removes visual
    placeholders, and `ValueError` if the text itself contains a placeholder.
    """

    def __init__(
        self,
        rows: IndexedRows | list[dict[str, Any]],
        dataset_processor: Any,
        media: MediaObserver,
        stage: Stage,
    ):
        self.rows, self.media, self.stage = rows, media, stage
        template = copy.copy(dataset_processor.template)
        template.mm_plugin = media.plugin
        self.processor = copy.copy(dataset_processor)
        self.processor.template = template

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.features_of([self.rows[number] for number in self.stage.together(index)], index)

    def features_of(self, rows: Sequence[dict[str, Any]], index: int | None = None) -> dict[str, Any]:
        """The features of the last of these converted rows, which are preprocessed together. index: of the last row."""
        self.media.check_text(rows[-1])
        encoded = self.stage.preprocess(self.processor, rows)
        if not encoded.get(f"{self.stage.answers[0]}input_ids"):
            prompt, response = rows[-1]["_prompt"], rows[-1]["_response"]
            why = f"it has {len(prompt)} turns of a prompt and {len(response)} answers"
            if not prompt and not response:  # as the converters of messages leave a row that they do not accept
                why = "it has no turns, or their roles are unknown or in a wrong order (`tags` of dataset_info.json)"
            if index is not None and isinstance(self.rows, IndexedRows):
                why += f"; {self.rows.find(index)[0].description}"
            raise RowDropped(INVALID_ROW, f"LLaMA-Factory drops it: {why}.")
        features = {key: values[0] for key, values in encoded.items()}
        if any(rows[-1][key] for key in MEDIA_OF_ROW):
            self._check_cut(rows, features)
        return features

    def _check_cut(self, rows: Sequence[dict[str, Any]], features: Mapping[str, Any]) -> None:
        """Raise `MediaCut` if truncation has removed placeholders of media."""
        answers, cutoff_len = self.stage.ids_of(features), self.processor.data_args.cutoff_len
        if max(map(len, answers), default=0) < cutoff_len:
            return
        uncut = copy.copy(self.processor)
        uncut.data_args = copy.copy(self.processor.data_args)
        uncut.data_args.cutoff_len = 2**31  # cuts nothing
        whole = self.stage.ids_of({key: values[0] for key, values in self.stage.preprocess(uncut, rows).items()})
        count = self.media.num_placeholders
        if any(count(ids) < count(whole_ids) for ids, whole_ids in zip(answers, whole)):
            raise MediaCut(f"cutoff_len {cutoff_len} cuts its visual placeholders, which the model cannot take.")


class TokenizedDataset(Dataset):
    """`dataset[i]`: a row that LLaMA-Factory has tokenized before, as stored."""

    def __init__(self, rows: datasets.Dataset, media: MediaObserver, stage: Stage):
        self.rows, self.media, self.stage = stored(rows, "images", encodings=0), media, stage

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class RowObserver:
    """Counts the cost of a preprocessed row; preprocesses it first if the dataset is a stream.

    head: of the stream; None if the dataset is not a stream.
    model_type: of the model's config; decides whether images and videos share a micro-batch (see `model.tower`; None:
    they do).
    shards_parameters: all ranks must run each module equally often, because they gather parameters or share its work.
    """

    def __init__(
        self,
        media: MediaObserver,
        stage: Stage,
        *,
        model_type: str | None = None,
        shards_parameters: bool = False,
        head: OnlineDataset | None = None,
    ):
        self.media, self.stage, self.head = media, stage, head
        self.model_type, self.shards_parameters = model_type, shards_parameters
        self.videos_apart = model_type is not None and not takes_both(model_type)

    def __call__(self, item: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
        return self.observe(item if self.head is None else self.head.features_of([item]))

    def observe(self, features: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
        is_apart = self.videos_apart and features.get("videos")
        if is_apart and features.get("images") and self.shards_parameters:
            raise ValueError(TWICE.format("it", self.model_type))
        cost = self.stage.cost(features, self.media)
        if is_apart:
            cost = dataclasses.replace(cost, modality=VIDEO)
        return features, cost

    def describe(self, dataset: Any, index: int) -> str:
        rows = dataset.rows if self.head is None else dataset
        where = f"row {index} of the training dataset"
        if isinstance(rows, IndexedRows):
            source, number = rows.find(index)
            where += f" (row {number} of {source.name})"
        try:
            row = rows[index]
        except Exception:  # the row may not be convertible
            return where
        media = [item for key in MEDIA_COLUMNS for item in row.get(key) or []]
        frames = [frame for item in media for frame in (item if isinstance(item, list) else [item])]
        files = [frame for frame in frames if isinstance(frame, str)]
        if files:
            missing = [file for file in files if not os.path.isfile(file)]
            named = missing or files
            more = f" and {len(named) - MAX_FILES_NAMED} more" if len(named) > MAX_FILES_NAMED else ""
            where += f", {'no such file: ' if missing else 'files '}{', '.join(named[:MAX_FILES_NAMED])}{more}"
        return where


class OpenMedia:
    """The trainer's own collator; encoded images are decoded first."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __getattr__(self, name: str) -> Any:
        """Attributes of the collator, such as its tokenizer."""
        if name.startswith("__") or name == "collator":  # `copy` reads these before `collator` is set
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        for feature in features:
            if feature.get("images"):
                feature["images"] = decoded(feature["images"])
        return self.collator(features)


# Streams: LLaMA-Factory converts, mixes and shuffles the rows; workers preprocess them one at a time (`data/order.py`).

ROWS_IN_HEAD = 3


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, datasets.IterableDataset)


class OnlineStream(IterableDataset):
    """Iterates over converted rows.

    head: the first rows before shuffling, so that reading them does not fill the shuffle buffer. already_split: `rows`
    are this rank's share. is_reshuffled: each epoch has another order.
    """

    def __init__(self, rows: Any, head: OnlineDataset, *, already_split: bool, is_reshuffled: bool):
        self.rows, self.head, self.already_split, self.is_reshuffled = rows, head, already_split, is_reshuffled
        self.media, self.stage = head.media, head.stage

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        if self.is_reshuffled:
            self.rows.set_epoch(epoch)


def online_stream(
    rows: datasets.IterableDataset, head: OnlineDataset, config: ODBConfig, data_args: Any, training_args: Any
) -> OnlineStream:
    """The stream as this rank reads it.

    With dispatch_batches (accelerate's default) every rank reads the whole stream, and step t has rows [tN, (t+1)N), as
    in stock. Ranks split the shards if stock does; with `fill`, which does not keep stock's steps, also if there is a
    shard for each rank. Nothing is split if `val_size` holds out the first rows.
    """
    rank, world_size = training_args.process_index, training_args.world_size
    holds_out = data_args.val_size > 1e-6
    shards, splits = rows.n_shards, False
    every_rank_reads = training_args.accelerator_config.dispatch_batches is False
    if world_size > 1 and not holds_out:
        # accelerate does not split if there are as many shards as ranks
        splits = shards > world_size if every_rank_reads else not config.keeps and shards >= world_size
    if splits:
        rows = rows.shard(num_shards=world_size, index=rank)
    logger.info(
        "streaming: %s; rows are preprocessed when a worker needs them, in the order of LLaMA-Factory's stream%s",
        f"each rank reads its part of the {shards} shards"
        if splits
        else "every rank reads all rows and uses its share",
        ", the same in each epoch: another order would train on rows that val_size holds out" if holds_out else "",
    )
    return OnlineStream(rows, head, already_split=splits, is_reshuffled=not holds_out)


# A row of each source is tried before training.

MOST_TRIED = 1000
"""Rows of a source to try; if none of them can be used, its description is wrong."""


def check_sources(dataset: OnlineDataset, by_pass: Callable[[Sequence[int]], Mapping[str, Any]]) -> None:
    """Compare a row of each source with LLaMA-Factory's passes, because another release may process rows differently.

    by_pass: makes the last of these rows by the passes, and prints it like LLaMA-Factory (the first row only). Raises
    `ConfigError` for a row that differs, and `DataError` if none of the first rows of a source can be used: then its
    description in dataset_info.json is wrong. If others can be used, `on_error` decides about a bad row.
    """
    rows, is_printed = dataset.rows, False
    by_source: list[Any] = [range(len(rows))]
    if isinstance(rows, IndexedRows):
        by_source = [np.flatnonzero(rows.source_of == number) for number in rows.sources]
    for lines in by_source:
        # The first row of the source that can be used.
        errors: list[Exception] = []
        for line in map(int, lines[:MOST_TRIED]):
            try:
                features = dataset[line]
                break
            except DataError:
                raise
            except Exception as error:
                errors.append(error)
        else:
            if not isinstance(rows, IndexedRows):  # only a few rows of the stream have been tried
                continue
            (source, number), why = rows.find(int(lines[0])), str(errors[0]).rstrip(".")
            if not isinstance(errors[0], RowDropped):
                why = f"{one_line(errors[0])}; {source.description}"
            raise DataError(
                f"dataset_info.json: none of the first {len(errors)} rows of {source.name} can be used; row "
                f"{number}: {why}; correct `formatting`, `columns` or `tags` there, or the rows."
            ) from errors[0]
        # The same row by stock's passes.
        with contextlib.ExitStack() as quiet:
            if not datasets.are_progress_bars_disabled():
                datasets.disable_progress_bars()
                quiet.callback(datasets.enable_progress_bars)
            if is_printed:
                quiet.enter_context(contextlib.redirect_stdout(None))
            stock, is_printed = by_pass(dataset.stage.together(line)), True
        for name in dict.fromkeys((*features, *stock)):
            value, expected = features.get(name), stock.get(name)
            if name in MEDIA_COLUMNS:
                value, expected = len(value or []), len(expected or [])
            if value != expected:
                raise ConfigError(
                    f"odb: LLaMA-Factory's preprocessing of row {line} alone gives another {name} than its pass over "
                    "all rows, so odb_factory would train on wrong data; install a supported release (`odb-factory "
                    "doctor` names them)."
                )


# Replacements of LLaMA-Factory's passes, called by the plugin's hooks and by patched forks (`patches/`).


def mark_source(dataset: Any, dataset_attr: Any, data_args: Any, training_args: Any) -> Any:
    """Replaces LLaMA-Factory's format conversion: returns an index of the rows, which are converted when needed.

    LLaMA-Factory's pass converts rows with audio or video columns of `datasets` (paths are not such columns), and with
    images that are cast to a mode or nested in lists of lists. Stock converts the rows of a stream when they are read.
    Raises `DataError` if the dataset has no row.
    """
    if not isinstance(dataset, datasets.Dataset):
        if next(iter(dataset), None) is None:
            raise DataError(
                f"{dataset_attr} yields no row; remove it from the YAML, or, if it is a local file, set "
                "dataloader_num_workers to 1 or more (LLaMA-Factory cuts the stream into that many shards)."
            )
        stream = align_dataset(dataset, dataset_attr, data_args, training_args)
        # Of every stream: a conversion error ends the training here.
        rows = list(itertools.islice(stream, ROWS_IN_HEAD))
        _head[:] = _head or rows
        return stream
    if not len(dataset):
        raise DataError(f"{dataset_attr} has no row; remove it from the YAML, or raise max_samples or num_samples.")
    if is_convertible(dataset, dataset_attr):
        converter = get_dataset_converter(dataset_attr.formatting, dataset_attr, data_args)
    else:
        dataset, converter = align_dataset(dataset, dataset_attr, data_args, training_args), None
    _sources.append(Source(dataset, dataset_attr, converter))
    row_of = np.arange(len(dataset), dtype=np.int32)
    columns = {SOURCE: np.full(len(dataset), len(_sources) - 1, np.int16), SOURCE_ROW: row_of}
    return datasets.Dataset(pa.table(columns))


def is_online(dataset: Any, data_args: Any, is_eval: bool) -> bool:
    """Whether `online_dataset` replaces LLaMA-Factory's preprocessing pass: for training data, unless it is stored at
    `tokenized_path`."""
    return (is_index(dataset) or is_stream(dataset)) and not is_eval and data_args.tokenized_path is None


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
    """Replaces LLaMA-Factory's preprocessing pass: rows are converted and preprocessed when they are needed.

    dataset: an index or a stream. config: the block; None in a patched fork, whose `data_args` hold it.
    """
    # LLaMA-Factory's processor of the stage, called for one row.
    dataset_processor = _get_dataset_processor(data_args, stage, template, tokenizer, processor)
    rows: IndexedRows | list[dict[str, Any]] = list(_head) if is_stream(dataset) else IndexedRows(dataset)
    row_stage = STAGES[stage].of_rows(data_args, len(rows))
    media = _media_of(row_stage, template, tokenizer, processor)
    online = OnlineDataset(rows, dataset_processor, media, row_stage)
    # A few rows also go through LLaMA-Factory's own pass, and must come out the same.
    one_by_one = copy.copy(data_args)
    one_by_one.preprocessing_num_workers, one_by_one.overwrite_cache = None, True

    def by_pass(numbers: Sequence[int]) -> Any:
        if isinstance(rows, IndexedRows):
            alone = converted(dataset.select(numbers), one_by_one, training_args)
        else:
            alone = datasets.Dataset.from_list([rows[number] for number in numbers])
        arguments = alone, one_by_one, training_args, stage, template, tokenizer, processor
        return _get_preprocessed_dataset(*arguments, is_eval=False)[-1]

    check_sources(online, by_pass)
    if is_stream(dataset):
        config = config or ODBConfig.from_block(data_args.odb)
        return online_stream(dataset, online, config, data_args, training_args)
    return online


def training_rows(
    dataset: Any, stage: Stage, template: Any, tokenizer: Any, processor: Any
) -> OnlineDataset | OnlineStream | TokenizedDataset:
    """LLaMA-Factory's training dataset with odb's interface: unchanged if it is odb's, else its tokenized rows."""
    if isinstance(dataset, OnlineDataset | OnlineStream):
        return dataset
    if is_stream(dataset):
        raise ConfigError("streaming: True does not go with odb and rows that are tokenized already; set it to false.")
    if "packing_params" in (getattr(dataset, "column_names", None) or ()):
        raise ConfigError(
            "tokenized_path: its rows are packs of several samples (neat_packing); tokenize again without packing, or "
            "train without odb."
        )
    return TokenizedDataset(dataset, _media_of(stage, template, tokenizer, processor), stage)


def _media_of(stage: Stage, template: Any, tokenizer: Any, processor: Any) -> MediaObserver:
    """Ignores media if the stage (pre-training) or a custom collator (no template) takes none."""
    plugin = template.mm_plugin if stage.takes_media and template is not None else get_mm_plugin("base")
    return MediaObserver(plugin, tokenizer, processor)
