"""The stages of LLaMA-Factory: preprocessing, cost and collation of a sample.

`STAGES` has one `Stage` for each name in the YAML. Nothing heavy is imported.
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
    """A stage; holds no state of a run, and is sent to worker processes.

    name: in the YAML. answers: prefixes of the columns of each answer of a preprocessed row.
    takes_media: the collator takes media.
    prepares_steps: the trainer sees all micro-batches of an optimizer step before it trains on the first.
    rows: rows of a sample after collation. batches: of `Collation`; if not empty, the loss of a micro-batch is one mean
    that cannot be weighted by sample, so samples with different weights in stock do not share a micro-batch.
    settings: arguments on which rows depend and that ranks do not compare otherwise.
    flags: keys that the collator reads in addition to answers and media.
    """

    name: str
    answers: tuple[str, ...] = ("",)
    takes_media: bool = True
    prepares_steps: bool = False
    rows: int = 1
    batches: tuple[str, ...] = ()
    settings: Mapping[str, object] = {}
    flags: tuple[str, ...] = ()

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        """The stage with the arguments that `cost` and `measure` need."""
        return self

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        """The stage with the arguments that `together` and `settings` need. num_rows: of the training dataset."""
        return self

    def together(self, index: int) -> Sequence[int]:
        """The rows that must be preprocessed in one batch to make row `index`, which is the last of them."""
        return (index,)

    def preprocess(self, processor: Any, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, list[Any]]:
        """The columns that LLaMA-Factory's dataset processor makes of the last of the converted rows of `together`.

        Each column has one entry, or none if the row is dropped.
        """
        encoded: Mapping[str, list[Any]] = processor.preprocess_dataset(
            {key: [value] for key, value in rows[-1].items()}
        )
        return encoded

    def ids_of(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        """The token ids of prompt and answer, for each answer of a preprocessed row."""
        return [features[f"{answer}input_ids"] for answer in self.answers]

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        """The cost of a preprocessed row, as it will be collated."""
        raise NotImplementedError

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """The size of a collated micro-batch. patch_size, segments: see `measure_batch`."""
        return measure_batch(batch, patch_size, segments)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        """The padding, fake image and fake audio that this collator adds to a micro-batch, learnt by collating a short
        sample without media."""
        template, dummies = getattr(collator, "template", None), dict[str, int]()
        if template is not None:  # a custom collator injects nothing
            values = {"input_ids": collator.tokenizer.pad_token_id, "attention_mask": 1, "labels": IGNORE_INDEX}
            probe: dict[str, Any] = dict.fromkeys(MEDIA) | dict.fromkeys(self.flags, True)
            probe |= {f"{answer}{name}": [values[name]] * PROBE_TOKENS for answer in self.answers for name in values}

            def injected(collator: Any) -> tuple[int, int]:
                batch = collator([copy.deepcopy(probe)])
                return batch["input_ids"].shape[1] - PROBE_TOKENS, count_media(batch, patch_size).patches

            unpadded = copy.copy(collator)
            unpadded.pad_to_multiple_of = None
            tokens, patches = image_tokens, image_patches = injected(unpadded)
            if template.mm_plugin.audio_token is not None:
                unpadded.get_rope_func = None  # positions may need audio, and are not used here
                unpadded.template = copy.copy(template)
                unpadded.template.mm_plugin = copy.copy(template.mm_plugin)
                unpadded.template.mm_plugin.audio_token = None
                image_tokens, image_patches = injected(unpadded)
            dummies = {
                "dummy_media_tokens": image_tokens,
                "dummy_media_patches": image_patches,
                "dummy_audio_tokens": tokens - image_tokens,
                "dummy_audio_patches": patches - image_patches,
            }
        multiple = getattr(collator, "pad_to_multiple_of", None) or 1
        return Collation(pad_to_multiple_of=multiple, rows=self.rows, batches=self.batches, **dummies)

    def parts(self, trainer: Any) -> Sequence[Any]:
        """Changes that a run makes to a trainer, as `Session.parts`. Evaluations must stay stock's."""
        return ()


# Stages whose loss is a mean over tokens


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
    """`stage: pt`: whole documents. The collator makes the labels and masks every padding token, also inside a document
    if the tokenizer pads with its end-of-text token."""

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
            has_media=True,  # the collator adds no fake image
        )


# Stages whose samples are pairs of a chosen and a rejected answer: reward models, and DPO with its variants.
# The collator makes two rows of a pair, all chosen rows first, padded to one length. A padded pair costs two rows of
# the longer answer, a flat pair the sum of both answers. Media occur twice. The loss is a mean over pairs.

SIDES = ("chosen", "rejected")
DIVIDES_BY_LENGTH = ("ipo", "orpo", "simpo")
"""Values of `pref_loss` whose loss divides by the length of an answer, which may be 0."""


class Pairs(Stage):
    """needs_labels: the answers that must have a supervised token, because the loss divides by their number."""

    answers = ("chosen_", "rejected_")
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
        """batch: the collator's, also if the micro-batch is flat."""
        measured = measure_batch(batch, patch_size)
        rows, length = (1, sum(segments)) if segments else (measured.rows, measured.length)
        return Measured(rows, length, measured.media, measured.rows // self.rows, segments)


class Rm(Pairs):
    """`stage: rm`."""

    name = "rm"


class Dpo(Pairs):
    """`stage: dpo`, with every `pref_loss`. The reference model keeps no activations, so budgets are the policy's."""

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


# Stage kto: desirable or undesirable examples, each with the answer to another prompt, which serves to estimate a KL
# divergence. The collator makes two batches, of own answers and of other answers, which go through the model one after
# the other. The budget bounds each of them, so an example costs the longer of its two rows. Only one of the two
# forwards keeps activations for a backward.

NOT_HANDED_ON = ("videos", "audios")
OF_BOTH_KINDS = "one preference type"


class Kto(Stage):
    """`stage: kto`."""

    name = "kto"
    prepares_steps = True
    answers = batches = ("", "kl_")
    flags = ("kto_tags",)
    num_rows = batch_size = num_shards = 1

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        stage = copy.copy(self)
        processes = data_args.preprocessing_num_workers
        stage.num_rows, stage.batch_size = num_rows, data_args.preprocessing_batch_size
        stage.num_shards = max(min(processes or 1, num_rows), 1)
        stage.settings = {"preprocessing_num_workers": processes}
        return stage

    def together(self, index: int) -> Sequence[int]:
        """The row and its partner: LLaMA-Factory pairs a prompt with the answer of the row before it in its batch, and
        the first prompt with the last answer.

        The pass runs after loading, mixing and splitting and before shuffling, and also pairs rows that it drops, so
        the partner follows from the row's number. `datasets` cuts the rows into a shard for each process (the first
        shards are a row longer), and each shard into batches.
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
        """The batch is this row and the answer of its partner: the first prompt is paired with the last answer."""
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
        """A flat micro-batch counts the longer row of each example, as the plan does."""
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
    """Drops the warning that a batch has examples of one kind only, which is always true of a single example."""
    return OF_BOTH_KINDS not in record.getMessage()


STAGES: dict[str, Stage] = {stage.name: stage for stage in (Sft(), Pt(), Rm(), Dpo(), Kto())}
