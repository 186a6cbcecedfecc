"""Stages whose loss is a mean over tokens: supervised fine-tuning and pre-training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.measure import count_supervised, has_leading_label
from odb_factory.llamafactory.stages.stage import Stage, media_cost, probe_answer, probe_collation
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver


class Sft(Stage):
    """`stage: sft`."""

    name = "sft"
    unit = "supervised token"
    trainer = ("llamafactory.train.sft.trainer", "CustomSeq2SeqTrainer")
    collator = "SFTDataCollatorWith4DAttentionMask"

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        ids, labels = features["input_ids"], features["labels"]
        return Cost(
            tokens=len(ids),
            units=count_supervised(labels),
            leading_label=has_leading_label(labels),
            **media_cost(features, media, ids),
        )

    def collation(self, collator: Any, patch_size: int) -> Collation:
        return probe_collation(collator, probe_answer(collator), patch_size)


class Pt(Stage):
    """`stage: pt`: whole documents. Their labels are made by the collator, which masks every padding token, also those
    of a tokenizer that pads with its end-of-text token."""

    name = "pt"
    unit = "supervised token"
    trainer = ("llamafactory.train.pt.trainer", "CustomTrainer")
    takes_media = False
    pad_token_id: int | None = None

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Pt:
        stage = copy.copy(self)
        stage.pad_token_id = tokenizer.pad_token_id
        return stage

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        return ()

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        ids = features["input_ids"]
        return Cost(
            tokens=len(ids),
            units=len(ids) - 1 - ids[1:].count(self.pad_token_id),
            leading_label=ids[0] != self.pad_token_id,
            has_media=True,  # it brings none, and the collator adds none beside it
        )

    def make_collator(self, template: Any, tokenizer: Any, processor: Any) -> Any:
        from transformers import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        return Collation(pad_to_multiple_of=getattr(collator, "pad_to_multiple_of", None) or 1)
