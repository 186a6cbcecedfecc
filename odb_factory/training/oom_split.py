"""`oom: split`: an optimizer step whose micro-batches are cut in two where memory does not hold them.

A backward that fails has added a part of its gradients. So the optimizer step is begun anew: gradients are dropped, and
all its micro-batches so far are collated and computed once more, the failing one in two parts. A rank does so by
itself, for no collective runs inside forward and backward: gradients are synchronised when every rank has said that its
part of the optimizer step went through.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from odb_factory.accounting.step_accounting import Begun
from odb_factory.accounting.token_loss import sum_of_losses
from odb_factory.comm.exchange import Exchange
from odb_factory.data.collate import Collated
from odb_factory.data.parts import Part
from odb_factory.log import get_logger
from odb_factory.planning import Limits
from odb_factory.training.oom import MemoryWatch, is_out_of_memory
from odb_factory.training.run import ODBRun
from odb_factory.training.synchronize import DDP, Synchronizer, ZeRO1

logger = get_logger(__name__)


@dataclass(slots=True)
class _Attempt:
    """An optimizer step on this rank. parts: of each of its micro-batches so far; done: those that went through since
    it was begun anew, with their losses. cuts, lowered: since its beginning."""

    parts: list[list[Part]] = field(default_factory=list)
    done: list[list[Begun]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    cuts: int = 0
    lowered: Limits | None = None

    def begin_anew(self) -> None:
        self.done, self.losses = [[] for _ in self.parts], []


class SplitSteps:
    """Takes the optimizer steps of a run. exchange: by which the ranks agree on each."""

    def __init__(self, run: ODBRun, exchange: Exchange, watch: MemoryWatch):
        self.run, self.exchange, self.watch = run, exchange, watch
        self._synchronizer: Synchronizer | None = None

    def take(self, trainer: Any, model: Any, micro_batches: Iterator[Collated]) -> Tensor:
        """Gradients of a whole optimizer step, synchronised; returns the sum of the losses of this rank.

        Raises `OutOfMemoryError` where memory does not hold a sample alone, `CollectiveError` where another rank ended.
        """
        if self._synchronizer is None:
            is_zero = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
            self._synchronizer = ZeRO1(model, trainer.accelerator) if is_zero else DDP(model, self.exchange.world_size)
        step = _Attempt()
        for collated in micro_batches:
            box = [collated]
            del collated  # who takes it out of its box holds the only reference
            micro_batch = box[0][0]
            step.parts.append([Part(micro_batch, self.run.loader.samples_of(micro_batch))])
            step.done.append([])
            if not self._runs(trainer, step, step.parts[-1][0], box):
                self._run_anew(trainer, step)
            if not micro_batch.ends_optimizer_step:
                trainer.control = trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)
        self._agree(step)
        for parts, done in zip(step.parts, step.done):
            self.run.accounting.count(parts[0].whole, done)
        return sum_of_losses(step.losses, skip_non_finite=trainer.args.logging_nan_inf_filter)

    def close(self, *, failed: bool = False) -> None:
        """Safe to call twice. failed: the training ends by an error."""
        self.exchange.close(failed=failed)

    def _run_anew(self, trainer: Any, step: _Attempt) -> None:
        """All parts of the micro-batches so far, until each went through."""
        assert self._synchronizer is not None
        while True:
            self._synchronizer.zero_grad()
            step.begin_anew()
            if all(
                self._runs(trainer, step, part, [self._collated(part)]) for parts in step.parts for part in [*parts]
            ):
                return

    def _collated(self, part: Part) -> Collated:
        began = time.perf_counter()
        collated = self.run.loader.collate(part.micro_batch, part.samples)
        self.run.loader.times.wait(time.perf_counter() - began)
        return collated

    def _runs(self, trainer: Any, step: _Attempt, part: Part, box: list[Collated]) -> bool:
        """Forward and backward of a part; False where memory did not hold it, and it was cut in two.

        The error refers to the frames that raised it, and these to what fills the memory: all of it is gone behind the
        `except`.
        """
        assert self._synchronizer is not None
        run, (micro_batch, measured, batch) = self.run, box.pop()
        try:
            run.begin_micro_batch(micro_batch, measured, batch, part)
            with self._synchronizer.alone():
                loss = trainer.odb_forward_backward(self._synchronizer.local, measured, [batch])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(part.samples) == 1:
                raise self.watch.error(micro_batch, measured, run.optimizer_steps + 1) from error
            what = self.watch.what(micro_batch, measured, run.optimizer_steps + 1)
            _forget(error)
        else:
            step.done[micro_batch.index].append(run.set_aside())
            step.losses.append(loss)
            self.watch.held(measured)
            return True
        del batch
        run.computing = None
        run.loader.times.forget()
        clear_device_cache(garbage_collection=True)
        step.cuts += 1
        step.lowered = self.watch.lower(measured).least(step.lowered)
        parts = step.parts[micro_batch.index]
        at = parts.index(part)
        parts[at : at + 1] = part.cut(run.loader.budget)
        logger.warning("%s; oom: split: it is cut in two, and the optimizer step begun anew on this rank", what)
        return False

    def _agree(self, step: _Attempt) -> None:
        """All ranks have gone through the optimizer step: lower budgets alike, synchronise gradients. Collective."""
        assert self._synchronizer is not None
        loader = self.run.loader
        mine = {
            "cuts": step.cuts,
            "lowered": None if step.lowered is None else asdict(step.lowered),
            "has_gradient": self._synchronizer.has_gradient(),
        }
        phase = f"optimizer step {self.run.optimizer_steps + 1}"
        answers = [json.loads(answer) for answer in self.exchange.gather(json.dumps(mine).encode(), phase)]
        before = loader.lowered
        for answer in answers:
            if answer["lowered"] is not None:
                loader.lower(Limits(**answer["lowered"]))
        if loader.lowered != before and loader.rank == 0:
            logger.warning("oom: split: plans to come are made with budgets of %s", _shown(loader.lowered))
        self.run.accounting.cut(sum(answer["cuts"] for answer in answers))
        self._synchronizer.synchronize([answer["has_gradient"] for answer in answers])


def _forget(error: BaseException | None) -> None:
    """Let go of the local variables of all frames that an error, and those that it came from, went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _shown(limits: Limits | None) -> str:
    assert limits is not None
    patches = "" if limits.max_patches is None else f" and {limits.max_patches} patches"
    return f"{limits.token_budget} tokens{patches}"
