"""How lengths and micro-batches are distributed, and what each rank and each data set has had of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.report.audit import Audit, dataset_numbers
from odb_factory.report.history import Entry

BINS = 32
FEWEST_PAIRS = 3


def distributions(audit: Audit | None) -> dict[str, Any] | None:
    """Histograms of what was trained on; idle micro-batches are not among them."""
    if audit is None or not len(audit.lengths):
        return None
    batches = audit.batches
    active = batches["idle"] == 0
    found = {
        "length": histogram(audit.lengths),
        "tokens_of_micro_batch": histogram(batches["padded_tokens"][active]),
        "samples_of_micro_batch": histogram(batches["samples"][active]),
        "micro_batches_of_step": histogram(audit.steps["micro_batches"]),
    }
    if batches["patches"].any():
        found["patches_of_micro_batch"] = histogram(batches["patches"][active])
    return {name: made if made["count"] else None for name, made in found.items()}


def histogram(values: np.ndarray) -> dict[str, Any]:
    """edges: one more than counts; a value belongs to the bin [edge, next edge)."""
    if not len(values):
        return {"edges": [], "counts": [], "count": 0}
    low, high = int(values.min()), int(values.max())
    width = _round_width(max(high - low + 1, 1) / BINS)
    edges = np.arange(low // width * width, high + width + 1, width)
    counts, _ = np.histogram(values, edges)
    if counts[-1] == 0 and len(counts) > 1:
        edges, counts = edges[:-1], counts[:-1]
    quantiles = {
        name: float(np.quantile(values, share)) for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "count": len(values),
        "min": low,
        "mean": float(values.mean()),
        **quantiles,
        "max": high,
    }


def _round_width(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= width:
                return factor * power
        power *= 10


def of_ranks(audit: Audit | None) -> list[dict[str, Any]] | None:
    """Sums of each rank. data_wait_s: that its training process waited for data."""
    if audit is None:
        return None
    made = []
    for rank in audit.ranks:
        mine = audit.batches["rank"] == rank
        line: dict[str, Any] = {"rank": rank, "micro_batches": int((mine & (audit.batches["part"] == 0)).sum())}
        line |= {"idle_micro_batches": int(audit.batches["idle"][mine].sum())}
        for name in ("samples", "tokens", "padded_tokens", "patches"):
            line[name] = int(audit.batches[name][mine].sum())
        line["padding_ratio"] = 1 - line["tokens"] / line["padded_tokens"] if line["padded_tokens"] else None
        made.append(line | {"data_wait_s": float(audit.batches["data_wait_s"][mine].sum())})
    return made


def of_datasets(audit: Audit | None, rows_of: Mapping[str, Any] | None, folder: Path) -> list[dict[str, Any]] | None:
    """Of each data set of a mix what was trained on; None where rows are not known by data set."""
    found = None if audit is None else dataset_numbers(rows_of, audit.ids, folder)
    if audit is None or found is None or not len(audit.lengths):
        return None
    names, numbers = found
    made = []
    for number, name in enumerate(names):
        lengths = audit.lengths[numbers == number]
        line: dict[str, Any] = {"name": name, "samples": len(lengths), "tokens": int(lengths.sum())}
        line["share_of_tokens"] = line["tokens"] / max(int(audit.lengths.sum()), 1)
        line["mean_length"] = float(lengths.mean()) if len(lengths) else None
        made.append(line | {"longest": int(lengths.max()) if len(lengths) else None})
    return made


def successive_correlation(entries: Sequence[Entry], audit: Audit | None) -> dict[str, Any] | None:
    """Correlation (Pearson) of the mean sample lengths of each optimizer step and the next.

    About 0 where samples come in random order; length-grouped orders have long steps follow each other. pairs: that
    it is made from. None where optimizer steps are not known one by one, or are too few or all alike.
    """
    means: dict[int, float] = {}
    if audit is not None:
        steps = audit.steps
        means = {
            int(step): tokens / samples
            for step, tokens, samples in zip(steps["step"], steps["tokens"], steps["samples"])
            if samples
        }
    else:
        for entry in entries:
            if entry.sums is not None and entry.sums["optimizer_steps"] == 1 and entry.sums["samples"]:
                means[entry.step] = entry.sums["tokens"] / entry.sums["samples"]
    pairs = np.array([(mean, means[step + 1]) for step, mean in means.items() if step + 1 in means])
    if len(pairs) < FEWEST_PAIRS or not np.ptp(pairs[:, 0]) or not np.ptp(pairs[:, 1]):
        return None
    return {"correlation": float(np.corrcoef(pairs.T)[0, 1]), "pairs": len(pairs)}
