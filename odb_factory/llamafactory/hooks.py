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
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError, ODBError, one_line
from odb_factory.llamafactory import uncaught
from odb_factory.llamafactory.activation import HOOKS, NEWEST_TESTED
from odb_factory.log import get_logger
from odb_factory.version import installed_version

logger = get_logger(__name__)

HOMES_OF_READ_ARGS = ("llamafactory.hparams.parser", "llamafactory.hparams", "llamafactory.extras.arguments")
"""Where releases have the function that reads a command line and its YAML: the parser has defined or imported it so
far, and the main branch is about to move it."""

_active: ODBConfig | None = None
"""The `odb:` block of the training that this process runs; LLaMA-Factory runs one at a time."""
_replaced: dict[tuple[Any, str], Callable | None] = {}
"""The originals; none for a method that a class inherits, whose wrapper is deleted on unhook instead of restored."""
_missing: list[str] = []
"""Seams that a hooked module turned out not to have."""
_num_ray_workers = 0
"""Of the training with a block whose Ray workers this process starts; 0: none."""
_begin_log: Callable[[], None] | None = None
"""Deletes the log of the run before, as LLaMA-Factory's log callback would have done where its trainer was made."""


def hook(module: ModuleType) -> None:
    """Wrap the seams of one LLaMA-Factory module, once."""
    for _, path, wrapper, without in (seam for seam in HOOKS if seam.module == module.__name__):
        if not _wrap(module, path, wrapper) and not without:
            _missing.append(f"{module.__name__}.{path}")
            if _active is not None:  # a module of a trainer that is imported after the arguments have been read
                _check_seams()


def _wrap(module: ModuleType, path: str, wrapper: str) -> bool:
    """Put `wrapper` around the function at `path`, once; its module is imported when it is called. Returns whether
    there is one."""
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
            home, _, function = wrapper.rpartition(".")
            there = importlib.import_module(f"odb_factory.llamafactory.{home or 'hooks'}")
            return getattr(there, function)(original, *args, **kwargs)

        setattr(owner, name, call)
    return True


def unhook() -> None:
    """Put every original back and forget the block."""
    global _active, _begin_log
    _active = _begin_log = None
    for (owner, name), original in _replaced.items():
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _replaced.clear()
    _missing.clear()
    uncaught.uninstall()


def seams() -> list[str]:
    """The functions without which no training with a block runs, as `module.name`."""
    return [f"{hook.module}.{hook.function}" for hook in HOOKS if not hook.without]


