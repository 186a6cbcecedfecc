"""Connect LLaMA-Factory's dataset, collator and trainer to `enable_odb`.

Called by the plugin's hooks and by patched forks (`odb_factory/patches`): both do the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from llamafactory.data.loader import _get_dataset_processor
from llamafactory.train.callbacks import LogCallback
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from odb_factory.batching import Collation
from odb_factory.config import ODBConfig
from odb_factory.data.measure import IGNORE_INDEX, count_patches
from odb_factory.llamafactory.dataset import SOURCE, SOURCE_ROW, OnlineDataset, OpenMedia, RowObserver, TokenizedDataset
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.log import get_logger
from odb_factory.training.enable import enable_odb

logger = get_logger(__name__)

PROBE_TOKENS = 8
ROWS_TRIED_FOR_EXAMPLE = 16
_sources: list[str] = []


def mark_source(dataset: Any, dataset_attr: Any) -> Any:
    """Add two integer columns that say which dataset a row comes from, for messages."""
    name = f"{dataset_attr}{' as sampled by num_samples' if dataset_attr.num_samples is not None else ''}"
    if name not in _sources:
        _sources.append(name)
    rows = len(dataset)
    dataset = dataset.add_column(SOURCE, np.full(rows, _sources.index(name), dtype=np.int16))
    return dataset.add_column(SOURCE_ROW, np.arange(rows, dtype=np.int32))


def is_online(dataset: Any, data_args: Any, is_eval: bool) -> bool:
    """Whether `online_dataset` stands in for LLaMA-Factory's preprocessing pass: for training data that is not
    to be stored at `tokenized_path`."""
    return dataset is not None and not is_eval and data_args.tokenized_path is None


def online_dataset(
    dataset: Any,
    data_args: Any,
    training_args: Any,
    stage: str,
    template: Any,
    tokenizer: Any,
    processor: Any = None,
    is_eval: bool = False,
) -> OnlineDataset:
    """In place of LLaMA-Factory's preprocessing pass: rows are preprocessed when they are needed."""
    dataset_processor = _get_dataset_processor(data_args, stage, template, tokenizer, processor)
    media = MediaObserver(template.mm_plugin, tokenizer, processor)
    online = OnlineDataset(dataset, dataset_processor, media, _sources)
    if training_args.should_log:
        _print_example(online)
    return online


def attach_block(trainer: Any, block: Mapping[str, Any]) -> None:
    """What a patched fork calls before training, with the `odb:` block that its arguments hold."""
    attach(trainer, ODBConfig.from_block(block))
    logger.info("online dynamic batching is on; called by the patched workflow of this LLaMA-Factory")


def attach(trainer: Any, config: ODBConfig) -> None:
    """Call `enable_odb` on LLaMA-Factory's trainer with its own collator and an observer for its dataset."""
    collator = trainer.data_collator
    collation = probe_collation(collator)
    if isinstance(trainer.train_dataset, OnlineDataset):
        media = trainer.train_dataset.media
    else:
        media = MediaObserver(collator.template.mm_plugin, collator.tokenizer, collator.processor)
        trainer.train_dataset = TokenizedDataset(trainer.train_dataset, media)
    trainer.data_collator = OpenMedia(collator)
    enable_odb(
        trainer,
        config,
        observer=RowObserver(
            media,
            decode=config.on_error == "skip",
            shards_parameters=trainer.args.world_size > 1 and (is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled),
        ),
        collation=collation,
        patch_size=media.patch_size,
    )
    trainer.add_callback(_MirrorMaxSteps(trainer))


def probe_collation(collator: Any) -> Collation:
    """Learn what this collator adds to a group without media, by collating one short text sample."""
    unpadded = copy.copy(collator)
    unpadded.pad_to_multiple_of = None
    token = collator.tokenizer.pad_token_id
    sample = {
        "input_ids": [token] * PROBE_TOKENS,
        "attention_mask": [1] * PROBE_TOKENS,
        "labels": [IGNORE_INDEX] * PROBE_TOKENS,
    }
    batch = unpadded([sample])
    return Collation(
        pad_to_multiple_of=collator.pad_to_multiple_of or 1,
        filler_tokens=batch["input_ids"].shape[1] - PROBE_TOKENS,
        filler_patches=count_patches(batch),
    )


def _print_example(dataset: OnlineDataset) -> None:
    """Show one training row, as LLaMA-Factory does; rows that fail are the loader's to report."""
    for index in range(min(len(dataset), ROWS_TRIED_FOR_EXAMPLE)):
        try:
            example = dataset[index]
        except Exception:
            continue
        print("training example:")
        dataset.processor.print_data_example(example)
        return


class _MirrorMaxSteps(TrainerCallback):
    """LLaMA-Factory's log callback reads the number of steps once; keep its copy up to date."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, LogCallback):
                callback.max_steps = state.max_steps
