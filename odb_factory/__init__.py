"""Online dynamic batching for LLM and VLM fine-tuning: the public names.

Names are loaded on first use: every `import torch` imports this package (see
`odb_factory.llamafactory.activation`), so the import must cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from odb_factory.refusals import __version__

if TYPE_CHECKING:
    from odb_factory.config import ODBConfig as ODBConfig
    from odb_factory.errors import ConfigError as ConfigError
    from odb_factory.errors import DataError as DataError
    from odb_factory.errors import ODBError as ODBError
    from odb_factory.loader import ODBDataLoader as ODBDataLoader
    from odb_factory.loader import ODBHandle as ODBHandle
    from odb_factory.loader import ODBStepInfo as ODBStepInfo
    from odb_factory.loader import apply_odb as apply_odb
    from odb_factory.loader import pop_step_info as pop_step_info
    from odb_factory.loader import weighted_loss as weighted_loss
    from odb_factory.loader import without_logits as without_logits
    from odb_factory.model.unpad import unpad as unpad
    from odb_factory.planner import Collation as Collation
    from odb_factory.planner import Cost as Cost
    from odb_factory.planner.keep import plan_micro_batches as plan_micro_batches
    from odb_factory.training.trainer import ODBTrainer as ODBTrainer
    from odb_factory.training.trainer import ODBTrainerMixin as ODBTrainerMixin
    from odb_factory.training.trainer import enable_odb as enable_odb

_HOMES = {
    "Collation": "odb_factory.planner",
    "ConfigError": "odb_factory.errors",
    "Cost": "odb_factory.planner",
    "DataError": "odb_factory.errors",
    "ODBConfig": "odb_factory.config",
    "ODBDataLoader": "odb_factory.loader",
    "ODBError": "odb_factory.errors",
    "ODBHandle": "odb_factory.loader",
    "ODBStepInfo": "odb_factory.loader",
    "ODBTrainer": "odb_factory.training.trainer",
    "ODBTrainerMixin": "odb_factory.training.trainer",
    "apply_odb": "odb_factory.loader",
    "enable_odb": "odb_factory.training.trainer",
    "plan_micro_batches": "odb_factory.planner.keep",
    "pop_step_info": "odb_factory.loader",
    "unpad": "odb_factory.model.unpad",
    "weighted_loss": "odb_factory.loader",
    "without_logits": "odb_factory.loader",
}

__all__ = ["__version__", *_HOMES]


if not TYPE_CHECKING:  # for a type checker it would make any name an Any

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
