"""`trainer.odb`: a `Session` has the settings of `enable_odb` and, during `train()`, a `Training`: its run and all that
is made for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import datasets
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpoint_function
from torch.utils.data import IterableDataset, RandomSampler
from transformers.trainer_utils import RemoveColumnsCollator

from odb_factory.accounting.losses import TokenLoss, in_float32
from odb_factory.accounting.statistics import Computing, log_first_step
from odb_factory.config import BUDGETS, ODBConfig, ResolvedConfig
from odb_factory.data.collate import Collated, trial_batches
from odb_factory.data.flat import UNPADDED
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import PATCHES_KEY, ItemObserver, Measure, Observer
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule, StockMean, dismantle
from odb_factory.data.ranks import Ranks, gather_once
from odb_factory.data.samples import Measured, OptimizerStep
from odb_factory.data.serialize import Picklable
from odb_factory.errors import ConfigError, LayoutError
from odb_factory.log import get_logger
from odb_factory.memory import MemoryMeter
from odb_factory.model.check import (
    NUM_SAMPLES,
    Layout,
    Runs,
    check_rows,
    fall_back,
    models_of,
    of_flat_batch,
    positions_of_media,
    resolve_layout,
    unwrapped,
)
from odb_factory.model.engine import Engine, engine_of, gradients_deferred
from odb_factory.model.flat_row import flat_row, noise_by_sample
from odb_factory.model.head import WithoutLogits
from odb_factory.model.known import can_know, with_known_integers
from odb_factory.model.unpad import FlatRows, UnpadDoor, positions_of_samples
from odb_factory.planner import Collation, Limits
from odb_factory.random_numbers import SamplerState
from odb_factory.training import checkpoint
from odb_factory.training.arguments import RunArguments
from odb_factory.training.auto_budget import choose_budgets, rehearse
from odb_factory.training.checkpoint import Checkpoint
from odb_factory.training.checks import (
    check_hooks,
    check_own_rows,
    of_trainer,
    why_logits,
    why_not_split,
)
from odb_factory.training.evaluation import Evaluation
from odb_factory.training.oom import MemoryWatch, RestartedSteps
from odb_factory.training.recompute import Recompute, can_be_measured, find_recompute
from odb_factory.training.run import ODBRun
from odb_factory.training.shared_encoder import SharedEncoder
from odb_factory.training.stock import (
    Rows,
    SampleModel,
    StockLoss,
    UnknownWeights,
    assumed,
    cut,
    measure,
    number_like,
    short_rows,
)

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# The dataloader that a run takes apart, with the columns that costs are counted from.


def with_all_columns(parts: DataLoaderParts, train_dataset: Any, cost_fn: Callable | None) -> DataLoaderParts:
    """With the columns of `train_dataset` that the Trainer removes, if costs are counted from them."""
    if not isinstance(parts.dataset, datasets.Dataset) or not isinstance(train_dataset, datasets.Dataset):
        return parts
    columns = parts.dataset.column_names
    removed = set(train_dataset.column_names) - set(columns)
    if PATCHES_KEY not in removed and (cost_fn is None or not removed):
        return parts
    return dataclasses.replace(
        parts, dataset=train_dataset, collate_fn=RemoveColumnsCollator(parts.collate_fn, columns)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The budgets of a run if the config says `auto`: from its checkpoint, or chosen when the model is wrapped.


def first_config(config: ODBConfig, resumed: Checkpoint | None) -> tuple[ResolvedConfig, bool]:
    """The config to begin with, and whether it has stand-ins for the budgets to train with.

    A resumed run keeps its budgets. Without them, each sample is a micro-batch until the budgets are chosen, so that
    little is read before.
    """
    if not (keys := config.auto_keys):
        return config.resolved(), False
    saved = None if resumed is None else resumed.saved
    if saved is not None and set(keys) <= saved["budgets"].keys():
        chosen = {key: saved["budgets"][key] for key in keys}
        logger.info(
            "%s, as chosen when this training began; a number in the YAML takes its place",
            ", ".join(f"{key}: auto is {'none' if value is None else value}" for key, value in chosen.items()),
        )
        return config.resolved(**chosen), False
    stand_in: dict[str, int | None] = {"token_budget": config.pad_to_multiple_of or 1, "max_patches": None}
    resolved = config.resolved(**{key: stand_in[key] for key in keys})
    return dataclasses.replace(resolved, overlong="singleton", buffer_size=1), True


# ----------------------------------------------------------------------------------------------------------------------


def not_reached(trainer: Any, name: str) -> str:
    return (
        f"{name} of {type(trainer).__name__} overrides odb's without calling super(), so the loss weights would be "
        "lost; let every override of it call super(), or train without odb."
    )


def routers_weigh(rule: OptimizerStepRule, step: OptimizerStep, world_size: int) -> float:
    """How often stock adds the loss of a model's routers in an optimizer step.

    If the loss of tokens is divided by the tokens of all micro-batches, nothing divides that of routers: it is added
    once a micro-batch and, if tokens are counted on all ranks, multiplied by these as the rest is.
    """
    if rule.stock_mean.over not in ("step", "rank"):
        return 1.0
    micro_batches = math.ceil(step.samples / rule.batch_size)
    return micro_batches / (world_size if rule.stock_mean.over == "rank" else 1)


Way = Literal["number of stock", "by sample", "mean"]
"""How the loss of a micro-batch is made. number of stock: stock's own number of items of the optimizer step makes it
weigh as in stock. by sample: code of the trainer is called once a sample. mean: over the units of the micro-batch,
which is weighed here."""


@dataclass(eq=False, kw_only=True, repr=False)
class Session:
    """odb on one trainer, as long as that lives: `trainer.odb`. The first fields are the arguments of `enable_odb`.

    before_step: called with the model and all micro-batches of an optimizer step before the first is trained on, which
        are in memory together then; None: they come one by one.
    collate_fn: of training, in the place of the trainer's data collator. parts: what `train()` changes on the trainer:
        each has `in_place()`, a context.
    training: the `train()` in progress. evaluation: by budget, while one runs, in a training or not. eval_limits: to
        which this rank has lowered the budgets of evaluations. eval_mean: what stock's loss of an evaluation is made
        of, once it is measured.
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
    eval_limits: Limits | None = None
    eval_mean: StockMean | None = None
    _token_losses: dict[str | None, TokenLoss] = field(default_factory=dict)
    _resolved: ResolvedConfig | None = None

    def end(self) -> None:
        """Forget the training, and what was made for its model, but not the budgets that it has chosen."""
        self._resolved = self.resolved
        self.training, self._token_losses = None, {}

    @property
    def resolved(self) -> ResolvedConfig | None:
        """With the budgets of the training, or of the last one; None while those of `auto` are not chosen."""
        if self.training is not None and self.training.has_begun:
            return None if self.training.lacks_budgets else self.training.run.config
        return self._resolved or (None if self.config.auto_keys else self.config.resolved())

    def gather(self, content: Any) -> list[Any]:
        """The contents (JSON types) of all ranks, in rank order. Collective."""
        answers = gather_once(json.dumps(content).encode(), self.config.exchange_timeout_s)
        return [json.loads(answer) for answer in answers]

    # For a training and for evaluations

    def observer_of_items(self, parts: DataLoaderParts, config: ODBConfig | ResolvedConfig) -> ItemObserver:
        """Of a dataset that yields processed samples."""
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

    # A micro-batch

    @property
    def computing(self) -> Computing | None:
        """The micro-batch in forward and backward; None if stock computes."""
        if self.evaluation is not None:
            return self.evaluation.computing
        if self.training is None or not self.training.has_begun:
            return None
        return self.training.run.accounting.computing

    @property
    def num_items(self) -> int | None:
        """Units (>= 1) of the micro-batch in forward, also of one that is only tried; None if stock computes."""
        if (computing := self.computing) is not None:
            return computing.num_items
        return None if self.training is None else self.training.trial_units

    @property
    def way(self) -> Way:
        """How the loss of the micro-batch in forward is made."""
        computing, training = self.computing, self.training
        if computing is None or training is None or self.evaluation is not None or not computing.micro_batch.samples:
            return "mean"
        stock = training.stock
        if stock.is_trainers:
            return "by sample"
        # Stock's own number of items makes any cut of the optimizer step stock's.
        is_stock = self.config.loss_scaling == "stock" and computing.loss.row_weights is None
        return "number of stock" if is_stock and stock.number is not None and stock.mean.over == "step" else "mean"

    @property
    def stock_number(self) -> tuple[Any, ...]:
        """Stock's own number of items of the optimizer step, as an argument of `training_step`; (): none is taken."""
        if self.way != "number of stock":
            return ()
        assert self.computing is not None and self.training is not None
        units = self.computing.micro_batch.samples[0].stock_units
        return (number_like(self.training.stock.number, units, self.trainer.args.device),)

    @contextlib.contextmanager
    def in_forward(self, measured: Measured) -> Iterator[None]:
        """Within it the models compute this micro-batch."""
        reference = getattr(self.trainer, "ref_model", None)
        positions = contextlib.nullcontext() if reference is None else positions_of_samples(unwrapped(reference))
        with flat_row(measured.segments), positions:
            yield

    def unpadded(self, inputs: Any) -> tuple[Any, contextlib.AbstractContextManager[None]]:
        """A batch without the rows that its models compute in place of its own, and the context in which they do."""
        if self.training is None or not isinstance(inputs, dict) or UNPADDED not in inputs:
            return inputs, contextlib.nullcontext()
        batch = {key: value for key, value in inputs.items() if not key.endswith(UNPADDED)}
        return batch, self.training.flat(FlatRows(**inputs[UNPADDED]))

    def weighing(self, model: Any, num_items: int) -> contextlib.AbstractContextManager[None]:
        """Within it the loss of the model in the current micro-batch is the weighted sum over its tokens, also in a
        trial, which needs the same memory. model: as trained. num_items: what a sum of equal weights is divided by."""
        computing, training = self.computing, self.training
        if self.equal_weights or (training is not None and training.stock.is_trainers):
            return contextlib.nullcontext()  # the trainer's own loss
        row_weights = None if computing is None else computing.loss.row_weights
        measured = None if computing is None else computing.measured
        segments, num_supervised = ((), None) if measured is None else (measured.segments, measured.num_supervised)
        if computing is not None and row_weights is None and num_supervised is None:
            return contextlib.nullcontext()  # the model's own mean
        times, is_stock = 1.0, self.config.loss_scaling == "stock" and self.evaluation is None
        if computing is not None and training is not None and is_stock:
            step = computing.micro_batch.step
            times = routers_weigh(training.run.loader.rule, step, self.trainer.args.world_size)
            times *= computing.num_items / num_items
        return self._loss_of(model).weighing(row_weights, segments, num_items, num_supervised, times)

    @property
    def is_measured_with_args(self) -> bool:
        """Whether the weights of samples are those of losses that stock may have multiplied by the number of ranks."""
        is_stock = self.config.loss_scaling == "stock" and self.evaluation is None
        return is_stock and self.training is not None and self.training.stock.is_trainers

    def loss_by_sample(self, compute_loss: Callable[..., Tensor], model: Any, inputs: Mapping[str, Any]) -> Any:
        """The weighted sum of the losses of the samples of the micro-batch in forward, each computed from its own
        logits, and the output of the model. compute_loss: of the trainer. If the model allows it, the logits of one
        sample exist at a time."""
        computing, training = self.computing, self.training
        assert computing is not None and training is not None
        stock, samples, measured = training.stock, computing.micro_batch.samples, computing.measured
        rows, length = inputs["labels"].shape
        if measured.segments:
            ends = list(itertools.accumulate(measured.segments))
            places = [(0, end - size, end) for end, size in zip(ends, measured.segments)]
        else:
            sizes, pads_left = computing.micro_batch.lengths, computing.pads_left or [False] * rows
            starts = [length - size if is_left else 0 for size, is_left in zip(sizes, pads_left)]
            places = [(row, start, start + size) for row, (start, size) in enumerate(zip(starts, sizes))]
        counts_first = self.is_measured_with_args and stock.mean.counts == "all labels"
        weights = computing.loss.row_weights or [1 / computing.num_items] * len(samples)

        def loss_of(number: int, logits: Tensor) -> Tensor:
            sample, alone = samples[number], SampleModel(self.trainer.model, logits)
            num_items = number_like(stock.number, sample.units, logits.device)
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

        if training.sample_door.gives_states:

            def of_states(logits_of: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
                def of_part(number: int, states: Tensor) -> Tensor:
                    return loss_of(number, logits_of(states))

                options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
                return total_of(hidden, functools.partial(checkpoint_function, of_part, **options))

            output, total = training.sample_door.at_head(run, of_states)
            return total, output
        output = run()
        return total_of(output["logits"] if isinstance(output, dict) else output[0], loss_of), output

    def _loss_of(self, model: Any) -> TokenLoss:
        why = why_logits(self.trainer)
        if self.evaluation is not None and not self.evaluation.loss_only:
            why = why or "the predictions of an evaluation are made of them"
        if why not in self._token_losses:
            is_measured = self.training is not None and self.training.is_measured
            self._token_losses[why] = TokenLoss(model, self.config.loss_scaling, why, is_measured=is_measured)
        return self._token_losses[why]


class Training:
    """One `train()`, from its begin to its end.

    arguments: the training arguments that it changes. checkpoint: that it resumes. encoder: the vision tower, if
        the ranks share its work. restarts: takes the optimizer steps with `oom: split` or `skip`, and if a micro-batch
        may run again with recomputation. recompute: decides which micro-batches are recomputed; None: as configured.
    layout: of its micro-batches; is_unchecked: it is flat, and not yet checked. lacks_budgets: the config holds
        stand-ins until `auto` budgets are chosen. trial_units: units of a micro-batch that is only tried (`auto`).
    From `begin` on (`has_begun`), when the Trainer asks for its dataloader:
    run: its loader, length and figures. memory: names micro-batches that do not fit. stock: how stock makes the loss;
        is_measured: by a measurement.
    """

    _run: ODBRun | None = None
    memory: MemoryWatch
    stock = StockLoss()
    is_measured = False
    _refusal: ConfigError | None = None
    _parts: DataLoaderParts
    _sampler_at_begin: SamplerState

    def __init__(self, odb: Session, checkpoint: Checkpoint | None):
        self.odb, self.trainer, self.checkpoint = odb, odb.trainer, checkpoint
        self.arguments = RunArguments(odb.trainer)
        self.encoder: SharedEncoder | None = None
        self.restarts: RestartedSteps | None = None
        self.recompute: Recompute | None = None
        self.layout = Layout("padded", "not resolved yet")
        self.is_unchecked = self.lacks_budgets = False
        self.trial_units: int | None = None
        self._doors: list[UnpadDoor] = []
        self._knows_integers: bool | None = None
        self._engine: Engine | None = None

    @functools.cached_property
    def sample_door(self) -> WithoutLogits:
        """Where code of the trainer computes the loss of a sample from its hidden states."""
        return WithoutLogits(self.trainer.model_wrapped)

    @property
    def has_begun(self) -> bool:
        """Whether the Trainer has asked for its dataloader."""
        return self._run is not None

    @property
    def run(self) -> ODBRun:
        if self._run is None:
            raise ConfigError(not_reached(self.trainer, "get_train_dataloader"))
        return self._run

    def begin(self, stock: Any) -> None:
        """Make the run of the settings. Its budgets and its layout are settled when the model is wrapped.

        stock: the Trainer's train dataloader.
        """
        odb, args, dataset = self.odb, self.trainer.args, self.trainer.train_dataset
        self._seed = self._seed_of_order()
        self._parts = dismantle(stock, self._seed, stream=dataset)
        if odb.collate_fn is not None:
            self._parts = dataclasses.replace(self._parts, collate_fn=odb.collate_fn)
        check_own_rows(self.trainer, self._parts)
        if odb.observer is None:
            self._parts = with_all_columns(self._parts, dataset, odb.cost_fn)
        config, self.lacks_budgets = first_config(odb.config, self.checkpoint)
        self._sampler_at_begin = SamplerState(self._parts.sampler)
        self.stock = self._ask_stock()
        models, is_stream = models_of(self.trainer), isinstance(dataset, IterableDataset)
        layout = resolve_layout(models, odb.config.layout, args, refused=odb.not_flat, is_stream=is_stream)
        self._make_run(layout, config)
        if self._refusal is not None:
            raise self._refusal
        self.is_unchecked = layout.name == "flat"
        self.arguments.hide()

    def _ask_stock(self) -> StockLoss:
        """How stock makes the loss of an optimizer step. Collective."""
        odb, trainer = self.odb, self.trainer
        if odb.equal_weights:
            return assumed(trainer)
        try:
            stock = measure(trainer, self._rows_to_measure(), self._parts.collate_fn, odb.gather)
        except ConfigError as error:
            is_own = isinstance(error, UnknownWeights)  # then other weights can be given to the losses of samples
            if odb.config.loss_scaling == "stock" or (odb.config.loss_scaling != "none" and not is_own):
                self._refusal = error  # raised once a checkpoint has been compared, whose message may be the cause
            else:
                logger.warning("%s", error)
            return assumed(trainer)
        self.is_measured = True
        return stock

    def _rows_to_measure(self) -> Rows:
        """None of a stream, of which each row can be read once."""
        if self._parts.sampler is None:
            return []
        observer = self.odb.observer or self.odb.observer_of_items(self._parts, self.odb.config)
        return short_rows(self._parts.dataset, observer, self.trainer.args.process_index)

    def _seed_of_order(self) -> int:
        """Of the order of samples: if none is given that which torch was seeded with last, as accelerate's sampler
        takes it, unless that is another on each rank. Collective."""
        args = self.trainer.args
        if args.data_seed is not None:
            return args.data_seed
        seeds = self.odb.gather(torch.initial_seed())
        return seeds[0] if len(set(seeds)) == 1 else args.seed

    def settle(self) -> None:
        """Settle the run to train with: replaces the one that has begun if the flat layout fails its check, or once
        `auto` budgets are chosen. Call after the model is wrapped."""
        trainer, odb = self.trainer, self.odb
        check_hooks(trainer)
        if self.layout.name == "flat" and getattr(trainer, "neftune_hook_handle", None) is not None:
            trainer.neftune_hook_handle.remove()
            embedding = unwrapped(trainer.model).get_input_embeddings()
            trainer.neftune_hook_handle = embedding.register_forward_hook(noise_by_sample)
        loader, configured = self.run.loader, odb.config
        if self.is_unchecked and loader.has_rows:
            why = self._check_layout(lambda: trial_batches(loader.first_samples(), loader.groups, NUM_SAMPLES))
            if why is not None:
                self._replace_run(fall_back(self.layout, configured.layout, why), self.run.config)
        if chooses := self.lacks_budgets:
            budgets = choose_budgets(trainer)
            self.lacks_budgets = False
            self._replace_run(self.layout, configured.resolved(**dataclasses.asdict(budgets)))
        self.run.schedule.scale(trainer.optimizer, trainer.lr_scheduler)
        logger.info("layout: %s (%s)", self.layout.name, self.layout.reason)
        if (begun := self.run.loader.under_way) is not None and begun.planned:
            log_first_step(self.run.loader, begun.planned[0].step)
        # What happens if memory is short.
        config = self.run.config
        if not chooses and odb.memory_meter is not None:
            rehearse(trainer)
        self.recompute = self.memory.recompute = find_recompute(trainer)
        if config.oom != "raise" or (self.recompute is not None and self._repeats_alone):
            self.restarts = RestartedSteps(self)

    @property
    def _repeats_alone(self) -> bool:
        """Whether a micro-batch that ran out of memory without recomputation can run again, with `oom: raise`, too. On
        several ranks it would cost something: restarted steps reduce their gradients late."""
        args = self.trainer.args
        return can_be_measured(self.trainer) and args.world_size == 1 and why_not_split(args) is None

    def check_first_batch(self, batch: Any, segments: tuple[int, ...]) -> None:
        """Check a flat layout by the first micro-batch, if rows cannot be read by their number. segments: of its
        samples. Raises `LayoutError` if the layout is not right for the model."""
        why = self._check_layout(lambda: of_flat_batch(batch, segments)) if self.is_unchecked else None
        if why is not None:
            raise LayoutError(why)

    def _check_layout(self, make: Callable[[], Iterable[Any]]) -> str | None:
        """Why the flat layout is not right for the model; None if it is. Collective."""
        self.is_unchecked, trainer, gather = False, self.trainer, self.odb.gather
        runs = Runs(trainer.model_wrapped, trainer._prepare_inputs, gather, trainer.compute_loss_context_manager)
        return check_rows(runs, make)

    def _replace_run(self, layout: Layout, config: ResolvedConfig) -> None:
        before = self.run
        before.close()
        self._sampler_at_begin.restore()
        self._make_run(layout, config)
        before.schedule.loader, before.schedule.config = self.run.loader, config
        self.run.schedule = before.schedule  # the scheduler follows it

    def _make_run(self, layout: Layout, config: ResolvedConfig) -> None:
        """A run at its start, or where its checkpoint left it, with its first plan made."""
        odb, trainer, args = self.odb, self.trainer, self.trainer.args
        self.layout = layout
        with self.arguments.shown():
            # 1. the loader, from the parts of the Trainer's dataloader
            parts = self._parts
            observer: Any = odb.observer or odb.observer_of_items(parts, config)
            if self.stock.counts_unsupervised:
                observer.keeps_unsupervised = True
            # Such a label counts, though nothing predicts it; a mean over the micro-batch of a row alone has no value.
            mean = self.stock.mean
            observer.counts_first_labels = mean.counts == "labels" and mean.over in ("step", "rank")
            loader = odb.make_loader(
                parts,
                config,
                layout,
                observer=observer,
                rule=OptimizerStepRule(
                    batch_size=parts.batch_size,
                    accumulation=args.gradient_accumulation_steps,
                    drop_last=parts.drop_last,
                    stock_mean=self.stock.mean,
                    equal_weights=odb.equal_weights,
                ),
                seed=self._seed,
                agree_on={**of_trainer(trainer), **odb.agree_on},
                fingerprint=getattr(trainer.train_dataset, "_fingerprint", None),
                keeps_samples=config.oom != "raise" or self._repeats_alone,
            )
            # 2. the run
            is_shuffled = getattr(parts.sampler, "shuffle", isinstance(parts.sampler, RandomSampler))
            run = self._run = ODBRun(loader, args, is_shuffled=is_shuffled)
            restarts_epoch = args.ignore_data_skip
        if odb.config.auto_keys:
            run.budgets = {key: getattr(config, key) for key in BUDGETS}
        cuts_nothing = config.oom == "raise" and not config.balance_encoder
        advises_split = cuts_nothing and why_not_split(args) is None
        self.memory = MemoryWatch(config, loader.budget, args.device, advises_split=advises_split)
        # 3. where a checkpoint left it, and the first plan
        if self.checkpoint is not None:
            checkpoint.load(run, self.checkpoint, restarts_epoch=restarts_epoch)
        if not run.finished and loader.begin().is_empty:  # the Trainer would end at an epoch without a step
            loader.set_epoch(loader.epoch + 1)
            if not run.finished:
                loader.begin()

    # Its micro-batches

    @contextlib.contextmanager
    def flat(self, rows: FlatRows) -> Iterator[None]:
        """Every model that sees the batch computes these rows in place of its own."""
        has_reward_head = hasattr(self.trainer.model, "pretrained_model")  # of TRL
        self._doors = self._doors or [
            UnpadDoor(model, reads="hidden states" if has_reward_head else "labels")
            for model in models_of(self.trainer)
        ]
        with contextlib.ExitStack() as doors:
            for door in self._doors:
                doors.enter_context(door.flat(rows))
            yield

    def with_known_integers(self, model: Any, batch: Any) -> Any:
        """The batch of a collator as the model, which is wrapped, computes it."""
        device = self.trainer.args.device
        if self._knows_integers is None:
            self._knows_integers = can_know(model, device)
        return with_known_integers(batch, device) if self._knows_integers else batch

    @contextlib.contextmanager
    def gradients_summed(self, model: Any, *, is_last: bool) -> Iterator[None]:
        """Gradients add up on each rank, and are synchronised with those of the last micro-batch, as in the Trainer."""
        self._engine = self._engine or engine_of(model)  # which passes all modules and parameters
        accelerator, engine = self.trainer.accelerator, self._engine
        if engine == "deepspeed":  # newer releases of accelerate do the same by `sync_gradients`
            model.set_gradient_accumulation_boundary(is_last)
        syncs = is_last or engine in ("deepspeed", "none")
        syncs = syncs or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if engine == "sharded" and self.arguments.accumulation == 1:
            syncs = True  # it would hold whole gradients, for which stock training needs no memory
        accelerator.sync_gradients = is_last
        try:
            with contextlib.nullcontext() if syncs else gradients_deferred(model):
                yield
        finally:
            accelerator.sync_gradients = True

    # Its end

    def close(self, error: BaseException | None = None) -> None:
        """End the run, its worker processes and its files. error: the training has failed on this rank."""
        failed = error is not None
        if error is not None and self.has_begun:
            self.run.abort(error)
        if self.has_begun:
            self.run.close()
        self.layout.undo()
        if (noise := getattr(self.trainer, "neftune_hook_handle", None)) is not None:
            noise.remove()  # stock leaves it after an error
        if self.encoder is not None:
            self.encoder.close(failed=failed)
        self.odb.end()
