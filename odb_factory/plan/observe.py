"""Observe whole optimizer steps, spread over the first epoch, and measure how long their samples are."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from odb_factory.data.processes import BusyRows, WorkerInit
from odb_factory.data.workers import END, take
from odb_factory.plan.rows import ObservedRow, TrainingRows
from odb_factory.planning import Media, make_metadata

# ----------------------------------------------------------------------------------------------------------------------
# Observe whole optimizer steps, spread over the first epoch, in worker processes and a bounded time.

MOST_SECONDS = 60.0
"""Observation ends then; what it has seen by then is planned."""
CHUNK = 8
ROWS_A_WORKER = 64
MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step: where it begins in the order of the epoch, and its samples there, as `ROW`."""

    start: int
    rows: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows of the first epoch. steps: optimizer steps that are planned. population: rows of the epoch, None: of a
    stream. resampled: why the steps are drawn from what was seen, with replacement; "": they are those of the training.
    """

    seen: list[ObservedRow]
    steps: list[Step]
    population: int | None
    resampled: str
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether every row of the epoch was seen, so that the plan is that of its first epoch."""
        return not self.resampled and self.population == len(self.seen)


def observe(rows: TrainingRows, step_size: int, samples: int, *, seconds: float = MOST_SECONDS) -> Sample:
    """About `samples` rows, at least one optimizer step; all rows where there are no more.

    step_size: samples of an optimizer step. Raises what a worker raises.
    """
    start = time.perf_counter()
    chosen = chosen_positions(len(rows.order), step_size, samples)
    # In another order: if the time is over before the end, what was seen is spread as well.
    blocks = [list(block) for block in chosen]
    random.Random(0).shuffle(blocks)
    positions = list(itertools.chain.from_iterable(blocks))
    found: dict[int, ObservedRow] = {}
    for position, seen in zip(positions, _read(rows, [rows.order[position] for position in positions])):
        found[position] = seen
        if time.perf_counter() - start > seconds:
            break
    is_all = len(found) == len(rows.order) and not (rows.is_stream and len(rows.order) >= samples)
    complete = [block for block in chosen if found.keys() >= set(block) and (is_all or len(block) == step_size)]
    steps = [Step(start=block[0], rows=_table(block, found)) for block in complete]
    steps = [step for step in steps if len(step.rows)]
    resampled = ""
    if not is_all and not steps:
        resampled = f"an optimizer step has {step_size} samples, and {len(found)} were observed"
        steps = _resampled(_table(sorted(found), found), step_size)
    return Sample(
        seen=[found[position] for position in sorted(found)],
        steps=steps,
        population=None if rows.is_stream else len(rows.order),
        resampled=resampled,
        seconds=time.perf_counter() - start,
    )


def chosen_positions(num_rows: int, step_size: int, samples: int) -> list[range]:
    """Positions in the order of an epoch: whole optimizer steps, evenly spread; all where there are no more rows.

    Where an optimizer step has more than `samples` they are single rows.

        >>> chosen_positions(100, 10, 30)
        [range(0, 10), range(50, 60), range(90, 100)]
    """
    steps = [range(start, min(start + step_size, num_rows)) for start in range(0, num_rows, step_size)]
    if num_rows <= samples:
        return steps
    if step_size > samples:
        spread = np.linspace(0, num_rows - 1, samples).round().astype(int).tolist()
        return [range(position, position + 1) for position in dict.fromkeys(spread)]
    whole = [step for step in steps if len(step) == step_size]
    spread = np.linspace(0, len(whole) - 1, samples // step_size).round().astype(int).tolist()
    return [whole[number] for number in dict.fromkeys(spread)]


def _read(rows: TrainingRows, indices: Sequence[int]) -> Iterator[ObservedRow]:
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS, len(indices) // ROWS_A_WORKER)
    options: dict[str, Any] = {"worker_init_fn": WorkerInit(None), "prefetch_factor": 4} if workers else {}
    loader = DataLoader(rows.reader, batch_size=CHUNK, sampler=indices, num_workers=workers, collate_fn=list, **options)
    batches = iter(loader)
    while (batch := take(batches, "observes", BusyRows())) is not END:
        yield from batch


def _table(positions: Sequence[int], found: dict[int, ObservedRow]) -> np.ndarray:
    """The samples among these rows, as `ROW`, with their positions after the first."""
    kept = [(position - positions[0], found[position]) for position in positions if found[position].cost is not None]
    costs = [seen.cost for _, seen in kept if seen.cost is not None]
    sizes = [seen.bytes for _, seen in kept]
    return make_metadata(costs, [0] * len(kept), False, sizes, [position for position, _ in kept]).rows


def _resampled(table: np.ndarray, step_size: int) -> list[Step]:
    """Optimizer steps as likely as any, of samples drawn with replacement; about two times what was seen."""
    if not len(table):
        return []
    rng = np.random.default_rng(0)
    steps = []
    for number in range(max(2 * len(table) // step_size, 2)):
        rows = table[rng.integers(len(table), size=step_size)]
        rows["position"] = np.arange(step_size)
        steps.append(Step(start=number * step_size, rows=rows))
    return steps


# ----------------------------------------------------------------------------------------------------------------------
# How long the samples are: tokens, patches and units of each data set of a mix, and what is wrong with its rows.

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean, percentiles and maximum of a measure over samples."""

    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    p99: int = 0
    most: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that were seen of one data set. rows: all; samples: those that can be trained on.

    media: by modality. cut_off: samples of which cutoff_len cuts tokens off; longest_uncut: tokens of the longest of
    them without it, 0 where there is none. left_out: rows that are no samples, by reason.
    """

    name: str
    rows: int
    samples: int
    tokens: Spread
    patches: Spread
    media: dict[str, Spread]
    units: Spread
    cut_off: int
    longest_uncut: int
    left_out: dict[str, int]


def parts_of(seen: Sequence[ObservedRow], sources: Sequence[str]) -> list[Part]:
    """All rows as one part, then the parts of a mix of several data sets."""
    whole = part_of(ALL, seen)
    if len(sources) < 2:
        return [whole]
    return [whole, *(part_of(name, [row for row in seen if row.source == name]) for name in dict.fromkeys(sources))]


def part_of(name: str, rows: Sequence[ObservedRow]) -> Part:
    costs = [row.cost for row in rows if row.cost is not None]
    uncut = [row.uncut for row in rows if row.uncut]
    return Part(
        name=name,
        rows=len(rows),
        samples=len(costs),
        tokens=spread([cost.tokens for cost in costs]),
        patches=spread([cost.patches for cost in costs]),
        media={name: spread([getattr(cost.by_modality, name) for cost in costs]) for name in Media._fields},
        units=spread([cost.units for cost in costs]),
        cut_off=len(uncut),
        longest_uncut=max(uncut, default=0),
        left_out=dict(Counter(row.reason for row in rows if row.cost is None)),
    )


def spread(amounts: Sequence[int]) -> Spread:
    if not amounts:
        return Spread()
    p50, p90, p99 = (int(found) for found in np.percentile(amounts, [50, 90, 99], method="higher"))
    return Spread(mean=float(np.mean(amounts)), p50=p50, p90=p90, p99=p99, most=int(max(amounts)))
