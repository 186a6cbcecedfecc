"""What a YAML asks for, read as a training reads it, and without an accelerator or other processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from odb_factory.config import AUTO, BUDGETS, ODBConfig, ResolvedConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.block import is_enabled, rewritten, without_null
from odb_factory.llamafactory.launch import check_yaml

PLACEHOLDER = 8192
"""The budget until LLaMA-Factory has read the keys that it follows from."""
NEEDS_ACCELERATOR = ("tf32", "ddp_backend", "pure_bf16")
"""Keys that are refused on a machine without an accelerator, and that no plan depends on."""
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment that torchrun sets for a process."""


class ParsedArguments(NamedTuple):
    """What LLaMA-Factory's parser gives."""

    model: Any
    data: Any
    training: Any
    finetuning: Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A YAML and its overrides.

    config: the block, its budgets whole numbers. auto: those among them that the YAML leaves to the training; they are
    what stock's batches would hold at most, as where has_block is false. ranks: to plan for.
    """

    path: Path
    parsed: ParsedArguments
    config: ResolvedConfig
    has_block: bool
    auto: tuple[str, ...]
    ranks: int
    uses_cpu: bool

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch of stock's."""
        return int(self.parsed.training.per_device_train_batch_size)

    @property
    def accumulation(self) -> int:
        return int(self.parsed.training.gradient_accumulation_steps)

    @property
    def seed(self) -> int:
        """The seed of the order of samples, chosen as in a training."""
        training = self.parsed.training
        return int(next(seed for seed in (self.config.seed, training.data_seed, training.seed) if seed is not None))


def read_yaml(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of a YAML with its overrides. Raises a one-line `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; give the YAML that you train with.")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: is no .yaml or .yml file; give the YAML that you train with.")
    check_yaml(path, overrides)
    try:  # all else that is wrong with it has been refused
        given = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides))))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"{path}{line}: cannot be read as YAML: {error.problem or error.context}.") from None
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{path}: holds no keys; give the YAML that you train with.")
    if not given.get("do_train"):
        raise ConfigError(f"do_train: {given.get('do_train')!r}, so {path} trains nothing; set `do_train: true`.")
    return without_null({str(key): value for key, value in given.items()}, overrides)


@contextlib.contextmanager
def parsed(path: Path, overrides: Sequence[str] = (), ranks: int | None = None) -> Iterator[Asked]:
    """What the YAML asks for; within it LLaMA-Factory's functions do as in a training with this block.

    ranks: to plan for (None: as many as a training that is started here has). Raises `ConfigError` for what a training
    would refuse, and whatever LLaMA-Factory raises. Its hooks must be in place.

        with parsed(Path("my.yaml"), ["odb.token_budget=8192"], ranks=8) as asked:
            print(asked.config.token_budget)
    """
    given = read_yaml(path, overrides)
    has_block = "odb" in given
    block = dict(given.get("odb") or {"token_budget": PLACEHOLDER})
    auto = tuple(key for key in BUDGETS if block.get(key) == AUTO)
    if auto:  # what chooses them then has nothing to choose
        block.pop("memory_fraction", None)
    given["odb"] = block | {key: PLACEHOLDER if key == "token_budget" else None for key in auto}
    from llamafactory.hparams.parser import get_train_args

    of_this_run = {key: given.pop(key) for key in NEEDS_ACCELERATOR if key in given}
    uses_cpu = bool(given.get("use_cpu"))
    given |= {"use_cpu": True, "overwrite_output_dir": True}
    needs_ranks = bool(given.get("deepspeed") or given.get("fsdp"))
    if needs_ranks:
        given["ddp_backend"] = "gloo"
    of_environment = ranks_of(os.environ)
    with _single_process(in_a_group=needs_ranks):
        model, data, training, finetuning, _ = get_train_args(given)
        if of_this_run.get("pure_bf16"):
            finetuning.pure_bf16 = True
        left_open = auto if has_block else ("token_budget",)
        of_stock = training.per_device_train_batch_size * data.cutoff_len
        numbers = {"token_budget": of_stock} if "token_budget" in left_open else {}
        yield Asked(
            path=path,
            parsed=ParsedArguments(model, data, training, finetuning),
            config=ODBConfig.from_block(rewritten(given, logs=False)["odb"] | numbers).resolved(),
            has_block=has_block,
            auto=auto,
            ranks=ranks or of_environment,
            uses_cpu=uses_cpu,
        )


def ranks_of(environment: Mapping[str, str]) -> int:
    """Processes of a training that is started here: torchrun's, or those that LLaMA-Factory would start by it."""
    from llamafactory.extras.misc import get_device_count

    if environment.get("WORLD_SIZE"):
        return int(environment["WORLD_SIZE"])
    devices = get_device_count()
    if is_enabled("FORCE_TORCHRUN", environment) or devices > 1:
        return int(environment.get("NNODES") or 1) * int(environment.get("NPROC_PER_NODE") or devices or 1)
    return 1


@contextlib.contextmanager
def _single_process(*, in_a_group: bool) -> Iterator[None]:
    """The environment of a process without peers. in_a_group: as torchrun starts one, what DeepSpeed asks for."""
    before = {name: os.environ.pop(name, None) for name in OF_A_RANK}
    if in_a_group:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free port
    try:
        yield
    finally:
        if in_a_group:
            _leave_group()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _leave_group() -> None:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    if dist.is_initialized():
        dist.destroy_process_group()
    for state in (AcceleratorState, PartialState):
        state._shared_state.clear()  # it would still hold the group
