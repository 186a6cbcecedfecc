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
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DISABLE = "ODB_FACTORY_DISABLE"
LAUNCH_RECORD = "ODB_FACTORY_LAUNCH_RECORD"
"""Names a file in a run that the hooked launcher has given to torchrun: see `uncaught`."""
SEAMS = (
    "llamafactory.hparams.parser",
    "llamafactory.data.loader",
    "llamafactory.train.sft.trainer",
    "llamafactory.train.pt.trainer",
    "llamafactory.train.rm.trainer",
    "llamafactory.train.dpo.trainer",
    "llamafactory.train.kto.trainer",
)
"""The modules of LLaMA-Factory that are hooked once they have been executed."""
OPTIONAL = ("llamafactory.launcher", "llamafactory.v1.launcher", "llamafactory.train.callbacks")
"""Hooked likewise: to check a YAML before processes are started, and to keep the log of the run before; training does
not depend on it."""


def activate() -> None:
    """Place the import hook, once. Does nothing if `ODB_FACTORY_DISABLE` is 1 or true."""
    if os.environ.get(DISABLE, "").lower() in ("1", "true", "y", "yes"):
        return
    try:
        if is_active():  # by `odb-factory train`: torch may be imported by the hooks themselves, in the midst of it
            return
        sys.meta_path.insert(0, SeamFinder())
        for name in (*SEAMS, *OPTIONAL):
            if name in sys.modules:
                _hook(sys.modules[name])
        if LAUNCH_RECORD in os.environ:
            importlib.import_module("odb_factory.llamafactory.uncaught").quiet_torchrun()
    except Exception as error:  # a failing entry point would make `import torch` fail
        warnings.warn(f"odb_factory could not be activated: {error!r}; run `odb-factory doctor`.", stacklevel=2)


def deactivate() -> None:
    """Take the import hook away and put every wrapped function back: nothing of odb_factory stays."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SeamFinder)]
    if hooks := sys.modules.get("odb_factory.llamafactory.hooks"):
        hooks.unhook()


def is_active() -> bool:
    return any(isinstance(finder, SeamFinder) for finder in sys.meta_path)


class SeamFinder(MetaPathFinder):
    """Finds the modules of `SEAMS` and `OPTIONAL` as usual and hooks them after they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SEAMS and fullname not in OPTIONAL:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # finders of old style have none
            spec = find(fullname, path, target) if find is not None and not isinstance(finder, SeamFinder) else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookingLoader(spec.loader)
                return spec
        return None


class _HookingLoader(Loader):
    """Stands in for a module's loader until the module has been executed."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # a copy is asked for these before it has a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _hook(module)


def _hook(module: ModuleType) -> None:
    importlib.import_module("odb_factory.llamafactory.hooks").hook(module)
