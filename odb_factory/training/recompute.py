"""`recompute: auto`: gradient checkpointing only in the micro-batches that need it.

LLaMA-Factory turns gradient checkpointing on by default: each layer's forward runs again in the backward, a third of
the computation. Before training, micro-batches of growing size run without this recomputation, and their peaks of
memory are measured. In a training, a micro-batch with no more tokens and patches than one that memory held runs with
the model's checkpointing modules switched off; a larger one runs as configured.

If a recomputation repeats collectives (FSDP, ZeRO-3), or if ranks encode each other's images, every rank decides by the
largest micro-batch of the micro-step, which the plan holds (`MicroStepTotals`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from odb_factory.accounting.statistics import Computing
from odb_factory.data.samples import Measured, describe_cost
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped, without_cache
from odb_factory.model.tower import shards_parameters
from odb_factory.planner import Media
from odb_factory.training.arguments import replaced
from odb_factory.training.auto_budget import size_of, trials_of
from odb_factory.training.stock import Unmeasured

logger = get_logger(__name__)

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
