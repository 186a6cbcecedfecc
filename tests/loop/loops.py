"""Helpers of the tests of loops."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from toy import NUM_ROWS, Rows, pad

from odb_factory import ODBDataLoader, pop_step_info

BUDGET = 128
EVERY_ROW = Counter(range(NUM_ROWS))


def make(dataset: Any = None, **changes: Any) -> ODBDataLoader:
    settings = {"token_budget": BUDGET, "batch_size": 16, "collate_fn": pad} | changes
    settings = {key: value for key, value in settings.items() if value is not None}
    return ODBDataLoader(Rows() if dataset is None else dataset, **settings)


def rows_of(loader: Any) -> Counter[int]:
    """The samples of an epoch, read from the step info."""
    return Counter(row for batch in loader for row in pop_step_info(batch).ids)


def stopped(loader: Any, step: int) -> tuple[Counter[int], Any]:
    """The samples of an epoch up to the end of an optimizer step, and the state then, after a round trip by JSON."""
    rows = Counter[int]()
    for batch in loader:
        info = pop_step_info(batch)
        rows.update(info.ids)
        if info.optimizer_step == step and info.ends_optimizer_step:
            return rows, json.loads(json.dumps(loader.state_dict()))
    raise AssertionError("the epoch has fewer optimizer steps")
