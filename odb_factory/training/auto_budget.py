"""Trials before a training: forward and backward of the heaviest micro-batches that its first rows can make.

`choose_budgets` (`token_budget: auto`, `max_patches: auto`) doubles a budget until memory does not hold its heaviest
micro-batch, then halves the distance to the largest that it held. `rehearse` tries the heaviest one of given budgets
once; `recompute.py` tries them without recomputation. All ranks run the same trials, with the memory of the optimizer's
state taken, and decide by the peaks of all.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import itertools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odb_factory.config import AUTO, ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import ConfigError, OutOfMemoryError
from odb_factory.log import get_logger
from odb_factory.model.engine import engine_of
from odb_factory.model.flat_row import flat_row
from odb_factory.planner import Budget, Limits
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import why_not_split
from odb_factory.training.stock import Unmeasured, apart, together

logger = get_logger(__name__)


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards gradients, buffers and random numbers are as they were.

    Weights and the optimizer are not changed within. A trial must have gradients of zero: an engine that keeps them to
    itself (DeepSpeed) keeps zeros.
    """
    model = trainer.model_wrapped
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # DDP: whether the next forward brings the buffers of rank 0 to all.
    synced = {name: value for name, value in vars(model).items() if name == "require_forward_param_sync"}
    try:
        with kept_random_numbers(trainer.args.device), replaced(model, **synced):
            yield
    finally:
        for parameter in without:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def state_bytes(trainer: Any) -> int:
    """Bytes that the optimizer of a training will keep on the device of this rank, beyond what it has already."""
    device, optimizer = trainer.args.device.type, trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # DeepSpeed's, which has made its state already
    if getattr(optimizer, "is_paged", False):
        return 0  # of bitsandbytes: state leaves the device if memory is short
    # FSDP may keep weights and state on the CPU, and has a part of each sharded weight on this rank.
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    weights = [weight for weight in weights if weight.device.type == device and not optimizer.state.get(weight)]
    local = [(weight.to_local() if hasattr(weight, "to_local") else weight).detach() for weight in weights]
    if not (total := sum(weight.numel() for weight in local)):
        return 0

    # The state of the largest weight after one update, by an optimizer of the same class.
    largest = torch.nn.Parameter(torch.ones_like(max(local, key=torch.numel)))
    known = inspect.signature(type(optimizer).__init__).parameters
    arguments = optimizer.defaults | {"args": getattr(optimizer, "args", None)}  # bitsandbytes keeps its bits in `args`
    optimizer_copy = type(optimizer)([largest], **{key: value for key, value in arguments.items() if key in known})
    largest.grad = torch.ones_like(largest)
    optimizer_copy.step()
    state = [value for value in optimizer_copy.state[largest].values() if isinstance(value, Tensor)]
    size = sum(value.numel() * value.element_size() for value in state if value.device == largest.device)
    return math.ceil(size * total / largest.numel())


