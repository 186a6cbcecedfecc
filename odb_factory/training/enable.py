"""`enable_odb(trainer)`: the single integration point. The plugin, patches and scripts all call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import Trainer

from odb_factory.comm.gloo import check_process_group
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.config import ODBConfig
from odb_factory.data.observe import DEFAULT_PATCH_SIZE, Measure, Observer, measure_batch
from odb_factory.data.order import make_config
from odb_factory.errors import ConfigError
from odb_factory.memory import PeakMeter
from odb_factory.planning import Collation
from odb_factory.training.checks import check_arguments, check_dummy_media, check_methods, check_stream
from odb_factory.training.session import ODBSettings, Session
from odb_factory.training.trainer import ODBTrainerMixin

if TYPE_CHECKING:
    from odb_factory.loop.iteration import TrainerKeys


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
    rows_from: Mapping[str, object] | None = None,
    eval_rows: Callable[[Any], tuple[Any, Observer]] | None = None,
    not_flat: str | None = None,
    memory_meter: PeakMeter | None = None,
    about: Mapping[str, object] | None = None,
    **block: Unpack[TrainerKeys],
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
    rows_from: settings that rows are made with (a template, a maximal length): a resume names those that have changed.
    eval_rows: of an evaluation dataset, the rows that are read from it and their observer, for `eval_token_budget`
    (default: its items, with the default observer; None beside an `observer`: evaluations stay stock's).
    not_flat: why flat micro-batches would be wrong, if the caller knows a reason (see the key `layout`).
    memory_meter: measures memory for budgets of `auto` (default: the accelerator's figures); with a
    `odb_factory.memory.CPUMeter` they can be chosen on a CPU, for tests.
    about: facts about the run for `odb-factory report`, beside its training arguments (JSON types).
    A `compute_loss_func` of the trainer is called once for the samples of each weight in a micro-batch, with their
    units as `num_items_in_batch`, and its mean is weighed like a model's own loss; a function that returns a sum is not
    supported.
    Outside of `train()` the trainer stays as it was: its dataset, its collator, its dataloaders.
    Raises `ConfigError` if a training argument cannot work with it. A second call is an error.
    """
    if getattr(trainer, "odb", None) is not None:
        raise ConfigError("enable_odb: this trainer has it already; call it once.")
    config = make_config(config, block)
    check_process_group(process_group)
    check_arguments(trainer.args, config, memory_meter)
    if isinstance(trainer.train_dataset, IterableDataset):
        check_stream(config)
    check_dummy_media(config, collation or Collation())
    check_methods(trainer)
    if not isinstance(trainer, ODBTrainerMixin):
        stock = type(trainer)
        trainer.__class__ = type(stock.__name__, (ODBTrainerMixin, stock), {"__module__": stock.__module__})
    lifeline_of(process_group, config.exchange_timeout_s)  # a rank that dies from here on ends the others
    settings = ODBSettings(
        config=config,
        observer=observer,
        collation=collation,
        patch_size=patch_size,
        measure=measure,
        equal_weights=equal_weights,
        cost_fn=cost_fn,
        process_group=process_group,
        agree_on=agree_on or {},
        rows_from=rows_from or {},
        eval_rows=eval_rows,
        not_flat=not_flat,
        memory_meter=memory_meter,
        about=about or {},
    )
    trainer.odb = Session(trainer, settings)
    return trainer


class ODBTrainer(ODBTrainerMixin, Trainer):
    """A `transformers.Trainer` with online dynamic batching: `ODBTrainer(..., odb={"token_budget": 8192})`."""

    def __init__(self, *args: Any, odb: ODBConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        enable_odb(self, odb if isinstance(odb, ODBConfig) else ODBConfig.from_block(odb))
