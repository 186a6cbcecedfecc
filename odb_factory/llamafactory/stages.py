"""LLaMA-Factory's stages of training: what each of them calls a sample, and what a sample costs.

One `Stage` object each; `STAGES` has them by the name in the YAML. Nothing heavy is imported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.observe import IGNORE_INDEX, count_media, count_supervised, has_leading_label, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.planner import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

MEDIA = ("images", "videos", "audios")
PROBE_TOKENS = 8


class Stage:
    """One object a stage; it holds no state of a run, and is sent to worker processes.

    name: as in the YAML. answers: what the columns of each answer of a processed row begin with.
    columns: that dataset_info.json must give, beside those of every stage.
    takes_media: its collator does.
    prepares_steps: it looks at all micro-batches of an optimizer step before the first is trained on.
    rows: that its collator makes of a sample. batches: of `Collation`; if there are any, the loss of a micro-batch is
    one mean whose units cannot be weighed one by one, so samples that stock weighs differently do not share one.
    settings: what ranks must have in common for their rows to be the same, beside the arguments that they compare.
    flags: what the collator takes of a sample beside its answers and media.
    """

    name: str
    answers: tuple[str, ...] = ("",)
    columns: tuple[str, ...] = ()
    takes_media: bool = True
    prepares_steps: bool = False
    rows: int = 1
    batches: tuple[str, ...] = ()
    settings: Mapping[str, object] = {}
    flags: tuple[str, ...] = ()

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        """The stage with the arguments of a training that `cost` and `measure` need."""
        return self

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        """The stage for a training dataset of `num_rows` rows, which `together` and `settings` need."""
        return self

    def together(self, index: int) -> Sequence[int]:
        """The rows that LLaMA-Factory's preprocessing must have in one batch to make this one; itself is the last."""
        return (index,)

    def preprocess(self, processor: Any, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, list[Any]]:
        """What LLaMA-Factory's dataset processor makes of a row: columns of one entry, or of none if it drops it.

        rows: converted, those of `together`.
        """
        encoded: Mapping[str, list[Any]] = processor.preprocess_dataset(
            {key: [value] for key, value in rows[-1].items()}
        )
        return encoded

    def ids_of(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        """The token ids of each answer of a processed row, with its prompt."""
        return [features[f"{answer}input_ids"] for answer in self.answers]

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        """Of a processed row, as it will be collated."""
        raise NotImplementedError

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """Of a collated micro-batch. patch_size, segments: of `measure_batch`."""
        return measure_batch(batch, patch_size, segments)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        """What this collator adds to a micro-batch: padding, and a fake image and audio, learnt by collating one short
        sample without media."""
        template, dummies = getattr(collator, "template", None), dict[str, int]()
        if template is not None:  # a custom collator, which injects nothing, is not asked to collate
            values = {"input_ids": collator.tokenizer.pad_token_id, "attention_mask": 1, "labels": IGNORE_INDEX}
            probe: dict[str, Any] = dict.fromkeys(MEDIA) | dict.fromkeys(self.flags, True)
            probe |= {f"{answer}{name}": [values[name]] * PROBE_TOKENS for answer in self.answers for name in values}

            def injected(collator: Any) -> tuple[int, int]:
                batch = collator([copy.deepcopy(probe)])
                return batch["input_ids"].shape[1] - PROBE_TOKENS, count_media(batch, patch_size).patches

            unpadded, plugin = copy.copy(collator), template.mm_plugin
            unpadded.pad_to_multiple_of = None
            tokens, patches = injected(unpadded)
            image_tokens, image_patches = (tokens, patches) if plugin.image_token is not None else (0, 0)
            if plugin.image_token is not None and plugin.audio_token is not None:
                unpadded.get_rope_func = None  # positions are not asked for, and may need audio
                unpadded.template = copy.copy(template)
                unpadded.template.mm_plugin = copy.copy(plugin)
                unpadded.template.mm_plugin.audio_token = None
                image_tokens, image_patches = injected(unpadded)
            dummies = {"dummy_media_tokens": image_tokens, "dummy_media_patches": image_patches}
            dummies |= {
                "dummy_audio_tokens": tokens - image_tokens,
                "dummy_audio_patches": patches - image_patches,
            }
        multiple = getattr(collator, "pad_to_multiple_of", None) or 1
        return Collation(pad_to_multiple_of=multiple, rows=self.rows, batches=self.batches, **dummies)

    def parts(self, trainer: Any) -> Sequence[Any]:
        """What a run changes on a trainer, as `Session.parts`. Its evaluations must stay stock's."""
        return ()


# Stages whose loss is a mean over tokens: supervised fine-tuning and pre-training.


class Sft(Stage):
    """`stage: sft`."""

    name = "sft"

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        ids, labels = features["input_ids"], features["labels"]
        return Cost(
            tokens=len(ids),
            units=count_supervised(labels),
            leading_label=has_leading_label(labels),
            **media.cost_of(features, ids),
        )


class Pt(Stage):
    """`stage: pt`: whole documents. Their labels are made by the collator, which masks every padding token, also those
    of a tokenizer that pads with its end-of-text token."""

    name = "pt"
    takes_media = False
    pad_token_id: int | None = None

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Pt:
        stage = copy.copy(self)
        stage.pad_token_id = tokenizer.pad_token_id
        return stage

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        ids = features["input_ids"]
        return Cost(
            tokens=len(ids),
            units=len(ids) - 1 - ids[1:].count(self.pad_token_id),
            leading_label=ids[0] != self.pad_token_id,
            has_media=True,  # it brings none, and the collator adds none beside it
        )


# Stages whose samples are pairs of a chosen and a rejected answer: reward models, and DPO with its variants.
# The collator makes two rows of a pair, all chosen ones first, padded to one length: padded, a pair costs two rows of
# the longer answer, and flat both answers. It brings its media twice. The loss is a mean over pairs.

SIDES = ("chosen", "rejected")
DIVIDES_BY_LENGTH = ("ipo", "orpo", "simpo")
"""Losses (`pref_loss`) that take the mean log-probability of an answer, which an empty one does not have."""


class Pairs(Stage):
    """needs_labels: the answers that must have a token left: the loss would divide by their number."""

    answers = ("chosen_", "rejected_")
    columns = SIDES
    rows = len(SIDES)
    batches = ("",)
    needs_labels: tuple[str, ...] = ()

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        lengths = [len(ids) for ids in self.ids_of(features)]
        return Cost(
            tokens=sum(lengths),
            row_tokens=self.rows * max(lengths),
            units=int(all(count_supervised(features[f"{side}_labels"]) for side in self.needs_labels)),
            **media.cost_of(features, features["chosen_input_ids"], self.rows),
        )

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """batch: as the collator returned it, also if it is laid flat for the model."""
        measured = measure_batch(batch, patch_size)
        rows, length = (1, sum(segments)) if segments else (measured.rows, measured.length)
        return Measured(rows, length, measured.media, measured.rows // self.rows, segments)


class Rm(Pairs):
    """`stage: rm`."""

    name = "rm"


class Dpo(Pairs):
    """`stage: dpo`, with every `pref_loss`. Each micro-batch goes through the reference model as well, which keeps no
    activations: budgets are those of the model that is trained."""

    name = "dpo"

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        stage = copy.copy(self)
        if finetuning_args.pref_loss in DIVIDES_BY_LENGTH:
            stage.needs_labels = SIDES
        elif finetuning_args.pref_ftx > 0:
            stage.needs_labels = ("chosen",)
        return stage

    def parts(self, trainer: Any) -> Sequence[Any]:
        from odb_factory.training.pair_metrics import PairMetrics

        return (PairMetrics(trainer),)


# Stage kto: examples that are desirable or not, each with an answer to another prompt to estimate a divergence from.
# The collator makes two batches of the examples, of their own answers and of those others, which go through the model
# one after the other: the budget bounds each of them, so an example costs the longer of its two rows. What is kept
# for a backward, which is where memory goes, is kept of one only.

NOT_HANDED_ON = ("videos", "audios")
OF_BOTH_KINDS = "one preference type"


class Kto(Stage):
    """`stage: kto`. batches: what the columns of the two answers begin with."""

    name = "kto"
    prepares_steps = True
    answers = batches = ("", "kl_")
    flags = ("kto_tags",)
    columns = ("kto_tag",)
    num_rows = batch_size = num_shards = 1

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        stage = copy.copy(self)
        processes = data_args.preprocessing_num_workers
        stage.num_rows, stage.batch_size = num_rows, data_args.preprocessing_batch_size
        stage.num_shards = max(min(processes or 1, num_rows), 1)
        stage.settings = {"preprocessing_num_workers": processes}
        return stage

    def together(self, index: int) -> Sequence[int]:
        """LLaMA-Factory gives a prompt the answer of the row before it in its batch, the first prompt the last answer.

        Loading, mixing and splitting come before that pass and shuffling after it, and a row that the pass drops has
        lent its answer first: so the number of a row says which row its partner is. `datasets` cuts the rows into a
        shard for each process, the first ones a row longer, and each shard into batches.
        """
        size, num_longer = divmod(self.num_rows, self.num_shards)
        longer = num_longer * (size + 1)
        if index < longer:
            size += 1
            begin = index // size * size
        else:
            begin = longer + (index - longer) // size * size
        end = begin + size
        begin += (index - begin) // self.batch_size * self.batch_size
        partner = index - 1 if index > begin else min(begin + self.batch_size, end) - 1
        return (index,) if partner == index else (partner, index)

    def preprocess(self, processor: Any, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, list[Any]]:
        """LLaMA-Factory gives the first prompt of a batch the last answer; here the partner's, which has no prompt."""
        *partner, row = rows
        examples = {key: [value] for key, value in row.items()}
        if partner:
            examples["_response"] = [row["_response"], partner[0]["_response"]]
        logger = logging.getLogger(type(processor).__module__)
        logger.addFilter(_is_about_rows)
        try:
            encoded: Mapping[str, list[Any]] = processor.preprocess_dataset(examples)
        finally:
            logger.removeFilter(_is_about_rows)
        return encoded

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        for name in NOT_HANDED_ON:
            if features.get(name):
                raise ValueError(f"it has {name}, which LLaMA-Factory's trainer for KTO does not hand to the model")
        ids, kl_ids = self.ids_of(features)
        return Cost(tokens=max(len(ids), len(kl_ids)), units=1, **media.cost_of(features, ids))

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """Flat, the longer rows of all examples follow each other, as the plan counts them."""
        measured = measure_batch(batch, patch_size)
        if not segments:
            longer = max(measured.length, batch["kl_input_ids"].shape[1])
            return Measured(measured.rows, longer, measured.media, measured.rows)
        lengths, kl_lengths = (batch[f"{answer}attention_mask"].sum(1) for answer in self.answers)
        length = sum(segments) + int((kl_lengths - lengths).clamp(min=0).sum())
        return Measured(1, length, measured.media, measured.rows, segments)

    def parts(self, trainer: Any) -> Sequence[Any]:
        from odb_factory.llamafactory.kto import ExampleMetrics, StepKL, check_trainer

        check_trainer(trainer)
        step_kl = StepKL(trainer)
        return step_kl, ExampleMetrics(trainer, step_kl)


def _is_about_rows(record: logging.LogRecord) -> bool:
    """Not the warning that a batch holds desirable or undesirable examples only, as a batch of one always does."""
    return OF_BOTH_KINDS not in record.getMessage()


STAGES: dict[str, Stage] = {stage.name: stage for stage in (Sft(), Pt(), Rm(), Dpo(), Kto())}
