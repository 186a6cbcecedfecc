"""LLaMA-Factory's stages of training: what each of them calls a sample, and what a sample costs.

One `Stage` object each; `STAGES` has them by the name in the YAML. Nothing heavy is imported.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from odb_factory.data.observe import IGNORE_INDEX, count_media, count_supervised, has_leading_label, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.data.serialize import fingerprint
from odb_factory.planner import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

MEDIA = ("images", "videos", "audios")
PROBE_TOKENS = 8


class Stage(ABC):
    """One object a stage; it holds no state of a run, and is sent to worker processes.

    collator: its class, among LLaMA-Factory's that take a template; other stages make theirs themselves.
    name: as in the YAML. unit: what stock's loss is a mean over, for messages. column: what every processed row has.
    takes_media: its collator does. equal_weights: the loss of a micro-batch is one mean whose units cannot be weighed
    one by one, so samples that stock weighs differently do not share one.
    evaluates_by_budget: `eval_token_budget` gives stock's figures.
    prepares_steps: it looks at all micro-batches of an optimizer step before the first is trained on.
    rows: that its collator makes of a sample. batches: of `Collation`.
    settings: what ranks must have in common for their rows to be the same, beside the arguments that they compare.
    """

    name: str
    unit: str
    collator: str
    column: str = "input_ids"
    takes_media: bool = True
    equal_weights: bool = False
    evaluates_by_budget: bool = True
    prepares_steps: bool = False
    rows: int = 1
    batches: tuple[str, ...] = ()
    settings: Mapping[str, object] = {}

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

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        """The token ids of all that media placeholders were put into, in the order of preprocessing."""
        return (features[self.column],)

    @abstractmethod
    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        """Of a processed row, as it will be collated."""

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """Of a collated micro-batch. patch_size, segments: of `measure_batch`."""
        return measure_batch(batch, patch_size, segments)

    def make_collator(self, template: Any, tokenizer: Any, processor: Any) -> Any:
        """As its workflow makes it, for a look before there is a model."""
        from llamafactory.data import collator  # heavy, and not needed to check a YAML

        make = getattr(collator, self.collator)
        return make(
            template=template,
            tokenizer=tokenizer,
            processor=processor,
            pad_to_multiple_of=8,
            label_pad_token_id=IGNORE_INDEX,
        )

    def probe(self, answer: Mapping[str, list[int]]) -> dict[str, Any]:
        """A sample of nothing but this answer, as the collator takes it."""
        return dict(answer)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        """What this collator adds to a micro-batch; learnt by collating one short sample without media."""
        multiple = getattr(collator, "pad_to_multiple_of", None) or 1
        if not self.takes_media:
            return Collation(pad_to_multiple_of=multiple)
        tokenizer = getattr(collator, "tokenizer", None)  # a collator without one is not asked to collate
        answer = {
            "input_ids": [0 if tokenizer is None else tokenizer.pad_token_id] * PROBE_TOKENS,
            "attention_mask": [1] * PROBE_TOKENS,
            "labels": [IGNORE_INDEX] * PROBE_TOKENS,
        }
        image, audio = _dummies(collator, self.probe(answer), patch_size)
        return Collation(
            pad_to_multiple_of=multiple,
            dummy_media_tokens=image[0],
            dummy_media_patches=image[1],
            dummy_audio_tokens=audio[0],
            dummy_audio_patches=audio[1],
            rows=self.rows,
            batches=self.batches,
        )

    def parts(self, trainer: Any) -> Sequence[Any]:
        """What a run changes on a trainer, as `Session.parts`. Its evaluations must stay stock's."""
        return ()


def media_cost(
    features: Mapping[str, Any], media: MediaObserver, input_ids: list[int], rows: int = 1
) -> dict[str, Any]:
    """The arguments of `Cost` that media decide, for a collator that takes those of a sample `rows` times."""
    images, videos, audios = (features.get(key) for key in MEDIA)
    counts = media.count_media(images, videos, audios, input_ids).times(rows)
    return {
        "patches": counts.patches,
        "media": counts,
        "has_media": media.has_media(images, videos),
        "has_audio": bool(audios),
    }


