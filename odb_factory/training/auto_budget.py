"""`token_budget: auto` and `max_patches: auto`: the largest whose heaviest micro-batch fits, tried before training.

A few micro-batches of real samples of growing size run forward and backward on the wrapped model; their peaks make a
model of memory over tokens, patches and rows x length squared; the budget it allows is verified with one more trial,
the heaviest micro-batch of real samples. All ranks run the same and decide by the peaks of all.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from odb_factory import memory
from odb_factory.config import AUTO, ODBConfig
from odb_factory.data.collate import NotCollated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.memory import PeakMeter
from odb_factory.model.flat_row import flat_row
from odb_factory.random_numbers import kept_random_numbers

# ----------------------------------------------------------------------------------------------------------------------
# A trial leaves the training as it was.

ACCUMULATION = "current_gradient_accumulation_steps"
"""The divisor of a loss; the Trainer's loop sets it with the first batch."""
METRICS = "_stored_metrics"
"""The figures that trl's preference trainers collect for their logs."""


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards gradients, buffers, modes of modules and random numbers are as they were.

    Weights and the optimizer are not changed within. A trial must have gradients of zero: an engine that keeps them to
    itself (DeepSpeed) keeps zeros.
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
# Forward and backward of the wrapped model on trial micro-batches, to measure their memory.


class TrialRuns:
    """Trial micro-batches of samples of `loader`: every rank runs the same, and learns the peaks of all.

    A tensor takes the place of the optimizer's later state in memory as long as this object exists.
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
        return tuple(self._trainer.odb.gather(self._meter.limit(fraction)))

    def peaks(self, samples: Sequence[Sample]) -> tuple[Measured, tuple[int | None, ...]]:
        """The shape of the samples as collated, and the peak bytes of each rank; None if it ran out of memory.

        Raises `DataError` if they cannot be collated, and `ConfigError` if ranks cannot continue after an error.
        """
        self.count += 1
        try:
            measured, batch = self._loader.groups.collate(list(samples))
        except NotCollated as error:
            raise DataError(f"rows cannot be tried for a budget: {error}") from None
        peaks = self._trainer.odb.gather(self._meter.peak(lambda: self._run(batch, measured), self._held()))
        if None in peaks and (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled):
            raise ConfigError(
                f"odb.token_budget: 'auto' ran out of memory at {measured.rows * measured.length} tokens and "
                f"{measured.patches} patches, and where weights or gradients are shared out among ranks no rank can go "
                f"on after that; set `token_budget: {max(measured.rows * measured.length // 2, 1)}`, and max_patches."
            )
        return measured, tuple(peaks)

    def _run(self, batch: Any, measured: Measured) -> None:
        """Computed as a micro-batch that does not end its optimizer step; its gradients are zeros."""
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


def state_bytes(trainer: Any) -> int:
    """Bytes that the optimizer of a training will keep on this rank, beyond what it has already."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # DeepSpeed's, which has made its state already
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if weight.requires_grad and not optimizer.state.get(weight):
            to_local = getattr(weight, "to_local", None)  # the part of a sharded weight that is on this rank
            by_kind.setdefault((weight.dtype, weight.device), []).append(weight if to_local is None else to_local())
    try:
        return sum(_state_of(optimizer, weights) for weights in by_kind.values())
    except Exception as error:
        raise ConfigError(
            f"odb.token_budget: 'auto' cannot tell how much memory {type(optimizer).__name__} will need "
            f"({one_line(error)}); set a number."
        ) from error


ROWS, COLUMNS = 3, 5
"""Shape of the test weight used to measure optimizer state."""


def _state_of(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> int:
    """Bytes kept of weights of one type and device: by one update of a small weight [ROWS, COLUMNS] with an optimizer
    of the same class, for each element, row, column and weight."""
    tried = torch.nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=weights[0].dtype, device=weights[0].device))
    known = inspect.signature(type(optimizer).__init__).parameters
    arguments = {key: value for key, value in optimizer.defaults.items() if key in known}
    small = type(optimizer)([tried], **arguments)
    tried.grad = torch.ones_like(tried)
    small.step()
    of_element = of_row = of_column = of_weight = 0.0
    for value in small.state[tried].values():
        if not isinstance(value, Tensor):
            continue
        size = value.numel() * value.element_size()
        if value.numel() == tried.numel():
            of_element += size / value.numel()
        elif value.shape == (ROWS,):
            of_row += size / ROWS
        elif value.shape == (COLUMNS,):
            of_column += size / COLUMNS
        else:
            of_weight += size
    total = 0.0
    for one in weights:
        total += one.numel() * of_element + of_weight
        if one.dim() > 1:
            total += one.shape[0] * of_row + one.numel() // one.shape[0] * of_column
        elif of_row:  # factored state is not for vectors
            total += one.numel() * 4
    return round(total)


# ----------------------------------------------------------------------------------------------------------------------
# The largest budgets whose heaviest micro-batch fits, from the peaks of a few that were tried. Pure.
# The model of bytes is linear in tokens, patches and rows x length squared.

HEADROOM = 1.25
"""Patches that a budget of auto leaves room for, as a multiple of the average of the data for its tokens."""
GRAIN = 64
"""Tokens; budgets beyond a thousand are multiples of it."""


class Shape(NamedTuple):
    """rows x length tokens as collated; patches of its media."""

    rows: int
    length: int
    patches: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def terms(self) -> list[float]:
        """The terms of the model. Attention of several rows may need a mask of all their pairs and one row needs none,
        so pairs count apart."""
        pairs = self.rows * self.length**2
        return [1.0, self.tokens, self.patches, pairs, pairs if self.rows > 1 else 0.0]


