"""LLaMA-Factory's training data where they can only be iterated: rows as it aligns, mixes and shuffles them.

Its preprocessing of them is put off to the observe workers, which are handed one row at a time (`data/order.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import datasets
from torch.utils.data import IterableDataset

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.dataset import OnlineDataset, RowObserver
from odb_factory.log import get_logger
from odb_factory.planning import Cost

logger = get_logger(__name__)

ROWS_IN_HEAD = 3


class OnlineStream(IterableDataset):
    """Iterates over raw rows.

    rows: the stream, as LLaMA-Factory would preprocess it. head: a few rows of it, preprocessed when asked for; they
    come before the shuffling, whose buffer need not be filled for them. already_split: `rows` are those of this rank.
    is_reshuffled: in another order in each epoch.
    """

    def __init__(self, rows: Any, head: OnlineDataset, *, already_split: bool, is_reshuffled: bool):
        self.rows, self.head, self.already_split, self.is_reshuffled = rows, head, already_split, is_reshuffled
        self.media, self.stage, self.processor = head.media, head.stage, head.processor

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        if self.is_reshuffled:
            self.rows.set_epoch(epoch)


class StreamObserver:
    """Makes features of a raw row and observes them, in the worker that is handed the row."""

    def __init__(self, observer: RowObserver, head: OnlineDataset):
        self.observer, self.head = observer, head

    def __call__(self, row: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
        return self.observer(self.head.features_of([row]))

    def describe(self, rows: Any, index: int) -> str:
        return self.observer.describe(SimpleNamespace(rows=rows), index)


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, datasets.IterableDataset)


def first_rows(stream: Any) -> list[dict[str, Any]]:
    return list(itertools.islice(stream, ROWS_IN_HEAD))


def online_stream(
    rows: datasets.IterableDataset, head: OnlineDataset, config: ODBConfig, data_args: Any, training_args: Any
) -> OnlineStream:
    """The stream as this rank reads it.

    Where stock means to have one rank read for all (accelerate's default), step t is the rows [tN, (t+1)N) of the one
    stream, and so it is here, where every rank reads it. Where stock splits the shards between ranks, so does this;
    with `fill`, which keeps no steps of stock's, wherever there are enough. Rows held out by `val_size` come before the
    split. Raises `ConfigError` for a stage whose rows are not preprocessed one by one.
    """
    if len(head.stage.together(0)) > 1:
        raise ConfigError(
            f"streaming: True does not go with odb and stage {head.stage.name}, where a row is preprocessed with the "
            "one before it; set it to false, or take a data set of local files."
        )
    rank, world_size = training_args.process_index, training_args.world_size
    holds_out = data_args.val_size > 1e-6
    shards, splits = rows.n_shards, False
    if world_size > 1 and not holds_out:
        # accelerate leaves as many shards as ranks alone
        splits = shards > world_size if _every_rank_reads(training_args) else not config.keeps and shards >= world_size
    if splits:
        rows = rows.shard(num_shards=world_size, index=rank)
    how = "this process reads all of it"
    if world_size > 1:
        how = (
            f"each rank reads its part of the {shards} shards" if splits else "every rank reads it and takes its share"
        )
    order = f"the order is that of LLaMA-Factory's stream, shuffled within {data_args.buffer_size} rows"
    if holds_out:
        order += ", and the same in each epoch: in another, rows that val_size has held out would be trained on"
    logger.info("streaming: %s, and rows are preprocessed when they are needed; %s", how, order)
    return OnlineStream(rows, head, already_split=splits, is_reshuffled=not holds_out)


def _every_rank_reads(training_args: Any) -> bool:
    return training_args.accelerator_config.dispatch_batches is False
