"""What `ODBDataLoader` and a DataLoader that `apply_odb` has changed have in common."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

from torch.utils.data import DataLoader

from odb_factory.config import BUDGETS, ODBConfig, ResolvedConfig
from odb_factory.config_values import AUTO
from odb_factory.data.make_loader import make_config
from odb_factory.ending import ending
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.loop.accelerated import checkpoint_with
from odb_factory.loop.iteration import Iteration
from odb_factory.loop.step_info import LOOP_LOSS_SCALINGS

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = get_logger(__name__)

T_co = TypeVar("T_co", covariant=True)


class Controls(Generic[T_co]):
    """What can be asked of an online DataLoader. Generic as `DataLoader` is: only then may an object become one."""

    _odb: Iteration

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Without it every iteration is the epoch after the last one."""
        self._odb.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Of the iteration under way or over, or of the next one after `set_epoch` or `load_state_dict`."""
        return self._odb.epoch

    @property
    def num_optimizer_steps(self) -> int | None:
        """Optimizer steps of an epoch; None where nobody knows (`global_batch_size: fill`, a dataset without a length).

        With several ranks, all ask.
        """
        return self._odb.loader.num_optimizer_steps

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch: `num_optimizer_steps`, or an estimate with `global_batch_size: fill`.

        The estimate is that of the next epoch, or of the one under way, if all samples are as long as those seen until
        now; it can be wrong by a factor where the data are sorted. It begins the epoch and waits for its first plan:
        with several ranks, all call it. Raises `TypeError` for a dataset without a length.
        """
        return self._odb.estimate_optimizer_steps()

    def stats(self) -> dict[str, float]:
        """Padding, balance, waiting and throughput since the first batch, all ranks together, to be logged.

        The names and meanings of the Trainer's `odb/...` figures, odb/left_out: rows that were left out, and
        odb/over_budget: micro-batches of all ranks that the collator made larger than the budget.
        Before the first batch: with several ranks, all ask.
        """
        return self._odb.accounting.stats()

    def close(self) -> None:
        """End the worker processes and give the process group of the planning back (on all ranks)."""
        self._odb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error the other ranks are told why this one leaves. Raises what is known to be its cause."""
        told = None if error is None else ending(error)
        if told is not None and not (isinstance(told, SystemExit) and not told.code):
            self._odb.abort(one_line(told))
        self.close()
        if told is not None and told is not error:
            raise told from error


class State:
    """Not part of `Online`: accelerate would add counts of its own to the state of a DataLoader it has wrapped."""

    _odb: Iteration

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, behind the last optimizer step whose batches were all yielded (JSON types).

        On the contract of torchdata's loaders; micro-batches of an unfinished optimizer step come again.
        """
        return self._odb.state()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from this rank's state, or from a list of all ranks', which also serves other ranks or settings.

        Before the first batch of an iteration; the state's epoch is the next to be iterated, and `set_epoch` with that
        epoch keeps the place in it. Raises `DataError` for what is no state of this rank, and where the data are not
        those of the state.
        """
        loader = self._odb.loader
        self._odb.load(_checked_states(state, loader.rank, loader.world_size))

    def checkpoint_with(self, accelerator: Accelerator, name: str = "odb_state") -> None:
        """Let `accelerator.save_state(folder)` and `load_state(folder)` keep this loader's state on every rank.

        Call it once. Each rank writes `{name}_rank{r}.json`; give two loaders two names.
        """
        checkpoint_with(accelerator, self, name)
        self._odb.is_checkpointed = True


class Online(Controls[T_co]):
    """Goes before a `DataLoader` class: the same object, iterated online. T_co: what its `collate_fn` returns."""

    def __iter__(self) -> Iterator[T_co]:
        return self._odb.batches()

    def __len__(self) -> NoReturn:
        raise TypeError(
            "the number of batches is not known before they are formed; num_optimizer_steps says how many optimizer "
            "steps an epoch has, and the step info where one ends and how much of the epoch is done (progress)"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        """`accelerator.prepare` would build another DataLoader, of fixed batches; it leaves prepared ones alone."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """`accelerator.prepare` sets it: from now on the batches are moved, and its mesh says who shares samples."""
        self._odb.is_prepared = self._odb.moves_batches = value


def loop_config(config: ODBConfig | None, block: Mapping[str, Any]) -> ResolvedConfig:
    """The config, with `exact` for the default loss_scaling of a trainer.

    Raises `ConfigError` for keys that have no effect outside of one.
    """
    for key in block:
        if key in inspect.signature(DataLoader.__init__).parameters:
            raise ConfigError(f"{key}: an argument of DataLoader that odb does not take here; leave it out.")
    if block.get("join") is True and block.get("global_batch_size") != "fill":
        logger.info(
            'join=True has no effect: kept optimizer steps have all samples; it goes with global_batch_size="fill"'
        )
    if block.get("loss_scaling") == "stock":
        raise ConfigError(
            "odb.loss_scaling: 'stock' is the loss of a trainer, and a loop of your own makes its own; leave it out "
            f"(exact), or choose one of {', '.join(LOOP_LOSS_SCALINGS)}."
        )
    config = make_config(config, block)
    if config.has_auto:
        key = next(key for key in BUDGETS if getattr(config, key) == AUTO)
        raise ConfigError(
            f"odb.{key}: 'auto' runs the model before training, which a loop of your own keeps to itself; give a "
            "number."
        )
    if config.loss_scaling == "stock":
        config = dataclasses.replace(config, loss_scaling="exact")
    if config.audit:
        raise ConfigError("odb.audit: True does not say where to; give audit_dir= instead.")
    if config.oom != "raise":
        raise ConfigError(
            f"odb.oom: {config.oom!r} takes the micro-batches of an optimizer step once more, and this loop is yours; "
            "leave it out, and lower token_budget if memory is short."
        )
    if config.lr_scale != "none":
        raise ConfigError(
            f"odb.lr_scale: {config.lr_scale!r} has no effect in a loop of your own, whose learning rate you set; "
            "leave it out, and scale by optimizer_step_samples of the step info."
        )
    if config.pad_to_multiple_of is not None and config.layout != "flat":
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} fills up flat micro-batches, and those of this loop "
            "are padded, as its collator says; set `layout: flat`, or leave it out."
        )
    if config.lr_reference_samples is not None:
        raise ConfigError("odb.lr_reference_samples: has no effect in a loop of your own; leave it out.")
    return config.resolved()


def check_sampler(sampler: object) -> None:
    """Raise `ConfigError` for an order that is gone once it has been read."""
    if isinstance(sampler, Iterator):
        raise ConfigError(
            f"sampler: a {type(sampler).__name__} can be iterated only once, and every epoch begins it anew; give a "
            "list, or a torch.utils.data.Sampler."
        )


def _checked_states(state: object, rank: int, world_size: int) -> list[dict[str, Any]]:
    """A list of states. Raises `DataError` for what cannot be gone on from on this rank."""
    states = [state] if isinstance(state, Mapping) else state
    if (
        not isinstance(states, Sequence)
        or not states
        or not all(isinstance(one, Mapping) and {"version", "rank", "world_size"} <= one.keys() for one in states)
    ):
        raise DataError(
            f"load_state_dict: {_short(state)} is not what state_dict() has returned; give this rank's, or a list of "
            "those of all ranks."
        )
    only = states[0]
    if len(states) == 1 and only["world_size"] == world_size and only["rank"] != rank:
        raise DataError(
            f"load_state_dict: rank {rank} was given the state of rank {only['rank']}; give each rank its own, or "
            "every rank a list of all (accelerator.register_for_checkpointing keeps one for all ranks: call "
            "checkpoint_with(accelerator) instead)."
        )
    return [dict(one) for one in states]


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:40]}..."
