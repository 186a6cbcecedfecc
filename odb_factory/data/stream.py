"""Observe a dataset that is iterated: every rank takes its share of the one stream that all iterate alike."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from odb_factory.comm.agreement import ranks_alike
from odb_factory.config import ODBConfig
from odb_factory.data.fingerprint import fingerprint
from odb_factory.data.observe import ObservedDataset, Observer
from odb_factory.data.sampler import Start, shard
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.worker import WorkerDataset
from odb_factory.errors import ConfigError, one_line
from odb_factory.planning import Budget

ITEMS_COMPARED = 16
"""Of a stream, read ahead and held until they are observed."""
DIFFERENT_STREAMS = (
    "the ranks iterate different streams ({}), so samples would be lost: each takes its own share of the one stream "
    "that all iterate alike; if the dataset gives every rank a part of its own, set already_split=True, else let it "
    "yield the same items in the same order on every rank."
)
SAME_STREAMS = (
    "already_split=True (or datasets.distributed.split_dataset_by_node), but ranks iterate the same stream ({}), so "
    "each sample would be trained on several times; leave it out, or give each rank a part of its own."
)


def is_split_by_node(stream: Any) -> bool:
    """Whether `datasets.distributed.split_dataset_by_node` has given each rank a part of it.

    Raises `ConfigError` for a release of `datasets` whose streams do not tell.
    """
    if type(stream).__module__.startswith("datasets.") and not hasattr(stream, "_distributed"):
        raise ConfigError(
            "dataset: this release of datasets does not tell whether split_dataset_by_node has split a stream, so parts"
            " of it could be lost; say so yourself with already_split=True, or install datasets 4.0."
        )
    return getattr(stream, "_distributed", None) is not None


class StreamStart(NamedTuple):
    """What an observed stream yields before its samples. fingerprint: of the first items, 0 if there are none."""

    fingerprint: int


class ObservedStream(WorkerDataset, IterableDataset):
    """The share of a rank of a dataset that is iterated, observed; a `StreamStart` goes before it.

    The id of a sample is its position in the stream. All ranks iterate the same stream, unless it is split between
    them beforehand (`is_split`), and then each all of its own; the ranks compare their first items. A resumed stream is
    read from its beginning, what is done passed over unobserved: a state of its own, where it has one, may forget what
    waits in it (that of `datasets` loses its shuffle buffer).
    """

    fingerprint = 0
    """Of the order, for a state: a stream is not begun to find out what it will yield."""

    def __init__(
        self,
        dataset: Any,
        observer: Observer,
        config: ODBConfig,
        budget: Budget,
        rank: int,
        world_size: int,
        *,
        is_split: bool = False,
    ):
        self.dataset = dataset
        self._observed = ObservedDataset(self, observer, config, budget)
        self._current: Any = None
        self.rank, self.world_size = rank, world_size
        self.is_split = is_split or is_split_by_node(dataset)
        self.start = Start()
        self._begun = StreamStart(0)

    def __getitem__(self, index: int) -> Any:
        return self._current

    def __iter__(self) -> Iterator[StreamStart | Sample | Rejection]:
        items = iter(self.dataset)
        first = list(itertools.islice(items, ITEMS_COMPARED))
        yield StreamStart(fingerprint(first) if first else 0)
        whole = (0, 1) if self.is_split else (self.rank, self.world_size)
        pairs = shard(itertools.chain(first, items), *whole, self.start)
        position = -1
        while True:
            try:
                position, self._current = next(pairs)
            except StopIteration:
                return
            except Exception as error:
                message = (
                    f"the dataset raised an error while it was iterated, behind item {position}: {one_line(error)}; "
                    "nothing can be read behind it, so mend the dataset (`on_error: skip` is for items alone)."
                )
                yield Rejection(position + 1, "unreadable", message, fatal=True)
                return
            yield self._observed[position * self.world_size + self.rank if self.is_split else position]

    def samples(self, observed: Iterable[Any]) -> Iterator[Sample | Rejection]:
        """What has been observed, perhaps in a worker process, without the `StreamStart`, which is kept."""
        for item in observed:
            if isinstance(item, StreamStart):
                self._begun = item
            else:
                yield item

    def common(self, place: tuple[int, ...]) -> int:
        """What `compare` compares: a number made of the first items and, unless the stream is split, the place."""
        return self._begun.fingerprint if self.is_split else zlib.crc32(repr((self._begun, place)).encode())

    def compare(self, numbers: Sequence[int]) -> str | None:
        """Why the ranks, with these numbers of `common`, cannot go on; None if they can."""
        if self.is_split:
            begun = [number for number in numbers if number]
            return SAME_STREAMS.format(ranks_alike(numbers)) if len(set(begun)) < len(begun) else None
        return DIFFERENT_STREAMS.format(ranks_alike(numbers)) if len(set(numbers)) > 1 else None

    def peek(self) -> int:
        return self.fingerprint

    def checksum_through(self, block: int) -> int:
        """Of a stream only the first items are compared."""
        return 0

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
