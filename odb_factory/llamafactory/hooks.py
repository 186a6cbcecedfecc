"""The wrappers of the functions of LLaMA-Factory that `activation.HOOKS` lists, and how they are put in place.

Without an `odb:` block each calls the original as it is. In a fork with one of the diffs in `patches/` the block never
gets past the first seam, so that the patch has nothing to do and odb attaches once. This module is imported whenever
LLaMA-Factory is, also for runs without odb, and imports nothing heavy itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError, ODBError, one_line
from odb_factory.llamafactory import uncaught
from odb_factory.llamafactory.activation import HOOKS, LAUNCHED, Hook
from odb_factory.log import get_logger

logger = get_logger(__name__)

_active: ODBConfig | None = None
"""The `odb:` block of the training that this process runs; LLaMA-Factory runs one at a time."""
_replaced: dict[tuple[Any, str], Callable | None] = {}
"""The originals; none for a method that a class inherits, whose wrapper is deleted on unhook instead of restored."""
_missing: list[Hook] = []
"""Seams that a hooked module turned out not to have."""
_num_ray_workers = 0
"""Of the training with a block whose Ray workers this process starts; 0: none."""
MEANT = re.compile(r"odb|token_budget", re.IGNORECASE)
"""What a YAML, or an override, has in it that has a block, or a typo for ours."""


def hook(module: ModuleType) -> None:
    """Wrap the seams of one LLaMA-Factory module, once."""
    for seam in (seam for seam in HOOKS if seam.module == module.__name__):
        if not _wrap(module, seam.function, seam.wrapper):
            _missing.append(seam)
            if _active is not None:  # a module of a trainer that is imported after the arguments have been read
                _check_seams()


def _wrap(module: ModuleType, path: str, wrapper: str) -> bool:
    """Put `wrapper` around the function at `path`, once. Returns whether there is one."""
    owner: Any = module
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    original = getattr(owner, name, None)
    if original is None:
        return False
    if (owner, name) not in _replaced:
        _replaced[owner, name] = vars(owner).get(name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return globals()[wrapper](original, *args, **kwargs)

        setattr(owner, name, call)
    return True


def unhook() -> None:
    """Put every original back and forget the block."""
    global _active
    _active = None
    for (owner, name), original in _replaced.items():
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _replaced.clear()
    _missing.clear()
    uncaught.uninstall()


# `llamafactory-cli train` with an `odb:` block: what can be checked of a YAML is checked before processes start.


def launch(original: Callable[[], Any]) -> Any:
    """Around the functions `launch` of LLaMA-Factory's launcher and of that of its next trainer (`USE_V1=1`)."""
    from odb_factory.llamafactory import block

    command, *arguments = sys.argv[1:] or [""]
    args = read(*arguments[:1], overrides=arguments[1:])
    if not block.is_given(block.without_null(args)):
        return original()
    is_v1 = ".v1." in original.__module__
    if command not in ("train", *(block.V1_COMMANDS if is_v1 else ())):
        uncaught.install()
        raise ConfigError(
            f"odb: `llamafactory-cli {command}` is not a training that odb drives; remove the odb: block from "
            f"{arguments[0]}."
        )
    block.check_v1(args) if is_v1 else block.checked(args, logs=False)
    launcher: Any = sys.modules[original.__module__]
    if os.name == "posix":
        launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "run": become_torchrun})
    try:
        return original()
    finally:
        launcher.subprocess = subprocess


def become_torchrun(command: list[str], env: Mapping[str, str], **_: Any) -> None:
    """In place of `subprocess.run`. A signal of a job scheduler, a container or the keyboard then reaches torchrun, and
    with it the ranks, which save first what `enable_jit_checkpoint` promises."""
    sys.stdout.flush()
    os.execvpe(command[0], command, {**env, LAUNCHED: "1"})


def read(path: str = "", *, overrides: Sequence[str]) -> dict[str, Any]:
    """As `arguments_of`; none for what is not a YAML, or has no word in it that is meant for odb_factory."""
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        return {}
    if not any(map(MEANT.search, [Path(path).read_text(encoding="utf-8", errors="replace"), *overrides])):
        return {}
    return arguments_of(path, overrides)


