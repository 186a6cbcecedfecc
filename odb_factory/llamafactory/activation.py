"""Activation: an import hook that wraps functions of LLaMA-Factory when their modules are imported.

`activate` is declared as an entry point of the group `torch.backends`, which torch calls at the end of `import torch`,
in every process: the command line, torchrun's children, Ray's workers. There it must cost nothing and never fail, so
it imports the standard library only and places one finder on `sys.meta_path`; everything else happens when a module of
`SEAMS` is imported.
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

SUPPORTED = ">=0.9.4,<1"
"""Releases of LLaMA-Factory, as in pyproject.toml."""
NEWEST_TESTED = "0.9.6.dev0"
"""LLaMA-Factory's main branch of 2026-08-18."""
DISABLE = "ODB_FACTORY_DISABLE"
LAUNCH_RECORD = "ODB_FACTORY_LAUNCH_RECORD"
"""Names a file in a run that the hooked launcher has given to torchrun: see `uncaught`."""
TRAINERS = {
    "sft": "CustomSeq2SeqTrainer",
    "pt": "CustomTrainer",
    "rm": "PairwiseTrainer",
    "dpo": "CustomDPOTrainer",
    "kto": "CustomKTOTrainer",
}
"""Class of LLaMA-Factory's trainer of each stage."""
SEAMS = {
    "llamafactory.hparams.parser": {"get_train_args": "read_block"},
    "llamafactory.data.loader": {"align_dataset": "index_rows", "_get_preprocessed_dataset": "preprocess_online"},
    **{f"llamafactory.train.{stage}.trainer": {f"{name}.train": "attach_first"} for stage, name in TRAINERS.items()},
}
"""By module of LLaMA-Factory the functions that are hooked once it has been executed, each with its wrapper, of
`hooks.py` or of a module named with it. The same names and meanings in LLaMA-Factory 0.9.4, 0.9.5 and the main branch
(0.9.6.dev0)."""
OPTIONAL = {
    "llamafactory.launcher": {"launch": "launch.launch"},
    "llamafactory.v1.launcher": {"launch": "launch.launch_v1"},
    "llamafactory.v1.config.arg_parser": {"get_args": "read_v1_block"},
    "llamafactory.v1.core.base_trainer": {"BaseTrainer._create_batch_generator": "make_v1_batches"},
    "llamafactory.hparams.parser": {"get_ray_args": "read_ray"},
    "llamafactory.train.tuner": {
        "_ray_training_function": "drive_ray",
        "get_placement_group": "reserve_in_ray",
        "get_ray_remote_config_for_worker": "name_ray_worker",
        "_training_function": "train_in_ray",
    },
    "llamafactory.train.callbacks": {"LogCallback.on_init_end": "keep_log"},
}
"""Hooked likewise; a release may lack them: training does not depend on them."""


def activate() -> None:
    """Place the import hook, once. Does nothing if `ODB_FACTORY_DISABLE` is 1 or true."""
    if os.environ.get(DISABLE, "").lower() in ("1", "true", "y", "yes"):
        return
    try:
        if is_active():  # by `odb-factory train`: the hooks themselves may import torch while they are placed
            return
        sys.meta_path.insert(0, SeamFinder())
        for name in SEAMS | OPTIONAL:
            if name in sys.modules:
                _hook(sys.modules[name])
        if LAUNCH_RECORD in os.environ:
            importlib.import_module("odb_factory.llamafactory.uncaught").quiet_torchrun()
    except Exception as error:  # a failing entry point would make `import torch` fail
        warnings.warn(f"odb_factory could not be activated: {error!r}; run `odb-factory doctor`.", stacklevel=2)


def deactivate() -> None:
    """Remove the import hook and restore every wrapped function: nothing of odb_factory stays."""
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
        if fullname not in SEAMS | OPTIONAL:
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
