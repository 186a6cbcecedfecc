"""`ODBTrainerMixin`: the few Trainer methods that online dynamic batching changes.

The Trainer keeps its loop. A batch of its dataloader is an optimizer step and its accumulation is 1, so that all it
counts, schedules, logs and saves is right by itself; `training_step` runs the micro-batches. Only methods with the same
meaning in transformers 4.55 to 5.x are overridden, and all but the dataloader call `super()`. What they rely on inside
the Trainer is probed before training (`probes.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_factory.accounting.losses import TokenLoss, in_float32, sum_of_losses
from odb_factory.accounting.step_accounting import say_what_to_expect
from odb_factory.comm.gloo import gather_once, world_size_of
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.data.collate import Collated
from odb_factory.data.layout import UNPADDED
from odb_factory.data.samples import OptimizerStep
from odb_factory.data.state import remove_unfinished
from odb_factory.ending import ending
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.model.check import Layout, Runs, check_rows, models_of, not_right, of_flat_batch, unwrapped
from odb_factory.model.flat_row import flat_row
from odb_factory.model.tower import check_batch, one_pass
from odb_factory.model.unpad import FlatRows, UnpadDoor, positions_of_samples
from odb_factory.training import probes
from odb_factory.training import settings as settings_module
from odb_factory.training.checkpoint import CheckpointMark, CheckpointSaver, Preemption, find_checkpoint
from odb_factory.training.checks import (
    TrainerLoss,
    check_trainer,
    compare_output_dirs,
    say_what_differs,
    why_logits,
    without_average_tokens,
)
from odb_factory.training.fill_schedule import scale_learning_rate
from odb_factory.training.run import ODBRun, RunLog
from odb_factory.training.run_start import HideArguments, RunArguments, RunStart

# ----------------------------------------------------------------------------------------------------------------------
# What the Trainer sees as its train dataloader: its batches are optimizer steps.


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


# ----------------------------------------------------------------------------------------------------------------------
# The callback of a run: the Trainer's figures where it cannot know them, and the first lines.

logger = get_logger(__name__)


class ODBCallback(TrainerCallback):
    """Runs before the other callbacks."""

    def __init__(self, trainer: Any, arguments: RunArguments):
        self.trainer, self.arguments = trainer, arguments

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        if args.local_process_index == 0:
            for folder in Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                remove_unfinished(folder)
        handler = self.trainer.callback_handler
        handler.train_dataloader = handler.train_dataloader.stock  # ordinary batches, for callbacks that look at them
        self.arguments.show()  # until `HideArguments`: trackers of experiments read them now
        if run.finished:
            logger.info("nothing is left to train: the checkpoint has all %s optimizer steps", run.optimizer_steps)
            return
        if run.fill is not None:
            state.max_steps = run.fill.estimated_steps()
            an_epoch = run.loader.estimate_optimizer_steps()
            state.num_train_epochs = math.ceil(run.length.epochs or run.length.max_steps / max(an_epoch, 1))
            state.compute_steps(args, state.max_steps)
        elif run.taken_anew and run.total_steps is not None:
            state.max_steps = run.total_steps
            state.compute_steps(args, state.max_steps)
        if not self.trainer.odb_start.lacks_budgets:
            say_what_to_expect(run.loader, run.config, run.loader.first_planned)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.odb_saver.begin_hashing()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        self.trainer.odb_saver.step_ends()
        if run.optimizer_steps != state.global_step:
            raise ConfigError(
                "training_step: an override of it does not come to the one of odb, so the loss would not be weighed; "
                "let it call super(), or train without odb."
            )
        state.epoch = run.epoch
        if run.fill is None:
            return
        # The Trainer's loop is sized by a bound; this ends it in time.
        state.max_steps = run.fill.expected_steps(run.epoch, run.optimizer_steps)
        control.should_epoch_stop = control.should_epoch_stop or run.step.last
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps


# ----------------------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from transformers import Trainer

    from odb_factory.data.collate import Collated
    from odb_factory.data.samples import Measured
    from odb_factory.training.settings import ODBSettings

    Base = Trainer
else:
    Base = object


class ODBTrainerMixin(Base):
    """Goes before a `transformers.Trainer` class in the bases: `class MyTrainer(ODBTrainerMixin, Trainer)`.

    Then `enable_odb(trainer, ...)` switches it on (it also does so for a trainer without the mixin).
    odb_settings: makes the run, given the trainer and its stock train dataloader; None: stock behaviour.
    odb_run: the run of the `train()` under way; None outside of it, where everything is stock's.
    odb_arguments: the training arguments that the run changes; None outside of `train()`.
    odb_layout: of its micro-batches. odb_is_unchecked: it is flat, and not yet checked.
    odb_start: makes the run.
    odb_trial_units: of a micro-batch that is only tried.
    odb_token_loss: of the model as trained; None before its first micro-batch. odb_doors: by which rows that the
        trainer looks at go flat through its models; () before the first.
    odb_before_step: called with the model and all micro-batches of an optimizer step before the first is trained on,
        which are in memory together then; None: they come one by one.
    """

    odb_settings: ODBSettings | None = None
    odb_run: ODBRun | None = None
    odb_checkpoint: str | None = None
    odb_arguments: RunArguments | None = None
    odb_saver: CheckpointSaver | None = None
    odb_layout: Layout | None = None
    odb_is_unchecked: bool = False
    odb_start: RunStart | None = None
    odb_trial_units: int | None = None
    odb_token_loss: TokenLoss | None = None
    odb_doors: tuple[UnpadDoor, ...] = ()
    odb_before_step: Callable[[Any, Sequence[Collated]], None] | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.odb_settings is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        settings = self.odb_settings
        if world_size_of(settings.process_group) > 1:
            lifeline_of(settings.process_group, settings.config.exchange_timeout_s).renew()
        check_trainer(self)
        probes.check_seams(self)
        say_what_differs(self, counts_tokens=not self.odb_settings.equal_weights)
        if self.args.world_size > 1 and self.args.save_strategy != "no":
            compare_output_dirs(str(self.args.output_dir), self._odb_gather)
        found = find_checkpoint(
            resume_from_checkpoint,
            output_dir=str(self.args.output_dir),
            rank=self.args.process_index,
            world_size=self.args.world_size,
            ignore_data=self.odb_settings.config.resume == "ignore_data",
            gather=self.odb_gather_json,
        )
        self.odb_checkpoint = resume_from_checkpoint = None if found is None else str(found)
        arguments = RunArguments(self)
        callback = ODBCallback(self, arguments)
        models = (self.model, getattr(self, "ref_model", None)) if self.args.world_size > 1 else ()
        saver = CheckpointSaver(self, self.odb_settings.config.exchange_timeout_s)
        preemption = Preemption(self, saver.exchange)
        with (
            self._odb_callbacks(callback, preemption, HideArguments(arguments)),
            preemption.in_place(),
            arguments.changed(),
            one_pass(*models),
        ):
            self.odb_arguments, self.odb_saver = arguments, saver
            try:
                result = super().train(resume_from_checkpoint, *args, **kwargs)
                if self.odb_run is None:
                    raise ConfigError(_not_reached(self, "get_train_dataloader"))
                self.odb_run.finish()
                return result
            except BaseException as error:
                told = ending(error, self.args.output_dir)
                if self.odb_run is not None:
                    self.odb_run.abort(told)
                saver.close(failed=True)
                if told is error:
                    raise
                raise told from error
            finally:
                saver.close()
                self.odb_arguments = self.odb_saver = self.odb_start = self.odb_token_loss = None
                self.odb_doors = ()
                if self.odb_run is not None:
                    self.odb_run.close()
                    self.odb_run = None
                if self.odb_layout is not None:
                    self.odb_layout.undo()
                    self.odb_layout = None

    @contextlib.contextmanager
    def _odb_callbacks(self, first: ODBCallback, *last: TrainerCallback) -> Iterator[None]:
        """The Trainer's callbacks as a run needs them."""
        callbacks = self.callback_handler.callbacks
        # First, so that every other callback reads figures that are set right.
        callbacks.insert(0, first)
        assert self.odb_settings is not None
        callbacks += [CheckpointMark(), RunLog(self, self.odb_settings.about), *last]
        try:
            yield
        finally:
            ours = (ODBCallback, CheckpointMark, RunLog, Preemption, HideArguments)
            # In place: the Trainer may have made some anew from a checkpoint.
            callbacks[:] = [one for one in callbacks if not isinstance(one, ours)]

    def get_train_dataloader(self) -> Any:
        """In `train()` the loader of the run; at all other times stock's, and nothing is started."""
        stock = super().get_train_dataloader()
        arguments = self.odb_arguments
        if self.odb_settings is None or arguments is None or self.odb_run is not None:
            return stock
        source = stock
        if self.odb_settings.observer is None and settings_module.are_needed(
            stock, self.train_dataset, self.odb_settings.cost_fn
        ):
            self.args.remove_unused_columns = False
            try:
                source = super().get_train_dataloader()
            finally:
                self.args.remove_unused_columns = True
        self.odb_start = RunStart(self, source, stock)
        run = self.odb_start.first()
        assert self.odb_saver is not None
        return TrainLoader(
            run,
            getattr(self.model, "main_input_name", "input_ids"),
            stock,
            self.odb_start.checked,
            self.odb_saver.step_is_asked_for,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, as the Trainer says them."""
        stock: int = super().get_total_train_batch_size(args)
        if self.odb_run is None or self.odb_arguments is None:
            return stock
        return self.odb_run.loader.global_batch_size or stock * self.odb_arguments.accumulation

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if self.odb_saver is None:
            super()._save_checkpoint(model, trial, *args, **kwargs)
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.odb_saver.saving(folder):
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.odb_arguments is None:
            super().save_model(output_dir, _internal_call)
            return
        with self.odb_arguments.shown():
            super().save_model(output_dir, _internal_call)

    def _odb_gather(self, message: bytes) -> list[bytes]:
        """What each rank says, to all ranks."""
        assert self.odb_settings is not None
        return gather_once(message, self.odb_settings.config.exchange_timeout_s)

    def odb_gather_json(self, content: Any) -> list[Any]:
        """The same, of what JSON knows."""
        return [json.loads(answer) for answer in self._odb_gather(json.dumps(content).encode())]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In `train()` a whole optimizer step: `inputs` are `StepInputs`. Returns the sum of its losses."""
        run = self.odb_run
        if run is None or not isinstance(inputs, StepInputs):
            return super().training_step(model, inputs, *args, **kwargs)
        assert self.odb_saver is not None
        self.odb_saver.step_begins()
        if self.odb_before_step is not None:
            whole = list(inputs.micro_batches)
            self.odb_before_step(model, whole)
            inputs.micro_batches = (whole.pop(0) for _ in range(len(whole)))
        if run.split is not None:
            return run.split.take(self, model, inputs.micro_batches)
        losses: list[torch.Tensor] = []
        for micro_batch, measured, batch in inputs.micro_batches:
            run.begin_micro_batch(micro_batch, measured, batch)
            box = [batch]
            del batch
            with (
                run.memory.named(micro_batch, measured, run.optimizer_steps + 1),
                self._odb_gradients_summed(model, is_last=micro_batch.ends_optimizer_step),
            ):
                loss = self.odb_forward_backward(model, measured, box)
            run.memory.held(measured)
            run.accounting.end()
            losses.append(loss)
            if not micro_batch.ends_optimizer_step:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        return sum_of_losses(losses, skip_non_finite=self.args.logging_nan_inf_filter)

    def odb_forward_backward(self, model: Any, measured: Measured, box: list[Any]) -> Any:
        """Add the gradient of the micro-batch that `odb_run` has begun; returns its loss. box: holds the only
        reference to its batch."""
        assert self.odb_run is not None and self.odb_run.computing is not None
        computing = self.odb_run.computing
        check_batch(self, box[0], computing.micro_batch.ids)
        if self.odb_is_unchecked:
            self._odb_check_batch(box[0], measured.segments[: max(len(computing.micro_batch.ids), 1)])
        with flat_row(measured.segments), self._odb_positions():
            loss = super().training_step(model, box.pop())
        if not computing.is_weighed:
            raise ConfigError(_not_reached(self, "compute_loss"))
        return loss

    def _odb_positions(self) -> contextlib.AbstractContextManager[None]:
        reference = getattr(self, "ref_model", None)
        return contextlib.nullcontext() if reference is None else positions_of_samples(unwrapped(reference))

    def _odb_check_batch(self, batch: Any, segments: tuple[int, ...]) -> None:
        """Check a flat layout where rows cannot be read by their number: by the first micro-batch. segments: those of
        its samples."""
        self.odb_is_unchecked = False
        why = check_rows(self.odb_runs(), lambda: of_flat_batch(batch, segments))
        if why is not None:
            raise not_right(why)

    def odb_runs(self) -> Runs:
        """How the check of a flat layout runs the model."""
        return Runs(self.model_wrapped, self._prepare_inputs, self.odb_gather_json, self.compute_loss_context_manager)

    @contextlib.contextmanager
    def _odb_gradients_summed(self, model: Any, *, is_last: bool) -> Iterator[None]:
        """Gradients add up on each rank, and are synchronised with those of the last micro-batch, as in the Trainer."""
        accelerator = self.accelerator
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_deepspeed:  # newer releases of accelerate do the same by `sync_gradients`
            model.set_gradient_accumulation_boundary(is_last)
        syncs = is_last or is_deepspeed or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if self.is_fsdp_enabled and self.odb_arguments is not None and self.odb_arguments.accumulation == 1:
            syncs = True  # it would hold whole gradients, for which stock training needs no memory
        accelerator.sync_gradients = is_last
        try:
            with contextlib.nullcontext() if syncs else accelerator.no_sync(model=model):
                yield
        finally:
            accelerator.sync_gradients = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if isinstance(inputs, dict) and UNPADDED in inputs:
            rows = FlatRows(**inputs[UNPADDED])
            inputs = {key: value for key, value in inputs.items() if not key.endswith(UNPADDED)}
            with self.odb_flat(rows):
                return self.compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        run = self.odb_run
        if self.odb_trial_units is not None:
            kwargs["num_items_in_batch"] = torch.full((), self.odb_trial_units, device=self.args.device)
            with without_average_tokens(self.args), self._odb_trial_loss(model):
                return 0 * super().compute_loss(model, inputs, **kwargs)
        if run is None or run.computing is None:
            if isinstance(inputs, StepInputs):
                raise ConfigError(_not_reached(self, "training_step"))
            if num_items_in_batch is not None:  # in an evaluation
                kwargs["num_items_in_batch"] = num_items_in_batch
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        computing, loss = run.computing, run.computing.loss
        computing.is_weighed = True
        # Of this micro-batch alone: what divides by it returns a mean, as what does not look at it does.
        kwargs["num_items_in_batch"] = torch.full((), computing.num_items, device=self.args.device)
        with without_average_tokens(self.args), run.weighing(self._odb_token_loss(model)):
            result: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if return_outputs:
            return (in_float32(result[0]) * loss.scale, *result[1:])
        return in_float32(result) * loss.scale

    @contextlib.contextmanager
    def odb_flat(self, rows: FlatRows) -> Iterator[None]:
        """Every model that sees the batch computes these rows in the place of its own."""
        if not self.odb_doors:
            self.odb_doors = tuple(UnpadDoor(model) for model in models_of(self))
        with contextlib.ExitStack() as doors:
            for door in self.odb_doors:
                doors.enter_context(door.flat(rows))
            yield

    def _odb_token_loss(self, model: Any) -> TokenLoss:
        if self.odb_token_loss is None:
            assert self.odb_settings is not None
            self.odb_token_loss = TokenLoss(model, self.odb_settings.config.loss_scaling, why_logits(self))
        return self.odb_token_loss

    def _odb_trial_loss(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """So that a trial needs the memory that a micro-batch does."""
        assert self.odb_settings is not None and self.odb_trial_units is not None
        if self.odb_settings.equal_weights or TrainerLoss.of(self) is not None:
            return contextlib.nullcontext()
        return self._odb_token_loss(model).weighing(None, (), self.odb_trial_units)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        run = self.odb_run
        if run is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if run.fill is None:
            return super().create_scheduler(run.total_steps or num_training_steps, optimizer)
        steps = run.fill.steps_of_schedule(self.args.warmup_steps)
        factor = run.fill.learning_rate_factor()
        if factor != 1.0:
            scale_learning_rate(optimizer or self.optimizer, factor)
        scheduler = super().create_scheduler(steps, optimizer)
        run.fill.follow(scheduler)
        return scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        run = self.odb_run
        # `should_log` and both entries: the Trainer's own log of the training, not one of a callback or a subclass.
        if run is not None and self.control.should_log and {"loss", "learning_rate"} <= logs.keys():
            logs.update(run.accounting.interval_metrics())
        elif run is not None and "train_runtime" in logs:
            logs.update(run.accounting.metrics())
            done, seconds = run.accounting.since_resume, logs["train_runtime"]
            logs["train_samples_per_second"] = round(done.samples / seconds, 3)
            if self.odb_arguments is not None and self.odb_arguments.counts_tokens:
                logs["train_tokens_per_second"] = round(done.padded_tokens / run.loader.world_size / seconds, 3)
        super().log(logs, *args, **kwargs)


def _not_reached(trainer: Any, name: str) -> str:
    return (
        f"{name} of {type(trainer).__name__} does not come to the one of odb, so the loss would not be weighed; let "
        "every override of it call super(), or train without odb."
    )
