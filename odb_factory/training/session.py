"""`trainer.odb`: the settings of `enable_odb` and, during `train()`, the run; how a run is made and settled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import datasets
import numpy as np
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset, RandomSampler
from transformers import TrainerCallback
from transformers.trainer_utils import RemoveColumnsCollator

from odb_factory.accounting.losses import LossBySet, TokenLoss
from odb_factory.accounting.statistics import Computing
from odb_factory.accounting.step_accounting import log_first_step
from odb_factory.comm.agreement import compare
from odb_factory.comm.gloo import Group, gather_once, patience_of, release
from odb_factory.comm.ranks import Ranks
from odb_factory.config import BUDGETS, ODBConfig, ResolvedConfig
from odb_factory.data.collate import Collated, trial_batches
from odb_factory.data.flat import UNPADDED
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import PATCHES_KEY, ItemObserver, Measure, Observer
from odb_factory.data.order import DataLoaderParts, dismantle
from odb_factory.data.progress import OptimizerStepRule
from odb_factory.data.samples import Measured
from odb_factory.data.serialize import Picklable
from odb_factory.errors import one_line
from odb_factory.log import get_logger
from odb_factory.memory import PeakMeter
from odb_factory.model.check import (
    NUM_SAMPLES,
    Layout,
    Runs,
    Trial,
    check_rows,
    fall_back,
    models_of,
    not_right,
    of_batches,
    of_flat_batch,
    resolve_layout,
    unwrapped,
)
from odb_factory.model.encoder import EncoderDoor, cost_of, find_tower
from odb_factory.model.flat_row import flat_row, noise_by_sample
from odb_factory.model.unpad import FlatRows, UnpadDoor, positions_of_samples
from odb_factory.planning import Collation, EncoderCost, EncoderPlan, Limits, plan_encoders
from odb_factory.training import checkpoint
from odb_factory.training.auto_budget import choose_budgets, rehearse
from odb_factory.training.checkpoint import Checkpoint, CheckpointSaver
from odb_factory.training.checks import check_hooks, of_trainer, why_not_split
from odb_factory.training.evaluation import Evaluation
from odb_factory.training.oom import MemoryWatch, RestartedSteps
from odb_factory.training.run import ODBRun, Operations, device_of
from odb_factory.training.trainer_loss import TrainerLoss, stock_mean, why_logits

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# Training arguments that have other values while odb trains.
# The Trainer's accumulation is 1, so that it counts optimizer steps, and it skips no batches after a resume, because
# the loader starts at the right place. It makes no pass over all data beforehand, to count tokens or to sort by length.
# Checkpoints and experiment trackers are shown the user's arguments, and DeepSpeed's engine is made for an accumulation
# of 1 as well.

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
RUNNING = {
    GAS: 1,
    "ignore_data_skip": True,
    "include_tokens_per_second": False,  # `ODBTrainerMixin.log` gives the figure
    "group_by_length": False,
}
SAMPLING = "train_sampling_strategy"
"""Replaces `group_by_length` in transformers 5."""


class RunArguments:
    """Training arguments, switched between the user's values (`show`) and those of a run (`hide`).

    accumulation, counts_tokens: the user's `gradient_accumulation_steps` and `include_tokens_per_second`."""

    def __init__(self, trainer: Any):
        self._args, self._world_size = trainer.args, trainer.args.world_size
        self._running: dict[str, Any] = {name: value for name, value in RUNNING.items() if hasattr(trainer.args, name)}
        if getattr(trainer.args, SAMPLING, None) == "group_by_length":
            self._running[SAMPLING] = "random"
        self._given = {name: getattr(trainer.args, name) for name in self._running}
        self._engine_configs = _deepspeed_configs(trainer)
        self.accumulation: int = self._given[GAS]
        self.counts_tokens = bool(self._given.get("include_tokens_per_second"))

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Within it they are as a run needs them, for the Trainer and for DeepSpeed."""
        before = [{key: config[key] for key in (GAS, TRAIN_BATCH) if key in config} for config in self._engine_configs]
        for config in self._engine_configs:
            config[GAS] = 1
            if isinstance(config.get(MICRO_BATCH), int):
                config[TRAIN_BATCH] = config[MICRO_BATCH] * self._world_size
        self.hide()
        try:
            yield
        finally:
            self.show()
            for config, values in zip(self._engine_configs, before):
                for key in (GAS, TRAIN_BATCH):
                    config.pop(key, None)
                config.update(values)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it they are as the user gave them."""
        self.show()
        try:
            yield
        finally:
            self.hide()

    def show(self) -> None:
        vars(self._args).update(self._given)

    def hide(self) -> None:
        vars(self._args).update(self._running)


