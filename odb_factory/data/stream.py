"""A dataset that is iterated: one reader on each rank takes its share of it, observe workers are handed raw items."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from odb_factory.comm.agreement import ranks_alike
from odb_factory.config import ODBConfig
from odb_factory.data.fingerprint import fingerprint
from odb_factory.data.observe import ItemError, ObservedDataset, Observer
from odb_factory.data.sampler import Start, shard
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.serialize import pack, unpack
from odb_factory.data.worker import BusyRows, WorkerDataset
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
    """Whether `datasets.distributed.split_dataset_by_node` has given each rank a part of it, or it says so itself.

    Raises `ConfigError` for a release of `datasets` whose streams do not tell.
    """
    if type(stream).__module__.startswith("datasets.") and not hasattr(stream, "_distributed"):
        raise ConfigError(
            "dataset: this release of datasets does not tell whether split_dataset_by_node has split a stream, so parts"
            " of it could be lost; say so yourself with already_split=True, or install datasets 4.0."
        )
    return getattr(stream, "already_split", False) or getattr(stream, "_distributed", None) is not None


class StreamStart(NamedTuple):
    """What a reader yields before the items. fingerprint: of the first items, 0 if there are none."""

    fingerprint: int


class RawItem(NamedTuple):
    """An item as the dataset has yielded it.

    id: its position in the stream. content: the item; packed if it goes to another process. problem: why it cannot.
    """

    id: int
    content: Any
    is_packed: bool = False
    problem: str | None = None


class StreamReader(WorkerDataset, IterableDataset):
    """The share of a rank of a dataset that is iterated: raw items, a `StreamStart` before them.

    The id of an item is its position in the stream. All ranks iterate the same stream, unless it is split between
    them beforehand (`is_split`), and then each all of its own; the ranks compare their first items. One process reads,
    however many observe what it has read, so that order and ids are the same. A resumed stream is read from its
    beginning, what is done passed over: a state of its own, where it has one, may forget what waits in it (that of
    `datasets` loses its shuffle buffer).
    """

    fingerprint = 0
    """Of the order, for a state: a stream is not begun to find out what it will yield."""

    def __init__(self, dataset: Any, rank: int, world_size: int, *, is_split: bool = False):
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.is_split = is_split or is_split_by_node(dataset)
        self.start = Start()
        self._begun = StreamStart(0)

    def __iter__(self) -> Iterator[StreamStart | RawItem | Rejection]:
        first: list[Any] = []
        rest: Iterator[Any] = iter(())
        try:
            rest = iter(self.dataset)
            first.extend(itertools.islice(rest, ITEMS_COMPARED))
        except Exception as error:
            rest = _raising(error)
        yield StreamStart(fingerprint(first) if first else 0)
        whole = (0, 1) if self.is_split else (self.rank, self.world_size)
        pairs = shard(itertools.chain(first, rest), *whole, self.start)
        position = -1
        while True:
            try:
                position, item = next(pairs)
            except StopIteration:
                return
            except Exception as error:
                message = (
                    f"the dataset raised an error while it was iterated, behind item {position}: {one_line(error)}; "
                    "nothing can be read behind it, so mend the dataset (`on_error: skip` is for items alone)."
                )
                yield Rejection(position + 1, "unreadable", message, fatal=True)
                return
            yield _raw(position * self.world_size + self.rank if self.is_split else position, item)

    def items(self, read: Iterable[Any]) -> Iterator[RawItem | Rejection]:
        """What has been read, perhaps in a worker process, without the `StreamStart`, which is kept."""
        for item in read:
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


class Arriving:
    """The batch sampler of the observe workers of a stream: the chunks that its reader hands on, as they come.

    chunks: of the epoch that begins. ahead: chunks that torch asks for when it starts the workers, in the caller's
    thread; those are empty, so that nobody waits there until the stream yields.
    """

    def __init__(self, reader: StreamReader, ahead: int):
        self.reader, self.ahead = reader, ahead
        self.chunks: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[RawItem | Rejection]]:
        # Taken when the first is asked for, since torch makes an iterator that it does not use; and kept by nobody
        # else, since leaving the epoch must end the process that reads.
        chunks, self.chunks = self.chunks, iter(())
        yield from itertools.repeat([], self.ahead)
        for chunk in chunks:
            yield list(self.reader.items(chunk))


class ObservedItems(WorkerDataset):
    """The dataset of the observe workers of a stream: `self[item]` is what becomes of a raw item, the index itself.

    dataset: the user's, for `worker_init_fn` alone. It is there in a forked worker and not sent to any other.
    """

    def __init__(self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget, busy: BusyRows):
        self.dataset = dataset
        self._current = CurrentItem()
        self._observed = ObservedDataset(self._current, observer, config, budget, busy)

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce__()
        return make, arguments, state | {"dataset": None}

    def __getitem__(self, item: RawItem | Rejection) -> Sample | Rejection:
        if isinstance(item, Rejection):
            return item
        self._current.raw = item
        return self._observed[item.id]


class CurrentItem:
    """What an observer is given for a dataset: whatever index it asks for, it gets the item that is observed now."""

    raw: RawItem

    def __getitem__(self, index: int) -> Any:
        if self.raw.problem is not None:
            raise ItemError(
                f"it cannot be sent to an observe worker ({self.raw.problem}); let it hold what pickle takes, or set "
                "num_workers to 0."
            )
        return unpack(self.raw.content) if self.raw.is_packed else self.raw.content


def _raw(id: int, item: Any) -> RawItem:
    """Packed here where this process is a worker: a queue would tell nobody that it cannot pickle an item."""
    if get_worker_info() is None:
        return RawItem(id, item)
    try:
        return RawItem(id, pack(item), is_packed=True)
    except Exception as error:
        return RawItem(id, None, problem=one_line(error))


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield
