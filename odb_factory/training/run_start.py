"""Make the run of a training: as its settings say, and once the model is wrapped as what is checked then allows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.accounting.expectation import say_what_to_expect
from odb_factory.config import BUDGETS
from odb_factory.log import get_logger
from odb_factory.training import checkpoint
from odb_factory.training.auto_budget import choose_budgets
from odb_factory.training.checks import check_hooks
from odb_factory.training.layout_choice import Layout, fall_back, resolve_layout
from odb_factory.training.run import ODBRun
from odb_factory.training.run_budgets import first_config

if TYPE_CHECKING:
    from odb_factory.training.run_arguments import RunArguments
    from odb_factory.training.settings import ODBSettings

logger = get_logger(__name__)


class RunStart:
    """Begins the run of one `train()`, and once more where its layout or its budgets turn out otherwise.

    trainer: an `ODBTrainerMixin`, whose `odb_run`, `odb_layout` and `odb_check` it sets. stock: its train dataloader;
    source: the same with all columns of the dataset, where they are needed.
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
        layout = resolve_layout(self._trainer, self._settings.config, self._settings.not_flat)
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
        check = self._trainer.odb_check
        if check is None or check.needs_batch:
            return run
        self._trainer.odb_check = None
        why = check.of_rows(self._trainer)
        return run if why is None else self._again(fall_back(self._trainer.odb_layout, self._settings.config, why))

    def _begin(self, layout: Layout) -> ODBRun:
        """A run that stands where it begins or goes on, its first plan made."""
        trainer = self._trainer
        trainer.odb_layout = layout
        with self._arguments.shown():
            run, check = self._settings.make_run(trainer, self._source, self._stock, layout, self.config)
            trainer.odb_run, trainer.odb_check = run, check
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
