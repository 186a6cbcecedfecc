"""Activation: an import hook that lets the plugin in when LLaMA-Factory is imported.

`activate` is declared as an entry point of the group `torch.backends`, which torch calls at the
end of `import torch`, in every process: the command line, torchrun's children, Ray's workers. It
must cost nothing and never fail there, so it imports the standard library only and places one
finder on `sys.meta_path`; everything else happens when a module of `SEAMS` is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from types import ModuleType
from typing import Any

DISABLE = "ODB_FACTORY_DISABLE"
SEAMS = ("llamafactory.hparams.parser", "llamafactory.data.loader", "llamafactory.train.sft.trainer")
"""The modules of LLaMA-Factory that are hooked once they have been executed."""


def activate() -> None:
    """Place the import hook, once. Does nothing if `ODB_FACTORY_DISABLE` is 1 or true."""
    if os.environ.get(DISABLE, "").lower() in ("1", "true", "y", "yes"):
        return
    try:
        if not is_active():
            sys.meta_path.insert(0, SeamFinder())
        for name in SEAMS:
            if name in sys.modules:
                _hook(sys.modules[name])
    except Exception as error:  # a failing entry point would make `import torch` fail
        warnings.warn(f"odb_factory could not be activated: {error!r}; run `odb-factory doctor`.", stacklevel=2)


def is_active() -> bool:
    return any(isinstance(finder, SeamFinder) for finder in sys.meta_path)


class SeamFinder:
    """Finds the modules of `SEAMS` as usual and hooks them after they have been executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in SEAMS:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


class _HookingLoader:
    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook(module)


def _hook(module: ModuleType) -> None:
    importlib.import_module("odb_factory.llamafactory.hooks").hook(module)
