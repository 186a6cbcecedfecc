"""`streaming: true` beside an `odb:` block: local files are read by index all the same.

LLaMA-Factory loads a local file whole and makes a stream of it, to do without the preprocessing pass; with a block
there is no such pass. What is left of streaming is for data sets that can only be iterated (`online_stream.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from odb_factory.log import get_logger

logger = get_logger(__name__)

BY_INDEX = ("file", "cloud_file")
"""What a data set is loaded from that LLaMA-Factory has whole in its hands, whether it makes a stream of it or not."""


def with_local_files_by_index(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` for LLaMA-Factory: without `streaming` where all rows can be read by index.

    Its parser then asks for none of what a stream needs (`max_steps`), and refuses none of what a stream cannot have
    (`max_samples`, a share as `val_size`).
    """
    args = dict(args)
    if not args.get("do_train") or args.get("streaming") is not True or not _all_rows_have_an_index(args):
        return args
    logger.info(
        "streaming: true is taken as false, for all data sets are local: rows are read by index and preprocessed when "
        "they are needed; samples, order and optimizer steps are those of `streaming: false` (stock's stream shuffles "
        "within its buffer), and max_steps is not needed"
    )
    return args | {"streaming": False}


def _all_rows_have_an_index(args: Mapping[str, Any]) -> bool:
    tokenized = args.get("tokenized_path")
    if tokenized is not None and os.path.isdir(str(tokenized)):
        return True
    found = data_sets(args, "dataset", "eval_dataset")
    return bool(found) and all(attr.load_from in BY_INDEX for attr in found)


def data_sets(args: Mapping[str, Any], *keys: str) -> list[Any]:
    """LLaMA-Factory's attributes of the data sets that these keys name; none if it cannot find them."""
    from llamafactory.data.parser import get_dataset_list

    try:
        found: list[Any] = get_dataset_list(
            [name for key in keys for name in _names(args.get(key))], args.get("dataset_dir") or "data"
        )
    except Exception:  # LLaMA-Factory will say so
        return []
    return found


def _names(datasets: Any) -> list[str]:
    """As LLaMA-Factory reads a list of names."""
    if isinstance(datasets, str):
        return [name.strip() for name in datasets.split(",")]
    return list(datasets or ())
