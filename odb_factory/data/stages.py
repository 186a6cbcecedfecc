"""The two stages of an `ODBLoader`, each an ordinary torch DataLoader: one observes rows, one collates groups.

Processes must not be forked while a thread may hold a lock. So both start their workers when an epoch begins, in the
caller's thread, and keep them for the run (but for the one that reads a stream, which begins anew with every epoch).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from odb_factory.batching import Budget
from odb_factory.config import ODBConfig
from odb_factory.data.collate import GroupDataset
from odb_factory.data.feed import TaskFeed
from odb_factory.data.measure import DEFAULT_PATCH_SIZE
from odb_factory.data.observe import ObservedDataset, ObservedStream, Observer, ShardSampler, where
from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import DataError, one_line

OBSERVE_CHUNK = 8
"""Samples an observe worker hands over at a time: fewer messages, still a short first wait."""
END = object()
"""What `take` returns behind the last."""


class Stages:
    """order: the rows of this rank, epoch by epoch. feed: where groups go in. threaded: whether processes collate them.

    num_workers: observe workers (one at most for a dataset that is iterated, which several would each iterate as a
    whole), and as many collate workers where the config does not say.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: Any,
        observer: Observer,
        collate_fn: Callable,
        config: ODBConfig,
        budget: Budget,
        seed: int,
        rank: int,
        world_size: int,
        patch_size: int = DEFAULT_PATCH_SIZE,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable | None = None,
    ):
        self.feed = TaskFeed()
        collate_workers = num_workers if config.collate_workers is None else config.collate_workers
        self.threaded = collate_workers > 0

        def loader(source: Any, workers: int, **kwargs: Any) -> DataLoader:
            if workers:
                kwargs = {
                    "persistent_workers": True,
                    "prefetch_factor": prefetch_factor,
                    "multiprocessing_context": multiprocessing_context,
                } | kwargs
            # A generator of its own: stock training draws nothing from the global one for us.
            generator = torch.Generator().manual_seed(seed)
            return DataLoader(source, num_workers=workers, collate_fn=_identity, generator=generator, **kwargs)

        options: dict[str, Any] = {"batch_size": OBSERVE_CHUNK, "worker_init_fn": worker_init_fn}
        if sampler is None:
            self._observed: Any = ObservedStream(dataset, observer, config, budget, rank, world_size)
            self._whole_stream: Any = ObservedStream(dataset, observer, config, budget, 0, 1)
            self.order: Any = self._observed
            num_workers = min(num_workers, 1)
            if num_workers:
                options["persistent_workers"] = False  # one that lives on would not hear of another epoch or state
        else:
            self._observed = ObservedDataset(dataset, observer, config, budget)
            self._whole_stream = None
            self.order = options["sampler"] = ShardSampler(sampler, rank, world_size)
        groups = GroupDataset(collate_fn, patch_size, functools.partial(where, observer, dataset), config.on_error)
        self._observing: DataLoader | None = loader(self._observed, num_workers, **options)
        self._collating: DataLoader | None = loader(
            groups, collate_workers, sampler=self.feed, batch_size=None, pin_memory=pin_memory
        )

    @property
    def is_closed(self) -> bool:
        return self._observing is None

    def observe(self) -> Iterator[Sample | Rejection]:
        """The rows of this rank in the epoch that `order` is set to."""
        chunks = iter(self._observing)
        return itertools.chain.from_iterable(iter(functools.partial(take, chunks, "observes"), END))

    def collate(self) -> Iterator[Any]:
        """What becomes of the groups of `feed`; to be asked with `take`."""
        return iter(self._collating)

    def find_spare(self) -> Sample:
        """The first usable row of the dataset, for idle steps of a rank whose shard had none."""
        rows: Iterable = self._whole_stream or map(self._observed.__getitem__, range(len(self._observed.dataset)))
        spare = next((row for row in rows if isinstance(row, Sample)), None)
        if spare is None:
            raise DataError("no row of the dataset can be read here to take idle steps with; other ranks could.")
        return spare

    def close(self) -> None:
        """End the worker processes."""
        self._observing = self._collating = None


def take(batches: Iterator[Any], task: str) -> Any:
    """What the workers of a DataLoader give next, or `END`. Their death in the middle of it is called by its name."""
    try:
        return next(batches, END)
    except (ConnectionError, EOFError, FileNotFoundError) as error:
        raise DataError(
            f"a DataLoader worker that {task} was killed while it handed over its result ({one_line(error)}); look for "
            "the system's out-of-memory killer, or lower dataloader_num_workers."
        ) from None


def _identity(item: Any) -> Any:
    return item
