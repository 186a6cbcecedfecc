"""`token_budget: auto` and `max_patches: auto`: the largest whose heaviest micro-batch fits, tried before training.

A few micro-batches of real samples, larger from one to the next, run forward and backward on the wrapped model; their
peaks make a model of memory over tokens, patches and rows x length squared; the budget it allows is verified with one
more, the heaviest of real samples. All ranks run the same and decide by what all have measured.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_factory import memory
from odb_factory.config import AUTO, ODBConfig
from odb_factory.data.collate import NotCollated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.memory import DataShape, PeakMeter, Tried, TriedShape, largest, rounded, update_bytes
from odb_factory.model.flat_row import flat_row
from odb_factory.random_numbers import kept_random_numbers

# ----------------------------------------------------------------------------------------------------------------------
# A training that has not begun, as it was before micro-batches were tried on it.

ACCUMULATION = "current_gradient_accumulation_steps"
"""What a loss is divided by; the Trainer's loop says it when it asks for the first batch."""
METRICS = "_stored_metrics"
"""Where trl's trainers of preferences collect what they log."""


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards gradients, buffers, modes of modules and random numbers are as they were.

    Weights and the optimizer are what nobody in it changes. What is tried must have gradients of zero: where an engine
    keeps them to itself (DeepSpeed), they stay there and add nothing.
    """
    model = trainer.model_wrapped
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    # DDP: whether the next forward brings the buffers of rank 0 to all.
    synced = getattr(model, "require_forward_param_sync", None)
    metrics = copy.deepcopy(getattr(trainer, METRICS, None))
    syncs_gradients = trainer.accelerator.sync_gradients
    attributes = set(vars(trainer))
    trainer.__dict__.setdefault(ACCUMULATION, 1)
    try:
        with kept_random_numbers(trainer.args.device):
            yield
    finally:
        for parameter in without:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes:
            module.training = training
        if synced is not None:
            model.require_forward_param_sync = synced
        if metrics is not None:
            setattr(trainer, METRICS, metrics)
        for name in set(vars(trainer)) - attributes:
            delattr(trainer, name)
        trainer.accelerator.sync_gradients = syncs_gradients


# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward of the wrapped model on micro-batches that are made up, to see how much memory they need.


class TrialRuns:
    """Micro-batches of samples of `loader`, on all ranks alike: each runs the same, and hears of the others' peaks.

    While it is there the state that the optimizer will have takes its place in memory.
    """

    def __init__(self, trainer: Any, loader: ODBLoader, meter: PeakMeter):
        self._trainer, self._loader, self._meter = trainer, loader, meter
        size = state_bytes(trainer)
        try:
            self._state = torch.empty(size, dtype=torch.uint8, device=trainer.args.device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"odb.token_budget: 'auto' found no room for the {size / 2**30:.1f} GiB of state that the optimizer "
                "will have; train fewer weights (LoRA), or share them out (ZeRO, FSDP)."
            ) from None
        self.count = 0

    def limits(self, fraction: float) -> tuple[int, ...]:
        """Bytes that each rank may use."""
        return tuple(self._of_all_ranks(self._meter.limit(fraction)))

    def peaks(self, samples: Sequence[Sample]) -> tuple[Measured, tuple[int | None, ...]]:
        """What the samples are as collated, and the peak of each rank in bytes; None where it ran out of memory.

        Raises `DataError` where they cannot be collated, and `ConfigError` where ranks cannot go on after an error.
        """
        self.count += 1
        try:
            measured, batch = self._loader.groups.collate(list(samples))
        except NotCollated as error:
            raise DataError(f"rows cannot be tried for a budget: {error}") from None
        peaks = self._of_all_ranks(self._meter.peak(lambda: self._run(batch, measured), self._held()))
        if None in peaks and (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled):
            raise ConfigError(
                f"odb.token_budget: 'auto' ran out of memory at {measured.rows * measured.length} tokens and "
                f"{measured.patches} patches, and where weights or gradients are shared out among ranks no rank can go "
                f"on after that; set `token_budget: {max(measured.rows * measured.length // 2, 1)}`, and max_patches."
            )
        return measured, tuple(peaks)

    def _run(self, batch: Any, measured: Measured) -> None:
        """As a micro-batch is computed that does not end its optimizer step; its gradients are zeros."""
        trainer = self._trainer
        trainer.odb.trial_units = max(measured.units, 1)
        try:
            with (
                flat_row(measured.segments),
                trainer.odb.gradients_summed(trainer.model_wrapped, is_last=False),
            ):
                trainer.training_step(trainer.model_wrapped, dict(batch))
        finally:
            trainer.odb.trial_units = None

    def _held(self) -> Iterator[Tensor]:
        yield self._state
        for parameter in self._trainer.model_wrapped.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._trainer.model_wrapped.buffers()

    def _of_all_ranks(self, mine: int | None) -> list[Any]:
        return self._trainer.odb.gather(mine)


def state_bytes(trainer: Any) -> int:
    """What the optimizer of a training that has not begun will keep on this rank, beyond what it has."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # one of DeepSpeed's, which has made its state when it was made
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    new = [_local(one) for one in weights if not optimizer.state.get(one)]
    try:
        return sum(
            update_bytes(type(optimizer), optimizer.defaults, dtype, device).of(group)
            for (dtype, device), group in _by_kind(new).items()
        )
    except Exception as error:
        raise ConfigError(
            f"odb.token_budget: 'auto' cannot tell how much memory {type(optimizer).__name__} will need "
            f"({one_line(error)}); set a number."
        ) from error