def _dummies(collator: Any, sample: Mapping[str, Any], patch_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(tokens, patches) of the fake image, and of the fake audio, that a collator injects.

    sample: text of `PROBE_TOKENS` tokens, collated alone.
    """
    template = getattr(collator, "template", None)
    if template is None:  # a custom collator, which injects nothing
        return (0, 0), (0, 0)

    def injected(collator: Any) -> tuple[int, int]:
        batch = collator([copy.deepcopy(dict(sample))])
        return batch["input_ids"].shape[1] - PROBE_TOKENS, count_media(batch, patch_size).patches

    unpadded = copy.copy(collator)
    unpadded.pad_to_multiple_of = None
    plugin = template.mm_plugin
    both = injected(unpadded)
    if plugin.image_token is None:
        image = (0, 0)
    elif plugin.audio_token is None:
        image = both
    else:
        without = copy.copy(unpadded)
        without.get_rope_func = None  # positions are not asked for, and may need audio
        without.template = copy.copy(template)
        without.template.mm_plugin = copy.copy(plugin)
        without.template.mm_plugin.audio_token = None
        image = injected(without)
    return image, (both[0] - image[0], both[1] - image[1])


# ----------------------------------------------------------------------------------------------------------------------
# Stages whose loss is a mean over tokens: supervised fine-tuning and pre-training.


class Sft(Stage):
    """`stage: sft`."""

    name = "sft"
    unit = "supervised token"
    collator = "SFTDataCollatorWith4DAttentionMask"

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        ids, labels = features["input_ids"], features["labels"]
        return Cost(
            tokens=len(ids),
            units=count_supervised(labels),
            leading_label=has_leading_label(labels),
            **media_cost(features, media, ids),
        )


class Pt(Stage):
    """`stage: pt`: whole documents. Their labels are made by the collator, which masks every padding token, also those
    of a tokenizer that pads with its end-of-text token."""

    name = "pt"
    unit = "supervised token"
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


# ----------------------------------------------------------------------------------------------------------------------
# Stages whose samples are pairs of a chosen and a rejected answer: reward models, and DPO with its variants.
# The collator makes two rows of a pair, all chosen ones first, padded to one length: padded, a pair costs two rows of
# the longer answer, and flat both answers. It brings its media twice. The loss is a mean over pairs.

SIDES = ("chosen", "rejected")
DIVIDES_BY_LENGTH = ("ipo", "orpo", "simpo")
"""Losses (`pref_loss`) that take the mean log-probability of an answer, which an empty one does not have."""


class Pairs(Stage):
    """needs_labels: the answers that must have a token left: the loss would divide by their number."""

    unit = "pair"
    column = "chosen_input_ids"
    collator = "PairwiseDataCollatorWithPadding"
    equal_weights = True
    rows = len(SIDES)
    batches = ("",)
    needs_labels: tuple[str, ...] = ()

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        return [features[f"{side}_input_ids"] for side in SIDES]

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        lengths = [len(ids) for ids in self.answers(features)]
        return Cost(
            tokens=sum(lengths),
            row_tokens=self.rows * max(lengths),
            units=int(all(count_supervised(features[f"{side}_labels"]) for side in self.needs_labels)),
            **media_cost(features, media, features["chosen_input_ids"], self.rows),
        )

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """batch: as the collator returned it, also where it is laid flat for the model."""
        measured = measure_batch(batch, patch_size)
        rows, length = (1, sum(segments)) if segments else (measured.rows, measured.length)
        return Measured(rows, length, measured.media, measured.rows // self.rows, segments)

    def probe(self, answer: Mapping[str, list[int]]) -> dict[str, Any]:
        pair = {f"{side}_{name}": value for side in SIDES for name, value in answer.items()}
        return pair | dict.fromkeys(MEDIA)


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


# ----------------------------------------------------------------------------------------------------------------------
# Stage kto: examples that are desirable or not, each with an answer to another prompt to estimate a divergence from.
# The collator makes two batches of the examples, of their own answers and of those others, which go through the model
# one after the other: the budget bounds each of them, so an example costs the longer of its two rows. What is kept
# for a backward, which is where memory goes, is kept of one only.

NOT_HANDED_ON = ("videos", "audios")
OF_BOTH_KINDS = "one preference type"


class Kto(Stage):
    """`stage: kto`. batches: what the columns of the two answers begin with."""

    name = "kto"
    evaluates_by_budget = False  # its figures are sums over the batches of a rank
    unit = "example"
    collator = "KTODataCollatorWithPadding"
    equal_weights = True
    prepares_steps = True
    batches = ("", "kl_")
    partners = np.arange(0)

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        """LLaMA-Factory gives a prompt the answer of the row before it in its batch, the first prompt the last answer.

        Loading, mixing and splitting come before that pass and shuffling after it, and a row that the pass drops has
        lent its answer first: so the number of a row says which row its partner is. `datasets` cuts the numbers into
        batches and shards as it does the rows.
        """
        import datasets

        stage = copy.copy(self)
        partners = datasets.Dataset.from_dict({"row": range(num_rows)}).map(
            lambda batch: {"row": np.roll(batch["row"], 1)},
            batched=True,
            batch_size=data_args.preprocessing_batch_size,
            num_proc=data_args.preprocessing_num_workers,
            desc="Pairing rows",
        )
        stage.partners = partners.data.column("row").to_numpy()
        stage.settings = {"pairs of rows (preprocessing_num_workers)": fingerprint(stage.partners)}
        return stage

    def together(self, index: int) -> Sequence[int]:
        partner = int(self.partners[index])
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
        except IndexError:
            if examples["_response"][-1]:
                raise
            raise ValueError(
                "it is paired with the answer of the row before it, which has none; LLaMA-Factory itself fails there"
            ) from None
        finally:
            logger.removeFilter(_is_about_rows)
        return encoded

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        return [features[f"{answer}input_ids"] for answer in self.batches]

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        for name in NOT_HANDED_ON:
            if features.get(name):
                raise ValueError(f"it has {name}, which LLaMA-Factory's trainer for KTO does not hand to the model")
        answers = self.answers(features)
        return Cost(tokens=max(map(len, answers)), units=1, **media_cost(features, media, answers[0]))

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """Flat, the longer rows of all examples follow each other, as the plan counts them."""
        measured = measure_batch(batch, patch_size)
        if not segments:
            longer = max(measured.length, batch["kl_input_ids"].shape[1])
            return Measured(measured.rows, longer, measured.media, measured.rows)
        lengths, kl_lengths = (batch[f"{answer}attention_mask"].sum(1) for answer in self.batches)
        length = sum(segments) + int((kl_lengths - lengths).clamp(min=0).sum())
        return Measured(1, length, measured.media, measured.rows, segments)

    def probe(self, answer: Mapping[str, list[int]]) -> dict[str, Any]:
        example = {f"{kind}{name}": value for kind in self.batches for name, value in answer.items()}
        return example | dict.fromkeys(MEDIA) | {"kto_tags": True}

    def parts(self, trainer: Any) -> Sequence[Any]:
        from odb_factory.llamafactory.kto import ExampleMetrics, StepKL, check_trainer

        check_trainer(trainer)
        step_kl = StepKL(trainer)
        return step_kl, ExampleMetrics(trainer, step_kl)


def _is_about_rows(record: logging.LogRecord) -> bool:
    """Not the warning that a batch holds desirable or undesirable examples only, as a batch of one always does."""
    return OF_BOTH_KINDS not in record.getMessage()


STAGES: dict[str, Stage] = {stage.name: stage for stage in (Sft(), Pt(), Rm(), Dpo(), Kto())}