class HideArguments(TrainerCallback):
    """The last callback: when training begins the others have seen the user's arguments."""

    def __init__(self, arguments: RunArguments):
        self.arguments = arguments

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.arguments.hide()


def _deepspeed_configs(trainer: Any) -> list[dict[str, Any]]:
    """The configurations that an engine is made from: that of the arguments, and accelerate's, if it is another."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    found = [
        getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None),
        getattr(plugin, "deepspeed_config", None),
        getattr(getattr(plugin, "hf_ds_config", None), "config", None),
    ]
    configs = [config for config in found if isinstance(config, dict)]
    return list({id(config): config for config in configs}.values())


# ----------------------------------------------------------------------------------------------------------------------
# The dataloader that a run takes apart, with the columns that costs are counted from.


def with_all_columns(parts: DataLoaderParts, train_dataset: Any, cost_fn: Callable | None) -> DataLoaderParts:
    """With the columns of `train_dataset` that the Trainer removes, where costs are counted from them."""
    if not isinstance(parts.dataset, datasets.Dataset) or not isinstance(train_dataset, datasets.Dataset):
        return parts
    kept = parts.dataset.column_names
    removed = set(train_dataset.column_names) - set(kept)
    if PATCHES_KEY not in removed and (cost_fn is None or not removed):
        return parts
    return dataclasses.replace(parts, dataset=train_dataset, collate_fn=RemoveColumnsCollator(parts.collate_fn, kept))


# ----------------------------------------------------------------------------------------------------------------------
# The budgets of a run if the config says `auto`: from its checkpoint, or chosen when the model is wrapped.


def first_config(config: ODBConfig, resumed: Checkpoint | None) -> tuple[ResolvedConfig, bool]:
    """The config to begin with, and whether its budgets are those to train with.

    A resumed run keeps its budgets. Without them, each sample is a micro-batch until the budgets are chosen, so that
    little is read before.
    """
    if not config.auto_keys:
        return config.resolved(), True
    asked = config.auto_keys
    kept: dict[str, int | None] = {}
    if resumed is not None and resumed.states:
        kept = resumed.states[0].run.get("budgets", {})
    if set(asked) <= kept.keys():
        chosen = {key: kept[key] for key in asked}
        logger.info(
            "%s, as chosen when this training began; a number in the YAML takes its place",
            ", ".join(f"{key}: auto is {'none' if value is None else value}" for key, value in chosen.items()),
        )
        return config.resolved(**chosen), True
    least = max(config.pad_to_multiple_of or 1, *(config.length_buckets or ()), 1)
    stand_in: dict[str, int | None] = {"token_budget": least, "max_patches": None}
    resolved = config.resolved(**{key: stand_in[key] for key in asked})
    return dataclasses.replace(resolved, overlong="singleton", buffer_size=1), False


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ODBSettings:
    """The arguments of `enable_odb`."""

    config: ODBConfig
    observer: Observer | None
    collation: Collation | None
    patch_size: int
    measure: Measure
    equal_weights: bool
    cost_fn: Callable[..., Any] | None
    process_group: dist.ProcessGroup | None
    agree_on: Mapping[str, object]
    rows_from: Mapping[str, object]
    eval_rows: Callable[[Any], tuple[Any, Observer]] | None
    not_flat: str | None
    memory_meter: PeakMeter | None
    about: Mapping[str, object]


class Session:
    """odb on one trainer: `trainer.odb`.

    settings: the arguments of `enable_odb`. before_step: called with the model and all micro-batches of an optimizer
        step before the first is trained on, which are in memory together then; None: they come one by one.
    eval_limits: to which this rank has lowered the budgets of evaluations.
    During `train()`, else None:
    run: its loader, length and figures. arguments: the training arguments that it changes. checkpoint: the folder that
        it resumes. layout: of its micro-batches; is_unchecked: it is flat, and not yet checked. saver: of checkpoints.
    memory: names micro-batches that do not fit. restarts: takes the optimizer steps with `oom: split` or `skip`.
    evaluation: by budget, while one runs. eval_loaders: that are kept, each with the dataset of its evaluations.
    trial_units: units of a micro-batch that is only tried (`auto`).
    lacks_budgets: the config holds stand-ins until `auto` budgets are chosen. trainer_loss: computed by the trainer in
        place of the model's own.
    """

    def __init__(self, trainer: Any, settings: ODBSettings):
        self.trainer, self.settings = trainer, settings
        self.eval_limits: Limits | None = None
        self.end()

    def end(self) -> None:
        """Forget the run."""
        self.before_step: Callable[[Any, Sequence[Collated]], None] | None = None
        self.run: ODBRun | None = None
        self.arguments: RunArguments | None = None
        self.saver: CheckpointSaver | None = None
        self.checkpoint: Checkpoint | None = None
        self.layout: Layout | None = None
        self.is_unchecked = False
        self.memory: MemoryWatch | None = None
        self.restarts: RestartedSteps | None = None
        self.evaluation: Evaluation | None = None
        self.eval_loaders: list[tuple[Any, ODBLoader]] = []
        self.trial_units: int | None = None
        self.lacks_budgets = False
        self.trainer_loss: TrainerLoss | None = None
        self._parts: DataLoaderParts | None = None
        self._encoder: tuple[EncoderDoor, Group] | None = None
        self._token_losses: dict[str | None, TokenLoss] = {}
        self._operations: Operations | None = None
        self._doors: list[UnpadDoor] = []

    @property
    def computing(self) -> Computing | None:
        """The micro-batch in forward and backward; None where stock computes."""
        if self.evaluation is not None:
            return self.evaluation.computing
        return None if self.run is None else self.run.accounting.computing

    def gather(self, content: Any) -> list[Any]:
        """The contents (JSON types) of all ranks, in rank order. Collective."""
        timeout_s = self.settings.config.exchange_timeout_s
        return [json.loads(answer) for answer in gather_once(json.dumps(content).encode(), timeout_s)]

    # The run

    @property
    def _seed(self) -> int:
        """Of the order of samples."""
        args = self.trainer.args
        return next(seed for seed in (self.settings.config.seed, args.data_seed, args.seed) if seed is not None)

    def begin(self, stock: Any) -> ODBRun:
        """Make the run of these settings. Its budgets and its layout are settled when the model is wrapped.

        stock: the Trainer's train dataloader.
        """
        args, dataset, settings = self.trainer.args, self.trainer.train_dataset, self.settings
        self._parts = dismantle(stock, self._seed, stream=dataset)
        if settings.observer is None:
            self._parts = with_all_columns(self._parts, dataset, settings.cost_fn)
        if not settings.equal_weights:
            with contextlib.suppress(AttributeError):  # of a config of another kind
                self._operations = Operations.of(self.trainer.model, device_of(args))
        config, is_chosen = first_config(self.settings.config, self.checkpoint)
        self.lacks_budgets = not is_chosen
        layout = resolve_layout(
            models_of(self.trainer),
            self.settings.config.layout,
            args,
            refused=self.settings.not_flat,
            is_stream=isinstance(dataset, IterableDataset),
        )
        run = self._make_run(layout, config)
        self.is_unchecked = layout.name == "flat"
        logger.info("layout: %s (%s)", layout.name, layout.reason)
        return run

    def settle(self) -> ODBRun:
        """The run to train with: replaces the one that has begun if the flat layout fails its check, or once `auto`
        budgets are chosen. Call after the model is wrapped."""
        assert self.run is not None and self.layout is not None
        check_hooks(self.trainer)
        if self.layout.name == "flat" and getattr(self.trainer, "neftune_hook_handle", None) is not None:
            self.trainer.neftune_hook_handle.remove()
            embedding = unwrapped(self.trainer.model).get_input_embeddings()
            self.trainer.neftune_hook_handle = embedding.register_forward_hook(noise_by_sample)
        loader, configured = self.run.loader, self.settings.config
        if self.is_unchecked and loader.has_rows:
            why = self.check_layout(
                lambda: of_batches(*trial_batches(loader.first_samples(), loader.groups, NUM_SAMPLES))
            )
            if why is not None:
                self._replace_run(fall_back(self.layout, configured.layout, why), self.run.config)
        if chooses := self.lacks_budgets:
            budgets = choose_budgets(self.trainer, self.run.loader, configured, self.settings.memory_meter)
            self.lacks_budgets = False
            self._replace_run(self.layout, configured.resolved(**dataclasses.asdict(budgets)))
        # What happens if memory is short.
        run, config, args = self.run, self.run.config, self.trainer.args
        cuts_nothing = config.oom == "raise" and config.row_multiple == 1 and not config.balance_encoder
        advises_split = cuts_nothing and why_not_split(args) is None
        self.memory = MemoryWatch(config, run.loader.budget, args.device, advises_split=advises_split)
        if not chooses and (config.rehearse or (config.rehearse is None and args.device.type != "cpu")):
            rehearse(self.trainer, run.loader, self.memory, self.settings.memory_meter)
        if config.oom != "raise":
            group, timeout_s = self.settings.process_group, config.exchange_timeout_s
            self.restarts = RestartedSteps(run, Group(group, timeout_s, "agreements on a restarted step"), self.memory)
        return run

    def check_first_batch(self, batch: Any, segments: tuple[int, ...]) -> None:
        """Check a flat layout by the first micro-batch, if rows cannot be read by their number. segments: of its
        samples. Raises `ConfigError` if the layout is not right for the model."""
        why = self.check_layout(lambda: of_flat_batch(batch, segments)) if self.is_unchecked else None
        if why is not None:
            raise not_right(why)

    def check_layout(self, make: Callable[[], Trial]) -> str | None:
        """Why the flat layout is not right for the model; None if it is. Collective."""
        self.is_unchecked, trainer = False, self.trainer
        runs = Runs(trainer.model_wrapped, trainer._prepare_inputs, self.gather, trainer.compute_loss_context_manager)
        return check_rows(runs, make)

    def _replace_run(self, layout: Layout, config: ResolvedConfig) -> None:
        before = self.run
        assert before is not None
        before.close()
        run = self._make_run(layout, config)
        run.schedule.take_over(before.schedule, self.trainer.optimizer, self.trainer.lr_scheduler)
        if not self.lacks_budgets:
            log_first_step(run.loader, run.config, run.loader.next_planned)

    def _make_run(self, layout: Layout, config: ResolvedConfig) -> ODBRun:
        """A run at its start, or where its checkpoint left it, with its first plan made."""
        trainer, settings, args = self.trainer, self.settings, self.trainer.args
        assert self.arguments is not None
        self.layout = layout
        with self.arguments.shown():
            # 1. the loader, from the parts of the Trainer's dataloader
            parts = self._parts
            assert parts is not None
            self.trainer_loss = None if settings.equal_weights else TrainerLoss.of(trainer)
            loader = self.make_loader(
                parts,
                config,
                layout,
                observer=settings.observer or self.observer_of_items(parts, config),
                rule=OptimizerStepRule(
                    batch_size=parts.batch_size,
                    accumulation=args.gradient_accumulation_steps,
                    drop_last=parts.drop_last,
                    stock_mean=stock_mean(trainer, self.trainer_loss, equal_weights=settings.equal_weights),
                    equal_weights=settings.equal_weights,
                ),
                seed=self._seed,
                agree_on={**of_trainer(trainer), **settings.agree_on},
                rows_from=settings.rows_from,
                keeps_samples=config.oom != "raise",
            )
            # 2. the run
            counts_steps = args.max_steps > 0
            run = self.run = ODBRun(
                loader,
                config,
                args.output_dir,
                epochs=None if counts_steps else args.num_train_epochs,
                max_steps=args.max_steps if counts_steps else None,
                accumulation=args.gradient_accumulation_steps,
                looks_at_labels=not settings.equal_weights,
                is_shuffled=getattr(parts.sampler, "shuffle", isinstance(parts.sampler, RandomSampler)),
            )
            run.operations, rows_of = self._operations, settings.about.get("rows_of")
            if isinstance(rows_of, dict) and not settings.equal_weights and self.trainer_loss is None:
                run.accounting.by_set = LossBySet(**rows_of)
        if settings.config.auto_keys:
            run.budgets = {key: getattr(config, key) for key in BUDGETS}
        # 3. where a checkpoint left it, and the first plan
        if self.checkpoint is not None:
            checkpoint.load(run, self.checkpoint, self.gather)
        if not run.finished:
            run.loader.begin()
        return run

    def observer_of_items(self, parts: DataLoaderParts, config: ResolvedConfig) -> ItemObserver:
        """Of a dataset that yields processed samples."""
        return ItemObserver(
            Picklable(parts.collate_fn, "collate_fn"),
            cost_fn=self.settings.cost_fn,
            patch_size=self.settings.patch_size,
            loss_scaling=config.loss_scaling,
        )

    def make_loader(self, parts: DataLoaderParts, config: ResolvedConfig, layout: Layout, **others: Any) -> ODBLoader:
        """others: arguments of `ODBLoader`."""
        settings = self.settings
        return ODBLoader(
            parts,
            config,
            collation=settings.collation,
            layout=layout.name,
            with_boundaries=layout.with_boundaries,
            ranks=Ranks(settings.process_group, config.exchange_timeout_s, config.group_size),
            patch_size=settings.patch_size,
            measure=settings.measure,
            **others,
        )

    def close(self, error: BaseException | None = None) -> None:
        """End the run, its worker processes and its files. error: the training has failed on this rank."""
        failed = error is not None
        if self.run is not None and error is not None:
            self.run.abort(error)
        for _, loader in self.eval_loaders:
            loader.close() if error is None else loader.abort(one_line(error))
        if self.restarts is not None:
            self.restarts.close(failed=failed)
        if self.saver is not None:
            self.saver.close(failed=failed)
        if self.run is not None:
            self.run.close()
        if self.layout is not None:
            self.layout.undo()
        if self._encoder is not None:
            door, exchange = self._encoder
            door.undo()
            exchange.close(failed=failed)
            release(door.group, failed=failed)
        self.end()

    # A micro-batch

    @contextlib.contextmanager
    def in_forward(self, measured: Measured) -> Iterator[None]:
        """Within it the models compute this micro-batch."""
        reference = getattr(self.trainer, "ref_model", None)
        positions = contextlib.nullcontext() if reference is None else positions_of_samples(unwrapped(reference))
        with flat_row(measured.segments), positions:
            yield

    def share_encoder(self) -> None:
        """Let the ranks share the work of the vision tower in training, if the block says so. Collective.

        Raises `CollectiveError` on all ranks if they differ in that: a rank alone would wait for its process group.
        """
        settings, trainer = self.settings, self.trainer
        config = settings.config
        if trainer.args.world_size == 1:
            return
        tower = find_tower(trainer.model) if config.balance_encoder else None
        why = None
        if config.balance_encoder and tower is None:
            name = trainer.model.config.model_type
            why = f"no vision tower of {name} is known whose features follow the order of its images"
        elif config.balance_encoder and trainer.args.torch_compile:
            why = "torch_compile compiles the model's forward, in which ranks would exchange images"
        compare(
            {"odb.balance_encoder": config.balance_encoder, "why balance_encoder has no effect": why},
            lambda message: gather_once(message, config.exchange_timeout_s),
            rank=trainer.args.process_index,
        )
        if not config.balance_encoder:
            return
        if tower is None or why is not None:
            logger.info("balance_encoder: %s has no effect: %s", config.balance_encoder, why)
            return
        trains = any(parameter.requires_grad for parameter in getattr(*tower).parameters())
        pair, patch, token = cost_of(tower[0].config, trains_tower=trains)
        cost = EncoderCost(pair=pair, patch=patch, token=token)
        exchange = Group(settings.process_group, config.exchange_timeout_s, "sharing the vision tower")
        parent = settings.process_group
        ranks = None if parent is None else dist.get_process_group_ranks(parent)
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=patience_of(parent)),
            use_local_synchronization=parent is not None,
            group_desc="odb_factory encoder",
        )

        def gather(message: bytes) -> list[bytes]:
            return exchange.all_gather(message, f"optimizer step {self.run.optimizer_steps + 1 if self.run else 1}")

        def assign(patches: list[np.ndarray], tokens: list[int]) -> EncoderPlan:
            assert self.run is not None
            given = tokens if config.balance_encoder == "auto" else None
            plan = plan_encoders(patches, cost, given, max_patches=self.run.config.max_patches)
            if self.memory is not None:
                self.memory.encoded = int(plan.patches[exchange.rank])
            return plan

        assert group is not None
        self._encoder = EncoderDoor(tower, group, gather, assign), exchange
        logger.info("balance_encoder: %s: images move to the rank that encodes them", config.balance_encoder)

    @contextlib.contextmanager
    def encoder_shared(self) -> Iterator[None]:
        """Within it forwards of the model are of the micro-batch that the run has begun, on all ranks."""
        if self._encoder is None:
            yield
            return
        computing = self.computing
        assert computing is not None
        with self._encoder[0].balanced() as plans:
            yield
        computing.encoded = tuple(plans)

    def unpadded(self, inputs: Any) -> tuple[Any, contextlib.AbstractContextManager[None]]:
        """A batch without the rows that its models compute in place of its own, and the context in which they do."""
        if not isinstance(inputs, dict) or UNPADDED not in inputs:
            return inputs, contextlib.nullcontext()
        rest = {key: value for key, value in inputs.items() if not key.endswith(UNPADDED)}
        return rest, self.flat(FlatRows(**inputs[UNPADDED]))

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

    @contextlib.contextmanager
    def gradients_summed(self, model: Any, *, is_last: bool) -> Iterator[None]:
        """Gradients add up on each rank, and are synchronised with those of the last micro-batch, as in the Trainer."""
        accelerator = self.trainer.accelerator
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_deepspeed:  # newer releases of accelerate do the same by `sync_gradients`
            model.set_gradient_accumulation_boundary(is_last)
        syncs = is_last or is_deepspeed or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if self.trainer.is_fsdp_enabled and self.arguments is not None and self.arguments.accumulation == 1:
            syncs = True  # it would hold whole gradients, for which stock training needs no memory
        accelerator.sync_gradients = is_last
        try:
            with contextlib.nullcontext() if syncs else accelerator.no_sync(model=model):
                yield
        finally:
            accelerator.sync_gradients = True

    def weighing(self, model: Any, labels: Any) -> contextlib.AbstractContextManager[None]:
        """Within it the loss of the current micro-batch is the weighted mean over its tokens, also in a
        trial, which needs the same memory. model: as trained. labels: of the batch, if it has some."""
        computing, own = self.computing, self.trainer_loss
        if computing is None:
            assert self.trial_units is not None
            if own is not None:
                return own.weighing(model, labels, None, (), self.trial_units)
            if self.settings.equal_weights:
                return contextlib.nullcontext()
            return self._loss_of(model).weighing(None, (), self.trial_units)
        row_weights, segments = computing.loss.row_weights, computing.measured.segments
        if own is not None:
            return own.weighing(model, labels, row_weights, segments, computing.num_items, computing.num_supervised)
        if row_weights is None and computing.num_supervised is None:
            return contextlib.nullcontext()
        watch, by_set = None, None if self.run is None else self.run.accounting.by_set
        if by_set is not None and self.evaluation is None and not computing.micro_batch.idle:
            watch = by_set.watch(computing.micro_batch, computing.measured, computing.seen)
        return self._loss_of(model).weighing(
            row_weights, segments, computing.num_items, computing.num_supervised, watch
        )

    def _loss_of(self, model: Any) -> TokenLoss:
        why = why_logits(self.trainer)
        if self.evaluation is not None and not self.evaluation.loss_only:
            why = why or "the predictions of an evaluation are made of them"
        if why not in self._token_losses:
            self._token_losses[why] = TokenLoss(model, self.settings.config.loss_scaling, why)
        return self._token_losses[why]
