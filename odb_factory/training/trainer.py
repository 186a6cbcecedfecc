"""`enable_odb(trainer)`, and `ODBTrainerMixin`: the few Trainer methods that online dynamic batching changes.

The Trainer keeps its loop. A batch of its dataloader is an optimizer step and its accumulation is 1, so that all it
counts, schedules, logs and saves is right by itself; `training_step` runs the micro-batches. Only methods with the same
meaning in transformers 5 are overridden, and all but the dataloader call `super()`. How stock weighs samples is
measured before training (`stock.py`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from odb_factory import memory
from odb_factory.accounting.losses import in_float32, sum_of_losses
from odb_factory.accounting.statistics import Computing
from odb_factory.config import ODBConfig, ODBKeys, make_config
from odb_factory.data.collate import Collated
from odb_factory.data.flat import pads_left
from odb_factory.data.observe import DEFAULT_PATCH_SIZE, Measure, MediaCut, Observer, RowDropped, measure_batch
from odb_factory.data.ranks import check_process_group, ring_of
from odb_factory.ending import ending
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.memory import MemoryMeter
from odb_factory.model.tower import check_batch, images_at_once, one_pass, patch_products
from odb_factory.planner import Collation
from odb_factory.training.arguments import replaced
from odb_factory.training.checkpoint import (
    ODBCursor,
    Preemption,
    find_checkpoint,
    keep_cursor,
    load_sharded_optimizer,
)
from odb_factory.training.checks import (
    check_arguments,
    check_dummy_media,
    check_methods,
    check_trainer,
    log_what_differs,
)
from odb_factory.training.evaluation import evaluation_by_budget
from odb_factory.training.session import Session, Training, not_reached
from odb_factory.training.shared_encoder import SharedEncoder

# ----------------------------------------------------------------------------------------------------------------------
# What the Trainer sees as its train dataloader: its batches are optimizer steps.


class StepInputs(dict[str, torch.Tensor]):
    """An optimizer step in the place of a batch.

    As a mapping it holds what the Trainer counts in a batch: a main input whose `numel` are input tokens (without
    storage), and an attention mask whose sum are tokens without padding. Its micro-batches are taken from the loader
    one by one, so that one at a time is in memory.
    """

    def __init__(self, main_input: str, num_tokens: int, num_real_tokens: int, micro_batches: Iterator[Collated]):
        main = torch.empty(num_tokens, device="meta")
        super().__init__({main_input: main, "attention_mask": torch.tensor(num_real_tokens)})
        self.micro_batches = micro_batches


class TrainLoader:
    """Yields the optimizer steps of an epoch of the run, which is settled when the first step is requested.

    main_input: the model's `main_input_name`. stock: the DataLoader that the Trainer would have used; callbacks are
    given that one, which they may iterate.
    """

    def __init__(self, training: Training, main_input: str, stock: Any):
        self._training, self._main_input, self.stock = training, main_input, stock
        self.dataset = training.run.loader.dataset
        self._is_settled = False
        self._offset: int | None = None

    def __len__(self) -> int:
        """Optimizer steps of an epoch: exact if they are kept, else a bound, at which the Trainer would end it."""
        length = self._training.run.epoch_length
        if length is None:
            raise TypeError("the number of optimizer steps of an epoch is not known ahead")
        return length

    def __iter__(self) -> Iterator[StepInputs]:
        if self._training.run.finished:
            return
        if not self._is_settled:
            self._is_settled = True
            self._training.settle()
        run = self._training.run
        collated = iter(run.loader)
        while True:
            box = [run.accounting.next(collated)]
            if box[0] is None:
                return
            step, micro_batches = box[0][0].step, self._micro_batches(box, collated)
            # Rank 0 reports the sums of all ranks: the Trainer adds up the figures of the ranks.
            padded, real = (step.padded_tokens, step.tokens) if run.loader.rank == 0 else (0, 0)
            tokens = padded if step.stock_input_tokens is None else step.stock_input_tokens
            yield StepInputs(self._main_input, tokens, real, micro_batches)

    def set_epoch(self, epoch: int) -> None:
        """After a resume the Trainer counts epochs from a bound; the first is the one where the loader stands."""
        if self._offset is None:
            self._offset = self._training.run.loader.epoch - epoch
        self._training.run.loader.set_epoch(epoch + self._offset)

    def _micro_batches(self, box: list[Any], collated: Iterator[Collated]) -> Iterator[Collated]:
        """The micro-batches of one optimizer step, of which the box holds the first; keeps no reference to those handed
        on."""
        is_last = False
        while not is_last:
            assert box[0] is not None, "an optimizer step is handed out whole"
            is_last = box[0][0].ends_optimizer_step
            yield box.pop()
            if not is_last:
                box.append(self._training.run.accounting.next(collated))


# ----------------------------------------------------------------------------------------------------------------------
# The callback of a run: sets the Trainer's figures that it cannot know, and logs the first lines.

logger = get_logger(__name__)


class ODBCallback(TrainerCallback):
    """Runs before the other callbacks."""

    def __init__(self, training: Training):
        self._training: Any = training

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._training.run
        keep_cursor(self._training.trainer, run)
        handler = self._training.trainer.callback_handler
        handler.train_dataloader = handler.train_dataloader.stock  # ordinary batches, for callbacks that look at them
        if run.finished:
            logger.info("nothing is left to train: the checkpoint has all %s optimizer steps", run.optimizer_steps)
            return
        if not run.config.keeps:
            state.max_steps = run.expected_steps()
            an_epoch = run.loader.estimate_optimizer_steps()
            state.num_train_epochs = math.ceil(run.max_steps / max(an_epoch, 1) if run.max_steps else run.epochs)
            state.compute_steps(args, state.max_steps)
        elif run.total_steps not in (None, state.max_steps):  # an epoch was restarted
            state.max_steps = run.total_steps
            state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self._training.run
        if run.optimizer_steps != state.global_step:
            raise ConfigError(
                "training_step: an override of it does not call odb's, so the loss weights would be lost; let it call "
                "super(), or train without odb."
            )
        state.epoch = run.epoch
        keep_cursor(self._training.trainer, run)
        if run.config.keeps:
            return
        # The Trainer's loop is sized by a bound; this ends it in time.
        state.max_steps = run.expected_steps()
        control.should_epoch_stop = control.should_epoch_stop or run.step.last
        for callback in self._training.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Other callbacks read the folder, as Ray Train's does on every rank: all ranks have written their files.
        self._training.trainer.accelerator.wait_for_everyone()


# ----------------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    Base = Trainer
else:
    Base = object


class ODBTrainerMixin(Base):
    """Goes before a `transformers.Trainer` class in the bases: `class MyTrainer(ODBTrainerMixin, Trainer)`.

    Then `enable_odb(trainer, ...)` switches it on (it also does so for a trainer without the mixin).
    odb: settings and, in `train()`, the training; None: stock behaviour. Outside of `train()` everything is stock's.
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
        checkpoint = find_checkpoint(self, resume_from_checkpoint)
        odb.training = training = Training(odb, checkpoint)
        models = (self.model, getattr(self, "ref_model", None))
        with (
            contextlib.ExitStack() as parts,
            self._odb_callbacks(training),
            contextlib.closing(training.arguments),
            patch_products(*models),
            images_at_once(*models if not self.args.torch_compile else ()),
            one_pass(*models if self.args.world_size > 1 else ()),
        ):
            try:
                for part in odb.parts:
                    parts.enter_context(part.in_place())
                training.encoder = SharedEncoder.of(self)
                resumed = None if checkpoint is None else str(checkpoint.folder)
                result = super().train(resumed, *args, **kwargs)
                training.run.finish()
            except BaseException as error:
                cause = ending(error, self.args.output_dir)
                training.close(cause)
                if cause is error:
                    raise
                raise cause from error
            training.close()
            return result

    @contextlib.contextmanager
    def _odb_callbacks(self, training: Training) -> Iterator[None]:
        """The Trainer's callbacks as a run needs them."""
        callbacks, preemption = self.callback_handler.callbacks, Preemption(training)
        # First, so that every other callback reads the right figures.
        callbacks.insert(0, ODBCallback(training))
        callbacks += [ODBCursor(), preemption]
        try:
            with preemption.in_place():
                yield
        finally:
            ours = (ODBCallback, ODBCursor, Preemption)
            # In place: the Trainer may have recreated some from a checkpoint.
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, ours)]

    def get_train_dataloader(self) -> Any:
        """In `train()` the loader of the run; at all other times stock's, and nothing is started."""
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
        return TrainLoader(training, getattr(self.model, "main_input_name", "input_ids"), stock)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, as the Trainer logs them."""
        stock: int = super().get_total_train_batch_size(args)
        if (training := self._odb_training) is None:
            return stock
        return training.run.loader.global_batch_size or stock * training.arguments.accumulation

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._odb_training is not None and self.is_fsdp_enabled and checkpoint is not None:
            load_sharded_optimizer(self, Path(checkpoint))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In `train()` a whole optimizer step: `inputs` are `StepInputs`. Returns the sum of its losses."""
        training = self._odb_training
        if training is None or not isinstance(inputs, StepInputs):
            return super().training_step(model, inputs, *args, **kwargs)
        run, watch, before_step = training.run, training.memory, training.odb.before_step
        if before_step is not None:
            whole = list(inputs.micro_batches)
            before_step(model, whole)
            inputs.micro_batches = (whole.pop(0) for _ in range(len(whole)))
        if training.restarts is not None:
            return training.restarts.take(inputs.micro_batches)
        losses: list[torch.Tensor] = []
        for micro_batch, measured, batch in inputs.micro_batches:
            computing = run.begin_micro_batch(micro_batch, measured)
            box = [batch]
            del batch
            with (
                watch.named(micro_batch, measured, run.optimizer_steps + 1),
                training.gradients_summed(model, is_last=micro_batch.ends_optimizer_step),
            ):
                losses.append(self.odb_forward_backward(training, model, computing, box))
            watch.held(measured)
            run.accounting.end()
            if not micro_batch.ends_optimizer_step:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        return sum_of_losses(losses, skip_non_finite=self.args.logging_nan_inf_filter)

    def odb_forward_backward(self, training: Training, model: Any, computing: Computing, box: list[Any]) -> Any:
        """Add the gradient of the micro-batch that the run has begun; returns its loss. box: holds the only reference
        to its batch."""
        measured, ids, encoder = computing.measured, computing.micro_batch.ids, training.encoder
        check_batch(self, box[0], ids)
        if training.stock.is_trainers:
            computing.pads_left = pads_left(box[0])
        training.check_first_batch(box[0], measured.segments[: max(len(ids), 1)])
        shared = contextlib.nullcontext() if encoder is None else encoder.balanced(computing)
        recompute = contextlib.nullcontext() if training.recompute is None else training.recompute.decided(computing)
        with training.odb.in_forward(measured), shared, recompute:
            number = training.odb.stock_number
            loss = super().training_step(model, training.with_known_integers(model, box.pop()), *number)
        if not computing.is_weighed:
            raise ConfigError(not_reached(self, "compute_loss"))
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        odb, stock = self.odb, functools.partial(super().compute_loss, return_outputs=return_outputs)
        if num_items_in_batch is not None:
            kwargs["num_items_in_batch"] = num_items_in_batch
        if odb is None:
            return stock(model, inputs, **kwargs)
        inputs, unpadded = odb.unpadded(inputs)
        num_items, computing, way = odb.num_items, odb.computing, odb.way
        if num_items is None:
            if isinstance(inputs, StepInputs):
                raise ConfigError(not_reached(self, "training_step"))
            with unpadded:
                return stock(model, inputs, **kwargs)
        # A custom loss may read the accumulation.
        shown = contextlib.nullcontext() if odb.training is None else odb.training.arguments.shown()
        if computing is not None and way == "number of stock":  # handed to `training_step`: nothing is weighed here
            with unpadded, shown, odb.weighing(model, computing.micro_batch.samples[0].stock_units):
                computing.is_weighed = True
                return stock(model, inputs, **kwargs)
        # Our weights include the number of ranks; those of code of the trainer were measured as stock multiplies.
        keeps_args = odb.is_measured_with_args
        args = contextlib.nullcontext() if keeps_args else replaced(self.args, average_tokens_across_devices=False)
        with unpadded, shown, args:
            if way == "by sample":
                kwargs.pop("num_items_in_batch", None)
                once: Any = functools.partial(super().compute_loss, **kwargs)
                result = odb.loss_by_sample(once, model, inputs)
                result = result if return_outputs else result[0]
            else:
                # A loss that divides by their number returns a mean, like one that ignores it.
                kwargs["num_items_in_batch"] = torch.full((), num_items, device=self.args.device)
                with odb.weighing(model, num_items):
                    result = stock(model, inputs, **kwargs)
        scale = 0.0  # of a trial
        if computing is not None:
            scale, computing.is_weighed = computing.loss.scale, True
        if return_outputs:
            return (in_float32(result[0]) * scale, *result[1:])
        return in_float32(result) * scale

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """With `eval_token_budget` the same loop over micro-batches, and stock's `eval_loss`."""
        evaluation = None if self.odb is None else evaluation_by_budget(self, dataloader, prediction_loss_only)
        if evaluation is None:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        with evaluation.under_way():
            in_its_place: Any = evaluation
            output = super().evaluation_loop(in_its_place, description, True, ignore_keys, metric_key_prefix)
            return evaluation.complete(output, metric_key_prefix)

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
        run = training.run
        steps = run.schedule.steps_of_schedule(run.expected_steps() or num_training_steps, self.args.warmup_steps)
        scheduler = super().create_scheduler(steps, optimizer)
        run.schedule.follow(scheduler)
        return scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if (training := self._odb_training) is None:
            super().log(logs, *args, **kwargs)
            return
        run, accounting = training.run, training.run.accounting
        # `should_log` and both entries: the Trainer's own log of the training, not one of a callback or a subclass.
        if self.control.should_log and {"loss", "learning_rate"} <= logs.keys():
            logs.update(accounting.interval_metrics())
        elif "train_runtime" in logs:
            logs.update(accounting.metrics())
            seconds = logs["train_runtime"]
            logs["train_samples_per_second"] = round(accounting.total["samples"] / seconds, 3)
            if training.arguments.user_values.get("include_tokens_per_second"):
                tokens = accounting.total["padded_tokens"] / run.loader.world_size
                logs["train_tokens_per_second"] = round(tokens / seconds, 3)
        super().log(logs, *args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# The single integration point. The plugin, patches and scripts all call it.


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

    trainer: a `transformers.Trainer` (or of a subclass) that has not begun. Its dataset yields processed samples
    (see `odb_factory.data.observe.ItemObserver`), unless an observer is given.
    config, or its keys one by one: `enable_odb(trainer, token_budget=8192, max_patches=16384)`.
    cost_fn: item -> `Cost` or tokens, if they cannot be read from `input_ids` and `labels`.
    observer: reads a row of the dataset as light features and a cost. collation: what the data collator adds to
    a group (default: its `pad_to_multiple_of`). patch_size: side of a vision patch (pixels), to count patches
    if the model takes no patch grid.
    measure: counts rows, tokens, patches and units of a collated batch (default: `measure_batch`, whose units are
    labels that carry loss); the loss is a mean over units. equal_weights: the loss of a micro-batch is one mean, whose
    units cannot be weighed one by one, so that samples of different weight must not share one.
    process_group: the data-parallel ranks, over which the engine averages gradients (None: all ranks, as with DDP,
    ZeRO, FSDP and HSDP); samples are shared among them and the loss weight depends on their number.
    agree_on: custom settings that all ranks must have in common; if they differ, no step is taken.
    eval_rows: of an evaluation dataset, the rows that are read from it and their observer, for `eval_token_budget`
    (default: its items, with the default observer; None beside an `observer`: evaluations stay stock's).
    not_flat: why flat micro-batches would be wrong, if the caller knows a reason (see the key `layout`).
    memory_meter: measures memory for what is tried before training (default: the accelerator's figures).
    Code of the trainer that computes the loss (a `compute_loss_func`) is called once a sample.
    Outside of `train()` the trainer stays as it was: its dataset, its collator, its dataloaders.
    Raises `ConfigError` if a training argument cannot work with it. A second call is an error.
    """
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
