"""What the Trainer sees as its train dataloader: its batches are optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from odb_factory.data.collate import Collated
from odb_factory.data.samples import OptimizerStep
from odb_factory.training.run import ODBRun


class StepInputs(dict[str, torch.Tensor]):
    """An optimizer step in the place of a batch.

    As a mapping it holds what the Trainer counts of a batch: a main input whose `numel` are input tokens (it has no
    storage), and an attention mask whose sum are tokens without padding. Its micro-batches are taken from the loader
    when they are asked for, so that one at a time is in memory.
    """

    def __init__(self, step: OptimizerStep, main_input: str, num_tokens: int, num_real_tokens: int):
        super().__init__(
            {
                main_input: torch.empty(num_tokens, device="meta"),
                "attention_mask": torch.tensor(num_real_tokens),
            }
        )
        self.step = step
        self.micro_batches: Iterator[Collated] = iter(())


class TrainLoader:
    """Yields the optimizer steps of an epoch of `run`.

    main_input: the model's `main_input_name`. stock: the DataLoader that the Trainer would have used. Callbacks are
    given that one, which they may iterate. before_first: called once, when the model is wrapped and the first step is
    asked for; returns the run to go on with. before_each: called before each step.
    """

    def __init__(
        self,
        run: ODBRun,
        main_input: str,
        stock: Any,
        before_first: Callable[[], ODBRun],
        before_each: Callable[[], None],
    ):
        self.run, self.main_input, self.stock, self._before_each = run, main_input, stock, before_each
        self._before_first: Callable[[], ODBRun] | None = before_first
        self.dataset = run.loader.dataset
        self._offset: int | None = None

    def __len__(self) -> int:
        """Optimizer steps of an epoch: exact where they are kept, else a bound, at which the Trainer would end it."""
        length = self.run.epoch_length
        if length is None:
            raise TypeError("the number of optimizer steps of an epoch is not known ahead")
        return length

    def __iter__(self) -> Iterator[StepInputs]:
        if self.run.finished:
            return
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            self.run = before_first()
        collated = iter(self.run.loader)
        while True:
            self._before_each()
            first = self.run.accounting.next(collated)
            if first is None:
                return
            inputs = self._inputs_of(first[0].step)
            inputs.micro_batches = self._micro_batches([first], collated)
            del first
            yield inputs

    def set_epoch(self, epoch: int) -> None:
        """After a resume the Trainer counts epochs from a bound; the first is the one where the loader stands."""
        if self._offset is None:
            self._offset = self.run.loader.epoch - epoch
        self.run.loader.set_epoch(epoch + self._offset)

    def _inputs_of(self, step: OptimizerStep) -> StepInputs:
        """What all ranks have computed is told by one of them: the Trainer adds up what they say."""
        tells = self.run.loader.rank == 0
        tokens = step.stock_input_tokens
        if tokens is None:
            tokens = step.padded_tokens if tells else 0
        return StepInputs(step, self.main_input, tokens, step.tokens if tells else 0)

    def _micro_batches(self, first: list[Collated], collated: Iterator[Collated]) -> Iterator[Collated]:
        """Those of one optimizer step; keeps no reference to what it has handed on."""
        is_last = first[0][0].ends_optimizer_step
        yield first.pop()
        while not is_last:
            item = self.run.accounting.next(collated)
            assert item is not None, "an optimizer step is handed out whole"
            is_last = item[0].ends_optimizer_step
            box = [item]
            del item
            yield box.pop()
