"""Make the run of a training: as its settings say, and once the model is wrapped as what is checked then allows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from odb_factory.accounting.step_accounting import say_what_to_expect
from odb_factory.config import BUDGETS, ODBConfig, ResolvedConfig
from odb_factory.data.trial import trial_batches
from odb_factory.log import get_logger
from odb_factory.model.check import Layout, check_rows, fall_back, models_of, of_batches, resolve_layout
from odb_factory.training import checkpoint
from odb_factory.training.auto_budget import choose_budgets
from odb_factory.training.checkpoint import RANK_FILE, by_rank, read_states
from odb_factory.training.checks import check_hooks
from odb_factory.training.run import ODBRun

if TYPE_CHECKING:
    from odb_factory.training.settings import ODBSettings


# ----------------------------------------------------------------------------------------------------------------------
# Training arguments that are others while odb trains.
# The Trainer's own accumulation is 1, so that what it counts are optimizer steps, and it skips no batches after a
# resume, for the loader stands where it has to. It makes no pass over all data beforehand, to count tokens or to sort
# by length. Checkpoints and experiment trackers are shown the arguments as they were given, and DeepSpeed's engine is
# made for an accumulation of 1 as well.

GAS, TRAIN_BATCH, MICRO_BATCH = "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"
RUNNING = {
    GAS: 1,
    "ignore_data_skip": True,
    "include_tokens_per_second": False,  # `ODBTrainerMixin.log` gives the figure
    "group_by_length": False,
}
SAMPLING = "train_sampling_strategy"
"""What `group_by_length` is in transformers 5, one of several."""


class RunArguments:
    """accumulation, counts_tokens: `gradient_accumulation_steps`, `include_tokens_per_second` as they were given."""

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
        """Within it they are as they were given."""
        self.show()
        try:
            yield
        finally:
            self.hide()

    def show(self) -> None:
        for name, value in self._given.items():
            setattr(self._args, name, value)

    def hide(self) -> None:
        for name, value in self._running.items():
            setattr(self._args, name, value)


class HideArguments(TrainerCallback):
    """The last callback: at the begin of the training the others have seen the arguments as they were given."""

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
# The budgets of a run where the config says `auto`: from its checkpoint, or to be chosen when the model is wrapped.

logger = get_logger(__name__)


def first_config(config: ODBConfig, folder: str | None, rank: int, ranks: int) -> tuple[ResolvedConfig, bool]:
    """The config to begin with, and whether its budgets are those to train with.

    folder: the checkpoint that is gone on from, whose budgets are kept. Else they stand for ones that are not known
    yet: each sample is a micro-batch of its own, so that little is read before there are better ones.
    """
    if not config.has_auto:
        return config.resolved(), True
    asked = config.auto_keys
    kept = {} if folder is None else _kept(Path(folder), rank, ranks)
    if set(asked) <= kept.keys():
        chosen = {key: kept[key] for key in asked}
        logger.info(
            "%s, as chosen when this training began; a number in the YAML takes its place",
            ", ".join(f"{key}: auto is {'none' if value is None else value}" for key, value in chosen.items()),
        )
        return config.resolved(**chosen), True
    least = max(config.pad_to_multiple_of or 1, *(config.length_buckets or ()), 1)
    stand_in: dict[str, int | None] = {"token_budget": least, "max_patches": None}
    return dataclasses.replace(
        config.resolved(**{key: stand_in[key] for key in asked}), overlong="singleton", buffer_size=1
    ), False


def _kept(folder: Path, rank: int, ranks: int) -> dict[str, int | None]:
    """What a checkpoint says; nothing where it was written without odb. What is damaged is told when it is loaded."""
    if not by_rank(folder, RANK_FILE):
        return {}
    kept: dict[str, int | None] = read_states(folder, rank, ranks)[0].run.get("budgets", {})
    return kept


# ----------------------------------------------------------------------------------------------------------------------


class RunStart:
    """Begins the run of one `train()`, and once more where its layout or its budgets turn out otherwise.

    trainer: an `ODBTrainerMixin`, whose `odb_run`, `odb_layout` and `odb_is_unchecked` it sets. stock: its train
    dataloader; source: the same with all columns of the dataset, where they are needed.
    config: of the run, whose budgets are numbers. lacks_budgets: they only stand for ones that are to be chosen.
    """

    def __init__(self, trainer: Any, source: Any, stock: Any):
        self._trainer, self._source, self._stock = trainer, source, stock
        self._settings: ODBSettings = trainer.odb_settings
        self._arguments: RunArguments = trainer.odb_arguments
        self.config, is_chosen = first_config(
            self._settings.config, trainer.odb_checkpoint, trainer.args.process_index, trainer.args.world_size
        )
        self.lacks_budgets = not is_chosen

    def first(self) -> ODBRun:
        """As the settings say."""
        layout = resolve_layout(
            models_of(self._trainer),
            self._settings.config.layout,
            self._trainer.args,
            refused=self._settings.not_flat,
            is_stream=isinstance(self._trainer.train_dataset, IterableDataset),
        )
        run = self._begin(layout)
        logger.info("layout: %s (%s)", layout.name, layout.reason)
        return run

    def checked(self) -> ODBRun:
        """The run to take the first optimizer step with: the one that has begun, or one in its place that has the
        padded layout, or the budgets that the memory allows."""
        check_hooks(self._trainer)
        run = self._with_checked_layout()
        if not self.lacks_budgets:
            return run
        chosen = choose_budgets(self._trainer, run.loader, self._settings.config, self._settings.memory_meter)
        self.config = self._settings.config.resolved(**dataclasses.asdict(chosen))
        self.lacks_budgets = False
        return self._again(self._trainer.odb_layout)

    def _with_checked_layout(self) -> ODBRun:
        run: ODBRun = self._trainer.odb_run
        if not self._trainer.odb_is_unchecked or not run.loader.has_rows:
            return run
        self._trainer.odb_is_unchecked = False
        why = check_rows(self._trainer.odb_runs(), lambda: of_batches(*trial_batches(run.loader)))
        if why is None:
            return run
        return self._again(fall_back(self._trainer.odb_layout, self._settings.config.layout, why))

    def _begin(self, layout: Layout) -> ODBRun:
        """A run that stands where it begins or goes on, its first plan made."""
        trainer = self._trainer
        trainer.odb_layout = layout
        with self._arguments.shown():
            run = self._settings.make_run(trainer, self._source, self._stock, layout, self.config)
            trainer.odb_run, trainer.odb_is_unchecked = run, layout.name == "flat"
        if self._settings.config.has_auto:
            run.budgets = {key: getattr(self.config, key) for key in BUDGETS}
        if trainer.odb_checkpoint is not None:
            checkpoint.load(run, Path(trainer.odb_checkpoint), trainer.odb_gather_json)
        if not run.finished:
            run.loader.begin()
        return run

    def _again(self, layout: Layout) -> ODBRun:
        """In the place of the run that has begun."""
        trainer, run = self._trainer, self._trainer.odb_run
        run.close()
        again = self._begin(layout)
        if again.fill is not None and run.fill is not None:
            again.fill.take_over(run.fill, trainer.optimizer, trainer.lr_scheduler)
        if not self.lacks_budgets:
            say_what_to_expect(again.loader, again.config, again.loader.first_planned)
        return again
