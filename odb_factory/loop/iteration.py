"""The epochs of a `DataLoader` that forms its batches online: which batch comes next, and when it is trained on."""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import json
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict, Unpack

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import DataLoader

from odb_factory.accounting.step_accounting import StepAccounting, log_first_step
from odb_factory.config import ODBConfig, ResolvedConfig, make_config
from odb_factory.data.collate import Collated, TrialBatches, trial_batches
from odb_factory.data.loader import ABORT_S, ODBLoader, Pass
from odb_factory.data.observe import ItemObserver
from odb_factory.data.order import MEAN_OF_STEP, StockMean, dismantle
from odb_factory.data.pool import why_not_observed
from odb_factory.data.progress import OptimizerStepRule
from odb_factory.data.ranks import Ranks, check_process_group, find_process_group, gather_once, ring_of, world_size_of
from odb_factory.data.serialize import Picklable
from odb_factory.ending import ending
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.loop.step_info import LOOP_LOSS_SCALINGS, ODBStepInfo, Receipt, make_step_info, put_step_info
from odb_factory.model.flat_row import end_row
from odb_factory.planning import Collation, Cost
from odb_factory.version import why_gradients_are_lost

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# The keys of `ODBConfig` as typed keyword arguments, for type checkers and completion.


class CommonKeys(TypedDict, total=False):
    """Keys that mean the same everywhere."""

    global_batch_size: int | Literal["keep", "fill"]
    layout: Literal["auto", "flat", "padded"]
    pad_to_multiple_of: int | None
    length_buckets: Sequence[int] | None
    row_multiple: int
    buffer_size: int
    join: bool
    balance: bool | None
    cost_model: Sequence[int] | None
    max_image_patches: int | None
    max_video_patches: int | None
    max_audio_frames: int | None
    overlong: Literal["singleton", "drop", "error"]
    on_error: Literal["raise", "skip"]
    resume: Literal["strict", "ignore_data"]
    exchange_timeout_s: int
    seed: int | None


class LoopKeys(CommonKeys, total=False):
    """Keys with an effect in a custom training loop."""

    token_budget: int
    max_patches: int | None
    loss_scaling: Literal["exact", "approx", "none"]


class TrainerKeys(CommonKeys, total=False):
    """All keys: those of a loop, and those that only a trainer can honour."""

    token_budget: int | Literal["auto"]
    max_patches: int | Literal["auto"] | None
    memory_fraction: float
    eval_token_budget: int | Literal["auto"] | None
    loss_scaling: Literal["stock", "exact", "approx", "none"]
    lr_scale: Literal["none", "sqrt", "linear"]
    oom: Literal["raise", "split", "skip"]
    balance_encoder: bool | Literal["auto"]
    rehearse: bool | None
    audit: bool


class LoopOptions(LoopKeys, total=False):
    """What `ODBDataLoader` and `apply_odb` take beside the arguments of a DataLoader."""

    gradient_accumulation_steps: int
    cost_fn: Callable[[Any], Cost | int] | None
    collation: Collation | None
    audit_dir: str | Path | None
    process_group: dist.ProcessGroup | None
    already_split: bool
    config: ODBConfig | None


NOT_IN_A_LOOP = {
    "audit": "does not say where to; give audit_dir= instead.",
    "oom": "takes the micro-batches of an optimizer step once more, which a custom loop does by itself; leave it out, "
    "and lower token_budget if memory is short.",
    "balance_encoder": "acts in the forwards of a trainer; leave it out.",
    "rehearse": "runs the model before training, which a custom loop does by itself; leave it out.",
    "lr_scale": "has no effect in a custom loop, which sets its learning rate; leave it out, and scale by "
    "optimizer_step_samples of the step info.",
}
"""Keys that only a trainer can honour, and what another value than the default would need."""


def loop_config(config: ODBConfig | None, block: LoopKeys) -> ResolvedConfig:
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
            "odb.loss_scaling: 'stock' is the loss of a trainer, and a custom loop computes its own; leave it out "
            f"(exact), or choose one of {', '.join(LOOP_LOSS_SCALINGS)}."
        )
    config = make_config(config, block)
    for key in config.auto_keys:
        raise ConfigError(
            f"odb.{key}: 'auto' runs the model before training, which a custom loop does by itself; give a number."
        )
    if config.loss_scaling == "stock":
        config = dataclasses.replace(config, loss_scaling="exact")
    for key, why in NOT_IN_A_LOOP.items():
        if (value := getattr(config, key)) not in (getattr(ODBConfig, key), False):
            raise ConfigError(f"odb.{key}: {value!r} {why}")
    if config.pad_to_multiple_of is not None and config.layout != "flat":
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} fills up flat micro-batches, and those of this loop "
            "are padded, as its collator makes them; set `layout: flat`, or leave it out."
        )
    return config.resolved()


