"""Pure planning: cost, grouping under budgets, alignment over ranks, order. No I/O, no torch."""

from odb_factory.planner.cost import FRAMES_PER_PATCH as FRAMES_PER_PATCH
from odb_factory.planner.cost import VIDEO as VIDEO
from odb_factory.planner.cost import Budget as Budget
from odb_factory.planner.cost import Collation as Collation
from odb_factory.planner.cost import Cost as Cost
from odb_factory.planner.cost import Limits as Limits
from odb_factory.planner.cost import Media as Media
from odb_factory.planner.encoder import EncoderCost as EncoderCost
from odb_factory.planner.encoder import EncoderPlan as EncoderPlan
from odb_factory.planner.encoder import plan_encoders as plan_encoders
from odb_factory.planner.fill import plan_buffers as plan_buffers
from odb_factory.planner.keep import plan_optimizer_step as plan_optimizer_step
from odb_factory.planner.plan import MAX_REDISTRIBUTED_BYTES as MAX_REDISTRIBUTED_BYTES
from odb_factory.planner.plan import ROW as ROW
from odb_factory.planner.plan import BufferMetadata as BufferMetadata
from odb_factory.planner.plan import MicroStepTotals as MicroStepTotals
from odb_factory.planner.plan import Plan as Plan
from odb_factory.planner.plan import make_metadata as make_metadata
