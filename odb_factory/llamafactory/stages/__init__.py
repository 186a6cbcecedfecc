"""LLaMA-Factory's stages of training: what each of them calls a sample, and what a sample costs.

One `Stage` object each; `STAGES` has them by the name in the YAML. Nothing heavy is imported.
"""

from odb_factory.llamafactory.stages.kto import Kto
from odb_factory.llamafactory.stages.pairs import Dpo, Rm
from odb_factory.llamafactory.stages.stage import Stage
from odb_factory.llamafactory.stages.tokens import Pt, Sft

STAGES: dict[str, Stage] = {stage.name: stage for stage in (Sft(), Pt(), Rm(), Dpo(), Kto())}

__all__ = ["STAGES", "Stage"]
