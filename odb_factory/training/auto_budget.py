"""`token_budget: auto` and `max_patches: auto`: the largest whose heaviest micro-batch fits, tried before training.
`rehearse`: the heaviest micro-batch that given budgets allow, tried before training.

A few micro-batches of real samples of growing size run forward and backward on the wrapped model; their peaks make a
model of memory over tokens, patches and rows x length squared; the budget it allows is verified with one more trial,
the heaviest micro-batch of real samples. All ranks run the same and decide by the peaks of all.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import inspect
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from odb_factory import memory
from odb_factory.config import AUTO, ODBConfig
from odb_factory.data.collate import NotCollated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import ConfigError, DataError, LayoutError, OutOfMemoryError, one_line
from odb_factory.log import get_logger
from odb_factory.memory import PeakMeter
from odb_factory.model.engine import engine_of
from odb_factory.model.flat_row import flat_row
from odb_factory.planning import Budget, Limits, Media
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import why_not_split

# ----------------------------------------------------------------------------------------------------------------------
# A trial leaves the training as it was.

ACCUMULATION = "current_gradient_accumulation_steps"
"""The divisor of a loss; the Trainer's loop sets it with the first batch."""


def _is_plain(value: Any) -> bool:
    """Numbers and text, and collections of them: figures that a trainer collects for its logs, as trl's do."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    is_figure = isinstance(value, Tensor) and value.numel() == 1 and value.is_leaf
    return is_figure or value is None or isinstance(value, int | float | str)


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards gradients, buffers, modes of modules, figures of the trainer and random numbers are as they were.

    Weights and the optimizer are not changed within. A trial must have gradients of zero: an engine that keeps them to
    itself (DeepSpeed) keeps zeros.
    """
    model = trainer.model_wrapped
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    # DDP: whether the next forward brings the buffers of rank 0 to all.
    synced = {name: value for name, value in vars(model).items() if name == "require_forward_param_sync"}
    figures = copy.deepcopy({name: value for name, value in vars(trainer).items() if _is_plain(value)})
    syncs_gradients, attributes = trainer.accelerator.sync_gradients, set(vars(trainer))
    changed = replaced(trainer, **{ACCUMULATION: 1} | figures)
    try:
        with kept_random_numbers(trainer.args.device), changed, replaced(model, **synced):
            yield
    finally:
        for parameter in without:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes:
            module.training = training
        for name in set(vars(trainer)) - attributes:
            delattr(trainer, name)
        trainer.accelerator.sync_gradients = syncs_gradients


# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward of the wrapped model on trial micro-batches, to measure their memory and to predict that of
# others. The model of bytes is linear in tokens, patches and rows x length squared.


