"""What other ways to form micro-batches do with the same samples: fixed batches, and grouping by length."""

from __future__ import annotations

import numpy as np

from odb_factory.planning import ROW, Budget, Collation, MicroStepTotals
from odb_factory.planning.plan import to_plan

MEGA_BATCH = 50
"""Batches of all ranks that the Trainer sorts at a time, where it groups by length."""
NO_LIMIT = 1 << 62


def fixed_batches(samples: np.ndarray, batch_size: int, ranks: int, collation: Collation) -> list[MicroStepTotals]:
    """The micro-steps of batches of `batch_size` rows in the order given: the first for rank 0, the next for rank 1.

    samples: as `ROW`. The last batches may have fewer rows, or be missing.
    """
    groups = [np.arange(k, min(k + batch_size, len(samples))) for k in range(0, len(samples), batch_size)]
    steps: list[list[np.ndarray | None]] = [
        [groups[k + rank] if k + rank < len(groups) else None for rank in range(ranks)]
        for k in range(0, len(groups), ranks)
    ]
    owner = np.zeros(len(samples), dtype=np.int64)
    return to_plan(steps, samples, [0, len(samples)], owner, Budget(NO_LIMIT, None, collation), False, False).totals


def length_grouped(samples: np.ndarray, batch_size: int, ranks: int, collation: Collation) -> list[MicroStepTotals]:
    """The same, sorted by length within mega-batches of 50 batches of all ranks, as the Trainer does.

    All lengths must be known before training, and other samples share an optimizer step.
    """
    mega = MEGA_BATCH * batch_size * ranks
    parts = [samples[start : start + mega] for start in range(0, len(samples), mega)]
    ordered = [part[np.argsort(-part["row_tokens"].astype(np.int64), kind="stable")] for part in parts]
    return fixed_batches(np.concatenate(ordered or [np.zeros(0, ROW)]), batch_size, ranks, collation)