def read_block(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_train_args: the block is taken out of the arguments, checked and kept."""
    global _active, _begin_log
    _active = _begin_log = None
    from odb_factory.llamafactory import block

    if (read_args := find_read_args()) is not None:
        args = read_args(args)
    is_read = isinstance(args, dict)
    if not is_read or not any(block.is_meant_for_block(key, value) for key, value in block.without_null(args).items()):
        return original(args)
    uncaught.install()
    block.check_keys(args)

    _check_seams()
    log_if_newer()
    args = block.checked(args)
    config = ODBConfig.from_block(args["odb"])
    parsed = original({key: value for key, value in args.items() if key != "odb"})
    model_args, data_args, training_args, finetuning_args, _ = parsed
    block.check_combination(model_args, data_args, training_args, finetuning_args, config)
    if training_args.world_size > 1:
        from odb_factory.data.ranks import ring_of

        # From here on a rank that dies, while it loads its data or the model, ends the others.
        ring_of(None, config.exchange_timeout_s).end_process = uncaught.end_process
    _active = config
    return parsed


def _check_seams() -> None:
    if _missing:
        raise ConfigError(
            f"odb: this LLaMA-Factory release does not have {', '.join(_missing)}, which odb_factory hooks; "
            "install a supported release (`odb-factory doctor` names them)."
        )


@functools.cache
def log_if_newer() -> None:
    """Log once, on rank 0, that nobody has tried this release; what it lacks is named where it is missing."""
    from packaging.version import Version

    version = installed_version("llamafactory")  # None for a source tree on the path
    if version and Version(version) > Version(NEWEST_TESTED) and int(os.environ.get("RANK") or 0) == 0:
        logger.warning(
            "LLaMA-Factory %s is newer than what odb_factory was tested with (%s); it has all that odb_factory needs, "
            "so the training continues",
            version,
            NEWEST_TESTED,
        )


def find_read_args() -> Callable[[Any], Any] | None:
    """LLaMA-Factory's `read_args`, wherever this release has it; None if nowhere."""
    for home in HOMES_OF_READ_ARGS:
        try:
            read_args = getattr(importlib.import_module(home), "read_args", None)
        except ImportError:
            continue
        if read_args is not None:
            return read_args
    return None


def read_v1_block(original: Callable, args: Any = None) -> Any:
    """v1.config.arg_parser.get_args: the block is taken out of the arguments, checked and kept."""
    global _active
    _active = None
    from odb_factory.llamafactory import block, launch

    arguments = launch.v1_arguments(args)
    if not any(block.is_meant_for_block(key, value) for key, value in arguments.items()):
        return original(arguments if block.WITHOUT in sys.argv else args)
    uncaught.install()
    log_if_newer()
    config = block.check_v1(arguments)
    block.check_v1_keys(arguments)
    parsed = original({key: value for key, value in arguments.items() if key != "odb"})
    trainer = importlib.import_module("llamafactory.v1.core.base_trainer").BaseTrainer
    if (trainer, "_create_batch_generator") not in _replaced:
        raise ConfigError(
            "odb: v1's trainer of this LLaMA-Factory release has no batch generator to replace; install a supported "
            "release (`odb-factory doctor` names them), or unset USE_V1."
        )
    _active = config
    return parsed


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
RAY_LINE_AFTER_S = 60.0
"""Workers for which Ray has had no room for so long are logged."""


def read_ray(original: Callable, args: Any = None) -> Any:
    """hparams.parser.get_ray_args: with `USE_RAY=1` the driver checks the block before it starts workers."""
    global _num_ray_workers
    _num_ray_workers, parsed = 0, original(args)
    from odb_factory.llamafactory import block

    if isinstance(args, dict) and "odb" in block.without_null(args):
        uncaught.install()
        block.check_backend()
        if parsed.use_ray:
            if importlib.util.find_spec("ray") is None:
                raise ConfigError(f'USE_RAY: Ray is not installed; pip install "{RAY}", or unset USE_RAY.')
            if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
                raise ConfigError("TORCH_DEVICE_BACKEND_AUTOLOAD: '0' keeps odb out of Ray's workers; unset it.")
            block.check_block(block.rewritten(args, logs=False))
            _num_ray_workers = parsed.ray_num_workers
    return parsed


def reserve_in_ray(original: Callable, num_devices: int) -> Any:
    """train.tuner.get_placement_group: room for the workers. LLaMA-Factory asks for 10 CPUs for each device of the
    cluster and, without an accelerator, for each CPU, which no cluster has."""
    if not _num_ray_workers:
        return original(num_devices)
    import ray

    group, bundle = original(min(num_devices, _num_ray_workers))
    if not group.wait(RAY_LINE_AFTER_S):
        count = len(group.bundle_specs)
        logger.warning(
            "ray_num_workers: for %.0f s Ray has had no room for %d x %s (in all: %s, free: %s), and is waited for; "
            "end other jobs, or add nodes, or, on one machine, tell Ray of more CPUs, which are only numbers to it: "
            "`ray_init_kwargs: {num_cpus: %d}`",
            RAY_LINE_AFTER_S,
            count,
            bundle,
            *(
                {name: of.get(name, 0) for name in bundle}
                for of in (ray.cluster_resources(), ray.available_resources())
            ),
            count * bundle["CPU"],
        )
    return group, bundle


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
        uncaught.say_last(line)
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
        from odb_factory.llamafactory.attach import check_max_patches
        from odb_factory.llamafactory.dataset import converted, is_online, online_dataset

        if is_online(dataset, data_args, kwargs.get("is_eval", False)):
            online = online_dataset(dataset, data_args, training_args, *args, config=_active, **kwargs)
            check_max_patches(online, _active)
            return online
        dataset = converted(dataset, data_args, training_args)
    return original(dataset, data_args, training_args, *args, **kwargs)


def keep_log(original: Callable, callback: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
    """train.callbacks.LogCallback.on_init_end deletes the log of the run before, which a refused training must not."""
    global _begin_log
    begin = functools.partial(original, callback, args, *rest, **kwargs)
    if _active is None or not args.do_train:
        begin()
    else:
        _begin_log = begin


def attach_first(original: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """train.STAGE.trainer, the trainer's `train`: `enable_odb` is called on it first."""
    if _active is None or getattr(trainer, "odb", None) is not None:
        return original(trainer, *args, **kwargs)
    from odb_factory.llamafactory import attach
    from odb_factory.llamafactory.stages import STAGES

    attach.attach(trainer, _active, _begin_log)
    stage = STAGES[trainer.finetuning_args.stage]
    logger.info("online dynamic batching is on; stage %s, unit: %s", stage.name, stage.unit)
    return trainer.train(*args, **kwargs)
