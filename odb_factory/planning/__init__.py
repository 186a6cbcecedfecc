"""Pure planning: cost, grouping under budgets, alignment over ranks, order. No I/O, no torch."""

from odb_factory.planning.cost import (
    EVERY_SIZE,
    FRAMES_PER_PATCH,
    VIDEO,
    Budget,
    Collation,
    Cost,
    CostModel,
    Limits,
    Media,
    Sizes,
)
from odb_factory.planning.encoder import EncoderCost, EncoderPlan, plan_encoders
from odb_factory.planning.fill import plan_buffers
from odb_factory.planning.keep import plan_in_groups, plan_optimizer_step
from odb_factory.planning.plan import (
    MAX_REDISTRIBUTED_BYTES,
    ROW,
    BufferMetadata,
    MicroStepTotals,
    Plan,
    exceeds_limit,
    make_metadata,
)

__all__ = [
    "EVERY_SIZE",
    "FRAMES_PER_PATCH",
    "MAX_REDISTRIBUTED_BYTES",
    "ROW",
    "VIDEO",
    "Budget",
    "BufferMetadata",
    "Collation",
    "Cost",
    "CostModel",
    "EncoderCost",
    "EncoderPlan",
    "Limits",
    "Media",
    "MicroStepTotals",
    "Plan",
    "Sizes",
    "exceeds_limit",
    "make_metadata",
    "plan_buffers",
    "plan_encoders",
    "plan_in_groups",
    "plan_optimizer_step",
]