@dataclass(frozen=True, slots=True)
class DataShape:
    """The heaviest micro-batches of the samples that were read.

    longest: tokens of the longest sample. most_patches: of any sample. densest: the most patches for each token, and
    mean: their average, of samples with media and without. is_flat: all samples in one row.
    """

    longest: int
    most_patches: int
    densest: float
    mean: float
    is_flat: bool

    def heaviest(self, tokens: int, max_patches: int | None) -> Shape:
        """The heaviest micro-batch within these budgets."""
        patches = math.ceil(self.densest * tokens)
        patches = patches if max_patches is None else min(patches, max_patches)
        if self.is_flat:
            return Shape(1, tokens, patches)
        length = min(self.longest, tokens)
        return Shape(tokens // length, length, patches)

    def patches_for(self, tokens: int) -> int | None:
        """A cap for micro-batches of this number of tokens; None for data without media."""
        if not self.most_patches:
            return None
        return max(self.most_patches, math.ceil(HEADROOM * self.mean * tokens))


class Tried:
    """The micro-batches that have been run, and the peak bytes of each rank (None: more than it had).

    limits: bytes that each rank may use.
    """

    def __init__(self, limits: tuple[int, ...]):
        self.limits = limits
        self._ran: list[tuple[Shape, tuple[int | None, ...]]] = []
        self._models: list[np.ndarray] = []

    def add(self, shape: Shape, peaks: Sequence[int | None]) -> bool:
        """Returns whether it is within the limits of all ranks."""
        self._ran.append((shape, tuple(peaks)))
        self._models = []
        return self._is_within(peaks)

    def holds(self, shape: Shape) -> bool:
        """Whether `shape` should fit, and is smaller than any that did not."""
        for other, peaks in self._ran:
            if shape.tokens >= other.tokens and shape.patches >= other.patches and not self._is_within(peaks):
                return False
        self._models = self._models or [self._fit(rank) for rank in range(len(self.limits))]
        needed = (round(float(np.dot(model, shape.terms()))) for model in self._models)
        return all(size <= limit for size, limit in zip(needed, self.limits))

    def _is_within(self, peaks: Sequence[int | None]) -> bool:
        return all(peak is not None and peak <= limit for peak, limit in zip(peaks, self.limits))

    def _fit(self, rank: int) -> np.ndarray:
        """Non-negative least squares (Lawson and Hanson 1974) of relative errors: more of anything never needs less."""
        known = [(shape.terms(), peaks[rank]) for shape, peaks in self._ran if peaks[rank] is not None]
        values = np.array([peak for _, peak in known], dtype=float)
        weights = 1 / np.maximum(values, 1.0)
        rows = np.array([terms for terms, _ in known]) * weights[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
        return nnls(rows / scale, values * weights)[0] / scale


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of [low, high] that `holds`; low if none does. It holds for all below one that does."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ----------------------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

ROWS_LOOKED_AT = 128
MOST_TOKENS = 2**20
"""The largest budget if nothing else bounds it."""
MOST_ROWS = 64
"""Rows of the micro-batch of short rows."""
MOST_VERIFIED = 6
BACK = 0.9
"""After a failed trial the next budget is at most 0.9 of it."""


@dataclass(frozen=True, slots=True)
class Budgets:
    token_budget: int
    max_patches: int | None


def choose_budgets(trainer: Any, loader: ODBLoader, config: ODBConfig, memory_meter: PeakMeter | None) -> Budgets:
    """The budgets for a training before its first optimizer step. Collective; leaves nothing behind.

    loader: for its rows and its collator; its own budgets do not matter. memory_meter: None: that of the accelerator.
    Raises `ConfigError` if not even one row fits.
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
        """The budgets, and a line with them and the reason."""
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
        """Shape and peaks of these samples; None if they do not fit."""
        measured, peaks = self.runs.peaks(samples)
        shape = Shape(measured.rows, measured.length, measured.patches)
        return (measured, peaks) if self.tried.add(shape, peaks) else None

    def _try_small(self) -> None:
        """Micro-batches that separate the terms of the model. The first run makes gradients and workspaces."""
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
        """Try larger and larger micro-batches, as long as they should fit."""
        tokens = 4 * self._data.longest
        while tokens <= (self._most if self._chooses_tokens else int(self._config.token_budget)):
            patches = self._patches(tokens)
            if (
                not self.tried.holds(self._data.heaviest(tokens, patches))
                or self._try(self._group(tokens, patches)) is None
            ):
                break
            tokens *= 2

    def _group(self, tokens: int, max_patches: int | None) -> list[Sample]:
        """The heaviest micro-batch of real samples within these budgets: the densest, beside them the longest, and in a
        flat row one text sample that fills the rest."""
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
        """The most patches of a micro-batch within the token_budget given."""
        return max(math.ceil(self._data.densest * int(self._config.token_budget)), self._data.most_patches)

    def _solve(self, bound: int) -> Budgets:
        """bound: of tokens; where only patches are searched for, of patches."""

        def holds(tokens: int, patches: int | None) -> bool:
            return self.tried.holds(self._data.heaviest(tokens, patches))

        if self._chooses_tokens:
            least = self._data.longest
            tokens = largest(least, bound, lambda one: holds(one, self._patches(one)))
            if 1024 < tokens < self._most:
                tokens = max(tokens - tokens % GRAIN, least)
            return Budgets(tokens, self._patches(tokens))
        given = int(self._config.token_budget)
        return Budgets(given, largest(self._data.most_patches, bound, lambda patches: holds(given, patches)))

    def _less(self, chosen: Budgets) -> int:
        """The bound of the next budget, after `chosen` did not fit."""
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
