"""LLaMA-Factory's datasets as loaded, each row converted to its common format when it is needed.

Stock converts the format of a dataset in a pass over all its rows. That pass is put off: an *index*, an ordinary
`datasets.Dataset` that names the source of every row and its number there, stands for the dataset while
LLaMA-Factory merges, samples and splits, for all of which only the number of rows counts. For training its own
converter is then called on one row at a time; what is evaluated goes through its pass after all (`through_pass`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from odb_factory.errors import DataError
from odb_factory.llamafactory.media import EncodedImage

SOURCE, SOURCE_ROW = "_odb_source", "_odb_row"
"""Columns of an index: the number of the source, in the order loaded, and the row there."""
_DECODED_IN_TIME = (datasets.Audio, getattr(datasets, "Video", datasets.Audio))


class StoredRows:
    """Rows of a `datasets.Dataset` as stored: images of the column `images` stay encoded, all else is not decoded.

    encodings: of the images, see `EncodedImage`.
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
            row[self._images] = [self._image(one) for one in cell] if isinstance(cell, list) else self._image(cell)
        return row

    def _image(self, cell: dict[str, Any]) -> EncodedImage:
        return EncodedImage(cell["bytes"], cell["path"], self._encodings)


def stored(rows: datasets.Dataset, images: str, encodings: int) -> StoredRows | datasets.Dataset:
    """Rows as stored, or as they are if they hold audio or video columns, which are rare and read as stock does."""
    decoded = any(_holds(feature, _DECODED_IN_TIME) for feature in rows.features.values())
    return rows if decoded else StoredRows(rows, images, encodings)


class MissingColumn(DataError):
    """No row has a column that the converter asks for."""


class Source:
    """One dataset: `source[row]` is a converted row.

    rows: as loaded, or already converted if `converter` is none. attr: LLaMA-Factory's description of it.
    Raises `MissingColumn`, and what the converter raises for a row.
    """

    def __init__(self, rows: datasets.Dataset, attr: Any, converter: Callable[[Any], dict[str, Any]] | None):
        self.rows, self.attr, self.converter = rows, attr, converter
        self.name = f"{attr}{' as sampled by num_samples' if attr.num_samples is not None else ''}"
        # Stock encodes images anew when it converts the format and when it preprocesses.
        self._stored = stored(rows, "_images", 1) if converter is None else StoredRows(rows, attr.images, 2)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self.converter is None:
            return self._stored[row]
        return self.converter(_Columns(self._stored[row], self.name))

    def check_columns(self) -> None:
        """Raise `MissingColumn` at once; what else is wrong with a row is for the policy `on_error`."""
        try:
            self[0]
        except MissingColumn:
            raise
        except Exception:
            return


class _Columns(dict):
    def __init__(self, row: dict[str, Any], name: str):
        super().__init__(row)
        self._name = name

    def __missing__(self, column: str) -> Any:
        raise MissingColumn(
            f"{self._name} has no column {column!r}, only {', '.join(self)}; "
            "give it the right `formatting` and `columns` in dataset_info.json."
        )


_sources: list[Source] = []
"""The datasets of the training that this process loads; an index names them by number."""


_first_rows: list[dict[str, Any]] = []
"""Of the first of its streams, converted."""


def forget() -> None:
    """A new training begins: let go of the datasets of the one before."""
    _sources.clear()
    _first_rows.clear()


def keep_first_rows(rows: list[dict[str, Any]]) -> None:
    """Of a stream, before it is mixed and shuffled; the first is one of the training."""
    if not _first_rows:
        _first_rows.extend(rows)


def first_rows() -> list[dict[str, Any]]:
    return list(_first_rows)


def is_convertible(rows: Any, attr: Any) -> bool:
    """Whether rows can be converted one at a time: not a stream; no media that the pass would decode and encode anew,
    but for images in a plain column of images."""
    if not isinstance(rows, datasets.Dataset):
        return False
    feature = rows.features.get(attr.images)
    image = _image(feature)
    if _holds(feature, (datasets.Image, *_DECODED_IN_TIME)) and (image is None or image.mode is not None):
        return False
    others = [rows.features.get(column) for column in (attr.videos, attr.audios)]
    return not any(_holds(feature, (datasets.Image, *_DECODED_IN_TIME)) for feature in others)


def index_of(source: Source) -> datasets.Dataset:
    """The index that stands for all rows of a source."""
    _sources.append(source)
    rows = len(source.rows)
    columns = {SOURCE: np.full(rows, len(_sources) - 1, np.int16), SOURCE_ROW: np.arange(rows, dtype=np.int32)}
    return datasets.Dataset(pa.table(columns))


def is_index(dataset: Any) -> bool:
    return isinstance(dataset, datasets.Dataset) and SOURCE in dataset.column_names


class IndexedRows:
    """`rows[i]`: the converted row that line i of an index names."""

    def __init__(self, index: datasets.Dataset):
        self._source, self._row = _columns(index)
        self._sources = {number: _sources[number] for number in np.unique(self._source)}

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sources[self._source[index]][int(self._row[index])]

    def by_source(self) -> tuple[list[str], np.ndarray]:
        """The names of the datasets, and of each row the number of its own (int16)."""
        place = np.zeros(max(self._sources) + 1, dtype=np.int16)
        place[list(self._sources)] = np.arange(len(self._sources))
        return [source.name for source in self._sources.values()], place[self._source]

    def origin(self, index: int) -> str:
        """Where a row came from, for messages: its number and the name of its dataset."""
        return f"row {self._row[index]} of {self.dataset_name(index)}"

    def dataset_name(self, index: int) -> str:
        return self._sources[self._source[index]].name

    @property
    def dataset_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self._sources.values())


def through_pass(index: datasets.Dataset, align: Callable[[datasets.Dataset, Any], datasets.Dataset]) -> Any:
    """The rows of an index, in its order, converted by `align(rows, attr)`, stock's pass over all of them."""
    source_of, row_of = _columns(index)
    parts, places = [], []
    for number in np.unique(source_of):
        source, lines = _sources[number], np.flatnonzero(source_of == number)
        rows, wanted = source.rows, row_of[lines]
        if not np.array_equal(wanted, np.arange(len(rows))):
            rows = rows.select(wanted)
        parts.append(rows if source.converter is None else align(rows, source.attr))
        places.append(lines)
    if len(parts) == 1:
        return parts[0]
    merged, place = datasets.concatenate_datasets(parts), np.concatenate(places)
    return merged if np.array_equal(place, np.arange(len(place))) else merged.select(np.argsort(place))


def _columns(index: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Source and source row of each line. Numpy applies the mapping of an index: `datasets` would gather row by row,
    at .8 KB a row."""
    columns = index.data.column(SOURCE).to_numpy(), index.data.column(SOURCE_ROW).to_numpy()
    if index._indices is None:
        return columns
    lines = index._indices.column(0).to_numpy()
    return columns[0][lines], columns[1][lines]


def _image(feature: Any) -> datasets.Image | None:
    """The type of the images in a column of images or of lists of images."""
    if isinstance(feature, list):
        feature = feature[0]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, datasets.Image) else None


def _holds(feature: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a column's type is `kind` or a list of it."""
    if isinstance(feature, list):
        return any(_holds(item, kind) for item in feature)
    return isinstance(feature, kind) or _holds(getattr(feature, "feature", []), kind)