class FirstRows:
    """The first rows of an epoch, and the heaviest micro-batches that a plan can make of them.

    longest, shortest: by tokens as collated (`tokens_of`). most_tokens, most_samples: of an optimizer step on a rank,
    and of a micro-batch of it.
    """

    def __init__(self, samples: Sequence[Sample], loader: ODBLoader, config: ODBConfig):
        self.samples, self._budget = samples, loader.budget
        self.longest, self.shortest = max(samples, key=self.tokens_of), min(samples, key=self.tokens_of)
        texts = [sample for sample in samples if not sample.cost.patches]
        self._texts = sorted(texts, key=self.tokens_of, reverse=True)
        self.most_tokens = self.most_samples = MOST_TOKENS
        if (size := loader.global_batch_size) is not None:
            share = math.ceil(size / loader.world_size)
            self.most_tokens = min(share * self.tokens_of(self.longest), MOST_TOKENS)
            # No rank of those that share their samples idles while another one has two.
            sharing = loader.world_size if config.balance else 1
            self.most_samples = max(min(size, sharing * share) - sharing + 1, 1)
        self.most_tokens = max(self.most_tokens, self.tokens_of(self.longest))

    def tokens_of(self, sample: Sample) -> int:
        return max(self._budget.tokens_of(sample.cost), 1)

    def heaviest(self, budget: Budget) -> list[list[Sample]]:
        """Micro-batches of the densest samples, of those with most patches, of the longest ones, and each sample that
        breaks the budgets alone. None has at most the tokens, the row length and the patches of another one."""
        firsts = [sample for sample in self.samples if budget.overlong(sample.cost)]
        if within := [sample for sample in self.samples if not budget.overlong(sample.cost)]:
            # If few samples make a micro-batch, those with many patches outweigh dense ones.
            least = budget.token_budget / self.most_samples
            firsts.append(max(within, key=lambda sample: sample.cost.patches / max(self.tokens_of(sample), least)))
            firsts.append(max(within, key=lambda sample: sample.cost.patches))
            firsts.append(max(within, key=self.tokens_of))
        by_size = {size_of(group, budget): group for group in (self._filled(sample, budget) for sample in firsts)}
        return [
            group
            for size, group in by_size.items()
            if not any(size != other_size and all(map(operator.le, size, other_size)) for other_size in by_size)
        ]

    def _filled(self, first: Sample, budget: Budget) -> list[Sample]:
        """As many of the first sample as the budget holds, then of the longest one, then texts."""
        group = [first]
        for sample in (first, self.longest, *self._texts):
            if sample.cost.modality == first.cost.modality:
                most = min(self.most_samples - len(group), budget.token_budget // self.tokens_of(sample))
                group += _copies(sample, group, most, budget) * [sample]
        return group


def _copies(sample: Sample, group: Sequence[Sample], most: int, budget: Budget) -> int:
    """How often the budget holds a sample beside a group; at most `most`."""
    costs = [member.cost for member in group]
    counts = range(1, most + 1)
    return bisect.bisect_left(counts, True, key=lambda count: not budget.fits(costs + count * [sample.cost]))


def size_of(group: Sequence[Sample], budget: Budget) -> tuple[int, int, int]:
    """(tokens, row length, patches) as collated."""
    rows, length, patches = budget.shape([sample.cost for sample in group])
    return rows * length, length, patches


class Trial(NamedTuple):
    """peak: bytes on the rank that is nearest to its limit; None: a rank ran out of memory."""

    measured: Measured
    peak: int | None
    limit: int

    @property
    def share(self) -> float:
        """Of the limit."""
        return math.inf if self.peak is None else self.peak / self.limit

    @property
    def size(self) -> int:
        return self.measured.rows * self.measured.length + self.measured.patches


class Trials:
    """Trials of micro-batches of a training. Collective: all ranks run the same and learn the same.

    key: that asks for them. fitting: trials that memory held, in order. seconds: of all trials, on the slowest rank.
    can_continue: the ranks can, after one of them ran out of memory.
    """

    def __init__(self, trainer: Any, rows: FirstRows, key: str):
        odb, device = trainer.odb, trainer.args.device
        self.rows, self.key, self._trainer, self._meter = rows, key, apart(trainer), odb.memory_meter
        self._trainer.current_gradient_accumulation_steps = 1  # the Trainer's loop sets it with the first batch
        self.can_continue = engine_of(trainer.model_wrapped) in ("none", "ddp") or why_not_split(trainer.args) is None
        self.fitting: list[Trial] = []
        self.count, self.seconds, self._began = 0, 0.0, time.perf_counter()

        def take_state() -> Tensor:  # a tensor in the place of the state that the optimizer will have
            return torch.empty(state_bytes(trainer), dtype=torch.uint8, device=device)

        failure = Unmeasured("the memory of the optimizer's state cannot be taken: ")
        self._state = together(odb.gather, failure, take_state)
        self.limits: list[int] = odb.gather(self._meter.limit(odb.config.memory_fraction))

    def run(self, samples: Sequence[Sample]) -> Trial:
        """Try a micro-batch. Raises `Unmeasured` if a rank cannot collate it."""
        odb, groups = self._trainer.odb, self._trainer.odb.training.loader.groups
        failure = Unmeasured("a micro-batch cannot be collated: ")
        measured, batch = together(odb.gather, failure, lambda: groups.collate(list(samples)))
        peak = self._meter.peak(lambda: self._compute(batch, measured), self._held_tensors())
        answers = odb.gather([peak, time.perf_counter() - self._began])
        self.count, self.seconds = self.count + 1, max(seconds for _, seconds in answers)
        trials = [Trial(measured, peak, limit) for (peak, _), limit in zip(answers, self.limits)]
        return max(trials, key=lambda trial: trial.share)

    def hold(self, samples: Sequence[Sample], share: float = 1.0) -> Trial | None:
        """The trial of a micro-batch that memory holds within this share of the limits; None if it does not.

        Raises `ConfigError` if memory runs out and ranks cannot continue after that.
        """
        trial = self.run(samples)
        if not self.fitting and trial.peak is not None:  # the first one made gradients and workspaces
            trial = self.run(samples)
        if trial.peak is None and not self.can_continue:
            last_fitting = f" (it held {self.fitting[-1].measured})" if self.fitting else ""
            raise ConfigError(
                f"odb.{self.key}: 'auto' ran out of memory at {trial.measured}{last_fitting}, after which no rank can "
                "continue if ranks share weights or gradients; set another value."
            )
        if trial.share > share:
            return None
        self.fitting.append(trial)
        return trial

    def expected(self, samples: Sequence[Sample], budget: Budget) -> float:
        """The share of the limit of a micro-batch along the line through the last two that were held; 0 before."""
        if len(self.fitting) < 2:
            return 0.0
        before, last = self.fitting[-2:]
        tokens, _, patches = size_of(samples, budget)
        growth = (last.share - before.share) / (last.size - before.size) if last.size != before.size else 0.0
        return last.share + (tokens + patches - last.size) * max(growth, 0.0)

    def _compute(self, batch: Any, measured: Measured) -> None:
        """Computed as a micro-batch that does not end its optimizer step; its gradients are zeros."""
        trainer, training = self._trainer, self._trainer.odb.training
        sums = training.gradients_summed(trainer.model_wrapped, is_last=False)
        with replaced(training, trial_units=max(measured.units, 1)), flat_row(measured.segments), sums:
            trainer.training_step(trainer.model_wrapped, dict(batch))

    def _held_tensors(self) -> Iterator[Tensor]:
        model = self._trainer.model_wrapped
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        return itertools.chain([self._state], model.parameters(), gradients, model.buffers())


@contextlib.contextmanager
def trials_of(trainer: Any, key: str) -> Iterator[Trials]:
    """Trials with the first rows of an epoch, which leave nothing behind. Collective. Raises `Unmeasured`.

    key: that asks for them.
    """
    loader = trainer.odb.training.loader
    if trainer.odb.before_step is not None:
        raise Unmeasured("this stage prepares its optimizer steps as a whole")
    if not (samples := list(loader.first_samples())):
        raise Unmeasured("its rows are a stream, or none of the first can be used")
    with untouched(trainer):
        yield Trials(trainer, FirstRows(samples, loader, trainer.odb.config), key)


# The budgets of `auto`, and the rehearsal of given ones.

MOST_TOKENS = 2**20
"""The largest budget if nothing else bounds it."""
LIMIT_S = 60
"""No trial of a search for budgets begins later."""
PRECISION = 32
"""A search ends when the budgets that hold and that do not differ by 1/32."""
HEADROOM = 1.25
"""Patches that a budget of auto leaves room for, as a multiple of the average of the data for its tokens."""


def choose_budgets(trainer: Any) -> Limits:
    """The budgets for a training before its first optimizer step. Collective; leaves nothing behind.

    Raises `ConfigError` if not even one row fits, or no row can be tried.
    """
    key = trainer.odb.config.auto_keys[0]
    try:
        with trials_of(trainer, key) as trials:
            return _search(trainer, trials)
    except Unmeasured as error:
        raise ConfigError(f"odb.{key}: 'auto' cannot try micro-batches ({error}); set a number.") from None


def _search(trainer: Any, trials: Trials) -> Limits:
    """Tokens by doubling, then by bisection; patches are those that the data have beside them."""
    config, rows, loader = trainer.odb.config, trials.rows, trainer.odb.training.loader
    patches = [sample.cost.patches for sample in rows.samples]
    density = HEADROOM * sum(patches) / sum(map(rows.tokens_of, rows.samples))

    def budget_of(tokens: int) -> Budget:
        most = config.max_patches
        if most == AUTO:
            most = max(*patches, math.ceil(density * tokens)) or None
        return replace(loader.budget, token_budget=tokens, max_patches=most)

    def held_by(tokens: int) -> Trial | None:
        """The trial nearest to its limit of those that the budget needs; None if memory does not hold one."""
        budget, nearest = budget_of(tokens), None
        for group in rows.heaviest(budget):
            if not trials.can_continue and trials.expected(group, budget) > 1:
                return None
            if (trial := trials.hold(group)) is None:
                return None
            nearest = max(nearest or trial, trial, key=lambda candidate: candidate.share)
        return nearest

    low = size_of([rows.longest], loader.budget)[0]
    high = max(rows.most_tokens, low)
    if config.token_budget != AUTO:
        low = high = int(config.token_budget)
    tokens, failed, trial = low, 2 * high, held_by(low)
    if trial is None:
        raise ConfigError(
            f"odb.{trials.key}: 'auto' found that not even {low} tokens fit into {_gib(min(trials.limits))} "
            f"(memory_fraction {config.memory_fraction}); lower cutoff_len or token_budget, or save memory (gradient "
            "checkpointing, LoRA, ZeRO-3 or FSDP)."
        )
    while tokens < high and trials.seconds < LIMIT_S and PRECISION * (failed - tokens) > tokens:
        tried = min(2 * tokens, high) if failed > high else (tokens + failed) // 2
        if (larger := held_by(tried)) is None:
            failed = tried
        else:
            tokens, trial = tried, larger
    reason = "as much as memory_fraction allows"
    if tokens >= high:
        reason = "all that a micro-batch can have"
    elif trials.seconds >= LIMIT_S:
        reason = f"the largest that memory held in {LIMIT_S} s of trials"
    limits, measured, peak = budget_of(tokens).limits, trial.measured, _gib(trial.peak or 0)
    chosen = [f"{name}: auto is {getattr(limits, name) or 'none'}" for name in config.auto_keys]
    logger.info(
        f"{', '.join(chosen)} ({reason}): the heaviest micro-batch of the first {len(patches)} rows, {measured.rows} x "
        f"{measured.length} tokens and {measured.patches} patches, takes {peak} of the {_gib(trial.limit)} that "
        f"{config.memory_fraction:.0%} of the memory are, the state of the optimizer included; tried {trials.count} "
        f"micro-batches in {trials.seconds:.1f} s"
    )
    return limits


def rehearse(trainer: Any) -> None:
    """Try the heaviest micro-batch that the budgets allow of the first rows, before the first optimizer step.

    Collective; leaves nothing behind. Raises `OutOfMemoryError` if memory does not hold it, unless `oom` goes on.
    """
    loader, watch = trainer.odb.training.loader, trainer.odb.training.memory
    budget = loader.budget.within(loader.lowered)

    tried: list[tuple[Trial, int]] = []
    try:
        with trials_of(trainer, "token_budget") as trials:
            for group in trials.rows.heaviest(budget):
                tried.append((trials.run(group), len(group)))
                if tried[-1][0].peak is None:
                    break
    except Unmeasured as error:
        logger.warning("rehearsal: no micro-batch can be tried (%s); training begins without", error)
        return
    trial, num_samples = max(tried, key=lambda result: result[0].share)
    micro_batch = f"the heaviest micro-batch that the budget of {budget} allows, {trial.measured}"
    if trial.peak is not None:
        logger.info("rehearsal: memory held %s (peak %s, %.1f s)", micro_batch, _gib(trial.peak), trials.seconds)
        return
    message = f"rehearsal: out of memory in {micro_batch}, before the first optimizer step"
    if watch.config.oom == "raise":
        raise OutOfMemoryError(f"{message}; {watch.advice(num_samples, trial.measured)}.")
    logger.warning("%s; oom: %s: training begins all the same", message, watch.config.oom)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
