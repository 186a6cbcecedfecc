"""The `Budget` of a config: what the planner may put into a micro-batch, and to which sizes it is rounded up."""

from __future__ import annotations

from odb_factory.config import ResolvedConfig
from odb_factory.data.step_rule import Layout
from odb_factory.planning import Budget, Collation, Sizes


def make_budget(config: ResolvedConfig, collation: Collation, layout: Layout) -> Budget:
    """collation: what the collator adds. layout: in which the micro-batches come, `auto` resolved."""
    is_flat = layout == "flat"
    multiple = config.pad_to_multiple_of or 1 if is_flat else 1
    limit = config.token_budget // multiple * multiple
    return Budget(
        config.token_budget,
        config.max_patches,
        collation if is_flat else collation.in_one_row(),
        layout,
        Sizes(multiple, tuple(config.length_buckets or ()), limit),
        1 if is_flat else config.row_multiple,
    )
