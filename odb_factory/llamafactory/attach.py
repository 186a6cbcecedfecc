"""Connect LLaMA-Factory's dataset, collator and trainer to `enable_odb`.

The plugin's hooks and patched forks (`patches/` in the repository) call the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from llamafactory.data.mm_plugin import BasePlugin
from llamafactory.train.callbacks import LogCallback
from transformers import TrainerCallback

from odb_factory.config import ODBConfig
from odb_factory.data.samples import Picklable, fingerprint
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.block import WHY_NOT_SHIFTED
from odb_factory.llamafactory.dataset import (
    INVALID_ROW,
    OnlineStream,
    OpenMedia,
    RowObserver,
    TokenizedDataset,
    training_rows,
)
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES
from odb_factory.log import get_logger
from odb_factory.model.tower import shards_parameters
from odb_factory.training.checks import why_no_door
from odb_factory.training.trainer import enable_odb

logger = get_logger(__name__)


class HostCallback(TrainerCallback):
    """Corrects the figures that LLaMA-Factory shows; runs before its log callback.

    watches_dropped: log once that LLaMA-Factory drops rows, if the optimizer steps are to be stock's.
    """

    def __init__(self, trainer: Any, watches_dropped: bool):
        self.trainer, self._watches_dropped = trainer, watches_dropped
        # Stock would preprocess every row again after the training to count tokens.
        self._counts_tokens = trainer.finetuning_args.include_effective_tokens_per_second
        trainer.finetuning_args.include_effective_tokens_per_second = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, LogCallback):  # reads the number of steps only at the start
                callback.max_steps = state.max_steps
        count = self.trainer.odb.training.step.rejected[INVALID_ROW] if self._watches_dropped else 0
        if count:
            self._watches_dropped = False
            logger.info(
                "LLaMA-Factory's preprocessing drops rows (%d by optimizer step %d); stock drops them before it "
                "shuffles, so its optimizer steps differ (without shuffling: from here on); set tokenized_path or "
                "remove these rows to have exactly stock's steps",
                count,
                state.global_step,
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log effective_tokens_per_sec: trained tokens without padding, per second and rank."""
        training, logs = self.trainer.odb.training, kwargs["logs"]
        if self._counts_tokens and training is not None and "train_runtime" in logs:
            tokens = training.accounting.total["tokens"] / training.loader.world_size
            logs["effective_tokens_per_sec"] = tokens / logs["train_runtime"]


PADS_TILES = "MllamaPlugin"


def _check_tiles(config: ODBConfig, media: MediaObserver) -> None:
    if config.max_patches is not None and type(media.original).__name__ == PADS_TILES:
        raise ConfigError(
            "odb.max_patches: the vision tower of mllama also computes the images and tiles that pad a batch, which no "
            "plan bounds; remove the key, and bound micro-batches by token_budget."
        )


def attach_block(trainer: Any, block: Mapping[str, Any]) -> None:
    """Attach odb to the trainer of a patched fork. block: the `odb:` block of its arguments."""
    attach(trainer, ODBConfig.from_block(block))
    logger.info("online dynamic batching is on; called by the patched workflow of this LLaMA-Factory")


def attach(trainer: Any, config: ODBConfig) -> None:
    """Call `enable_odb` on LLaMA-Factory's trainer with its own collator and an observer for its dataset."""
    collator = trainer.data_collator
    tokenizer = getattr(collator, "tokenizer", trainer.processing_class)
    stage = STAGES[trainer.finetuning_args.stage].of_training(trainer.finetuning_args, tokenizer)
    dataset = trainer.train_dataset
    template, processor = (getattr(collator, name, None) for name in ("template", "processor"))
    trainer.train_dataset = rows = training_rows(dataset, stage, template, tokenizer, processor)
    _check_tiles(config, rows.media)
    if type(rows.media.original) is BasePlugin and isinstance(config.max_patches, int):
        logger.info(
            "odb.max_patches: %d has no effect: template and stage take no images, videos or audio", config.max_patches
        )
    trainer.data_collator = Picklable(OpenMedia(collator), "data_collator")  # evaluation sends the collator to workers
    head = rows.head if isinstance(rows, OnlineStream) else None
    observe = functools.partial(
        RowObserver,
        rows.media,
        stage,
        model_type=trainer.model.config.model_type,
        shards_parameters=shards_parameters(trainer) or (bool(config.balance_encoder) and trainer.args.world_size > 1),
    )
    observer = observe(head=head)

    not_flat = why_no_door(trainer) if stage.batches else None
    if getattr(trainer.model.config, "group_size_ratio", None) is not None:  # LLaMA-Factory has changed the attention
        not_flat = f"shift_attn: {WHY_NOT_SHIFTED}"

    def eval_rows(stored: Any) -> tuple[TokenizedDataset, RowObserver]:
        return TokenizedDataset(stored, rows.media, stage), observe()

    enable_odb(
        trainer,
        config,
        observer=observer,
        collation=stage.collation(collator, rows.media.patch_size),
        patch_size=rows.media.patch_size,
        measure=stage.measure,
        equal_weights=bool(stage.batches),
        agree_on={**rows.stage.settings, "content of row 0": _first_row(rows if head is None else head, observer)},
        eval_rows=None if stage.prepares_steps else eval_rows,  # the figures of kto are sums over a rank's batches
        not_flat=not_flat,
    )
    trainer.odb.parts = stage.parts(trainer)
    trainer.callback_handler.callbacks.insert(0, HostCallback(trainer, config.keeps))
    if not config.keeps and config.lr_scale == "none" and trainer.args.per_device_train_batch_size > 1:
        logger.info(
            "per_device_train_batch_size has no effect with `global_batch_size: fill`, which goes by token_budget"
        )


def _first_row(dataset: Any, observer: RowObserver) -> object:
    """A fingerprint of the first row after template and tokenizer, which ranks compare (I11); the type of the error if
    the row cannot be read, which the loader reports."""
    try:
        features, cost = observer.observe(dataset[0])
        return fingerprint([dataclasses.astuple(cost), features])
    except Exception as error:
        return type(error).__name__
