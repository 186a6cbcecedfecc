"""Stage kto: examples that are desirable or not, each with an answer to another prompt to estimate a divergence from.

The collator makes two batches of the examples, of their own answers and of those others, which go through the model one
after the other: the budget bounds each of them, so an example costs the longer of its two rows. What is kept for a
backward, which is where memory goes, is kept of one only.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.measure import measure_batch
from odb_factory.data.samples import Measured
from odb_factory.llamafactory.stages.kto_partners import Partners
from odb_factory.llamafactory.stages.stage import MEDIA, Stage, media_cost, probe_answer, probe_collation
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

NOT_HANDED_ON = ("videos", "audios")
OF_BOTH_KINDS = "one preference type"


class Kto(Stage):
    """`stage: kto`. batches: what the columns of the two answers begin with."""

    name = "kto"
    unit = "example"
    trainer = ("llamafactory.train.kto.trainer", "CustomKTOTrainer")
    collator = "KTODataCollatorWithPadding"
    equal_weights = True
    prepares_steps = True
    batches = ("", "kl_")
    partners = Partners(num_rows=0, batch_size=1, num_shards=1)

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        stage = copy.copy(self)
        stage.partners = Partners.of_pass(num_rows, data_args)
        return stage

    @property
    def settings(self) -> dict[str, object]:
        """The number of processes decides which rows are pairs."""
        return {"shards of preprocessing (preprocessing_num_workers)": self.partners.num_shards}

    def together(self, index: int) -> Sequence[int]:
        partner = self.partners[index]
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
        found = measure_batch(batch, patch_size)
        if not segments:
            longer = max(found.length, batch["kl_input_ids"].shape[1])
            return dataclasses.replace(found, length=longer, units=found.rows)
        own, others = (batch[f"{answer}attention_mask"].sum(1) for answer in self.batches)
        length = sum(segments) + int((others - own).clamp(min=0).sum())
        return Measured(1, length, found.patches, found.rows, segments)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        answer = probe_answer(collator)
        example: dict[str, Any] = {f"{kind}{name}": value for kind in self.batches for name, value in answer.items()}
        example |= dict.fromkeys(MEDIA) | {"kto_tags": True}
        return probe_collation(collator, example, patch_size, batches=self.batches)

    def prepare(self, trainer: Any) -> Callable[[], None]:
        from odb_factory.llamafactory.stages import kto_probes
        from odb_factory.llamafactory.stages.kto_kl import StepKL
        from odb_factory.llamafactory.stages.kto_metrics import ExampleMetrics

        kto_probes.check_trainer(trainer)
        step_kl = StepKL(trainer)
        metrics = ExampleMetrics(trainer, step_kl)
        step_kl.install()
        metrics.install()

        def undo() -> None:
            metrics.uninstall()
            step_kl.uninstall()

        return undo


def _is_about_rows(record: logging.LogRecord) -> bool:
    """Not the warning that a batch holds desirable or undesirable examples only, as a batch of one always does."""
    return OF_BOTH_KINDS not in record.getMessage()
