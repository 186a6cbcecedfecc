"""LLaMA-Factory's training data one row at a time: no preprocessing pass before training."""

from __future__ import annotations

import copy
from typing import Any

import datasets
from torch.utils.data import Dataset

from odb_factory.batching import Cost
from odb_factory.data.measure import count_supervised
from odb_factory.data.observe import MediaCut, RowDropped
from odb_factory.llamafactory.media import EncodedImage, MediaObserver, check_decodable, decoded

SOURCE, SOURCE_ROW = "_odb_source", "_odb_row"
"""Columns with the number of the dataset a row came from (in the order loaded) and its row there."""
MAX_FILES_NAMED = 3


class OnlineDataset(Dataset):
    """`dataset[i]`: one row of the converted dataset through LLaMA-Factory's own dataset processor.

    Gives what stock preprocessing would have stored for the row (token ids, labels, attention mask
    as lists of int; media as references). Raises `RowDropped` where stock drops the row and
    `MediaCut` where truncation cut visual placeholders.
    """

    def __init__(self, rows: datasets.Dataset, dataset_processor: Any, media: MediaObserver, sources: list[str]):
        self.rows, self.media, self.sources = rows, media, sources
        template = copy.copy(dataset_processor.template)
        template.mm_plugin = media.plugin
        self.processor = copy.copy(dataset_processor)
        self.processor.template = template
        images = rows.features.get("_images")
        self._images_encoded = _holds(images, datasets.Image)
        # Rows are read as stored, so that images stay encoded; other decoded media are rare, and read as stock does.
        stored = not any(_holds(rows.features.get(name), datasets.Audio) for name in ("_videos", "_audios"))
        self._reader = rows.with_format("arrow") if stored else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.media.begin_row()
        row = self.row(index)
        encoded = self.processor.preprocess_dataset({key: [value] for key, value in row.items()})
        if not encoded.get("input_ids"):
            raise RowDropped("invalid", "LLaMA-Factory drops it: the turns do not end in one answer to a prompt.")
        features = {key: values[0] for key, values in encoded.items()}
        if self.media.placeholders_cut(features["input_ids"]):
            cutoff_len = self.processor.data_args.cutoff_len
            raise MediaCut(f"cutoff_len {cutoff_len} cuts its visual placeholders, which the model cannot take.")
        return features

    def row(self, index: int) -> dict[str, Any]:
        """The converted row (`_prompt`, `_response`, ...), its images still encoded."""
        row = self._reader[index]
        if not isinstance(row, dict):
            row = {name: column[0] for name, column in row.to_pydict().items()}
            if self._images_encoded and row["_images"]:
                row["_images"] = [EncodedImage(image["bytes"], image["path"]) for image in row["_images"]]
        return row


class RowObserver:
    """The observer of LLaMA-Factory's datasets, online or tokenized beforehand.

    decode: also decode every image once, so that unreadable ones are known at observation.
    """

    def __init__(self, media: MediaObserver, *, decode: bool):
        self.media, self.decode = media, decode

    def __call__(self, dataset: Any, index: int) -> tuple[dict[str, Any], Cost]:
        features = dataset[index]
        if not isinstance(dataset, OnlineDataset):
            self.media.begin_row()
        images, videos, audios = (features.get(key) for key in ("images", "videos", "audios"))
        if self.decode:
            check_decodable(images)
        cost = Cost(
            tokens=len(features["input_ids"]),
            patches=self.media.count_patches(images, videos, audios, features["input_ids"]),
            supervised_tokens=count_supervised(features["labels"]),
            has_media=self.media.has_media(images, videos, audios),
        )
        return features, cost

    def describe(self, dataset: Any, index: int) -> str:
        where = f"row {index} of the training dataset"
        if not isinstance(dataset, OnlineDataset):
            return where
        row = dataset.row(index)
        if SOURCE in row:
            where += f" (row {row[SOURCE_ROW]} of {dataset.sources[row[SOURCE]]})"
        files = [item for key in ("_images", "_videos", "_audios") for item in row[key] or [] if isinstance(item, str)]
        if files:
            more = f" and {len(files) - MAX_FILES_NAMED} more" if len(files) > MAX_FILES_NAMED else ""
            where += f", files {', '.join(files[:MAX_FILES_NAMED])}{more}"
        return where


class OpenMedia:
    """The trainer's own collator, given the images it expects in place of encoded cells."""

    def __init__(self, collator: Any):
        self.collator = collator

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        for feature in features:
            if feature.get("images"):
                feature["images"] = decoded(feature["images"])
        return self.collator(features)


def _holds(feature: Any, kind: type) -> bool:
    """Whether a column's type is `kind` or a list of it."""
    if isinstance(feature, list):
        return any(_holds(item, kind) for item in feature)
    return isinstance(feature, kind) or _holds(getattr(feature, "feature", []), kind)