class Trials:
    """Trial micro-batches of samples of a training: every rank runs the same, and learns the peaks of all.

    limits: bytes that each rank may use. state_bytes: a tensor of this size takes the place of the optimizer's later
    state in memory as long as this object exists. key, other: whose trials these are, and how else to go on, for
    messages. can_continue: the ranks can, after one of them ran out of memory.
    """

    def __init__(self, trainer: Any, state_bytes: int, key: str = "odb.token_budget: 'auto'", other: str = ""):
        odb, device = trainer.odb, trainer.args.device
        self._trainer, self._groups, self._key, self._other = trainer, odb.training.run.loader.groups, key, other
        self._meter: PeakMeter = odb.memory_meter or memory.find_meter(device) or memory.NoMeter()
        is_alone = engine_of(trainer.model_wrapped) in ("none", "ddp")
        self.can_continue = is_alone or why_not_split(trainer.args) is None  # ZeRO-1 can
        try:
            self._state = torch.empty(state_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{key} found no room for the {state_bytes / 2**30:.1f} GiB of state that the optimizer will have; "
                "train fewer weights (LoRA), or shard them (ZeRO, FSDP)."
            ) from None
        self.limits: list[int] = odb.gather(self._meter.limit(odb.config.memory_fraction))
        self.count = 0
        self._ran: list[tuple[Measured, list[int | None]]] = []
        self._models: list[np.ndarray] = []

    def run(self, samples: Sequence[Sample]) -> tuple[Measured, list[int | None]]:
        """The samples as collated, and the peak bytes of each rank; None if it ran out of memory.

        Raises `DataError` on all ranks if they cannot be collated on one, and `ConfigError` if ranks cannot continue
        after an error.
        """
        self.count += 1
        problem = None
        try:
            measured, batch = self._groups.collate(list(samples))
        except (LayoutError, NotCollated) as error:
            problem = str(error)
        problems = [one for one in self._trainer.odb.gather(problem) if one is not None]
        if problems:
            raise DataError(f"rows cannot be tried for a budget: {problems[0]}")
        peaks = self._trainer.odb.gather(self._meter.peak(lambda: self._compute(batch, measured), self._held()))
        if None in peaks and not self.can_continue:
            tokens = measured.rows * measured.length
            raise ConfigError(
                f"{self._key} ran out of memory at {measured}, and no rank can continue after that where ranks share "
                f"weights or gradients; set `token_budget: {max(tokens // 2, 1)}`, and max_patches{self._other}."
            )
        return measured, peaks

    def fit(self, samples: Sequence[Sample]) -> tuple[Measured, list[int | None]] | None:
        """As `run`, recorded for `holds`; None if a rank exceeds its limit."""
        measured, peaks = self.run(samples)
        self._ran.append((measured, peaks))
        self._models = []
        return (measured, peaks) if self._is_within(peaks) else None

    def holds(self, micro_batch: Measured) -> bool:
        """Whether it should fit, and is smaller than any that did not."""
        tokens = micro_batch.rows * micro_batch.length
        for other, peaks in self._ran:
            is_larger = tokens >= other.rows * other.length and micro_batch.patches >= other.patches
            if is_larger and not self._is_within(peaks):
                return False
        self._models = self._models or [self._model(rank) for rank in range(len(self.limits))]
        needed = (round(float(np.dot(model, _terms(micro_batch)))) for model in self._models)
        return all(size <= limit for size, limit in zip(needed, self.limits))

    def nearest(self, peaks: Sequence[int | None]) -> tuple[int, int]:
        """Peak and limit, in bytes, of the rank whose peak is nearest to its limit."""
        return max(((peak or 0, limit) for peak, limit in zip(peaks, self.limits)), key=lambda pair: pair[0] / pair[1])

    def _is_within(self, peaks: Sequence[int | None]) -> bool:
        return all(peak is not None and peak <= limit for peak, limit in zip(peaks, self.limits))

    def _model(self, rank: int) -> np.ndarray:
        """Non-negative least squares (Lawson and Hanson 1974) of relative errors: more of anything never needs less."""
        known = [(_terms(measured), peaks[rank]) for measured, peaks in self._ran if peaks[rank] is not None]
        values = np.array([peak for _, peak in known], dtype=float)
        weights = 1 / np.maximum(values, 1.0)
        rows = np.array([terms for terms, _ in known]) * weights[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
        return nnls(rows / scale, values * weights)[0] / scale

    def _compute(self, batch: Any, measured: Measured) -> None:
        """Computed as a micro-batch that does not end its optimizer step; its gradients are zeros."""
        trainer, training = self._trainer, self._trainer.odb.training
        sums = training.gradients_summed(trainer.model_wrapped, is_last=False)
        with replaced(training, trial_units=max(measured.units, 1)), flat_row(measured.segments), sums:
            trainer.training_step(trainer.model_wrapped, dict(batch))

    def _held(self) -> Iterator[Tensor]:
        model = self._trainer.model_wrapped
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        return itertools.chain([self._state], model.parameters(), gradients, model.buffers())


def _terms(micro_batch: Measured) -> list[float]:
    """The terms of the model. Attention of several rows may need a mask of all their pairs and one row needs none,
    so pairs count apart."""
    rows, length = micro_batch.rows, micro_batch.length
    pairs = rows * length**2
    return [1.0, rows * length, micro_batch.patches, pairs, pairs if rows > 1 else 0.0]


def state_bytes(trainer: Any) -> int:
    """Bytes that the optimizer of a training will keep on the device of this rank, beyond what it has already."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # DeepSpeed's, which has made its state already
    if getattr(optimizer, "is_paged", False):
        return 0  # of bitsandbytes: state leaves the device where memory is short
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        on_device = weight.device.type == trainer.args.device.type  # FSDP may keep weights and state on the CPU
        if weight.requires_grad and on_device and not optimizer.state.get(weight):
            to_local = getattr(weight, "to_local", None)  # the part of a sharded weight that is on this rank
            by_kind.setdefault((weight.dtype, weight.device), []).append(weight if to_local is None else to_local())
    try:
        return sum(_state_of(optimizer, weights) for weights in by_kind.values())
    except Exception as error:
        raise ConfigError(
            f"odb.token_budget: 'auto' cannot measure the memory that {type(optimizer).__name__} will need "
            f"({one_line(error)}); set a number."
        ) from error


ROWS, COLUMNS = 64, 96
"""Shape of the test weight used to measure optimizer state; bitsandbytes keeps that of less than 4,096 elements in 32
bits."""


def _state_of(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> int:
    """Bytes kept of weights of one type and device: by one update of a test weight [ROWS, COLUMNS] with an optimizer
    of the same class, for each element, row, column and weight."""
    tried = torch.nn.Parameter(torch.ones(ROWS, COLUMNS, dtype=weights[0].dtype, device=weights[0].device))
    known = inspect.signature(type(optimizer).__init__).parameters
    given = optimizer.defaults | {"args": getattr(optimizer, "args", None)}  # bitsandbytes keeps its bits in `args`
    arguments = {key: value for key, value in given.items() if key in known}
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
# The largest budgets whose heaviest micro-batch fits.

HEADROOM = 1.25
"""Patches that a budget of auto leaves room for, as a multiple of the average of the data for its tokens."""
GRAIN = 64
"""Tokens; budgets beyond a thousand are multiples of it."""
MOST_TOKENS = 2**20
"""The largest budget if nothing else bounds it."""
MOST_ROWS = 64
"""Rows of the micro-batch of short rows."""
MOST_VERIFIED = 6
CLOSE = 0.95
"""A budget whose heaviest micro-batch takes this share of the memory allowed is not raised further."""
BACK = 0.9
"""After a failed trial the next budget is at most 0.9 of it."""

logger = get_logger(__name__)


def choose_budgets(trainer: Any) -> Limits:
    """The budgets for a training before its first optimizer step. Collective; leaves nothing behind.

    Raises `ConfigError` if not even one row fits.
    """
    loader, config = trainer.odb.training.run.loader, trainer.odb.config
    samples = list(loader.first_samples())
    if not samples:
        raise ConfigError(
            "odb.token_budget: 'auto' tries rows of the dataset before training, and there is none that can be read by "
            "its number (a stream), or none of the first that can be used; set a number."
        )
    if config.token_budget != AUTO and not any(sample.cost.patches for sample in samples):
        logger.info("max_patches: auto is none, as the first %d samples have no media", len(samples))
        return Limits(int(config.token_budget), None)
    began = time.perf_counter()
    with untouched(trainer):
        trials = Trials(trainer, state_bytes(trainer))
        assert all(trials.limits), "`check_arguments` refuses a device without a meter"
        budgets, why = Search(trials, loader, config, samples).run()
    logger.info("%s; tried %d micro-batches in %.1f s", why, trials.count, time.perf_counter() - began)
    return budgets


def rehearse(trainer: Any) -> None:
    """Run the heaviest micro-batch of the first rows that the budgets allow once, with weight 0, before the first
    optimizer step, the state of its optimizer taken. Collective; leaves nothing behind.

    If memory does not hold it, the budgets are halved until one passes; then raises `OutOfMemoryError`, which names it,
    unless `oom` goes on.
    """
    loader, watch = trainer.odb.training.run.loader, trainer.odb.training.memory
    if trainer.odb.before_step is not None:
        logger.info("rehearse: this stage prepares its optimizer steps as a whole, so no micro-batch is tried alone")
        return
    samples = list(loader.first_samples())
    if not samples:
        logger.info("rehearse: no row can be read by its number (a stream), so nothing is tried")
        return
    config, began = watch.config, time.perf_counter()
    budget = loader.budget.within(loader.lowered)
    limits, failed, least_patches = budget.limits, None, max(budget.collation.dummies(0, 0)[1], 1)
    try:
        with untouched(trainer):
            trials = trials_beside_state(trainer, "odb.rehearse: a rehearsal", NOT_REHEARSED)
            search = Search(trials, loader, config, samples)
            limits = Limits(min(limits.token_budget, search.most), limits.max_patches)
            while True:
                for group in search.allowed(budget.within(limits)):
                    measured, peaks = trials.run(group)
                    if None in peaks:
                        break
                if None not in peaks or len(group) == 1:
                    break
                failed = failed or measured
                patches = None if limits.max_patches is None else max(limits.max_patches // 2, least_patches)
                limits = Limits(limits.token_budget // 2, patches)
    except DataError as error:
        logger.warning("rehearse: %s; training begins without", one_line(error))
        return
    fits, most = None not in peaks, max(peak or 0 for peak in peaks)
    if failed is None and fits:
        peak = f", peak {_gib(most)}" if most else ""
        seconds = time.perf_counter() - began
        logger.info("rehearse: the heaviest micro-batch, %s, went through in %.1f s%s", measured, seconds, peak)
        return
    also = "" if limits.max_patches is None else f" and `max_patches: {limits.max_patches}`"
    advice = f"the largest budget that passed is `token_budget: {limits.token_budget}`{also} ({measured})"
    if not fits:
        advice = f"a sample alone ({measured}) did not fit either: lower cutoff_len or the size of media"
    message = (
        f"rehearse: out of memory in the heaviest micro-batch that the budget of {budget} allows, "
        f"{failed or measured}, before the first optimizer step; {advice}"
    )
    if config.oom == "raise":
        this = f"; set this{', `oom: split`' if watch.advises_split else ''}" if fits else ""
        raise OutOfMemoryError(f"{message}{this}{NOT_REHEARSED}.")
    logger.warning("%s; oom: %s: training begins all the same", message, config.oom)


NOT_REHEARSED = ", or `rehearse: false` to begin without"


def trials_beside_state(trainer: Any, key: str, other: str) -> Trials:
    """With the memory of the optimizer's state taken, where it is known and there is room for it. key, other: as of
    `Trials`."""
    try:
        return Trials(trainer, state_bytes(trainer), key, other)
    except ConfigError as error:
        logger.warning("%s: the memory of the optimizer's state is not counted: %s", key, one_line(error))
    return Trials(trainer, 0, key, other)


class Search:
    """Of the samples that were read: longest, shortest and densest sample, and the largest numbers of tokens and
    patches of any (`longest_tokens`, `_most_patches`). most, most_samples: tokens that an optimizer step can have on a
    rank, and samples that a micro-batch of it can have."""

    def __init__(self, trials: Trials, loader: ODBLoader, config: ODBConfig, samples: list[Sample]):
        self.trials, self._config = trials, config
        self._chooses_tokens = config.token_budget == AUTO
        self._is_flat = loader.layout == "flat"
        self.tokens_of = lambda sample: max(loader.budget.tokens_of(sample.cost), 1)
        tokens = [self.tokens_of(sample) for sample in samples]
        patches = [sample.cost.patches for sample in samples]
        self._longest = max(samples, key=lambda one: (self.tokens_of(one), -one.id))
        self.shortest = min(samples, key=lambda one: (self.tokens_of(one), one.id))
        self._fillers = sorted((one for one in samples if not one.cost.patches), key=self.tokens_of)
        self.longest_tokens, self._most_patches = max(tokens), max(patches)
        self.most, self.most_samples = MOST_TOKENS, MOST_TOKENS
        if (size := loader.global_batch_size) is not None:
            share = math.ceil(size / loader.world_size)
            self.most = min(share * self.longest_tokens, self.most)
            # No rank of those that share their samples idles while another one has two.
            sharing = loader.world_size if config.balance else 1
            self.most_samples = max(min(size, sharing * share) - sharing + 1, 1)
        self.most = max(self.most, self.longest_tokens)
        # Where few samples fill a rehearsal, those with many patches outweigh dense ones.
        few = 0.0 if config.auto_keys else min(self.most, int(config.token_budget)) / self.most_samples
        self._by_density = sorted(samples, key=lambda one: (-one.cost.patches / max(self.tokens_of(one), few), one.id))
        self._densest = self._by_density[0]
        self._density = self._densest.cost.patches / self.tokens_of(self._densest)
        self._mean_density = sum(patches) / sum(tokens)

    def run(self) -> tuple[Limits, str]:
        """The budgets, and a line with them and the reason."""
        self._try_small()
        self._grow()
        bound = self.most
        if not self._chooses_tokens:  # the most patches of a micro-batch within the given token_budget
            bound = max(math.ceil(self._density * int(self._config.token_budget)), self._most_patches)
        best: tuple[Limits, Measured, list[int | None]] | None = None
        for _ in range(MOST_VERIFIED):
            chosen = self._solve(bound)
            if best is not None and chosen.least(best[0]) == chosen:
                break
            verified = self.trials.fit(self.heaviest(chosen.token_budget, chosen.max_patches))
            if verified is None:
                bound = self._less(chosen)
                continue
            best = chosen, *verified
            peak, limit = self.trials.nearest(verified[1])
            if peak >= CLOSE * limit or not self.trials.can_continue:
                break
        if best is None:
            raise ConfigError(
                f"odb.token_budget: 'auto' found no budget that holds after {self.trials.count} micro-batches (the "
                f"last of {chosen.token_budget} tokens); set a number."
            )
        return best[0], self._why(*best)

    # Trials

    def _try_small(self) -> None:
        """Micro-batches that separate the terms of the model. The first run makes gradients and workspaces."""
        longest, tokens = [self._longest], self.longest_tokens
        self.trials.run(longest)
        if self.trials.fit(longest) is None:
            raise ConfigError(
                f"odb.token_budget: 'auto' found that not even one row of {tokens} tokens fits into "
                f"{_gib(min(self.trials.limits))} (memory_fraction {self._config.memory_fraction}); lower cutoff_len, "
                "or save memory (gradient checkpointing, LoRA, ZeRO-3 or FSDP)."
            )
        rows = min(2 * tokens // self.tokens_of(self.shortest), MOST_ROWS)
        groups = [2 * longest, rows * [self.shortest]]
        if self._densest.cost.patches:
            groups += [[self._densest], 2 * [self._densest]]
        for group in groups:
            if sum(map(self.tokens_of, group)) > 2 * self.most or self.trials.fit(group) is None:
                return

    def _grow(self) -> None:
        """Try larger and larger micro-batches, as long as they should fit."""
        tokens = 4 * self.longest_tokens
        while tokens <= (self.most if self._chooses_tokens else int(self._config.token_budget)):
            patches = self._patches(tokens)
            if not self._holds(tokens, patches) or self.trials.fit(self.heaviest(tokens, patches)) is None:
                break
            tokens *= 2

    def heaviest(self, tokens: int, max_patches: int | None) -> list[Sample]:
        """The heaviest micro-batch of real samples within these budgets: the densest, beside them the longest, and in a
        flat row one text sample that fills the rest."""
        dense = self._densest_within(tokens, max_patches)
        longest, densest = self._longest.cost, dense.cost
        of_longest, of_densest = self.longest_tokens, self.tokens_of(dense)
        most = tokens // of_densest if densest.patches else 0
        num_dense = most if max_patches is None or not densest.patches else min(max_patches // densest.patches, most)
        if num_dense and densest.modality != longest.modality:
            return num_dense * [dense]
        if self._is_flat:
            rest = tokens - num_dense * of_densest
            num_long, rest = divmod(rest, of_longest)
            alike = [one for one in self._fillers if one.cost.modality == longest.modality]
            last = [one for one in alike if self.tokens_of(one) <= rest][-1:]
            return num_dense * [dense] + num_long * [self._longest] + last or [self._longest]
        if most and num_dense == most:  # shorter rows, of which there are more
            num_long = 0
        else:
            rows = tokens // of_longest
            num_dense = min(num_dense, rows)
            num_long = rows - num_dense
        return num_dense * [dense] + num_long * [self._longest] or [self._longest]

    def _densest_within(self, tokens: int, max_patches: int | None) -> Sample:
        """The densest sample that these budgets allow; the densest of all where none is."""
        within = (
            one
            for one in self._by_density
            if self.tokens_of(one) <= tokens and (max_patches is None or one.cost.patches <= max_patches)
        )
        return next(within, self._densest)

    def allowed(self, budget: Budget) -> list[list[Sample]]:
        """`heaviest` without what breaks these budgets or `most_samples`, filled up with text samples. If its number of
        samples leaves tokens unused, the one of most tokens beside it."""
        group = self.heaviest(budget.token_budget, budget.max_patches)
        groups = [group[: self.most_samples]]
        if len(group) > self.most_samples and group[0] is not self._longest:
            groups.append(self.most_samples * [self._longest])
        return [self._filled(one, budget) for one in groups]

    def _filled(self, group: list[Sample], budget: Budget) -> list[Sample]:
        while len(group) > 1 and not budget.fits([one.cost for one in group]):
            group.pop()
        for filler in reversed(self._fillers):
            while (
                len(group) < self.most_samples
                and filler.cost.modality == group[0].cost.modality
                and budget.fits([one.cost for one in (*group, filler)])
            ):
                group.append(filler)
        return group

    # Decisions

    def _patches(self, tokens: int) -> int | None:
        """The cap for micro-batches of this number of tokens; None for data without media."""
        given = self._config.max_patches
        if given != AUTO:
            return None if given is None else int(given)
        return max(self._most_patches, math.ceil(HEADROOM * self._mean_density * tokens)) or None

    def _holds(self, tokens: int, max_patches: int | None) -> bool:
        """Whether the heaviest micro-batch within these budgets should fit."""
        patches = math.ceil(self._density * tokens)
        patches = patches if max_patches is None else min(patches, max_patches)
        length = tokens if self._is_flat else min(self.longest_tokens, tokens)
        return self.trials.holds(Measured(tokens // length, length, Media(patches), units=0))

    def _solve(self, bound: int) -> Limits:
        """bound: of tokens; where only patches are searched for, of patches."""
        if not self._chooses_tokens:
            given = int(self._config.token_budget)
            return Limits(given, largest(self._most_patches, bound, lambda patches: self._holds(given, patches)))
        least = self.longest_tokens
        tokens = largest(least, bound, lambda one: self._holds(one, self._patches(one)))
        if 1024 < tokens < self.most:
            tokens = max(tokens - tokens % GRAIN, least)
        return Limits(tokens, self._patches(tokens))

    def _less(self, chosen: Limits) -> int:
        """The bound of the next budget, after `chosen` did not fit."""
        if self._chooses_tokens:
            return max(int(BACK * chosen.token_budget), self.longest_tokens)
        assert chosen.max_patches is not None
        if chosen.max_patches <= self._most_patches:
            raise ConfigError(
                f"odb.token_budget: {chosen.token_budget} with the {chosen.max_patches} patches of the largest sample "
                "does not fit into the memory; lower it, or set `token_budget: auto`."
            )
        return max(int(BACK * chosen.max_patches), self._most_patches)

    def _why(self, chosen: Limits, measured: Measured, peaks: list[int | None]) -> str:
        found = []
        if self._chooses_tokens:
            found.append(f"token_budget: auto is {chosen.token_budget}")
        if self._config.max_patches == AUTO:
            no_media = "none, as the samples have no media"
            found.append(f"max_patches: auto is {no_media if chosen.max_patches is None else chosen.max_patches}")
        worst, limit = self.trials.nearest(peaks)
        bound = "as much as memory_fraction allows"
        if self._chooses_tokens and chosen.token_budget >= self.most:
            bound = "as much as an optimizer step can have on a rank"
        return (
            f"{', '.join(found)} ({bound}): the heaviest micro-batch that was found, {measured.rows} x "
            f"{measured.length} tokens and {measured.patches} patches, takes {_gib(worst)} of the "
            f"{_gib(limit)} that {self._config.memory_fraction:.0%} of the memory are, the state of the optimizer "
            "included"
        )


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of [low, high] that `holds`; low if none does. It holds for all below one that does."""
    return low + bisect.bisect_left(range(low + 1, high + 1), True, key=lambda one: not holds(one))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
