"""`recompute: auto`: gradient checkpointing only in the micro-batches that need it.

LLaMA-Factory turns gradient checkpointing on for everyone: each layer's forward runs again in the backward, a third of
the computation. Micro-batches differ in size, so each decides. Before training, micro-batches of growing size run
without recomputation, and their peaks of memory are measured. In a training, a micro-batch with no more tokens and
patches than one that memory held runs with the model's checkpointing modules switched off; a larger one as configured.

If a recomputation repeats collectives (FSDP, ZeRO-3), and if ranks encode each other's images, every rank decides
by the largest micro-batch of the micro-step, which the plan holds (`MicroStepTotals`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from odb_factory.accounting.statistics import Computing
from odb_factory.data.samples import Measured, Sample, describe_cost
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped, without_cache
from odb_factory.model.tower import shards_parameters
from odb_factory.planner import Budget, Limits, Media
from odb_factory.training.arguments import replaced
from odb_factory.training.auto_budget import FirstRows, trials_of
from odb_factory.training.stock import Unmeasured

logger = get_logger(__name__)

RESERVE = 0.9
"""Share of the memory that trials may use (`Trials.limits`) which micro-batches without recomputation may fill. The
rest is for fragments: memory that the allocator holds and cannot hand out in one piece."""
GROWTH = 1.5
"""The next trial from the longest sample on, as a multiple of the last."""


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
        """Within it forward and backward are of this micro-batch."""
        tokens, patches = computing.measured.rows * computing.measured.length, computing.measured.patches
        if self._by_plan:
            totals = computing.micro_batch.totals
            tokens, patches = totals.max_rank_tokens, totals.max_rank_patches
        self.is_off = any(tokens <= most and patches <= most_patches for most, most_patches in self._sizes)
        with self.off() if self.is_off else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within it no forward is computed again in its backward, and no cache of keys and values is made, which
        transformers leaves out by itself only if it checkpoints."""
        with contextlib.ExitStack() as stack:
            stack.callback(without_cache(self._model))
            for module in self._modules:
                stack.enter_context(replaced(module, gradient_checkpointing=False))
            yield

    def lower(self, measured: Measured) -> bool:
        """After memory did not hold the micro-batch computed last: whether it ran without recomputation. Then it can
        run again with it, and the bound is at most three quarters of its tokens."""
        if not self.is_off:
            return False
        most = measured.rows * measured.length * 3 // 4
        self._sizes = [(min(tokens, most), patches) for tokens, patches in self._sizes]
        return True


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of transformers that have torch's gradient checkpointing switched on, also through
    LLaMA-Factory's function. Checkpointing that moves activations to the host is left alone: who asks for that has no
    memory to spare."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and _is_of_torch(getattr(module, "_gradient_checkpointing_func", None))
    ]


def _is_of_torch(function: Any) -> bool:
    while function is not None and function is not checkpoint:
        function = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # a partial, a wrapper
    return function is checkpoint


def can_be_measured(trainer: Any) -> bool:
    """Whether a training of this trainer decides by micro-batch, if its model checkpoints: not on a CPU, whose memory
    is not counted."""
    return trainer.odb.config.recompute == "auto" and trainer.odb.memory_meter is not None


def find_recompute(trainer: Any) -> Recompute | None:
    """What a training decides by, measured on its wrapped model before the first optimizer step; None: its gradient
    checkpointing stays as configured. Collective: all ranks run the same trials and get the same. Leaves nothing
    behind."""
    training, model = trainer.odb.training, trainer.model_wrapped
    if not can_be_measured(trainer) or not checkpointing_modules(model):
        return None
    tried, loader = Recompute(model, []), training.loader
    budget = loader.budget.within(loader.lowered)

    try:
        with trials_of(trainer, "recompute") as search:
            # No trial runs that the two before it show to be too large: not every engine can continue after an error.
            for group in _growing(search.rows, budget):
                if search.expected(group, budget) > RESERVE:
                    break
                with tried.off():
                    if search.hold(group, RESERVE) is None:
                        break
    except Unmeasured as error:
        logger.info("recompute: auto: no micro-batch can be tried (%s), so all are recomputed", error)
        return None
    trials, cost = search.fitting, f"{search.count} micro-batches tried in {search.seconds:.1f} s"
    if not trials:
        logger.info("recompute: auto: memory does not hold the shortest sample without recomputation; %s", cost)
        return None
    sizes = [(trial.measured.rows * trial.measured.length, trial.measured.patches) for trial in trials]
    tokens, patches = max(sizes)
    logger.info(
        "recompute: auto: micro-batches of up to %s run without gradient checkpointing (peak %.0f%% of the memory that "
        "trials may use; %s)",
        describe_cost(tokens, Media(patches)),
        100 * max(trial.share for trial in trials),
        cost,
    )
    by_plan = shards_parameters(trainer) or training.encoder is not None
    return Recompute(model, sizes, by_plan=by_plan)


def _growing(rows: FirstRows, budget: Budget) -> Iterator[list[Sample]]:
    """More and more of the shortest sample, until it has as many tokens as the longest; then the heaviest micro-batches
    of real samples, up to the budgets."""
    longest, shortest = rows.tokens_of(rows.longest), rows.tokens_of(rows.shortest)
    count = 1
    while count * shortest < longest:
        yield count * [rows.shortest]
        count *= 2
    tokens, most = longest, min(budget.token_budget, rows.most_tokens)
    while True:
        patches = budget.max_patches and -(-budget.max_patches * min(tokens, most) // most)
        yield from rows.heaviest(budget.within(Limits(min(tokens, most), patches)))
        if tokens >= most:
            return
        tokens = int(GROWTH * tokens) + 1
