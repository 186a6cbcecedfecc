"""The wrappers of LLaMA-Factory's functions in `activation.HOOKS`.

Without an `odb:` block each wrapper only calls the original. In a fork with a diff of `patches/` the first wrapper
takes the block, so the patch does nothing and odb attaches once. Every run of LLaMA-Factory imports this module, also
without a block, so it imports nothing heavy.
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
"""The `odb:` block of the training of this process; LLaMA-Factory runs one training at a time."""
_replaced: dict[tuple[Any, str], Callable | None] = {}
"""The originals; None for an inherited method, whose wrapper is deleted on unhook."""
_missing: list[Hook] = []
"""Functions that a hooked module does not have."""
_num_ray_workers = 0
"""Ray workers that this process starts for a training with a block; 0: none."""
MEANT = re.compile(r"odb|token_budget", re.IGNORECASE)
"""Text in a YAML or override that may have a block, or a misspelled one."""


def hook(module: ModuleType) -> None:
    """Wrap the functions of one LLaMA-Factory module that are in `HOOKS`, once."""
    for seam in (seam for seam in HOOKS if seam.module == module.__name__):
        *owners, name = seam.function.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if original is None:
            _missing.append(seam)
            if _active is not None:  # the module of a trainer may be imported after the arguments have been read
                _check_seams()
        elif (owner, name) not in _replaced:
            _replaced[owner, name] = vars(owner).get(name)
            setattr(owner, name, _wrapped(original, seam.wrapper))


def _wrapped(original: Callable, wrapper: str) -> Callable:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return globals()[wrapper](original, *args, **kwargs)

    return call


def unhook() -> None:
    """Restore every original and forget the block."""
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


# `llamafactory-cli train` with an `odb:` block: mistakes in the YAML are reported before processes start.


def launch(original: Callable[[], Any]) -> Any:
    """launcher.launch, v1.launcher.launch: refuse mistakes in the YAML, and let torchrun replace this process."""
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
    block.check_v1(args) if is_v1 else block.checked(args)
    launcher: Any = sys.modules[original.__module__]
    if os.name == "posix":
        launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "run": become_torchrun})
    try:
        return original()
    finally:
        launcher.subprocess = subprocess


def become_torchrun(command: list[str], env: Mapping[str, str], **_: Any) -> None:
    """Replaces `subprocess.run`: a signal of a job scheduler, container or keyboard then reaches torchrun and the
    ranks, which save a checkpoint first with `enable_jit_checkpoint`."""
    sys.stdout.flush()
    os.execvpe(command[0], command, {**env, LAUNCHED: "1"})


def read(path: str = "", *, overrides: Sequence[str]) -> dict[str, Any]:
    """`arguments_of` a YAML; empty if the path is no YAML or nothing in it is meant for odb_factory."""
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        return {}
    if not any(map(MEANT.search, [Path(path).read_text(encoding="utf-8", errors="replace"), *overrides])):
        return {}
    return arguments_of(path, overrides)


def arguments_of(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The arguments of a YAML with its overrides; empty if it holds no mapping. Raises `ConfigError` for a YAML that
    cannot be read."""
    from omegaconf import OmegaConf

    try:
        args: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides))))
    except Exception as error:  # no YAML, a set, a null key, a number with thousands of digits, a byte that is not text
        uncaught.install()
        overridden = f" with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{path}{overridden}: this YAML cannot be read ({one_line(error)}).") from None
    return {str(key): value for key, value in args.items()} if isinstance(args, dict) else {}


def read_block(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_train_args, v1.config.arg_parser.get_args: remove the block from the arguments, check and keep
    it."""
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

            # From here on the other ranks end if a rank dies, also while data or the model are loaded.
            ring_of(None, config.exchange_timeout_s).end_process = uncaught.end_process
    _active = config
    return parsed


def _check_seams(*, is_v1: bool = False) -> None:
    """Refuse a training if a function that it needs does not exist. is_v1: the training is v1's."""
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


# Ray: LLaMA-Factory's own workers (`USE_RAY=1`: a driver starts an actor for each rank) and workers of Ray Train.

RAY = "ray[default,train]>=2.50"
"""The requirement in pyproject.toml."""


def read_ray(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_ray_args: with `USE_RAY=1` the driver checks the block before it starts workers."""
    global _num_ray_workers
    from odb_factory.llamafactory import block

    has_block = isinstance(args, dict) and block.is_given(block.without_null(args))
    _num_ray_workers, parsed = 0, original(args)
    if has_block and parsed.use_ray:
        block.checked(args)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f'USE_RAY: Ray is not installed; pip install "{RAY}", or unset USE_RAY.')
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            raise ConfigError("TORCH_DEVICE_BACKEND_AUTOLOAD: '0' keeps odb out of Ray's workers; unset it.")
        _num_ray_workers = parsed.ray_num_workers
    return parsed


def reserve_in_ray(original: Callable, num_devices: int) -> Any:
    """train.tuner.get_placement_group: reserve only for the workers. LLaMA-Factory asks for 10 CPUs for each device of
    the cluster, and for each CPU if there is no accelerator, which no cluster has."""
    return original(min(num_devices, _num_ray_workers) if _num_ray_workers else num_devices)


def name_ray_worker(original: Callable, **kwargs: Any) -> Any:
    """train.tuner.get_ray_remote_config_for_worker: name each actor by its rank."""
    options = original(**kwargs)
    return options | ({"name": "rank {rank} at port {master_port}".format(**kwargs)} if _num_ray_workers else {})


def drive_ray(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """train.tuner._ray_training_function: report in one line why workers failed, and shut down Ray."""
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
    """train.tuner._training_function: Ray catches the errors of a worker, so the other ranks are informed here."""
    ray = sys.modules.get("ray")
    try:
        return original(config)
    except Exception as error:
        if "odb" in config["args"] and ray is not None and ray.is_initialized():
            sys.excepthook(type(error), error, error.__traceback__)
        raise


def index_rows(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """data.loader.align_dataset: return an index; its rows are converted when they are needed."""
    if _active is None:
        return original(*args, **kwargs)
    from odb_factory.llamafactory.dataset import mark_source

    return mark_source(*args, **kwargs)


def preprocess_online(
    original: Callable, dataset: Any, data_args: Any, training_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """data.loader._get_preprocessed_dataset: preprocess training rows one at a time, others by stock's pass."""
    if _active is not None:
        from odb_factory.llamafactory.dataset import converted, is_online, online_dataset

        if is_online(dataset, data_args, kwargs.get("is_eval", False)):
            return online_dataset(dataset, data_args, training_args, *args, config=_active, **kwargs)
        dataset = converted(dataset, data_args, training_args)
    return original(dataset, data_args, training_args, *args, **kwargs)


def attach_first(original: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """train.STAGE.trainer, the trainer's `train`: call `enable_odb` on the trainer first."""
    if _active is None or getattr(trainer, "odb", None) is not None:
        return original(trainer, *args, **kwargs)
    from odb_factory.llamafactory import attach

    attach.attach(trainer, _active)
    logger.info("online dynamic batching is on; stage %s", trainer.finetuning_args.stage)
    return trainer.train(*args, **kwargs)
