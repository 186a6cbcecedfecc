"""The paper's offline baselines as batch samplers of the stock trainer, written by us from their descriptions.

Each knows the exact length of every sample before training (a length cache), which online batching does without. A
function takes lengths (tokens) and returns batches of indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

MULTIPLE = 8
"""LLaMA-Factory's collator pads rows to a multiple of so many tokens."""
Batches = list[list[int]]


def sorted_by_length(lengths: np.ndarray, rows: int) -> Batches:
    """*Sorted*: fixed batches, from the shortest samples to the longest."""
    order = np.argsort(lengths, kind="stable").tolist()
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def global_maximum(lengths: np.ndarray, token_budget: int, rng: np.random.Generator) -> Batches:
    """*GMT*: all samples sorted, cut where a padded batch would exceed the budget, batches shuffled (fairseq's
    `batch_by_size`)."""
    return _shuffled(_within(np.argsort(lengths, kind="stable").tolist(), lengths, token_budget), rng)


def bucketed_maximum(lengths: np.ndarray, token_budget: int, rng: np.random.Generator, mega_bucket: int) -> Batches:
    """*BMT*: the same within buckets of so many samples of a random order."""
    order = rng.permutation(len(lengths))
    batches: Batches = []
    for start in range(0, len(order), mega_bucket):
        bucket = order[start : start + mega_bucket]
        batches += _within(bucket[np.argsort(lengths[bucket], kind="stable")].tolist(), lengths, token_budget)
    return _shuffled(batches, rng)


def _within(order: Sequence[int], lengths: np.ndarray, token_budget: int) -> Batches:
    batches: Batches = []
    longest = 0
    for index in order:
        padded = -(-int(lengths[index]) // MULTIPLE) * MULTIPLE
        if not batches or max(longest, padded) * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
            longest = 0
        batches[-1].append(index)
        longest = max(longest, padded)
    return batches


def _shuffled(batches: Batches, rng: np.random.Generator) -> Batches:
    return [batches[k] for k in rng.permutation(len(batches))]


def for_ranks(batches: Batches, ranks: int) -> list[Batches]:
    """Of each rank its batches, as many on each: the largest batches are halved until the ranks divide their number."""
    batches = list(batches)
    while len(batches) % ranks:
        k = max(range(len(batches)), key=lambda k: len(batches[k]))
        half = len(batches[k]) // 2
        if not half:
            raise ValueError(
                f"{len(batches)} batches of one sample cannot be dealt to {ranks} ranks; take more samples."
            )
        batches[k : k + 1] = [batches[k][:half], batches[k][half:]]
    return [batches[rank::ranks] for rank in range(ranks)]


SEED = 0


def make(kind: str, lengths: Sequence[int], *, rows: int, token_budget: int, mega_bucket: int) -> Batches:
    """kind: `Sorted`, `GMT` or `BMT`. The same batches wherever it is called."""
    known, rng = np.asarray(lengths), np.random.default_rng(SEED)
    makers: dict[str, Callable[[], Batches]] = {
        "Sorted": lambda: sorted_by_length(known, rows),
        "GMT": lambda: global_maximum(known, token_budget, rng),
        "BMT": lambda: bucketed_maximum(known, token_budget, rng, mega_bucket),
    }
    return makers[kind]()


def install(**settings: Any) -> None:
    """From now on stock trainers of this process take their training batches from `make` with these settings.

    Workers, prefetch factor and collator stay the trainer's.
    """
    from torch.utils.data import DataLoader
    from transformers import Trainer

    def dataloader(self: Trainer) -> DataLoader:
        lengths = [len(ids) for ids in self.train_dataset["input_ids"]]
        batches = for_ranks(make(lengths=lengths, **settings), self.args.world_size)
        return DataLoader(
            self.train_dataset,
            batch_sampler=batches[self.args.process_index],
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            pin_memory=self.args.dataloader_pin_memory,
        )

    Trainer.get_train_dataloader = dataloader
