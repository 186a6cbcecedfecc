"""`enable_odb(trainer)`, and `ODBTrainerMixin`: the few Trainer methods that online dynamic batching changes.

The Trainer keeps its loop. A batch of its dataloader is an optimizer step and its accumulation is 1, so its counts,
schedules, logs and checkpoints need no change; `training_step` runs the micro-batches. All overrides have one meaning
in all releases of transformers 5, and call `super()`. How stock weighs samples is measured before training
(`stock.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import Trainer

from odb_factory import memory
from odb_factory.accounting import Computing, sum_of_losses
from odb_factory.config import ODBConfig, ODBKeys, make_config
from odb_factory.data.flat import pads_left
from odb_factory.data.observe import DEFAULT_PATCH_SIZE, Measure, MediaCut, Observer, RowDropped, measure_batch
from odb_factory.data.ranks import check_process_group, gather_once, ring_of
from odb_factory.errors import ConfigError
from odb_factory.memory import MemoryMeter
from odb_factory.model.known import with_known_integers
from odb_factory.model.tower import check_batch
from odb_factory.planner import Collation
from odb_factory.training.checkpoint import find_checkpoint, load_sharded_optimizer
from odb_factory.training.checks import (
    check_arguments,
    check_dummy_media,
    check_methods,
    check_trainer,
    log_what_differs,
)
from odb_factory.training.evaluation import evaluation_by_budget
from odb_factory.training.run import StepInputs, Training, not_reached
from odb_factory.training.session import Session
from odb_factory.training.stock import number_like

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class ODBTrainerMixin(Base):
    """The Trainer methods of odb, for a class such as `class MyTrainer(ODBTrainerMixin, Trainer)`.

    `enable_odb(trainer, ...)` switches them on (and adds them to a trainer without the mixin).
    odb: settings and, in `train()`, the training; None: stock behaviour. Outside of `train()` the trainer is stock's.
    """

    odb: Session | None = None

    @property
    def _odb_training(self) -> Training | None:
        return None if self.odb is None else self.odb.training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        odb = self.odb
        if odb is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        ring_of(odb.process_group, odb.config.exchange_timeout_s)  # a rank that dies from here on ends the others
        check_trainer(self)
        log_what_differs(self)
        gather = functools.partial(gather_once, silence_s=odb.config.exchange_timeout_s)
        checkpoint = find_checkpoint(self, resume_from_checkpoint, gather)
        with Training(self, checkpoint).under_way():
            return super().train(None if checkpoint is None else str(checkpoint.folder), *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """In `train()` the loader of the run; otherwise stock's, and nothing is started."""
        if (training := self._odb_training) is None or training.has_begun:
            return super().get_train_dataloader()
        try:
            stock = super().get_train_dataloader()
        except (RowDropped, MediaCut) as error:
            raise ConfigError(
                f"group_by_length: the lengths of all rows are read before training, and one cannot be used: {error} "
                "Remove the row, or leave the key (train_sampling_strategy) out."
            ) from error
        training.begin(stock)
        return training

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, for the Trainer's log."""
        stock: int = super().get_total_train_batch_size(args)
        if (training := self._odb_training) is None:
            return stock
        if not training.has_begun:
            raise ConfigError(not_reached(self, "get_train_dataloader"))
        return training.loader.global_batch_size or stock * training.accumulation

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._odb_training is not None and self.is_fsdp_enabled and checkpoint is not None:
            load_sharded_optimizer(self, Path(checkpoint))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In `train()` a whole optimizer step: `inputs` are `StepInputs`. Returns the sum of its losses."""
        training = self._odb_training
        if training is None or not isinstance(inputs, StepInputs):
            return super().training_step(model, inputs, *args, **kwargs)
        if (before_step := training.odb.before_step) is not None:
            whole = list(inputs.micro_batches)
            before_step(model, whole)
            inputs.micro_batches = (whole.pop(0) for _ in range(len(whole)))
        if training.restarts is not None:
            return training.restarts.take(inputs.micro_batches)
        losses: list[torch.Tensor] = []
        for micro_batch, measured, batch in inputs.micro_batches:
            computing = training.begin_micro_batch(micro_batch, measured)
            box = [batch]
            del batch
            with (
                training.memory.named(micro_batch, measured, training.optimizer_steps + 1),
                training.gradients_summed(model, is_last=micro_batch.ends_optimizer_step),
            ):
                losses.append(self.odb_forward_backward(training, model, computing, box))
            training.memory.held(measured)
            training.accounting.end()
            if not micro_batch.ends_optimizer_step:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        return sum_of_losses(losses, skip_non_finite=self.args.logging_nan_inf_filter)

    def odb_forward_backward(self, training: Training, model: Any, computing: Computing, box: list[Any]) -> Any:
        """Add the gradient of the micro-batch that has begun; returns its loss. box: has the only reference to its
        batch."""
        odb, measured, ids = training.odb, computing.measured, computing.micro_batch.ids
        encoder, recompute, number = training.encoder, training.recompute, list[Any]()
        check_batch(self, box[0], ids)
        if training.stock.is_trainers:
            computing.pads_left = pads_left(box[0])
        training.check_first_batch(box[0], measured.segments[: max(len(ids), 1)])
        if odb.way == "number of stock":
            units = computing.micro_batch.samples[0].stock_units
            number = [number_like(training.stock.number, units, self.args.device)]
        with (
            odb.in_forward(measured),
            contextlib.nullcontext() if encoder is None else encoder.balanced(),
            contextlib.nullcontext() if recompute is None else recompute.decided(computing),
        ):
            if training.knows_integers:
                box.append(with_known_integers(box.pop(), self.args.device))
            loss = super().training_step(model, box.pop(), *number)
        if not computing.is_weighed:
            raise ConfigError(not_reached(self, "compute_loss"))
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        stock = super().compute_loss
        if self.odb is None:
            return stock(model, inputs, return_outputs=return_outputs, **kwargs)
        return self.odb.compute_loss(stock, model, inputs, return_outputs=return_outputs, kwargs=kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """With `eval_token_budget` stock's loop over micro-batches, with stock's `eval_loss`."""
        evaluation = None if self.odb is None else evaluation_by_budget(self, dataloader, prediction_loss_only)
        loop = super().evaluation_loop
        if evaluation is None:
            return loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        return evaluation.run(loop, description, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **kwargs: Any
    ) -> Any:
        step: Any = functools.partial(super().prediction_step, **kwargs)
        if self.odb is None or self.odb.evaluation is None:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        return self.odb.evaluation.predict(step, model, inputs, ignore_keys), None, None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        training = self._odb_training
        if training is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        make, expected = super().create_scheduler, training.expected_steps() or num_training_steps
        return training.schedule.create(lambda steps: make(steps, optimizer), expected, self.args.warmup_steps)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if (training := self._odb_training) is None:
            super().log(logs, *args, **kwargs)
            return
        accounting = training.accounting
        # Only the Trainer's own log of the training, not a log of a callback or a subclass
        if self.control.should_log and {"loss", "learning_rate"} <= logs.keys():
            logs.update(accounting.interval_metrics())
        elif "train_runtime" in logs:
            logs.update(accounting.metrics())
            logs["train_samples_per_second"] = round(accounting.total["samples"] / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)


def enable_odb(
    trainer: Any,
    config: ODBConfig | None = None,
    *,
    observer: Observer | None = None,
    collation: Collation | None = None,
    patch_size: int = DEFAULT_PATCH_SIZE,
    measure: Measure = measure_batch,
    equal_weights: bool = False,
    cost_fn: Callable[..., Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    agree_on: Mapping[str, object] | None = None,
    eval_rows: Callable[[Any], tuple[Any, Observer]] | None = None,
    not_flat: str | None = None,
    memory_meter: MemoryMeter | None = None,
    **block: Unpack[ODBKeys],
) -> Any:
    """Make `trainer.train()` form its batches online. Changes this one object; returns it.

    trainer: a `transformers.Trainer` (or of a subclass) before its training. Its dataset yields processed samples
    (see `odb_factory.data.observe.ItemObserver`), unless an observer is given.
    config, or its keys one by one: `enable_odb(trainer, token_budget=8192, max_patches=16384)`.
    cost_fn: item -> `Cost` or tokens, if they cannot be read from `input_ids` and `labels`.
    observer: reads a row of the dataset as light features and a cost. collation: what the data collator adds to
    a group (default: its `pad_to_multiple_of`). patch_size: side of a vision patch (pixels), to count patches
    if the model takes no patch grid.
    measure: counts rows, tokens, patches and units of a collated batch (default: `measure_batch`, whose units are
    labels that carry loss); the loss is a mean over units. equal_weights: the units of a micro-batch cannot be weighed
    one by one, so samples of different weight never share a micro-batch.
    process_group: the data-parallel ranks, over which the engine averages gradients (None: all ranks, as with DDP,
    ZeRO, FSDP and HSDP); samples are shared among them and the loss weight depends on their number.
    agree_on: custom settings in which all ranks must agree; if they differ, no step is taken.
    eval_rows: evaluation dataset -> its rows and their observer, for `eval_token_budget` (default: its items, with the
    default observer; None with an `observer`: evaluations stay stock's).
    not_flat: a reason why flat micro-batches would be wrong (see the key `layout`).
    memory_meter: measures the memory of trials before training (default: the accelerator's figures).
    If the trainer computes the loss (a `compute_loss_func`), it is called once a sample.
    Outside of `train()` the dataset, collator and dataloaders of the trainer are unchanged.
    Raises `ConfigError` for a training argument that cannot work with odb, and in a second call.
    """
    # What cannot work is refused before the trainer is changed.
    is_trainer = isinstance(trainer, Trainer)
    if not is_trainer:
        raise ConfigError(f"enable_odb: {type(trainer).__name__} is not a transformers Trainer; give the trainer.")
    if getattr(trainer, "odb", None) is not None:
        raise ConfigError("enable_odb: this trainer has it already; call it once.")
    config = make_config(config, block)
    check_process_group(process_group)
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    check_arguments(trainer.args, config, memory_meter, is_stream=is_stream)
    check_dummy_media(config, collation or Collation())
    check_methods(trainer)
    # This one object becomes of a class that has the mixin before the class it had.
    if not isinstance(trainer, ODBTrainerMixin):
        stock = type(trainer)
        trainer.__class__ = type(stock.__name__, (ODBTrainerMixin, stock), {"__module__": stock.__module__})
    trainer.odb = Session(
        trainer=trainer,
        config=config,
        observer=observer,
        collation=collation,
        patch_size=patch_size,
        measure=measure,
        equal_weights=equal_weights,
        cost_fn=cost_fn,
        process_group=process_group,
        agree_on=agree_on or {},
        eval_rows=eval_rows,
        not_flat=not_flat,
        memory_meter=memory_meter or memory.find_meter(trainer.args.device),
    )
    return trainer


class ODBTrainer(ODBTrainerMixin, Trainer):
    """A `transformers.Trainer` with online dynamic batching: `ODBTrainer(..., odb={"token_budget": 8192})`."""

    def __init__(self, *args: Any, odb: ODBConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        enable_odb(self, odb if isinstance(odb, ODBConfig) else ODBConfig.from_block(odb))