# ----------------------------------------------------------------------------------------------------------------------
# What accelerate does for a prepared DataLoader, for one whose batches are formed online.


def refuse_fixed_batches(items: Any) -> NoReturn:
    """Replaces a DataLoader's `collate_fn`, which nobody calls while the batches are formed online.

    A caller has built another DataLoader from the attributes of this one, as `accelerate.skip_first_batches` does.
    """
    raise ConfigError(
        "a DataLoader was built from the parts of one whose batches odb forms online, as "
        "accelerate.skip_first_batches does, and would yield fixed batches; to resume in the middle of an epoch "
        "use state_dict() and load_state_dict(), and otherwise the online loader itself."
    )


def _is_deepspeed() -> bool:
    """Whether this is a training by DeepSpeed through accelerate."""
    is_training = is_initialized() and torch.is_grad_enabled()
    return is_training and AcceleratorState().distributed_type == DistributedType.DEEPSPEED


def check_accumulation(*, is_prepared: bool) -> None:
    """Raise `ConfigError` if accelerate would end optimizer steps by its own count, or DeepSpeed lose micro-batches."""
    if _is_deepspeed() and (lost := why_gradients_are_lost(AcceleratorState().deepspeed_plugin.deepspeed_config)):
        raise ConfigError(lost)
    theirs = GradientState().num_steps
    if is_prepared and theirs != 1:
        raise ConfigError(
            f"gradient_accumulation_steps: {theirs} in the Accelerator, which would end its optimizer steps by that "
            "count, but odb cuts each into as many micro-batches as it needs; leave it at 1 there (give it to "
            "ODBDataLoader or apply_odb), and step where the step info says ends_optimizer_step."
        )


_syncs: bool | int = True
"""What a loader has set as accelerate's `sync_gradients` last; 1 is true like True, but for `tell_accelerate`."""


def tell_accelerate(*, is_last: bool, is_left: bool = False) -> None:
    """Let DeepSpeed step in the `accelerator.backward` of the last micro-batch of an optimizer step alone; before each
    is handed over, and when the iteration is left.

    Raises `ConfigError` if `accelerator.accumulate` has set what accelerate goes by since the micro-batch before.
    """
    global _syncs
    if not (is_initialized() and torch.is_grad_enabled()):
        return
    state = GradientState()
    if state.sync_gradients is True and _syncs is not True and not is_left:
        raise ConfigError(
            "accelerator.accumulate: it counts batches, and lets the optimizer step after each micro-batch of an "
            "optimizer step that odb has cut; leave it out, and step where the step info says ends_optimizer_step."
        )
    # Without DeepSpeed 1: a prepared optimizer clears gradients also before the first micro-batch.
    state.sync_gradients = _syncs = is_last or (False if _is_deepspeed() else 1)


# ----------------------------------------------------------------------------------------------------------------------
# Close a loader that its user has not closed: when it is garbage-collected, or when the program ends.


class LastResort:
    """Closes `loader` when `owner` is garbage-collected, or at exit. `owner` must not be reachable from `loader`."""

    def __init__(self, owner: object, loader: ODBLoader):
        # Not the finalizer's at exit: then it is known whether an error has ended the program.
        self._at_exit = partial(_at_exit, weakref.ref(loader), id(_last_error()), os.getpid())
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(owner, _collected, loader, self._at_exit, os.getpid())
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """The loader has been closed."""
        self._finalizer.detach()
        atexit.unregister(self._at_exit)


def _collected(loader: ODBLoader, at_exit: partial[None], pid: int) -> None:
    atexit.unregister(at_exit)
    if os.getpid() == pid and not sys.is_finalizing():
        loader.release()


def _at_exit(loader: weakref.ref[ODBLoader], error_before: int, pid: int) -> None:
    """Report the error that ends this program to the other ranks; not one that has ended a cell of a notebook."""
    left, error = loader(), _last_error()
    if left is None or os.getpid() != pid:
        return
    if error is not None and id(error) != error_before:
        left.abort(one_line(ending(error)))
    else:
        left.close(ABORT_S)


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


# ----------------------------------------------------------------------------------------------------------------------


def _is_first_of_replica(*, by_mesh: bool) -> bool:
    """Whether this rank is the first of the tensor-parallel ranks that compute the same micro-batches."""
    mesh = getattr(AcceleratorState(), "device_mesh", None) if by_mesh else None
    return mesh is None or "tp" not in (mesh.mesh_dim_names or ()) or mesh["tp"].get_local_rank() == 0


# ----------------------------------------------------------------------------------------------------------------------

