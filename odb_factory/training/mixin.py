"""`ODBTrainerMixin`: the few Trainer methods that online dynamic batching changes.

Only methods with the same meaning in transformers 4.55 to 5.x are overridden, and all but the two
that bring the batches call `super()`. What they rely on inside the Trainer is probed before training (`probes.py`).
The Trainer keeps its loop; `ODBCallback` sets its figures right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from odb_factory.accounting.loss_weights import without_average_tokens
from odb_factory.comm.gloo import gather_once
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.training import checkpoint, columns, probes
from odb_factory.training.checks import check_trainer
from odb_factory.training.find_checkpoint import find_checkpoint
from odb_factory.training.progress import CheckpointMark, ODBCallback
from odb_factory.training.run import ODBRun
from odb_factory.training.schedule import ScheduleClock, follow_clock, scale_learning_rate
from odb_factory.training.train_loader import TrainLoader

if TYPE_CHECKING:
    from transformers import Trainer

    from odb_factory.training.enable import ODBSettings

    Base = Trainer
else:
    Base = object

logger = get_logger(__name__)


class ODBTrainerMixin(Base):
    """Goes before a `transformers.Trainer` class in the bases: `class MyTrainer(ODBTrainerMixin, Trainer)`.

    Then `enable_odb(trainer, ...)` switches it on (it also does so for a trainer without the mixin).
    odb_settings: makes the run, given the trainer and its stock train dataloader; None: stock behaviour.
    odb_run: the run of the `train()` under way; None outside of it, where everything is stock's.
    """

    odb_settings: ODBSettings | None = None
    odb_run: ODBRun | None = None
    odb_checkpoint: str | None = None
    odb_is_training: bool = False
    odb_callback: ODBCallback | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.odb_settings is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        check_trainer(self)
        probes.check_seams(self)
        found = find_checkpoint(
            resume_from_checkpoint,
            output_dir=str(self.args.output_dir),
            rank=self.args.process_index,
            world_size=self.args.world_size,
            ignore_data=self.odb_settings.config.resume == "ignore_data",
            gather=self._odb_gather,
        )
        self.odb_checkpoint = resume_from_checkpoint = None if found is None else str(found)
        skips, self.args.ignore_data_skip = self.args.ignore_data_skip, True  # the loader stands where it has to
        callback = self.odb_callback = ODBCallback(self)
        # First, so that every other callback reads the step count and epoch already set right.
        self.callback_handler.callbacks.insert(0, callback)
        self.odb_is_training = True
        self.add_callback(CheckpointMark())
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            if self.odb_run is None:
                raise ConfigError(_not_reached(self, "get_train_dataloader"))
            self.odb_run.finish()
            return result
        except BaseException as error:
            if self.odb_run is not None:
                self.odb_run.abort(error)
            raise
        finally:
            self.odb_is_training = False
            self.args.ignore_data_skip = skips
            self.callback_handler.callbacks.remove(callback)
            self.remove_callback(CheckpointMark)
            self.odb_callback = None
            if self.odb_run is not None:
                self.odb_run.close()
                self.odb_run = None

    def get_train_dataloader(self) -> Any:
        """In `train()` the loader of the run; at all other times stock's, and nothing is started."""
        stock = super().get_train_dataloader()
        if self.odb_settings is None or not self.odb_is_training or self.odb_run is not None:
            return stock
        source = stock
        if self.odb_settings.observer is None and columns.are_needed(
            stock, self.train_dataset, self.odb_settings.cost_fn
        ):
            self.args.remove_unused_columns = False
            try:
                source = super().get_train_dataloader()
            finally:
                self.args.remove_unused_columns = True
        self.odb_run = self.odb_settings.make_run(self, source, stock)
        if self.odb_checkpoint is not None:
            checkpoint.load(self.odb_run, Path(self.odb_checkpoint))
        if not self.odb_run.finished:
            self.odb_run.loader.start()
        return TrainLoader(self.odb_run, stock)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.odb_run is not None and self.odb_callback is not None:
            # Before the Trainer writes its files, and deletes older checkpoints.
            self.odb_callback.begin_save(output_dir)
        super().save_model(output_dir, _internal_call)

    def _odb_gather(self, numbers: list[int]) -> list[list[int]]:
        """What each rank says, to all ranks."""
        assert self.odb_settings is not None
        answers = gather_once(json.dumps(numbers).encode(), self.odb_settings.config.exchange_timeout_s)
        return [json.loads(answer) for answer in answers]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        if self.odb_run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        # None instead of num_items_in_batch: every model then returns its mean loss, which is weighed below.
        return self.odb_run.take(epoch_iterator, num_batches), None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self.odb_run
        if run is None:
            return super().training_step(*args, **kwargs)
        if not run.has_batch:
            raise ConfigError(_not_reached(self, "get_batch_samples"))
        run.begin_step()
        loss = super().training_step(*args, **kwargs)
        if not run.is_weighed:
            raise ConfigError(_not_reached(self, "compute_loss"))
        run.end_step()
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        run = self.odb_run
        if run is None or run.weight is None:  # evaluation
            if run is not None and run.has_batch and model.training:
                raise ConfigError(_not_reached(self, "training_step"))
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        weight, run.is_weighed = run.weight, True
        if self.compute_loss_func is None:
            # The Trainer divides by this afterwards, unless a loss function of the user's own took the loss over.
            weight *= self.current_gradient_accumulation_steps
        else:
            # Of this micro-batch alone: a function that divides by it then returns a mean too, and one that is not
            # asked for it (LLaMA-Factory's asft) does so anyway.
            kwargs["num_items_in_batch"] = torch.tensor(run.num_items, device=self.args.device)
        with without_average_tokens(self.args):
            result: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        return (result[0] * weight, *result[1:]) if return_outputs else result * weight

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        run = self.odb_run
        if run is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if run.max_steps is None and run.clock is None:
            warmup_steps = int(self.args.warmup_steps) if self.args.warmup_steps >= 1 else 0
            run.clock = ScheduleClock(run.estimated_optimizer_steps(), warmup_steps)
        factor = run.learning_rate_factor()
        if factor != 1.0:
            scale_learning_rate(optimizer or self.optimizer, factor)
        steps = run.estimated_optimizer_steps() if run.clock is None else run.clock.total_steps
        scheduler = super().create_scheduler(steps, optimizer)
        if run.clock is not None and run.max_steps is None:
            follows = follow_clock(scheduler, run.clock)
            if not follows and not isinstance(scheduler, ReduceLROnPlateau):
                logger.warning("%s counts optimizer steps, which are estimated as %d", type(scheduler).__name__, steps)
        return scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        run = self.odb_run
        # `should_log` and both entries: the Trainer's own log of the training, not one of a callback or a subclass.
        if run is not None and self.control.should_log and {"loss", "learning_rate"} <= logs.keys():
            logs.update(run.interval_metrics())
        elif run is not None and "train_runtime" in logs:
            logs.update(run.run_metrics())
            logs["train_samples_per_second"] = round(run.samples_since_resume / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)


def _not_reached(trainer: Any, name: str) -> str:
    return (
        f"{name} of {type(trainer).__name__} does not come to the one of odb, so the loss would not be weighed; let "
        "every override of it call super(), or train without odb."
    )
