"""What the ranks of a LLaMA-Factory training must have in common, beside the `odb:` block (I11)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from odb_factory.data.content import checksum
from odb_factory.data.observe import Observer
from odb_factory.llamafactory.dataset import OnlineDataset, TokenizedDataset

ROWS_COMPARED = 3
LOCAL_KEYS = ("dataset_dir", "media_dir", "tokenized_path", "overwrite_cache", "preprocessing_num_workers")
"""Data arguments that may differ from node to node: where things are, and how fast they are read."""


def settings_of(dataset: OnlineDataset | TokenizedDataset, observer: Observer) -> dict[str, object]:
    """Versions, data arguments, and what the first rows say once template and tokenizer have run."""
    settings: dict[str, object] = {name: version(name) for name in ("llamafactory", "transformers")}
    if isinstance(dataset, OnlineDataset):
        arguments = vars(dataset.processor.data_args)
        settings |= {key: value for key, value in arguments.items() if key not in LOCAL_KEYS} | dataset.stage.settings
    rows = range(min(len(dataset), ROWS_COMPARED))
    return settings | {"what the first rows say": [_content(dataset, observer, index) for index in rows]}


def _content(dataset: Any, observer: Observer, index: int) -> object:
    """A checksum of a row; for one that cannot be read, the kind of its error: it is the loader's to report."""
    try:
        return checksum(*observer(dataset, index))
    except Exception as error:
        return type(error).__name__
