"""`Training`: one `train()` under online dynamic batching. To the Trainer its batches are optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, RandomSampler
from transformers import TrainerCallback
from transformers.trainer_utils import RemoveColumnsCollator

from odb_factory.accounting import Computing, StepAccounting, log_first_step
from odb_factory.config import BUDGETS, ResolvedConfig
from odb_factory.data.collate import Collated, trial_batches
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import PATCHES_KEY
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule, dismantle
from odb_factory.data.ranks import ring_of
from odb_factory.data.samples import Measured, MicroBatch, OptimizerStep
from odb_factory.ending import ending
from odb_factory.errors import CollectiveError, ConfigError, LayoutError, one_line
from odb_factory.log import get_logger
from odb_factory.model.check import (
    NUM_SAMPLES,
    Layout,
    Runs,
    check_rows,
    fall_back,
    models_of,
    of_flat_batch,
    resolve_layout,
)
from odb_factory.model.encoder import EncoderDoor
from odb_factory.model.engine import engine_of, gradients_deferred
from odb_factory.model.head import WithoutLogits
from odb_factory.model.known import can_know
from odb_factory.model.tower import images_at_once, one_pass, patch_products
from odb_factory.model.unpad import FlatRows, UnpadDoor
from odb_factory.training.arguments import replaced, run_arguments
from odb_factory.training.budgets import Recompute, can_be_measured, choose_budgets, find_recompute, rehearse
from odb_factory.training.checkpoint import CURSOR, Checkpoint, Preemption, go_to_checkpoint
from odb_factory.training.checks import check_hooks, check_own_rows, of_trainer, why_not_split
from odb_factory.training.oom import MemoryWatch, RestartedSteps
from odb_factory.training.shared_encoder import shared_encoder
from odb_factory.training.stock import StockLoss, UnknownWeights, assumed, measurable_model, measure, short_rows

logger = get_logger(__name__)

# The learning rate of a run whose number of optimizer steps is unknown (`fill` in epochs).
# A schedule is a curve over optimizer steps. The curve is drawn over an estimated number of steps and read at a
# position that follows the share of samples done: after half the samples the learning rate is that of half the run.

SAMPLES_TO_JUDGE_BY = 256
"""Lengths often vary as much as their mean, so the mean of 256 random ones is known to about 6 %."""


class FillSchedule:
    """The learning rate of a run. A run with a known number of steps keeps the Trainer's scheduler.

    is_shuffled: the order of samples is random. is_estimated: the number of steps is unknown.
    position: of the run on the curve, in estimated optimizer steps. warmup_steps: a warm-up given in optimizer steps,
    taken in real steps; 0 if it is a share of the run. total_steps: steps of the curve: warm-up plus the rest (at least
    1, so that a low estimate does not end the schedule at once); 0 before the scheduler is made.
    """

    def __init__(self, *, is_shuffled: bool, is_estimated: bool):
        self._is_shuffled, self._is_estimated = is_shuffled, is_estimated
        self.total_steps = self.warmup_steps = 0
        self.position = self._share_warm = 0.0
        self._lr_factor: float | None = None

    def advance(self, step: int, share: float) -> None:
        """Move to optimizer step `step` (real, from 1), with `share` (0 to 1) of all samples done."""
        if step <= self.warmup_steps:
            self.position, self._share_warm = float(step), share
        else:
            rest = (share - self._share_warm) / max(1.0 - self._share_warm, 1e-12)
            self.position = self.warmup_steps + rest * (self.total_steps - self.warmup_steps)

    def scale(self, loader: ODBLoader, optimizer: Any, scheduler: Any) -> None:
        """Multiply the learning rates by the factor of `lr_scale`, linear or sqrt: samples of an optimizer step
        (estimated from the first plan) / samples of stock's (rows of a batch x accumulation x ranks).

        Call before the first optimizer step; the rates of a checkpoint are multiplied already. Raises `ConfigError` if
        the first window may differ from the rest: few samples, or an order that is not random.
        """
        config, num_samples, rule = loader.config, loader.num_samples, loader.rule
        if self._lr_factor is not None or config.lr_scale == "none":
            return
        # Are the samples of the first window like the rest?
        name, window = f"odb.lr_scale: {config.lr_scale!r}", config.buffer_size * loader.world_size
        if num_samples is None:
            raise ConfigError(
                f"{name} needs to know how many samples an epoch has, and this dataset has no length; leave lr_scale "
                "out and set learning_rate itself."
            )
        if window < num_samples and (not self._is_shuffled or window < SAMPLES_TO_JUDGE_BY):
            why = (
                "so few need not be" if self._is_shuffled else "the first of an order that is not shuffled need not be"
            )
            raise ConfigError(
                f"{name} goes by the first {window} of {num_samples} samples, and {why} like the rest; raise "
                "buffer_size, or leave lr_scale out and set learning_rate itself."
            )
        # The factor, and the rates of optimizer and scheduler that it multiplies.
        samples = num_samples / loader.estimate_optimizer_steps()
        of_stock = rule.batch_size * rule.accumulation * loader.world_size
        ratio = samples / of_stock
        self._lr_factor = factor = ratio if config.lr_scale == "linear" else math.sqrt(ratio)
        for group in optimizer.param_groups:
            group.update({name: group[name] * factor for name in ("lr", "initial_lr") if name in group})
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's
        for name in ("base_lrs", "_last_lr"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
        logger.info(
            "learning rate x %.4g (lr_scale %s: about %.1f samples an optimizer step, %d by the training arguments)",
            factor,
            config.lr_scale,
            samples,
            of_stock,
        )

    def create(self, make: Callable[[int], Any], expected: int, warmup_steps: float) -> Any:
        """The scheduler of `make` over the expected optimizer steps. If these are estimated, the scheduler follows the
        samples done. warmup_steps: of the training arguments."""
        if not self._is_estimated:
            return make(expected)
        if not self.total_steps:
            self.warmup_steps = int(warmup_steps) if warmup_steps >= 1 else 0
            self.total_steps = self.warmup_steps + max(expected - self.warmup_steps, 1)
        scheduler = make(self.total_steps)
        if isinstance(scheduler, LambdaLR):  # every schedule of transformers that does not follow a metric
            # Plain functions: LambdaLR saves the attributes of callable objects with the checkpoint.
            at_position: list[Any] = [lambda _, curve=curve: curve(self.position) for curve in scheduler.lr_lambdas]
            scheduler.lr_lambdas = at_position
        elif "metrics" not in inspect.signature(scheduler.step).parameters:
            name, steps = type(scheduler).__name__, self.total_steps
            logger.warning("%s counts optimizer steps, which are estimated as %d", name, steps)
        return scheduler

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_is_shuffled", "_is_estimated")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class StepInputs(dict[str, torch.Tensor]):
    """An optimizer step, which the Trainer takes for a batch.

    Its entries are for the counts of the Trainer: a main input whose `numel` is the input tokens (without storage), and
    an attention mask whose sum is the tokens without padding. The micro-batches come from the loader one by one, so
    that one at a time is in memory.
    """

    def __init__(self, main_input: str, num_tokens: int, num_real_tokens: int, micro_batches: Iterator[Collated]):
        main = torch.empty(num_tokens, device="meta")
        super().__init__({main_input: main, "attention_mask": torch.tensor(num_real_tokens)})
        self.micro_batches = micro_batches


def not_reached(trainer: Any, name: str) -> str:
    return (
        f"{name} of {type(trainer).__name__} overrides odb's without calling super(), so the loss weights would be "
        "lost; let every override of it call super(), or train without odb."
    )


class Training(TrainerCallback):
    """One `train()`. To the Trainer it is the train dataloader, whose batches are optimizer steps, and a callback that
    sets the figures which the Trainer cannot know.

    checkpoint: to resume from. encoder: lets the ranks share the work of the vision tower. trial_units: units of a
        micro-batch that is only tried (`auto`).
    Set by `begin` (`has_begun`), when the Trainer asks for its dataloader:
    stock_dataloader: the Trainer's own, for callbacks, which may iterate it. stock: how stock makes the loss.
        user_values: training arguments that differ in a run.
    config, layout, loader, accounting, memory (names micro-batches that do not fit): replaced if layout or budgets
        change before the first optimizer step. is_unchecked: the layout is flat, and not yet checked. lacks_budgets:
        the config holds placeholders until `auto` budgets are chosen. accounting counts optimizer steps, those before a
        resume included. schedule: of the learning rate. step: the optimizer step taken last.
    epochs, max_steps: of the arguments; epochs are infinite if `max_steps` is set, else `max_steps` is None.
    Set by `settle`: restarts: takes the optimizer steps with `oom: split` or `skip`, and if a micro-batch may run again
        with recomputation. recompute: decides which micro-batches are recomputed; None: as configured.
    """

    config: ResolvedConfig
    loader: ODBLoader
    accounting: StepAccounting
    memory: MemoryWatch
    schedule: FillSchedule
    dataset: Any
    stock_dataloader: Any
    _parts: DataLoaderParts

    def __init__(self, trainer: Any, checkpoint: Checkpoint | None):
        self.odb, self.trainer, self.checkpoint = trainer.odb, trainer, checkpoint
        self.stock, self.layout = StockLoss(), Layout("padded", "not resolved yet")
        self.has_begun = self.is_unchecked = self.lacks_budgets = False
        self.user_values: dict[str, Any] = {}
        self.encoder: EncoderDoor | None = None
        self.restarts: RestartedSteps | None = None
        self.recompute: Recompute | None = None
        self.step: OptimizerStep | None = None
        self.trial_units: int | None = None
        self._epochs_before, self._least_length = 0.0, 0
        self._first_epoch: int | None = None
        self._ends = contextlib.ExitStack()

    # The begin

    def begin(self, stock: Any) -> None:
        """Make the loader. `settle` decides on its budgets and its layout once the model is wrapped.

        stock: the Trainer's train dataloader.
        """
        odb, trainer, args, dataset = self.odb, self.trainer, self.trainer.args, self.trainer.train_dataset
        self.stock_dataloader = stock
        self.max_steps: int | None = args.max_steps if args.max_steps > 0 else None
        self.epochs: float = args.num_train_epochs if self.max_steps is None else math.inf
        self.accumulation: int = args.gradient_accumulation_steps
        self._restarts_epoch, self._agree_on = args.ignore_data_skip, {**of_trainer(trainer), **odb.agree_on}
        # 1. The parts of the Trainer's dataloader. Without `data_seed` the order has torch's last seed, as in
        #    accelerate's sampler, unless the ranks differ in it.
        self._seed: int = args.data_seed
        if self._seed is None:
            seeds = odb.gather(torch.initial_seed())
            self._seed = seeds[0] if len(set(seeds)) == 1 else args.seed
        parts = dismantle(stock, self._seed, stream=dataset)
        if odb.collate_fn is not None:
            parts = dataclasses.replace(parts, collate_fn=odb.collate_fn)
        check_own_rows(trainer, parts)
        if odb.observer is None:
            parts = with_all_columns(parts, dataset, odb.cost_fn)
        self._parts = parts
        # 2. How stock makes the loss of an optimizer step. A stream can be read once, so none of its rows are read.
        if odb.equal_weights:
            self.stock = assumed(trainer, has_labels=False)
        else:
            model, scaling = measurable_model(trainer), odb.config.loss_scaling
            observer = odb.observer or odb.observer_of_items(parts, odb.config)
            has_rows = parts.sampler is not None
            rows = short_rows(parts.dataset, observer, args.process_index) if has_rows else []
            try:
                self.stock = measure(trainer, model, rows, parts.collate_fn, odb.gather)
            except ConfigError as error:
                if scaling == "stock" or (scaling != "none" and not isinstance(error, UnknownWeights)):
                    raise
                logger.warning("%s", error)
                self.stock = assumed(trainer, has_labels=True)
        # 3. The loader, in its first layout
        config = self._first_config()
        models, is_stream = models_of(trainer), isinstance(dataset, IterableDataset)
        layout = resolve_layout(models, odb.config.layout, args, refused=odb.not_flat, is_stream=is_stream)
        self.is_unchecked = layout.name == "flat"
        is_shuffled = getattr(parts.sampler, "shuffle", isinstance(parts.sampler, RandomSampler))
        is_estimated = not config.keeps and self.max_steps is None
        self.schedule = FillSchedule(is_shuffled=is_shuffled, is_estimated=is_estimated)
        self._make_loader(layout, config)
        self.user_values = self._ends.enter_context(run_arguments(trainer))

    def _first_config(self) -> ResolvedConfig:
        """The config with the `auto` budgets of the checkpoint or, before they are chosen, placeholders: each sample is
        a micro-batch, so that little is read."""
        config = self.odb.config
        if not (keys := config.auto_keys):
            return config.resolved()
        saved = None if self.checkpoint is None else self.checkpoint.saved
        if saved is not None and set(keys) <= saved["budgets"].keys():
            chosen = {key: saved["budgets"][key] for key in keys}
            logger.info(
                "%s, as chosen when this training began; a number in the YAML takes its place",
                ", ".join(f"{key}: auto is {'none' if value is None else value}" for key, value in chosen.items()),
            )
            return config.resolved(**chosen)
        self.lacks_budgets = True
        least: dict[str, int | None] = {"token_budget": config.pad_to_multiple_of or 1, "max_patches": None}
        resolved = config.resolved(**{key: least[key] for key in keys})
        return dataclasses.replace(resolved, overlong="singleton", buffer_size=1)

    def _make_loader(self, layout: Layout, config: ResolvedConfig) -> None:
        """Make the loader, at the start of the run or where its checkpoint left it, and its first plan."""
        odb, trainer, args, parts = self.odb, self.trainer, self.trainer.args, self._parts
        if self.has_begun:
            self._close_loader()
        self.layout, self.config, mean = layout, config, self.stock.mean
        observer: Any = odb.observer or odb.observer_of_items(parts, config)
        if self.stock.counts_unsupervised:
            observer.keeps_unsupervised = True
        # A first label counts in a mean over more than the row, though nothing predicts it.
        observer.counts_first_labels = mean.counts == "labels" and mean.over in ("step", "rank")
        self.loader = loader = odb.make_loader(
            parts,
            config,
            layout,
            observer=observer,
            rule=OptimizerStepRule(
                batch_size=parts.batch_size,
                accumulation=self.accumulation,
                drop_last=parts.drop_last,
                stock_mean=mean,
                equal_weights=odb.equal_weights,
            ),
            seed=self._seed,
            agree_on=self._agree_on,
            fingerprint=getattr(trainer.train_dataset, "_fingerprint", None),
            keeps_samples=config.oom != "raise" or self._repeats_alone,
        )
        self.dataset = loader.dataset
        self.accounting = StepAccounting(loader, args.output_dir if config.audit else None)
        self.has_begun = True
        if not self.lacks_budgets:
            odb.resolved = config
        self.memory = MemoryWatch(config, loader.budget, args)
        if (checkpoint := self.checkpoint) is not None:
            steps, restarts_epoch = checkpoint.optimizer_steps, self._restarts_epoch
            self._epochs_before = go_to_checkpoint(loader, checkpoint, restarts_epoch=restarts_epoch)
            self.accounting.resume_at(steps)
            if (an_epoch := loader.num_optimizer_steps) and steps // an_epoch > loader.epoch:
                # An epoch was restarted. The Trainer divides the steps taken by the length of an epoch, which must not
                # give more epochs than were done.
                self._least_length = steps // (loader.epoch + 1) + 1
            if checkpoint.saved is not None:
                self.schedule.load_state_dict(checkpoint.saved["schedule"])
        if not self.finished and loader.begin().is_empty:  # the Trainer would end at an epoch without a step
            loader.set_epoch(loader.epoch + 1)
            if not self.finished:
                loader.begin()

    def settle(self) -> None:
        """Check the flat layout, choose `auto` budgets, and replace the loader if these change it. Call after the model
        is wrapped."""
        trainer, odb = self.trainer, self.odb
        check_hooks(trainer)
        loader = self.loader
        if self.is_unchecked and loader.has_rows:
            why = self._check_layout(lambda: trial_batches(loader.first_samples(), loader.groups, NUM_SAMPLES))
            if why is not None:
                self._make_loader(fall_back(self.layout, odb.config.layout, why), self.config)
        if chooses := self.lacks_budgets:
            budgets = choose_budgets(trainer)
            self.lacks_budgets = False
            self._make_loader(self.layout, odb.config.resolved(**dataclasses.asdict(budgets)))
        self.schedule.scale(self.loader, trainer.optimizer, trainer.lr_scheduler)
        logger.info("layout: %s (%s)", self.layout.name, self.layout.reason)
        if (begun := self.loader.under_way) is not None and begun.planned:
            log_first_step(self.loader, begun.planned[0].step)
        # What happens if memory is short
        if not chooses and odb.memory_meter is not None:
            rehearse(trainer)
        self.recompute = self.memory.recompute = find_recompute(trainer)
        if self.config.oom != "raise" or (self.recompute is not None and self._repeats_alone):
            self.restarts = RestartedSteps(self)

    @property
    def _repeats_alone(self) -> bool:
        """Whether a micro-batch that ran out of memory without recomputation can run again with `oom: raise`. Only on
        one rank: restarted steps reduce their gradients late, which costs time on several."""
        args = self.trainer.args
        return can_be_measured(self.trainer) and args.world_size == 1 and why_not_split(args) is None

    def check_first_batch(self, batch: Any, segments: tuple[int, ...]) -> None:
        """Check a flat layout by the first micro-batch of a dataset whose rows have no number. segments: lengths of its
        samples (tokens). Raises `LayoutError` if the layout is wrong for the model."""
        if self.is_unchecked and (why := self._check_layout(lambda: of_flat_batch(batch, segments))):
            raise LayoutError(why)

    def _check_layout(self, make: Callable[[], Iterable[Any]]) -> str | None:
        """Why the flat layout is wrong for the model; None if it is right. Collective."""
        self.is_unchecked, trainer = False, self.trainer
        context = trainer.compute_loss_context_manager
        return check_rows(Runs(trainer.model_wrapped, trainer._prepare_inputs, self.odb.gather, context), make)

    # The length of the run

    @property
    def optimizer_steps(self) -> int:
        return self.accounting.optimizer_steps

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if unknown (`fill` in epochs)."""
        if self.max_steps is not None:
            return self.max_steps
        an_epoch = self.loader.num_optimizer_steps
        return None if an_epoch is None else max(math.ceil(self.epochs * an_epoch), self.optimizer_steps)

    def expected_steps(self) -> int:
        """`total_steps`, or an estimate, which equals the steps taken if and only if the run is done."""
        if (total := self.total_steps) is not None:
            return total
        steps, share = self.optimizer_steps, self._share
        if not share:
            return steps + math.ceil(self.epochs * self.loader.estimate_optimizer_steps())  # waits for the first plan
        return steps if share >= 1.0 else max(round(steps / share), steps + 1)

    @property
    def _share(self) -> float:
        """Share (0 to 1) of the samples that are done, in a run of epochs."""
        return min(self.epoch / self.epochs, 1.0)

    @property
    def finished(self) -> bool:
        """Whether a resumed run has nothing left to do."""
        if (total := self.total_steps) is not None:
            return self.optimizer_steps >= total
        return max(self._epochs_before, self.loader.epoch) >= self.epochs

    @property
    def epoch(self) -> float:
        """Epochs done once the current optimizer step is taken, as in stock."""
        step = self.step
        if step is None:
            return self._epochs_before
        if step.progress is not None:
            return step.epoch + step.progress
        if not self.config.keeps:
            return float(step.epoch + step.last)
        assert self.max_steps is not None
        return step.epoch + (step.index + 1) / self.max_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep_cursor(state)
        # Ordinary batches, for callbacks that look at them.
        self.trainer.callback_handler.train_dataloader = self.stock_dataloader
        if self.finished:
            logger.info("nothing is left to train: the checkpoint has all %s optimizer steps", self.optimizer_steps)
            return
        state.max_steps = self.expected_steps()
        if not self.config.keeps:
            an_epoch = max(self.loader.estimate_optimizer_steps(), 1)
            state.num_train_epochs = math.ceil(self.max_steps / an_epoch if self.max_steps else self.epochs)
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.step is None or self.optimizer_steps != state.global_step:
            raise ConfigError(not_reached(self.trainer, "training_step"))
        state.epoch = self.epoch
        self._keep_cursor(state)
        if self.config.keeps:
            return
        # The Trainer's loop is sized by a bound; this ends it in time.
        state.max_steps = self.expected_steps()
        control.should_epoch_stop = control.should_epoch_stop or self.step.last
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Other callbacks read the folder, as Ray Train's does on every rank: all ranks have written their files.
        self.trainer.accelerator.wait_for_everyone()

    def _keep_cursor(self, state: Any) -> None:
        """Put the present state into all checkpoints that are saved before the next optimizer step ends."""
        state.stateful_callbacks[CURSOR] = {"args": self.state_dict(), "attributes": {}}

    # Optimizer steps, as a dataloader

    def __len__(self) -> int:
        """Optimizer steps of an epoch: exact if they are kept, else an upper bound."""
        loader = self.loader
        length = loader.num_optimizer_steps
        if not self.config.keeps and self.max_steps is None and loader.num_samples is not None:
            # A micro-step has at least one sample, and all optimizer steps but the last have `accumulation` of them.
            length = -(-loader.num_samples // self.accumulation)
        if length is None:
            raise TypeError("the number of optimizer steps of an epoch is unknown")
        return max(length, self._least_length)

    def set_epoch(self, epoch: int) -> None:
        """Start the epoch. After a resume the Trainer's first epoch number follows from a bound, so the epochs are
        counted from the loader's."""
        if self._first_epoch is None:
            self._first_epoch = self.loader.epoch - epoch
        self.loader.set_epoch(epoch + self._first_epoch)

    def __iter__(self) -> Iterator[StepInputs]:
        """The optimizer steps of an epoch. The first request settles the run."""
        if self.finished:
            return
        if self.step is None:
            self.settle()
        main_input = getattr(self.trainer.model, "main_input_name", "input_ids")
        collated, box = iter(self.loader), list[Any]()
        while (first := self.accounting.next(collated)) is not None:
            step = first[0].step
            box.append(first)
            del first  # the box holds the only reference
            # Rank 0 reports the sums of all ranks: the Trainer adds up the figures of the ranks.
            padded, real = (step.padded_tokens, step.tokens) if self.loader.rank == 0 else (0, 0)
            tokens = padded if step.stock_input_tokens is None else step.stock_input_tokens
            yield StepInputs(main_input, tokens, real, self._micro_batches(box, collated))

    def _micro_batches(self, box: list[Any], collated: Iterator[Collated]) -> Iterator[Collated]:
        """The micro-batches of an optimizer step. box: holds the first. Keeps no reference to yielded micro-batches."""
        while box:
            is_last = box[0][0].ends_optimizer_step
            yield box.pop()
            if not is_last:
                box.append(self.accounting.next(collated))

    # Micro-batches

    def begin_micro_batch(self, micro_batch: MicroBatch, measured: Measured) -> Computing:
        """Begin the micro-batch whose forward comes next. `accounting.computing` weighs its loss until
        `accounting.end`."""
        self.step = micro_batch.step
        if micro_batch.index == 0 and self.schedule.total_steps:
            self.schedule.advance(self.optimizer_steps + 1, self._share)
        return self.accounting.begin(micro_batch, measured)

    @contextlib.contextmanager
    def flat(self, rows: FlatRows) -> Iterator[None]:
        """Within it every model that sees the batch computes these flat rows instead of the rows of the batch."""
        with contextlib.ExitStack() as doors:
            for door in self._doors:
                doors.enter_context(door.flat(rows))
            yield

    @functools.cached_property
    def _doors(self) -> list[UnpadDoor]:
        has_reward_head = hasattr(self.trainer.model, "pretrained_model")  # of TRL
        return [
            UnpadDoor(model, reads="hidden states" if has_reward_head else "labels")
            for model in models_of(self.trainer)
        ]

    @functools.cached_property
    def sample_door(self) -> WithoutLogits:
        """Lets the trainer compute the loss of a sample from its hidden states."""
        return WithoutLogits(self.trainer.model_wrapped)

    @functools.cached_property
    def knows_integers(self) -> bool:
        """Whether micro-batches pass through `with_known_integers`."""
        return can_know(self.trainer.model_wrapped, self.trainer.args.device)

    @contextlib.contextmanager
    def gradients_summed(self, model: Any, *, is_last: bool) -> Iterator[None]:
        """Within it gradients add up on each rank; the backward of the last micro-batch synchronises them."""
        accelerator, engine = self.trainer.accelerator, self._engine
        if engine == "deepspeed":  # newer releases of accelerate do the same by `sync_gradients`
            model.set_gradient_accumulation_boundary(is_last)
        syncs = is_last or engine in ("deepspeed", "none")
        syncs = syncs or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if engine == "sharded" and self.accumulation == 1:
            syncs = True  # unsynchronised gradients are whole, and stock training has no memory for them
        accelerator.sync_gradients = is_last
        try:
            with contextlib.nullcontext() if syncs else gradients_deferred(model):
                yield
        finally:
            accelerator.sync_gradients = True

    @functools.cached_property
    def _engine(self) -> str:
        return engine_of(self.trainer.model_wrapped)

    # The state and the end

    def state_dict(self) -> dict[str, Any]:
        """The state after the optimizer step taken last: JSON types, the same on all ranks. budgets: chosen by
        `auto`."""
        budgets = BUDGETS if self.odb.config.auto_keys else ()
        return {
            "optimizer_steps": self.optimizer_steps,
            "data": self.loader.state_dict(),
            "budgets": {key: getattr(self.config, key) for key in budgets},
            "schedule": self.schedule.state_dict(),
        }

    def _close_loader(self) -> None:
        self.loader.close()
        self.accounting.close()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Within it the Trainer trains with odb. Its end writes the summary (collective). An error also ends the other
        ranks, and its cause is raised, if known."""
        odb, trainer, args = self.odb, self.trainer, self.trainer.args
        callbacks, models = trainer.callback_handler.callbacks, (trainer.model, getattr(trainer, "ref_model", None))
        with self._ends as ends:
            odb.training = self
            try:
                callbacks.insert(0, self)  # the other callbacks read the figures that this one sets
                ends.callback(callbacks.remove, self)
                jit: Any = next((each for each in callbacks if getattr(each, "jit_manager", None) is not None), None)
                if jit is not None:
                    preemption = Preemption(jit.jit_manager, ring_of(None, odb.config.exchange_timeout_s).main)
                    callbacks.append(preemption)
                    ends.callback(callbacks.remove, preemption)
                    ends.callback(jit.on_train_end, args, trainer.state, trainer.control)
                    ends.enter_context(replaced(jit, jit_manager=None))
                ends.enter_context(patch_products(*models))
                ends.enter_context(images_at_once(*models if not args.torch_compile else ()))
                ends.enter_context(one_pass(*models if args.world_size > 1 else ()))
                for part in odb.parts:
                    ends.enter_context(part.in_place())
                self.encoder = ends.enter_context(shared_encoder(trainer))
                yield
                self.loader.leave()
                self.accounting.finish(Path(args.output_dir), round(self.epoch, 4))
            except BaseException as error:
                cause = ending(error, args.output_dir)
                if self.has_begun and not isinstance(cause, CollectiveError):  # which all ranks raise
                    self.loader.abort(one_line(cause))
                if cause is not error:
                    raise cause from error
                raise
            finally:
                if self.has_begun:
                    self._close_loader()
                self.layout.undo()
                odb.training, odb.token_losses = None, {}


def with_all_columns(parts: DataLoaderParts, train_dataset: Any, cost_fn: Callable | None) -> DataLoaderParts:
    """The parts with the columns that the Trainer removes from `train_dataset`, if costs are counted from them."""
    if not isinstance(parts.dataset, datasets.Dataset) or not isinstance(train_dataset, datasets.Dataset):
        return parts
    columns = parts.dataset.column_names
    removed = set(train_dataset.column_names) - set(columns)
    if PATCHES_KEY not in removed and (cost_fn is None or not removed):
        return parts
    return dataclasses.replace(
        parts, dataset=train_dataset, collate_fn=RemoveColumnsCollator(parts.collate_fn, columns)
    )