def arguments_of(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The arguments that a YAML and its overrides give; none if it holds no mapping. Raises `ConfigError` for a YAML
    that cannot be read."""
    from omegaconf import OmegaConf

    try:
        args: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides))))
    except Exception as error:  # no YAML, a set, a null key, a number of thousands of digits, a byte that is not text
        uncaught.install()
        overridden = f" with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{path}{overridden}: this YAML cannot be read ({one_line(error)}).") from None
    return {str(key): value for key, value in args.items()} if isinstance(args, dict) else {}


def read_block(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_train_args, v1.config.arg_parser.get_args: the block is taken out of the arguments, checked
    and kept."""
    global _active
    _active = None
    from odb_factory.llamafactory import block

    args = read(*sys.argv[1:2], overrides=sys.argv[2:]) or None if args is None else args
    if not isinstance(args, dict) or not block.is_given(block.without_null(args)):
        return original(args)
    if is_v1 := ".v1." in original.__module__:
        importlib.import_module("llamafactory.v1.core.base_trainer")
        config = block.check_v1(args)
    else:
        args = block.checked(args)
        config = ODBConfig.from_block(args["odb"])
    _check_seams(is_v1=is_v1)
    parsed = original({key: value for key, value in args.items() if key != "odb"})
    if not is_v1:
        model_args, data_args, training_args, finetuning_args, _ = parsed
        block.check_combination(model_args, data_args, training_args, finetuning_args, config)
        if training_args.world_size > 1:
            from odb_factory.data.ranks import ring_of

            # From here on a rank that dies, while it loads its data or the model, ends the others.
            ring_of(None, config.exchange_timeout_s).end_process = uncaught.end_process
    _active = config
    return parsed


def _check_seams(*, is_v1: bool = False) -> None:
    """is_v1: the training is one of v1."""
    missing = [seam for seam in _missing if (".v1." in seam.module if is_v1 else not seam.without)]
    if missing:
        raise ConfigError(
            f"odb: this LLaMA-Factory release does not have {', '.join(seam.name for seam in missing)}, which "
            "odb_factory hooks; install a supported release (`odb-factory doctor` names them)."
        )


def make_v1_batches(original: Callable, trainer: Any) -> None:
    """v1.core.base_trainer.BaseTrainer._create_batch_generator."""
    if _active is None:
        original(trainer)
        return
    from odb_factory.llamafactory.v1 import BatchGenerator

    trainer.train_batch_generator = BatchGenerator(trainer, _active)


# Ray: LLaMA-Factory's own workers (`USE_RAY=1`: a driver starts an actor for each rank), and those of Ray Train.

RAY = "ray[default,train]>=2.50"
"""As in pyproject.toml."""


def read_ray(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_ray_args: with `USE_RAY=1` the driver checks the block before it starts workers."""
    global _num_ray_workers
    from odb_factory.llamafactory import block

    has_block = isinstance(args, dict) and block.is_given(block.without_null(args))
    _num_ray_workers, parsed = 0, original(args)
    if has_block and parsed.use_ray:
        block.checked(args, logs=False)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f'USE_RAY: Ray is not installed; pip install "{RAY}", or unset USE_RAY.')
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            raise ConfigError("TORCH_DEVICE_BACKEND_AUTOLOAD: '0' keeps odb out of Ray's workers; unset it.")
        _num_ray_workers = parsed.ray_num_workers
    return parsed


def reserve_in_ray(original: Callable, num_devices: int) -> Any:
    """train.tuner.get_placement_group: room for the workers. LLaMA-Factory asks for 10 CPUs for each device of the
    cluster and, without an accelerator, for each CPU, which no cluster has."""
    return original(min(num_devices, _num_ray_workers) if _num_ray_workers else num_devices)


def name_ray_worker(original: Callable, **kwargs: Any) -> Any:
    """train.tuner.get_ray_remote_config_for_worker: the name of an actor says its rank."""
    options = original(**kwargs)
    return options | ({"name": "rank {rank} at port {master_port}".format(**kwargs)} if _num_ray_workers else {})


def drive_ray(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """train.tuner._ray_training_function: one line says why workers have failed; nothing is left in Ray."""
    if not _num_ray_workers:
        return original(*args, **kwargs)
    import ray

    try:
        return original(*args, **kwargs)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, ODBError):
            raise cause from None
        line = f"a Ray worker has failed: {one_line(cause)}"
        if cause is error:
            name = re.search(r"name: (rank \d+)", str(error))
            line = (
                f"the Ray worker of {name[1] if name else 'a rank'} has died: its process was killed or has crashed; "
                "look for its own last message, or for that of an out-of-memory killer: the system's (dmesg) or Ray's "
                "(raylet.out)"
            )
        uncaught.print_last(line)
        raise
    finally:
        ray.shutdown()


def train_in_ray(original: Callable, config: Any) -> Any:
    """train.tuner._training_function: Ray catches what a worker raises, so the other ranks are told of it here."""
    ray = sys.modules.get("ray")
    try:
        return original(config)
    except Exception as error:
        if "odb" in config["args"] and ray is not None and ray.is_initialized():
            sys.excepthook(type(error), error, error.__traceback__)
        raise


def index_rows(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """data.loader.align_dataset: an index stands for the dataset, whose rows are converted when they are needed."""
    if _active is None:
        return original(*args, **kwargs)
    from odb_factory.llamafactory.dataset import mark_source

    return mark_source(*args, **kwargs)


def preprocess_online(
    original: Callable, dataset: Any, data_args: Any, training_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """data.loader._get_preprocessed_dataset: training rows are preprocessed one at a time; others stay stock's."""
    if _active is not None:
        from odb_factory.llamafactory.dataset import converted, is_online, online_dataset

        if is_online(dataset, data_args, kwargs.get("is_eval", False)):
            return online_dataset(dataset, data_args, training_args, *args, config=_active, **kwargs)
        dataset = converted(dataset, data_args, training_args)
    return original(dataset, data_args, training_args, *args, **kwargs)


def attach_first(original: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """train.STAGE.trainer, the trainer's `train`: `enable_odb` is called on it first."""
    if _active is None or getattr(trainer, "odb", None) is not None:
        return original(trainer, *args, **kwargs)
    from odb_factory.llamafactory import attach

    attach.attach(trainer, _active)
    logger.info("online dynamic batching is on; stage %s", trainer.finetuning_args.stage)
    return trainer.train(*args, **kwargs)
