"""One rank of the tests of `oom`: real Trainers whose model runs out of memory above a size."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from training.cases import Case, load_model, precision
from training.gradient_ranks import InOrder, make, switch_on
from transformers.integrations import unset_hf_deepspeed_config

from odb_factory import ConfigError, ODBError

RESULTS = "results{rank}.json"


@dataclass(frozen=True)
class Short:
    """A training. most: tokens that the memory of each rank holds (0: any). phase: in which it runs out. block,
    arguments: changes."""

    case: Case
    most: tuple[int, ...] = (0, 0)
    phase: str = "forward"
    world_size: int = 2
    block: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Short:
        return cls(**saved | {"case": Case(**saved["case"]), "most": tuple(saved["most"])})


class Memory:
    """Raises torch's own error where the embeddings of a model are larger than it holds; in a backward, when their
    gradient comes, with which all other parameters have theirs.

    fails: how often it did. leaked: what a failed attempt had in memory that was there when the next forward began.
    """

    def __init__(self, model: torch.nn.Module, most: int, phase: str):
        self.most, self.phase, self.fails, self.leaked = most, phase, 0, 0
        self._failed: weakref.ref[Tensor] | None = None
        if most:
            model.get_input_embeddings().register_forward_hook(self._embedded)

    def _embedded(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.leaked += self._failed is not None and self._failed() is not None
        self._failed = None
        if output.shape[:-1].numel() <= self.most:
            return
        self._failed = weakref.ref(output)
        if self.phase == "forward":
            self._run_out(output)
        elif torch.is_grad_enabled():
            output.register_hook(self._run_out)

    def _run_out(self, _: Tensor) -> None:
        self.fails += 1
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )


def train(rank: int, short: Short, path: str, output_dir: Path, resume: bool = False) -> dict[str, Any]:
    """What came of it: how often memory was short on this rank, or the error that ended the training."""
    model = load_model(short.case, path)
    memory = Memory(model, short.most[rank], short.phase)
    trainer = make(short.case, model, path, output_dir, short.world_size, **short.arguments)
    switch_on(trainer, short.case, **short.block)
    found: dict[str, Any] = {"error": None, "cause": None}
    with precision(short.case.dtype):
        try:
            trainer.train(resume_from_checkpoint=resume or None)
        except Exception as error:
            kind = "ODBError" if isinstance(error, ODBError) else type(error).__name__
            found = {"error": f"{kind}: {error}", "cause": type(error.__cause__).__name__}
    return found | {"fails": memory.fails, "leaked": memory.leaked}


def train_all(rank: int, shorts: list[dict[str, Any]], models: dict[str, str], output_dir: str) -> None:
    """Train all; the files of number k are in `output_dir`/k. Ends as a training does that has failed."""
    os.environ["LOCAL_RANK"] = str(rank)
    folder = Path(output_dir)
    results: list[dict[str, Any]] = []
    for number, short in enumerate(map(Short.of, shorts)):
        with deepspeed_forgotten():
            results.append(train(rank, short, models[short.case.model], folder / str(number)))
        gc.collect()
    Path(folder, RESULTS.format(rank=rank)).write_text(json.dumps(results))
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def deepspeed_forgotten() -> Iterator[None]:
    """The next Trainer of this process finds nothing of DeepSpeed's configuration of this one."""
    before = dict(os.environ)
    yield
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def train_with_a_gathering_loss(rank: int, path: str, output_dir: str, methods: list[str]) -> list[str]:
    """What the loss is told that calls methods of accelerate's Accelerator for a figure, and how the training ended."""
    os.environ["LOCAL_RANK"] = str(rank)
    errors: list[str] = []

    class Gathers(InOrder):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            for method in methods:
                try:
                    getattr(self.accelerator, method)(loss.detach())
                except ConfigError as error:
                    errors.append(str(error))
                    if method == methods[-1]:
                        raise
            return loss

    case = Case("text", "float32", 2, keep=3, loss_scaling="stock")
    model = load_model(case, path)
    Memory(model, 56 if rank == 0 else 0, "forward")
    trainer = make(case, model, path, Path(output_dir), 2)
    trainer.__class__ = Gathers
    try:
        switch_on(trainer, case, oom="split").train()
    except ODBError as error:
        errors.append(str(error))
    return errors