def _by_kind(weights: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for one in weights:
        groups.setdefault((one.dtype, one.device), []).append(one)
    return groups


def _local(weight: Tensor) -> Tensor:
    """The part of a sharded weight that is on this rank."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


# ----------------------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

ROWS_LOOKED_AT = 128
MOST_TOKENS = 2**20
"""Of a budget where nothing else bounds it."""
MOST_ROWS = 64
"""Of the micro-batch of short rows."""
MOST_VERIFIED = 6
BACK = 0.9
"""Of a budget that did not fit, the next one that is verified, at the most."""


@dataclass(frozen=True, slots=True)
class Budgets:
    token_budget: int
    max_patches: int | None


def choose_budgets(trainer: Any, loader: ODBLoader, config: ODBConfig, memory_meter: PeakMeter | None) -> Budgets:
    """The budgets for a training that is about to take its first optimizer step. Collective; leaves nothing behind.

    loader: its rows and how they are collated; the budgets it plans with do not matter. memory_meter: None: that of the
        accelerator.
    Raises `ConfigError` where not even one row fits.
    """
    samples = list(itertools.islice(loader.first_samples(), ROWS_LOOKED_AT))
    if not samples:
        raise ConfigError(
            "odb.token_budget: 'auto' tries rows of the dataset before training, and there is none that can be read by "
            "its number (a stream), or none of the first that can be used; set a number."
        )
    if config.token_budget != AUTO and not any(sample.cost.patches for sample in samples):
        logger.info("max_patches: auto is none, as the first %d samples have no media", len(samples))
        return Budgets(int(config.token_budget), None)
    began = time.perf_counter()
    with untouched(trainer):
        meter = memory_meter or memory.find_meter(trainer.args.device)
        assert meter is not None, "`check_arguments` refuses a CPU"
        search = _Search(TrialRuns(trainer, loader, meter), loader, config, samples)
        budgets, why = search.run()
    logger.info("%s; tried %d micro-batches in %.1f s", why, search.runs.count, time.perf_counter() - began)
    return budgets


class _Search:
    def __init__(self, runs: TrialRuns, loader: ODBLoader, config: ODBConfig, samples: list[Sample]):
        self.runs, self._config = runs, config
        self.tried = Tried(runs.limits(config.memory_fraction))
        costs = [sample.cost for sample in samples]
        self._tokens_of = tokens_of = loader.budget.tokens_of
        self._longest = max(samples, key=lambda one: (tokens_of(one.cost), -one.id))
        self._shortest = min(samples, key=lambda one: (tokens_of(one.cost), one.id))
        self._densest = max(samples, key=lambda one: (one.cost.patches / max(tokens_of(one.cost), 1), -one.id))
        self._fillers = sorted((one for one in samples if not one.cost.patches), key=lambda one: tokens_of(one.cost))
        self._data = DataShape(
            longest=tokens_of(self._longest.cost),
            most_patches=max(cost.patches for cost in costs),
            densest=self._densest.cost.patches / max(tokens_of(self._densest.cost), 1),
            mean=sum(cost.patches for cost in costs) / max(sum(map(tokens_of, costs)), 1),
            is_flat=loader.layout == "flat",
        )
        size = loader.global_batch_size
        a_rank = MOST_TOKENS if size is None else math.ceil(size / loader.world_size) * self._data.longest
        self._most = max(min(a_rank, MOST_TOKENS), self._data.longest)
        self._chooses_tokens = config.token_budget == AUTO

    def run(self) -> tuple[Budgets, str]:
        """The budgets, and a line that says them and why."""
        self._try_small()
        self._grow()
        bound = self._most if self._chooses_tokens else self._useful
        for _ in range(MOST_VERIFIED):
            chosen = self._solve(bound)
            verified = self._try(self._group(chosen.token_budget, chosen.max_patches))
            if verified is not None:
                return chosen, self._why(chosen, *verified)
            bound = self._less(chosen)
        raise ConfigError(
            f"odb.token_budget: 'auto' found no budget that holds after {self.runs.count} micro-batches (the last of "
            f"{chosen.token_budget} tokens); set a number."
        )

    # Runs

    def _try(self, samples: list[Sample]) -> tuple[Measured, tuple[int | None, ...]] | None:
        """What has been measured of these samples; None where they do not fit."""
        measured, peaks = self.runs.peaks(samples)
        shape = TriedShape(measured.rows, measured.length, measured.patches)
        return (measured, peaks) if self.tried.add(shape, peaks) else None

    def _try_small(self) -> None:
        """Micro-batches that tell apart what memory goes by. The first run makes gradients and workspaces."""
        longest, tokens = [self._longest], self._data.longest
        self.runs.peaks(longest)
        if self._try(longest) is None:
            raise ConfigError(
                f"odb.token_budget: 'auto' found that not even one row of {tokens} tokens fits into "
                f"{_gib(min(self.tried.limits))} (memory_fraction {self._config.memory_fraction}); lower cutoff_len, "
                "or save memory (gradient checkpointing, LoRA, ZeRO-3 or FSDP)."
            )
        rows = min(2 * tokens // max(self._tokens_of(self._shortest.cost), 1), MOST_ROWS)
        groups = [2 * longest, rows * [self._shortest]]
        if self._densest.cost.patches:
            groups += [[self._densest], 2 * [self._densest]]
        for group in groups:
            total = sum(self._tokens_of(sample.cost) for sample in group)
            if total > 2 * self._most or self._try(group) is None:
                return

    def _grow(self) -> None:
        """Larger and larger ones, as long as they should fit."""
        tokens = 4 * self._data.longest
        while tokens <= (self._most if self._chooses_tokens else int(self._config.token_budget)):
            shape = self._data.heaviest(tokens, self._patches(tokens))
            if not self.tried.holds(shape, self.tried.models()):
                break
            if self._try(self._group(tokens, self._patches(tokens))) is None:
                break
            tokens *= 2

    def _group(self, tokens: int, max_patches: int | None) -> list[Sample]:
        """The heaviest micro-batch of real samples within these budgets: the densest, beside them the longest, and in a
        flat row one of text that fits behind them."""
        longest, densest = self._longest.cost, self._densest.cost
        of_longest, of_densest = self._tokens_of(longest), self._tokens_of(densest)
        most = tokens // max(of_densest, 1) if densest.patches else 0
        num_dense = most if max_patches is None or not densest.patches else min(max_patches // densest.patches, most)
        if num_dense and densest.modality != longest.modality:
            return num_dense * [self._densest]
        if self._data.is_flat:
            rest = tokens - num_dense * of_densest
            num_long, rest = divmod(rest, of_longest)
            last = [one for one in self._fillers if self._tokens_of(one.cost) <= rest][-1:]
            return num_dense * [self._densest] + num_long * [self._longest] + last or [self._longest]
        if most and num_dense == most:  # shorter rows, of which there are more
            num_long = 0
        else:
            rows = tokens // of_longest
            num_dense = min(num_dense, rows)
            num_long = rows - num_dense
        return num_dense * [self._densest] + num_long * [self._longest] or [self._longest]

    # Decisions

    def _patches(self, tokens: int) -> int | None:
        given = self._config.max_patches
        return self._data.patches_for(tokens) if given == AUTO else None if given is None else int(given)

    @property
    def _useful(self) -> int:
        """Patches that micro-batches of the token_budget given can have."""
        return max(math.ceil(self._data.densest * int(self._config.token_budget)), self._data.most_patches)

    def _solve(self, bound: int) -> Budgets:
        """bound: of tokens; where only patches are searched for, of patches."""
        models = self.tried.models()

        def holds(tokens: int, patches: int | None) -> bool:
            return self.tried.holds(self._data.heaviest(tokens, patches), models)

        if self._chooses_tokens:
            tokens = largest(self._data.longest, bound, lambda one: holds(one, self._patches(one)))
            tokens = rounded(tokens, self._data.longest) if tokens < self._most else tokens
            return Budgets(tokens, self._patches(tokens))
        given = int(self._config.token_budget)
        return Budgets(given, largest(self._data.most_patches, bound, lambda patches: holds(given, patches)))

    def _less(self, chosen: Budgets) -> int:
        """What bounds the next budget, when `chosen` did not fit."""
        if self._chooses_tokens:
            return max(int(BACK * chosen.token_budget), self._data.longest)
        assert chosen.max_patches is not None
        if chosen.max_patches <= self._data.most_patches:
            raise ConfigError(
                f"odb.token_budget: {chosen.token_budget} with the {chosen.max_patches} patches of the largest sample "
                "does not fit into the memory; lower it, or set `token_budget: auto`."
            )
        return max(int(BACK * chosen.max_patches), self._data.most_patches)

    def _why(self, chosen: Budgets, measured: Measured, peaks: tuple[int | None, ...]) -> str:
        found = []
        if self._chooses_tokens:
            found.append(f"token_budget: auto is {chosen.token_budget}")
        if self._config.max_patches == AUTO:
            found.append(
                "max_patches: auto is none, as the samples have no media"
                if chosen.max_patches is None
                else f"max_patches: auto is {chosen.max_patches}"
            )
        worst, limit = max(zip(peaks, self.tried.limits), key=lambda pair: (pair[0] or 0) / pair[1])
        bound = "as much as memory_fraction allows"
        if self._chooses_tokens and chosen.token_budget >= self._most:
            bound = "as much as an optimizer step can have on a rank"
        return (
            f"{', '.join(found)} ({bound}): the heaviest micro-batch that was found, {measured.rows} x "
            f"{measured.length} tokens and {measured.patches} patches, takes {_gib(worst or 0)} of the "
            f"{_gib(limit)} that {self._config.memory_fraction:.0%} of the memory are, the state of the optimizer "
            "included"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
