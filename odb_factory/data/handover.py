"""Hand over the samples that a balanced plan gives to another rank than the one that holds them."""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Callable, Sequence

from odb_factory.batching import Plan
from odb_factory.data.samples import Sample


def make_parcels(plan: Plan, rank: int, held: Sequence[Sample]) -> list[bytes]:
    """What this rank gives to each rank: a list of its samples in the order in which they will be taken, pickled."""
    start, end = plan.starts[rank : rank + 2]
    parcels = [
        [held[row - start] for group in groups for row in group if start <= row < end] if taker != rank else []
        for taker, groups in enumerate(plan.groups)
    ]
    return [pickle.dumps(parcel) for parcel in parcels]


def hand_over(
    plan: Plan, rank: int, held: Sequence[Sample], trade: Callable[[list[bytes]], list[bytes]]
) -> dict[int, Sample]:
    """The samples that this rank has for the plan, by their number in it. held: its window.

    All ranks know the plan, so what travels needs no address. Collective, unless nothing travels.
    """
    samples = dict(enumerate(held, plan.starts[rank]))
    if plan.moves:
        coming = [iter(pickle.loads(parcel)) for parcel in trade(make_parcels(plan, rank, held))]
        for row in (row for group in plan.groups[rank] for row in group):
            home = bisect.bisect_right(plan.starts, row) - 1
            if home != rank:
                samples[row] = next(coming[home])
    return samples
