"""A look as plain values, for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from odb_factory.dry_run import efficiency
from odb_factory.dry_run.advice import Advice
from odb_factory.dry_run.look import Look


def to_dict(found: Look, advice: Advice) -> dict[str, Any]:
    """JSON types. These names are public."""
    sample, config = found.sample, found.config
    return {
        "yaml": str(found.asked.path),
        "ranks": found.asked.ranks,
        "global_batch_size": found.step_size,
        "per_device_train_batch_size": found.asked.batch_size,
        "gradient_accumulation_steps": found.asked.accumulation,
        "has_block": found.asked.has_block,
        "config": config.to_dict(),
        "layout": found.layout,
        "layout_reason": found.layout_reason,
        "observed": {
            "rows": len(sample.seen),
            "of": sample.population,
            "optimizer_steps": len(sample.steps),
            "resampled": sample.resampled,
            "seconds": sample.seconds,
        },
        "data": [dataclasses.asdict(part) for part in found.parts],
        "examples": found.examples,
        "cost_model": {"fixed_tokens_a_micro_step": efficiency.FIXED, "measured": False},
        "own": dataclasses.asdict(found.own),
        "budgets": [dataclasses.asdict(one) for one in found.budgets],
        "other_layout": dataclasses.asdict(found.other_layout),
        "any_size": None if found.any_size is None else dataclasses.asdict(found.any_size),
        "fixed": dataclasses.asdict(found.fixed),
        "length_grouped": dataclasses.asdict(found.length_grouped),
        "by_ranks": [{"ranks": ranks} | dataclasses.asdict(one) for ranks, one in found.by_ranks],
        "patch_caps": [dataclasses.asdict(one) for one in found.patch_caps],
        "bound_by_longest": found.bound_by_longest,
        "advice": dataclasses.asdict(advice),
    }
