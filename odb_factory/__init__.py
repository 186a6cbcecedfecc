"""Online dynamic batching for LLM and VLM fine-tuning. The public names, nothing else.

Names are loaded on first use: this package is on the path of every `import torch` (see
`odb_factory.llamafactory.activation`), so importing it must cost nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Collation": "odb_factory.planning",
    "ConfigError": "odb_factory.errors",
    "Cost": "odb_factory.planning",
    "DataError": "odb_factory.errors",
    "ODBConfig": "odb_factory.config",
    "ODBDataLoader": "odb_factory.loop.dataloader",
    "ODBError": "odb_factory.errors",
    "ODBHandle": "odb_factory.loop.wrapping",
    "ODBStepInfo": "odb_factory.loop.step_info",
    "ODBTrainer": "odb_factory.training.enable",
    "ODBTrainerMixin": "odb_factory.training.mixin",
    "apply_odb": "odb_factory.loop.wrapping",
    "check_flat": "odb_factory.training.flat_in_loop",
    "enable_odb": "odb_factory.training.enable",
    "pop_step_info": "odb_factory.loop.step_info",
    "weighted_loss": "odb_factory.loop.weighted_loss",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
