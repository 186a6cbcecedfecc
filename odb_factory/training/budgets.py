"""Trials before a training: forward and backward of the heaviest micro-batches that its first rows can make.

`Trials.largest` doubles a token budget until memory does not hold its heaviest micro-batches, then halves the distance
to the largest budget that memory held. `choose_budgets` (`token_budget: auto`, `max_patches: auto`) and `Recompute`
search with it; `rehearse` tries given budgets once. All ranks run the same trials, with the memory of the optimizer's
state taken, and decide by the peaks of all ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from odb_factory.accounting import Computing
from odb_factory.config import AUTO
from odb_factory.data.samples import Measured, Sample, describe_cost
from odb_factory.errors import ConfigError, OutOfMemoryError
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped, without_cache
from odb_factory.model.engine import engine_of
from odb_factory.model.flat_row import flat_row
from odb_factory.model.tower import shards_parameters
from odb_factory.planner import Budget, Limits, Media
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import why_not_split
from odb_factory.training.stock import Unmeasured, apart, together

logger = get_logger(__name__)


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Restore gradients, buffers and random numbers at the end.

    The caller changes neither weights nor the optimizer, and its gradients are zero, because an engine that keeps
    gradients to itself (DeepSpeed) keeps those of the trials.
    """
    model = trainer.model_wrapped
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    # DDP: whether the next forward sends the buffers of rank 0 to all ranks
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
    """Bytes of the state that the optimizer of a training has still to make on the device of this rank."""
    device, optimizer = trainer.args.device.type, trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # an optimizer of DeepSpeed, which has made its state already
    if getattr(optimizer, "is_paged", False):
        return 0  # bitsandbytes moves the state off the device if memory is short
    # FSDP may keep weights and state on the CPU; this rank has a part of each sharded weight.
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


MOST_TOKENS = 2**20
"""The largest budget if nothing else bounds it."""
LIMIT_S = 60
"""No trial of a search begins later."""
PRECISION = 32
"""A search ends when the budgets that memory holds and does not hold differ by 1/32."""
HEADROOM = 1.25
"""Patches that `max_patches: auto` leaves room for, as a multiple of the average of the data for its tokens."""


