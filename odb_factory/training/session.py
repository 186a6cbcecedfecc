"""`Session`, the `trainer.odb` of a trainer: the settings of `enable_odb`, and the loss of the micro-batch in forward.

It holds a `Training` (`run.py`) during `train()`, and an `Evaluation` during an evaluation by budget."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_function

from odb_factory.accounting import Computing, TokenLoss, in_float32
from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.flat import UNPADDED
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import ItemObserver, Measure, Observer
from odb_factory.data.order import DataLoaderParts, StockMean
from odb_factory.data.ranks import Ranks, gather_once
from odb_factory.data.samples import Measured, Picklable
from odb_factory.errors import ConfigError
from odb_factory.memory import MemoryMeter
from odb_factory.model.check import Layout, positions_of_media, unwrapped
from odb_factory.model.flat_row import flat_row
from odb_factory.model.unpad import FlatRows, positions_of_samples
from odb_factory.planner import Collation
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import why_logits
from odb_factory.training.evaluation import Evaluation
from odb_factory.training.run import StepInputs, Training, not_reached
from odb_factory.training.stock import SampleModel, cut, number_like


@dataclass(eq=False, kw_only=True, repr=False)
class Session:
    """odb on one trainer: `trainer.odb`. The first fields are the arguments of `enable_odb`.

    before_step: called with the model and all micro-batches of an optimizer step, which then are in memory together,
        before the first is trained on; None: the micro-batches come one by one.
    collate_fn: replaces the trainer's data collator in training. parts: change the trainer in `train()`; each has
        `in_place()`, a context.
    training: the `train()` in progress. evaluation: the evaluation by budget in progress. resolved: the config with the
        budgets of this or the last training; None until `auto` budgets are chosen.
    eval_mean: the measured rule of stock's loss of an evaluation. token_losses: of the training, by the reason why they
        need logits.
    """

    trainer: Any
    config: ODBConfig
    observer: Observer | None
    collation: Collation | None
    patch_size: int
    measure: Measure
    equal_weights: bool
    cost_fn: Callable[..., Any] | None
    process_group: dist.ProcessGroup | None
    agree_on: Mapping[str, object]
    eval_rows: Callable[[Any], tuple[Any, Observer]] | None
    not_flat: str | None
    memory_meter: MemoryMeter | None
    before_step: Callable[[Any, Sequence[Collated]], None] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    parts: Sequence[Any] = ()
    training: Training | None = None
    evaluation: Evaluation | None = None
    resolved: ResolvedConfig | None = None
    eval_mean: StockMean | None = None
    token_losses: dict[str | None, TokenLoss] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resolved = None if self.config.auto_keys else self.config.resolved()

    def gather(self, content: Any) -> list[Any]:
        """The contents (JSON types) of all ranks, in rank order. Collective."""
        answers = gather_once(json.dumps(content).encode(), self.config.exchange_timeout_s)
        return [json.loads(answer) for answer in answers]

    # For a training and for evaluations

    def observer_of_items(self, parts: DataLoaderParts, config: ODBConfig | ResolvedConfig) -> ItemObserver:
        """The observer of a dataset that yields processed samples."""
        collate, scaling = Picklable(parts.collate_fn, "collate_fn"), config.loss_scaling
        return ItemObserver(collate, cost_fn=self.cost_fn, patch_size=self.patch_size, loss_scaling=scaling)

    def make_loader(self, parts: DataLoaderParts, config: ResolvedConfig, layout: Layout, **kwargs: Any) -> ODBLoader:
        """kwargs: arguments of `ODBLoader`."""
        return ODBLoader(
            parts,
            config,
            collation=self.collation,
            layout=layout.name,
            with_boundaries=layout.with_boundaries,
            positions=positions_of_media(self.trainer.model) if layout.name == "flat" else None,
            ranks=Ranks(self.process_group, config.exchange_timeout_s),
            patch_size=self.patch_size,
            measure=self.measure,
            **kwargs,
        )

    # The micro-batch in forward

    @property
    def computing(self) -> Computing | None:
        """The micro-batch in forward and backward; None if stock computes."""
        if self.evaluation is not None:
            return self.evaluation.computing
        return self.training.accounting.computing if self.training is not None and self.training.has_begun else None

    @property
    def num_items(self) -> int | None:
        """Units (>= 1) of the micro-batch in forward, also of one that is only tried; None if stock computes."""
        if (computing := self.computing) is not None:
            return computing.num_items
        return None if self.training is None else self.training.trial_units

    @property
    def way(self) -> Literal["number of stock", "by sample", "mean"]:
        """How the loss of the micro-batch in forward is made.

        number of stock: with stock's number of items of the optimizer step. by sample: by one call of the trainer's
        code a sample. mean: as a mean over the units of the micro-batch, which odb weighs.
        """
        computing, training = self.computing, self.training
        if computing is None or training is None or self.evaluation is not None or not computing.micro_batch.samples:
            return "mean"
        stock = training.stock
        if stock.is_trainers:
            return "by sample"
        # With stock's number of items any cut of the optimizer step has stock's loss.
        is_stock = self.config.loss_scaling == "stock" and computing.row_weights is None
        return "number of stock" if is_stock and stock.number is not None and stock.mean.over == "step" else "mean"

    @contextlib.contextmanager
    def in_forward(self, measured: Measured) -> Iterator[None]:
        """Within it the models compute this micro-batch."""
        reference = getattr(self.trainer, "ref_model", None)
        positions = contextlib.nullcontext() if reference is None else positions_of_samples(unwrapped(reference))
        with flat_row(measured.segments), positions:
            yield

    @contextlib.contextmanager
    def unpadded(self, inputs: Any) -> Iterator[Any]:
        """Yields the batch without its flat rows; within it the models compute these instead of the padded rows."""
        if self.training is None or not isinstance(inputs, dict) or UNPADDED not in inputs:
            yield inputs
            return
        with self.training.flat(FlatRows(**inputs[UNPADDED])):
            yield {key: value for key, value in inputs.items() if not key.endswith(UNPADDED)}

    def compute_loss(
        self, stock: Callable[..., Any], model: Any, inputs: Any, *, return_outputs: bool, kwargs: dict[str, Any]
    ) -> Any:
        """The weighted loss of the micro-batch in forward. stock: the trainer's `compute_loss`; kwargs: its other
        arguments."""
        training: Any = self.training
        computing, num_items, args = self.computing, self.num_items, self.trainer.args
        if num_items is None and isinstance(inputs, StepInputs):
            raise ConfigError(not_reached(self.trainer, "training_step"))
        with self.unpadded(inputs) as batch, contextlib.ExitStack() as contexts:
            if num_items is None:
                return stock(model, batch, return_outputs=return_outputs, **kwargs)
            if training is not None:  # a custom loss may read the accumulation
                contexts.enter_context(replaced(args, **training.user_values))
            way = self.way
            weighs_as_stock = training is not None and self.evaluation is None and self.config.loss_scaling == "stock"
            is_measured = way == "by sample" and weighs_as_stock
            # odb's weights include the number of ranks, unless they were measured for the trainer's own code.
            if way != "number of stock" and not is_measured:
                contexts.enter_context(replaced(args, average_tokens_across_devices=False))
            if way == "by sample":
                kwargs.pop("num_items_in_batch", None)
                counts_first = is_measured and training.stock.mean.counts == "all labels"
                once = functools.partial(stock, return_outputs=False, **kwargs)
                result = self._loss_by_sample(once, model, batch, counts_first=counts_first)
                result = result if return_outputs else result[0]
            else:
                if way == "mean":  # a loss that divides by the number then is a mean, as a loss that ignores it
                    kwargs["num_items_in_batch"] = torch.full((), num_items, device=args.device)
                elif computing is not None:  # `training_step` was given this number
                    num_items = computing.micro_batch.samples[0].stock_units
                contexts.enter_context(self._weighing(model, num_items, weighs_as_stock=weighs_as_stock))
                result = stock(model, batch, return_outputs=return_outputs, **kwargs)
        if computing is not None:
            computing.is_weighed = True
        if way == "number of stock":
            return result
        scale = 0.0 if computing is None else computing.scale  # of a trial: 0
        if return_outputs:
            return (in_float32(result[0]) * scale, *result[1:])
        return in_float32(result) * scale

    def _weighing(
        self, model: Any, num_items: int, *, weighs_as_stock: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Within it the loss of the model is the weighted sum over its tokens, also in a trial, which must need the
        same memory. model: as wrapped. num_items: divides the sum if all weights are equal."""
        training: Any = self.training
        computing = self.computing
        if self.equal_weights or (training is not None and training.stock.is_trainers):
            return contextlib.nullcontext()  # the trainer's own loss
        row_weights, num_supervised, times = None, None, 1.0
        segments: Sequence[int] = ()
        if computing is not None:
            row_weights, segments = computing.row_weights, computing.measured.segments
            num_supervised = computing.measured.num_supervised
            has_log_probs = training is not None and training.stock.has_log_probs
            if row_weights is None and (num_supervised is None or has_log_probs):
                return contextlib.nullcontext()  # the mean of the model, or of its trainer
            if weighs_as_stock:
                times = computing.num_items / num_items
                # Stock divides a loss of tokens by the tokens of all micro-batches, but adds the loss of routers once a
                # micro-batch, multiplied by the ranks if tokens are counted on all ranks.
                rule, samples = training.loader.rule, computing.micro_batch.step.samples
                if rule.stock_mean.over in ("step", "rank"):
                    times *= math.ceil(samples / rule.batch_size)
                    times /= self.trainer.args.world_size if rule.stock_mean.over == "rank" else 1
        why = why_logits(self.trainer)
        if self.evaluation is not None and not self.evaluation.loss_only:
            why = why or "the predictions of an evaluation are made of them"
        if why not in self.token_losses:
            is_measured = training is not None and training.stock.is_measured
            self.token_losses[why] = TokenLoss(model, self.config.loss_scaling, why, is_measured=is_measured)
        return self.token_losses[why].weighing(row_weights, segments, num_items, num_supervised, times)

    def _loss_by_sample(
        self, compute_loss: Callable[..., Tensor], model: Any, inputs: Mapping[str, Any], *, counts_first: bool
    ) -> Any:
        """The weighted sum of the losses of all samples of the micro-batch in forward, and the output of the model.

        Each loss is computed from the logits of its sample; if the model allows it, only these exist at a time.
        compute_loss: of the trainer. counts_first: a sample weighs by all its labels, the first too.
        """
        computing: Any = self.computing
        training: Any = self.training
        number_of_stock, samples, measured = training.stock.number, computing.micro_batch.samples, computing.measured
        # Row, start and end of each sample, padding left out.
        rows, length = inputs["labels"].shape
        if measured.segments:
            ends = list(itertools.accumulate(measured.segments))
            places = [(0, end - size, end) for end, size in zip(ends, measured.segments)]
        else:
            sizes, pads_left = computing.micro_batch.lengths, computing.pads_left or [False] * rows
            starts = [length - size if is_left else 0 for size, is_left in zip(sizes, pads_left)]
            places = [(row, start, start + size) for row, (start, size) in enumerate(zip(starts, sizes))]
        weights = computing.row_weights or [1 / computing.num_items] * len(samples)

        def loss_of(number: int, logits: Tensor) -> Tensor:
            sample, alone = samples[number], SampleModel(self.trainer.model, logits)
            num_items = number_like(number_of_stock, sample.units, logits.device)
            with flat_row(()):  # a reference model computes the sample, not the row
                loss = compute_loss(alone, cut(inputs, *places[number]), num_items_in_batch=num_items)
            return in_float32(loss) * (weights[number] * (sample.stock_counted if counts_first else sample.units))

        def total_of(values: Tensor, of_part: Callable[[int, Tensor], Tensor]) -> Tensor:
            """values: logits, or hidden states, [rows, length, ...]."""
            if values.shape[:2] != (rows, length):
                raise ConfigError(
                    f"compute_loss of {type(self.trainer).__name__}: odb calls it once a sample, and "
                    f"{type(unwrapped(self.trainer.model)).__name__} makes no logits of its rows; train without odb."
                )
            parts = [values[row : row + 1, start:end] for row, start, end in places[: len(samples)]]
            losses = [of_part(number, part) for number, part in enumerate(parts)]
            return torch.stack(losses).sum()

        def run() -> Any:
            return model(**{key: value for key, value in inputs.items() if key != "labels"})

        def of_states(linear: torch.nn.Linear, hidden: Tensor) -> Tensor:
            def of_part(number: int, states: Tensor) -> Tensor:
                return loss_of(number, torch.nn.Linear.forward(linear, states))

            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            return total_of(hidden, functools.partial(checkpoint_function, of_part, **options))

        # From the states of each sample, whose logits the backward makes again, or from all logits.
        if training.sample_door.gives_states:
            output, total = training.sample_door.at_head(run, of_states)
            return total.sum(), output
        output = run()
        return total_of(output["logits"] if isinstance(output, dict) else output[0], loss_of), output
