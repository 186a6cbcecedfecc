"""Activation: an import hook that wraps functions of LLaMA-Factory when their modules are imported.

`activate` is an entry point of the group `torch.backends`, which torch calls at the end of `import torch` in every
process: the command line, torchrun's children, Ray's workers. It must cost nothing and never fail, so it imports only
the standard library and places one finder on `sys.meta_path`; the rest happens when a module of `HOOKS` is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

SUPPORTED = ">=0.9.5,<1"
"""Releases of LLaMA-Factory, as in pyproject.toml."""
NEWEST_TESTED = "0.9.6.dev0"
"""LLaMA-Factory's main branch of 2026-08-18."""
DISABLE = "ODB_FACTORY_DISABLE"
LAUNCHED = "ODB_FACTORY_LAUNCHED"
"""Set in the processes of a run that the hooked launcher started with torchrun: see `uncaught`."""


class Hook(NamedTuple):
    """A function of LLaMA-Factory 0.9.5 and 0.9.6.dev0 that is wrapped after its module has been executed.

    wrapper: a function of `hooks.py`. without: what does not work in a release without the function; "": a training
    with a block is refused.
    """

    module: str
    function: str
    wrapper: str
    without: str = ""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"


_V1, _RAY = "no training with USE_V1=1", "no reserved CPUs and no short messages with USE_RAY=1"
HOOKS = (
    Hook("llamafactory.hparams.parser", "get_train_args", "read_block"),
    Hook("llamafactory.data.loader", "align_dataset", "index_rows"),
    Hook("llamafactory.data.loader", "_get_preprocessed_dataset", "preprocess_online"),
    Hook("llamafactory.train.sft.trainer", "CustomSeq2SeqTrainer.train", "attach_first"),
    Hook("llamafactory.train.pt.trainer", "CustomTrainer.train", "attach_first"),
    Hook("llamafactory.train.rm.trainer", "PairwiseTrainer.train", "attach_first"),
    Hook("llamafactory.train.dpo.trainer", "CustomDPOTrainer.train", "attach_first"),
    Hook("llamafactory.train.kto.trainer", "CustomKTOTrainer.train", "attach_first"),
    Hook("llamafactory.launcher", "launch", "launch", "mistakes are found after processes have started"),
    Hook("llamafactory.v1.launcher", "launch", "launch", _V1),
    Hook("llamafactory.v1.config.arg_parser", "get_args", "read_block", _V1),
    Hook("llamafactory.v1.core.base_trainer", "BaseTrainer._create_batch_generator", "make_v1_batches", _V1),
    Hook("llamafactory.hparams.parser", "get_ray_args", "read_ray", _RAY),
    Hook("llamafactory.train.tuner", "_ray_training_function", "drive_ray", _RAY),
    Hook("llamafactory.train.tuner", "get_placement_group", "reserve_in_ray", _RAY),
    Hook("llamafactory.train.tuner", "get_ray_remote_config_for_worker", "name_ray_worker", _RAY),
    Hook("llamafactory.train.tuner", "_training_function", "train_in_ray", _RAY),
)
MODULES = {hook.module for hook in HOOKS}


def activate() -> None:
    """Place the import hook, once. Does nothing if `ODB_FACTORY_DISABLE` is 1 or true."""
    if os.environ.get(DISABLE, "").lower() in ("1", "true", "y", "yes"):
        return
    try:
        if is_active():  # `odb-factory train` activates first, and the hooks may import torch
            return
        sys.meta_path.insert(0, SeamFinder())
        for name in MODULES:
            if name in sys.modules:
                _hook(sys.modules[name])
        if LAUNCHED in os.environ:
            importlib.import_module("odb_factory.llamafactory.uncaught").quiet_torchrun()
    except Exception as error:  # a failing entry point would make `import torch` fail
        warnings.warn(f"odb_factory could not be activated: {error!r}; run `odb-factory doctor`.", stacklevel=2)


def deactivate() -> None:
    """Remove the import hook and restore every wrapped function."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SeamFinder)]
    if hooks := sys.modules.get("odb_factory.llamafactory.hooks"):
        hooks.unhook()


def is_active() -> bool:
    return any(isinstance(finder, SeamFinder) for finder in sys.meta_path)


class SeamFinder(MetaPathFinder):
    """Finds the modules of `HOOKS` as usual and hooks them after they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        others = [getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self]
        specs = (find(fullname, path, target) for find in others if find is not None)  # old finders have no find_spec
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # restores the loader
            loader.exec_module(module)
            _hook(module)

        loader.exec_module = exec_module
        return spec


def _hook(module: ModuleType) -> None:
    importlib.import_module("odb_factory.llamafactory.hooks").hook(module)