def most_samples_of(global_batch_size: int | None, world_size: int, *, balance: bool) -> int:
    """The most samples that a plan puts into one micro-batch."""
    if global_batch_size is None:
        return MOST_TOKENS
    # A plan gives no rank two samples while another rank that shares samples with it is idle.
    sharing = world_size if balance else 1
    return max(min(global_batch_size, sharing * -(-global_batch_size // world_size)) - sharing + 1, 1)


def heaviest(samples: Sequence[Sample], budget: Budget, most_samples: int) -> list[list[Sample]]:
    """Micro-batches of the densest sample, of that with most patches and of the longest one, filled up to the budget,
    and each sample that breaks the budget alone. No micro-batch is smaller than another in tokens, row length and
    patches."""

    def tokens_of(sample: Sample) -> int:
        return max(budget.tokens_of(sample.cost), 1)

    longest = max(samples, key=tokens_of)
    texts = sorted((sample for sample in samples if not sample.cost.patches), key=tokens_of, reverse=True)

    def filled(first: Sample) -> list[Sample]:
        """Copies of the first sample up to the budget, then copies of the longest one, then of texts."""
        group = [first]
        for sample in (first, longest, *texts):
            if sample.cost.modality == first.cost.modality:
                most = min(most_samples - len(group), budget.token_budget // tokens_of(sample))
                group += _copies(sample, group, most, budget) * [sample]
        return group

    firsts = [sample for sample in samples if budget.overlong(sample.cost)]
    if within := [sample for sample in samples if not budget.overlong(sample.cost)]:
        # If few samples make a micro-batch, samples with many patches outweigh dense ones.
        least = budget.token_budget / most_samples
        firsts.append(max(within, key=lambda sample: sample.cost.patches / max(tokens_of(sample), least)))
        firsts.append(max(within, key=lambda sample: sample.cost.patches))
        firsts.append(max(within, key=tokens_of))
    # Those that another one exceeds in all sizes need no trial.
    by_size = {size_of(group, budget): group for group in map(filled, firsts)}
    return [
        group
        for size, group in by_size.items()
        if not any(size != other and all(map(operator.le, size, other)) for other in by_size)
    ]


def _copies(sample: Sample, group: Sequence[Sample], most: int, budget: Budget) -> int:
    """The number of copies of a sample, at most `most`, that the budget holds in addition to a group."""
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
        """The peak as a share of the limit."""
        return math.inf if self.peak is None else self.peak / self.limit

    @property
    def size(self) -> int:
        return self.measured.rows * self.measured.length + self.measured.patches


class Trials:
    """Trials of micro-batches of a training. Collective: all ranks run the same trials and get the same results.

    samples: of the first rows. key: the key that asks for the trials. most_samples, most_tokens: of a micro-batch.
    fitting: trials that memory held, in order. seconds: of all trials, on the slowest rank.
    can_continue: the ranks can continue after one of them ran out of memory.
    """

    def __init__(self, trainer: Any, samples: Sequence[Sample], key: str):
        odb, loader = trainer.odb, trainer.odb.training.loader
        self.samples, self.key, self._trainer, self._meter = samples, key, apart(trainer), odb.memory_meter
        self._trainer.current_gradient_accumulation_steps = 1  # the Trainer's loop sets it with the first batch
        self.can_continue = engine_of(trainer.model_wrapped) in ("none", "ddp") or why_not_split(trainer.args) is None
        size, world_size = loader.global_batch_size, loader.world_size
        self.most_samples = most_samples_of(size, world_size, balance=odb.config.balance)
        longest = max(loader.budget.tokens_of(sample.cost) for sample in samples)
        self.most_tokens = MOST_TOKENS if size is None else min(math.ceil(size / world_size) * longest, MOST_TOKENS)
        self.fitting: list[Trial] = []
        self.count, self.seconds, self._began = 0, 0.0, time.perf_counter()
        failure = Unmeasured("the memory of the optimizer's state cannot be taken: ")
        self._state_bytes = together(odb.gather, failure, lambda: self._take(state_bytes(trainer)).numel())
        self.limits: list[int] = odb.gather(self._meter.limit(odb.config.memory_fraction))

    def run(self, group: Sequence[Sample]) -> Trial:
        """Try a micro-batch of these samples. Raises `Unmeasured` if a rank cannot collate it."""
        odb, groups = self._trainer.odb, self._trainer.odb.training.loader.groups
        failure = Unmeasured("a micro-batch cannot be collated: ")
        measured, batch = together(odb.gather, failure, lambda: groups.collate(list(group)))
        peak = self._meter.peak(lambda: self._compute(batch, measured))
        answers = odb.gather([peak, time.perf_counter() - self._began])
        self.count, self.seconds = self.count + 1, max(seconds for _, seconds in answers)
        trials = [Trial(measured, peak, limit) for (peak, _), limit in zip(answers, self.limits)]
        return max(trials, key=lambda trial: trial.share)

    def largest(
        self, budget_of: Callable[[int], Budget], low: int, high: int, share: float = 1.0
    ) -> tuple[int, Trial] | None:
        """The largest number of tokens from `low` to `high` whose budget memory holds, and the trial of that budget
        that is nearest to the limit; None if memory does not hold the budget of `low`.

        budget_of: tokens -> budget. Samples with more tokens are left out. share: of the limits that may be used.
        Raises `ConfigError` if memory runs out and the ranks cannot continue after that.
        """
        tokens, failed, nearest = low, 2 * high, self._hold(budget_of(low), share)
        if nearest is None:
            return None
        while tokens < high and self.seconds < LIMIT_S and PRECISION * (failed - tokens) > tokens:
            tried = min(2 * tokens, high) if failed > high else (tokens + failed) // 2
            if (trial := self._hold(budget_of(tried), share)) is None:
                failed = tried
            else:
                tokens, nearest = tried, trial
        return tokens, nearest

    def _hold(self, budget: Budget, share: float) -> Trial | None:
        """The trial nearest to its limit of the heaviest micro-batches; None if memory does not hold one of them."""
        trials = []
        samples = [sample for sample in self.samples if size_of([sample], budget)[0] <= budget.token_budget]
        for group in heaviest(samples or self.samples, budget, self.most_samples):
            if not self.can_continue and self._expected(group, budget) > share:
                return None
            trial = self.run(group)
            if not self.fitting and trial.peak is not None:  # the first trial made gradients and workspaces
                trial = self.run(group)
            if trial.peak is None and not self.can_continue:
                last_fitting = f" (it held {self.fitting[-1].measured})" if self.fitting else ""
                raise ConfigError(
                    f"odb.{self.key}: 'auto' ran out of memory at {trial.measured}{last_fitting}, after which no rank "
                    "can continue if ranks share weights or gradients; set another value."
                )
            if trial.share > share:
                return None
            self.fitting.append(trial)
            trials.append(trial)
        return max(trials, key=lambda trial: trial.share)

    def _expected(self, group: Sequence[Sample], budget: Budget) -> float:
        """The share of the limit that a micro-batch takes, along the line through the last two trials that memory held;
        0 before there are two."""
        if len(self.fitting) < 2:
            return 0.0
        before, last = self.fitting[-2:]
        tokens, _, patches = size_of(group, budget)
        growth = (last.share - before.share) / (last.size - before.size) if last.size != before.size else 0.0
        return last.share + (tokens + patches - last.size) * max(growth, 0.0)

    def _take(self, size: int) -> Tensor:
        """Memory of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self._trainer.args.device)

    def _compute(self, batch: Any, measured: Measured) -> None:
        """Compute a micro-batch that does not end its optimizer step, with gradients of zero, while memory of the size
        of the optimizer's state is taken."""
        trainer, training, state = self._trainer, self._trainer.odb.training, self._take(self._state_bytes)
        sums = training.gradients_summed(trainer.model_wrapped, is_last=False)
        with replaced(training, trial_units=max(measured.units, 1)), flat_row(measured.segments), sums:
            trainer.training_step(trainer.model_wrapped, dict(batch))
        del state


@contextlib.contextmanager
def trials_of(trainer: Any, key: str) -> Iterator[Trials]:
    """Trials with the first rows of an epoch, which leave nothing behind. key: the key that asks for the trials.

    Collective. Raises `Unmeasured`.
    """
    if trainer.odb.before_step is not None:
        raise Unmeasured("this stage prepares its optimizer steps as a whole")
    if not (samples := list(trainer.odb.training.loader.first_samples())):
        raise Unmeasured("its rows are a stream, or none of the first can be used")
    with untouched(trainer):
        yield Trials(trainer, samples, key)


def choose_budgets(trainer: Any) -> Limits:
    """The budgets of a training, before its first optimizer step: the search is for the number of tokens, and the
    number of patches follows from the patches that the data have. Collective; leaves nothing behind.

    Raises `ConfigError` if not even one row fits, or no row can be tried.
    """
    config, budget = trainer.odb.config, trainer.odb.training.loader.budget
    key = config.auto_keys[0]
    try:
        with trials_of(trainer, key) as trials:
            # A cap of auto follows the tokens, at the density of the data with headroom.
            samples = trials.samples
            patches = [sample.cost.patches for sample in samples]
            density = HEADROOM * sum(patches) / max(sum(budget.tokens_of(sample.cost) for sample in samples), 1)

            def budget_of(tokens: int) -> Budget:
                most = config.max_patches
                if most == AUTO:
                    most = max(*patches, math.ceil(density * tokens)) or None
                return replace(budget, token_budget=tokens, max_patches=most)

            # Between the longest row alone and all that a micro-batch can have.
            low = max(size_of([sample], budget)[0] for sample in samples)
            high = max(trials.most_tokens, low)
            if config.token_budget != AUTO:
                low = high = int(config.token_budget)
            largest = trials.largest(budget_of, low, high)
    except Unmeasured as error:
        raise ConfigError(f"odb.{key}: 'auto' cannot try micro-batches ({error}); set a number.") from None
    if largest is None:
        raise ConfigError(
            f"odb.{key}: 'auto' found that not even {low} tokens fit into {_gib(min(trials.limits))} "
            f"(memory_fraction {config.memory_fraction}); lower cutoff_len or token_budget, or save memory (gradient "
            "checkpointing, LoRA, ZeRO-3 or FSDP)."
        )
    # Log what was chosen, why, and what it takes.
    tokens, trial = largest
    reason = "as much as memory_fraction allows"
    if tokens >= high:
        reason = "all that a micro-batch can have"
    elif trials.seconds >= LIMIT_S:
        reason = f"the largest that memory held in {LIMIT_S} s of trials"
    limits, measured = budget_of(tokens).limits, trial.measured
    chosen = [f"{name}: auto is {getattr(limits, name) or 'none'}" for name in config.auto_keys]
    logger.info(
        f"{', '.join(chosen)} ({reason}): the heaviest micro-batch of the first {len(samples)} rows, {measured.rows} x "
        f"{measured.length} tokens and {measured.patches} patches, takes {_gib(trial.peak or 0)} of the "
        f"{_gib(trial.limit)} that {config.memory_fraction:.0%} of the memory are, the state of the optimizer "
        f"included; tried {trials.count} micro-batches in {trials.seconds:.1f} s"
    )
    return limits


def rehearse(trainer: Any) -> None:
    """Try the heaviest micro-batch of the first rows that the budgets allow, before the first optimizer step.

    Collective; leaves nothing behind. Raises `OutOfMemoryError` if memory does not hold it, with `oom: raise`.
    """
    loader, watch = trainer.odb.training.loader, trainer.odb.training.memory
    tried: list[tuple[Trial, int]] = []
    try:
        with trials_of(trainer, "token_budget") as trials:
            for group in heaviest(trials.samples, loader.budget, trials.most_samples):
                tried.append((trials.run(group), len(group)))
                if tried[-1][0].peak is None:
                    break
    except Unmeasured as error:
        logger.warning("rehearsal: no micro-batch can be tried (%s), so training begins without a rehearsal", error)
        return
    trial, num_samples = max(tried, key=lambda result: result[0].share)
    micro_batch = f"the heaviest micro-batch that the budget of {loader.budget} allows, {trial.measured}"
    if trial.peak is not None:
        logger.info("rehearsal: memory held %s (peak %s, %.1f s)", micro_batch, _gib(trial.peak), trials.seconds)
        return
    message = f"rehearsal: out of memory in {micro_batch}, before the first optimizer step"
    if watch.config.oom == "raise":
        raise OutOfMemoryError(f"{message}; {watch.advice(num_samples, trial.measured)}.")
    logger.warning("%s; oom: %s: training begins nevertheless", message, watch.config.oom)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


# `recompute: auto`: gradient checkpointing only in the micro-batches that need it.
# LLaMA-Factory turns gradient checkpointing on by default: each layer's forward runs again in the backward, a third of
# the computation. Before training, micro-batches of growing size run without this recomputation, and their peaks of
# memory are measured. In a training, a micro-batch with no more tokens and patches than one that memory held runs with
# the model's checkpointing modules switched off; a larger one runs as configured.
# If a recomputation repeats collectives (FSDP, ZeRO-3), or if ranks encode each other's images, every rank decides by
# the largest micro-batch of the micro-step, which the plan holds (`MicroStepTotals`).


RESERVE = 0.9
"""Share of `Trials.limits` that micro-batches without recomputation may fill. The rest is for fragments: memory that
the allocator holds and cannot hand out in one piece."""


class Recompute:
    """Switches the gradient checkpointing of a model off in each micro-batch whose activations memory holds.

    model: as wrapped by the engine. sizes: (tokens, patches), as collated, of micro-batches that memory held without
    recomputation. by_plan: all ranks decide by the largest micro-batch of the micro-step.
    is_off: the micro-batch computed last ran without recomputation.

        recompute = Recompute(model, [(8192, 4096)])
        with recompute.decided(computing):
            loss = training_step(model, batch)
    """

    def __init__(self, model: nn.Module, sizes: Sequence[tuple[int, int]], *, by_plan: bool = False):
        self._model, self._modules = unwrapped(model), checkpointing_modules(model)
        self._sizes, self._by_plan = list(sizes), by_plan
        self.is_off = False

    @contextlib.contextmanager
    def decided(self, computing: Computing) -> Iterator[None]:
        """Switch for the forward and backward of this micro-batch."""
        tokens, patches = computing.measured.rows * computing.measured.length, computing.measured.patches
        if self._by_plan:
            totals = computing.micro_batch.totals
            tokens, patches = totals.max_rank_tokens, totals.max_rank_patches
        self.is_off = any(tokens <= most and patches <= most_patches for most, most_patches in self._sizes)
        with self.off() if self.is_off else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switch checkpointing off, and the cache of keys and values, which transformers leaves on without it."""
        with contextlib.ExitStack() as stack:
            stack.callback(without_cache(self._model))
            for module in self._modules:
                stack.enter_context(replaced(module, gradient_checkpointing=False))
            yield

    def lower(self, measured: Measured) -> bool:
        """Lower the bound to three quarters of a micro-batch that memory did not hold, if it ran without recomputation.

        Returns whether it did: then the micro-batch can run again, with recomputation."""
        if not self.is_off:
            return False
        most = measured.rows * measured.length * 3 // 4
        self._sizes = [(min(tokens, most), patches) for tokens, patches in self._sizes]
        return True


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of transformers that have torch's gradient checkpointing switched on, also through
    LLaMA-Factory's function. Checkpointing that moves activations to the host is not among them: it is chosen if memory
    is short."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and _is_of_torch(getattr(module, "_gradient_checkpointing_func", None))
    ]


def _is_of_torch(function: Any) -> bool:
    while function is not None and function is not checkpoint:
        function = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # partials, wrappers
    return function is checkpoint


def can_be_measured(trainer: Any) -> bool:
    """Whether a training decides by micro-batch if its model checkpoints. The memory of a CPU is not counted."""
    return trainer.odb.config.recompute == "auto" and trainer.odb.memory_meter is not None


def find_recompute(trainer: Any) -> Recompute | None:
    """The switch of a training, measured on its wrapped model before the first optimizer step; None: its gradient
    checkpointing stays as configured. Collective: all ranks get the same. Leaves nothing behind."""
    training, model = trainer.odb.training, trainer.model_wrapped
    if not can_be_measured(trainer) or not checkpointing_modules(model):
        return None
    budget = training.loader.budget
    try:
        # The largest micro-batch without checkpointing.
        with trials_of(trainer, "recompute") as trials, Recompute(model, []).off():
            low = min(size_of([sample], budget)[0] for sample in trials.samples)
            high = max(min(budget.token_budget, trials.most_tokens), low)
            trials.largest(lambda tokens: replace(budget, token_budget=tokens), low, high, RESERVE)
    except Unmeasured as error:
        logger.info("recompute: auto: no micro-batch can be tried (%s), so all are recomputed", error)
        return None
    cost = f"{trials.count} micro-batches tried in {trials.seconds:.1f} s"
    if not trials.fitting:
        logger.info("recompute: auto: memory does not hold the shortest sample without recomputation; %s", cost)
        return None
    sizes = [(trial.measured.rows * trial.measured.length, trial.measured.patches) for trial in trials.fitting]
    tokens, patches = max(sizes)
    logger.info(
        "recompute: auto: micro-batches of up to %s run without gradient checkpointing (peak %.0f%% of the memory that "
        "trials may use; %s)",
        describe_cost(tokens, Media(patches)),
        100 * max(trial.share for trial in trials.fitting),
        cost,
    )
    by_plan = shards_parameters(trainer) or training.encoder is not None
    return Recompute(model, sizes, by_plan=by_plan)