STALE = (
    "this iterator is stale: its loader was iterated again, given another epoch or state, or closed; finish one "
    "iteration before the next, or make two loaders."
)
UNCHECKED = (
    "layout: flat in a custom loop, and nothing has made sure that the model keeps the samples of a row apart "
    "(one with its cache switched on does not); call odb_factory.unpad(model, loader) before the first batch"
)
NOT_TAKEN = (
    "a batch was dropped with its step info in it, so its loss was not weighed: call pop_step_info(batch) before "
    "model(**batch), which may swallow the key, and multiply the mean loss by loss_scale (logged once)."
)
NUM_WATCHED = 64
"""Batches whose step info may still be taken out; a loop that collects more of them is not watched."""
RUN_STEPS = "optimizer_steps_of_run"
"""The key of a loop's state from which the audit counts; `ODBLoader` does not use it."""


def check_whole(name: str, value: object, meaning: str = "") -> None:
    """Raise `ConfigError` for what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least 1{meaning}.")


class Iteration:
    """The iterations of one DataLoader. Its `ODBLoader` is made when it is first needed, for the ranks there are then.

    options: as without odb, but for is_fetched_ahead: a framework asks for the next batch before it hands over the
    current one; and stock_mean, what `SampleInfo.stock_units` are counted of.
    is_checked: `unpad` has found that the loop's model takes flat rows.
    is_prepared: accelerate has prepared the DataLoader. moves_batches: and has left it to odb to move batches.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        *,
        gradient_accumulation_steps: int = 1,
        cost_fn: Callable[[Any], Any] | None = None,
        collation: Collation | None = None,
        audit_dir: str | Path | None = None,
        process_group: dist.ProcessGroup | None = None,
        already_split: bool = False,
        is_fetched_ahead: bool = False,
        stock_mean: StockMean = MEAN_OF_STEP,
        config: ODBConfig | None = None,
        **block: Unpack[LoopKeys],
    ):
        self.config = resolved = loop_config(config, block)
        check_process_group(process_group)
        check_whole("gradient_accumulation_steps", gradient_accumulation_steps)
        generator = dataloader.generator
        seed = next(s for s in (resolved.seed, generator and generator.initial_seed(), 0) if s is not None)
        parts = dismantle(dataloader, seed, already_split=already_split)
        if already_split and parts.sampler is not None:
            raise ConfigError(
                "already_split: this dataset has an index, of which every rank takes its own share; give each rank the "
                "whole dataset (an order that is split, such as DistributedSampler's, is joined again)."
            )
        self.is_prepared = self._is_fetched_ahead = is_fetched_ahead
        self.moves_batches = self.is_checkpointed = self.is_checked = False
        self._process_group, self._pin_memory, self._audit_dir = process_group, parts.pin_memory, audit_dir
        observer = ItemObserver(
            Picklable(parts.collate_fn, "collate_fn"),
            cost_fn=cost_fn,
            loss_scaling=resolved.loss_scaling,
            takes_any_loss=True,
        )
        if parts.sampler is not None and (why := why_not_observed(parts, observer)):
            raise ConfigError(f"dataset: {observer.describe(parts.dataset, 0)}: {why}.")
        self._make = partial(
            ODBLoader,
            parts,
            resolved,
            observer=observer,
            rule=OptimizerStepRule(
                batch_size=parts.batch_size,
                accumulation=gradient_accumulation_steps,
                drop_last=parts.drop_last,
                stock_mean=stock_mean,
            ),
            collation=collation,
            layout="flat" if resolved.layout == "flat" else "padded",
            seed=seed,
            agree_on={"already_split": already_split},
        )
        ring_of(process_group, resolved.exchange_timeout_s)  # a rank that dies from here on ends the others
        self._loader: ODBLoader | None = None
        self._accounting: StepAccounting
        self._last_resort: LastResort
        self._is_closed = self._begun = self._has_said = self._has_warned = False
        self._epoch = 0
        self._current: Pass | None = None

    def __repr__(self) -> str:
        loader = self._loader
        ranks = "not begun" if loader is None else f"rank {loader.rank} of {loader.world_size}"
        return f"token_budget={self.config.token_budget}, epoch={self.epoch}, {ranks}"

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one if `set_epoch` has chosen it."""
        return self._epoch if self._loader is None else self._loader.epoch

    @property
    def accounting(self) -> StepAccounting:
        _ = self.loader
        return self._accounting

    @property
    def loader(self) -> ODBLoader:
        """Made by the first to ask; on all ranks at the same place of the program."""
        if self._loader is None:
            if self._is_closed:
                raise ConfigError("odb: this loader has been closed; make another one.")
            group = find_process_group(self._process_group, is_prepared=self.is_prepared)
            loader = self._make(ranks=Ranks(group, self.config.exchange_timeout_s))
            loader.set_epoch(self._epoch)
            by_mesh = self.is_prepared and self._process_group is None
            audit_dir = self._audit_dir if _is_first_of_replica(by_mesh=by_mesh) else None
            self._accounting = StepAccounting(loader, self.config, audit_dir, left_out_dir=audit_dir)
            self._loader, self._last_resort = loader, LastResort(self, loader)
        return self._loader

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._loader is not None:
            self._loader.set_epoch(epoch)
        self._begun = False

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict() | {RUN_STEPS: self.accounting.optimizer_steps}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self._current is not None:
            raise ConfigError(
                "load_state_dict: batches of this iteration have been taken; load before the first batch, or leave the "
                "loop (and drop its iterator) before."
            )
        self.loader.load_state_dict([{key: one[key] for key in one if key != RUN_STEPS} for one in states])
        self.accounting.resume_at(states[0].get(RUN_STEPS, 0))
        self._begun = False

    def estimate_optimizer_steps(self) -> int:
        loader = self.loader
        if loader.num_optimizer_steps is None:
            if loader.num_samples is None:
                raise TypeError("the dataset has no length, so the number of its optimizer steps cannot be estimated")
            if loader.under_way is None and self._begun:
                self.set_epoch(loader.epoch + 1)
        return loader.estimate_optimizer_steps()

    def batches(self) -> Iterator[Any]:
        loader = self.loader
        self._check_ranks(loader)
        check_accumulation(is_prepared=self.is_prepared)
        if self._begun:
            self.set_epoch(loader.epoch + 1)
        elif self.config.layout == "flat" and not self.is_checked and loader.rank == 0:
            logger.warning(UNCHECKED)
        self._begun = True
        items = iter(loader)
        assert loader.under_way is not None
        return self._batches(loader, items, loader.under_way)

    def trial_batches(self, count: int) -> TrialBatches:
        """`count` samples of the epoch that has begun, to check the model with (`unpad`)."""
        return trial_batches(self.loader.first_samples(), self.loader.groups, count)

    def gather(self, content: Any) -> list[Any]:
        """What each rank says (JSON types), to all ranks of the process group."""
        said = json.dumps(content).encode()
        answers = gather_once(said, self.config.exchange_timeout_s, parent=self._process_group)
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._loader is not None:
            self._last_resort.cancel()
            self._loader.close()
            self._accounting.close()

    def abort(self, message: str) -> None:
        """Report to the other ranks why this one ends; `close` comes next."""
        if self._loader is not None and not self._is_closed:
            self._loader.abort(message)

    def _batches(self, loader: ODBLoader, items: Iterator[Collated], current: Pass) -> Iterator[Any]:
        micro_batch = None
        handed_over: deque[tuple[weakref.ref[ODBStepInfo], Receipt]] = deque(maxlen=NUM_WATCHED)
        end_row()
        try:
            for micro_batch, measured, collated in iter(partial(self.accounting.next, items), None):
                self._check_goes_on(loader, current)
                info = make_step_info(
                    micro_batch,
                    self.config.loss_scaling,
                    loader.world_size,
                    measured,
                    loader.num_samples,
                    self.accounting.optimizer_steps + 1,
                )
                self.accounting.begin(micro_batch, measured)
                if not self._has_said:
                    self._has_said = True
                    log_first_step(loader, self.config, micro_batch.step, in_loop=True)
                if self.moves_batches:  # as accelerate does
                    collated = send_to_device(collated, AcceleratorState().device, non_blocking=self._pin_memory)
                batch = put_step_info(collated, info)
                if not self._is_fetched_ahead:
                    tell_accelerate(is_last=micro_batch.ends_optimizer_step)
                    self.accounting.end()
                self._current = current
                handed_over.append((weakref.ref(info), info.receipt))
                del info, collated  # the batch alone holds the info
                yield batch
                del batch
                if not self._has_warned and any(info() is None and not one.taken for info, one in handed_over):
                    self._has_warned = True
                    logger.warning(NOT_TAKEN)
                if self._is_fetched_ahead:  # the framework hands it over now, and holds the next one
                    self._check_goes_on(loader, current)
                    tell_accelerate(is_last=micro_batch.ends_optimizer_step)
                    self.accounting.end()
            if not (current.is_empty or (micro_batch and micro_batch.step.last and micro_batch.ends_optimizer_step)):
                raise ConfigError(STALE)
        finally:
            end_row([one.row for _, one in handed_over])
            if self._current is current:
                self._current = None
                tell_accelerate(is_last=True, is_left=True)

    def _check_ranks(self, loader: ODBLoader) -> None:
        group = find_process_group(self._process_group, is_prepared=self.is_prepared)
        if not self._is_closed and loader.world_size != world_size_of(group):
            raise ConfigError(
                f"this loader has begun with {loader.world_size} ranks, there are {world_size_of(group)} now; make "
                "another one after torch.distributed has been initialised."
            )

    def _check_goes_on(self, loader: ODBLoader, current: Pass) -> None:
        if loader.under_way is not current:
            raise ConfigError(STALE)
