"""LLaMA-Factory's training data one row at a time: no preprocessing pass before training."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Protocol

import datasets
from torch.utils.data import Dataset

from odb_factory.data.observe import MediaCut, RowDropped
from odb_factory.llamafactory.media import MediaObserver, check_sizes, decoded
from odb_factory.llamafactory.sources import IndexedRows, StoredRows, stored
from odb_factory.llamafactory.stages import Stage
from odb_factory.planning import VIDEO, Cost
from odb_factory.training.one_pass import TWICE, takes_both

MEDIA_COLUMNS = ("_images", "_videos", "_audios", "images", "videos", "audios")
MAX_FILES_NAMED = 3
SIZES = "odb_image_sizes"
"""The key under which a light sample has the sizes of its image files, as they were observed."""
INVALID_ROW = "invalid"
"""What rows are counted under that LLaMA-Factory drops."""


class Column(Sequence[Any]):
    """One value of every row of a dataset, made when it is asked for."""

    def __init__(self, dataset: OnlineDataset, name: str):
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self.dataset[range(len(self))[index]][self.name]


class OnlineDataset(Dataset):
    """`dataset[i]`: one converted row through LLaMA-Factory's own dataset processor; `dataset["input_ids"]`: a column.

    Gives what stock preprocessing would have stored for the row (token ids, labels, attention mask
    as lists of int; media as references). Raises `RowDropped` where stock drops the row, `MediaCut` where truncation
    cut visual placeholders, and `ValueError` where its text has one written out.
    """

    def __init__(
        self,
        rows: IndexedRows | StoredRows | list[dict[str, Any]],
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

    @property
    def column_names(self) -> list[str]:
        """Those of the first row, as all rows have them."""
        return list(self[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index not in self.column_names:
                raise KeyError(f"{index!r} is no column of the training dataset; it has {', '.join(self.column_names)}")
            return Column(self, index)
        return self.features_of([self.rows[number] for number in self.stage.together(index)])

    def features_of(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of the last of these converted rows, preprocessed together; they need not be its own."""
        self.media.begin_row()
        encoded = self.stage.preprocess(self.processor, rows)
        if not encoded.get(self.stage.column):
            raise RowDropped(INVALID_ROW, f"LLaMA-Factory drops it: {self.stage.dropped}.")
        features = {key: values[0] for key, values in encoded.items()}
        if self.media.placeholders_cut(self.stage.answers(features)):
            cutoff_len = self.processor.data_args.cutoff_len
            raise MediaCut(f"cutoff_len {cutoff_len} cuts its visual placeholders, which the model cannot take.")
        return features


class TokenizedDataset(Dataset):
    """`dataset[i]`: one row of data that LLaMA-Factory tokenized beforehand, used as it is.

    Columns of media may be missing. Raises `MediaCut` where it holds fewer placeholders than its media have tokens, and
    `ValueError` where it holds more, if that can be known.
    """

    def __init__(self, rows: datasets.Dataset, media: MediaObserver, stage: Stage):
        self.rows, self.media, self.stage = stored(rows, "images", encodings=0), media, stage

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.media.begin_row()
        features = self.rows[index]
        images, videos, audios = (features.get(key) for key in ("images", "videos", "audios"))
        answers = self.stage.answers(features)
        if any(self.media.tokenized_placeholders_cut(images, videos, audios, ids) for ids in answers):
            raise MediaCut("it was tokenized with a cutoff_len that cuts its visual placeholders.")
        return features


class Rows(Protocol):
    """`self[i]` is a processed row, made of `rows[i]`, which is not."""

    rows: Any

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class RowObserver:
    """The observer of both.

    stage: says what a row costs.
    decode: also decode all media once, so that unreadable ones are known at observation.
    model_type: of the model's config; says whether images and videos can share a micro-batch (see `one_pass.py`), as
    they do if it is not given.
    shards_parameters: ranks gather parameters in each run of a module, so that all must run it equally often.
    """

    def __init__(
        self,
        media: MediaObserver,
        stage: Stage,
        *,
        decode: bool,
        model_type: str | None = None,
        shards_parameters: bool = False,
    ):
        self.media, self.stage, self.decode = media, stage, decode
        self.model_type, self.shards_parameters = model_type, shards_parameters
        self.videos_apart = model_type is not None and not takes_both(model_type)

    def __call__(self, dataset: Rows, index: int) -> tuple[dict[str, Any], Cost]:
        features = dataset[index]
        images, videos, audios = (features.get(key) for key in ("images", "videos", "audios"))
        if self.videos_apart and self.shards_parameters and images and videos:
            raise ValueError(TWICE.format("it", self.model_type))
        if self.decode:
            self.media.check_decodable(images, videos, audios)
        cost = self.stage.cost(features, self.media)
        if self.videos_apart and videos:
            cost = dataclasses.replace(cost, modality=VIDEO)
        sizes = self.media.sizes_of(images)
        return (features | {SIZES: sizes} if any(sizes) else features), cost

    def describe(self, dataset: Rows, index: int) -> str:
        where = f"row {index} of the training dataset"
        if isinstance(dataset.rows, IndexedRows):
            where += f" ({dataset.rows.origin(index)})"
        try:
            row = dataset.rows[index]
        except Exception:  # its conversion may be what failed
            return where
        media = [item for key in MEDIA_COLUMNS for item in row.get(key) or []]
        frames = [frame for item in media for frame in (item if isinstance(item, list) else [item])]
        files = [frame for frame in frames if isinstance(frame, str)]
        # LLaMA-Factory puts its folder before the names of files alone, so others may exist there.
        folder = getattr(getattr(getattr(dataset, "processor", None), "data_args", None), "media_dir", None) or ""
        not_files = [file for file in files if not os.path.isfile(file)]
        missing = [file for file in not_files if not os.path.exists(os.path.join(folder, file))]
        if files:
            kind = "no such file: " if missing else "not a file: " if not_files else "files "
            named = missing or not_files or files
            more = f" and {len(named) - MAX_FILES_NAMED} more" if len(named) > MAX_FILES_NAMED else ""
            where += f", {kind}{', '.join(named[:MAX_FILES_NAMED])}{more}"
        return where


class OpenMedia:
    """The trainer's own collator, given the images it expects in place of encoded cells."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __getattr__(self, name: str) -> Any:
        """What others read of the collator, its tokenizer for example."""
        if name.startswith("__") or name == "collator":  # a copy is asked for these before it has a collator
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        for feature in features:
            if feature.get("images"):
                check_sizes(feature["images"], feature.pop(SIZES, ()))
                feature["images"] = decoded(feature["images"])
        return self.collator(features)
