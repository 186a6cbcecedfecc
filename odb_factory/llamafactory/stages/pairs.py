"""Stages whose samples are pairs of a chosen and a rejected answer: reward models, and DPO with its variants.

The collator makes two rows of a pair, all chosen ones first, padded to one length: padded, a pair costs two rows of the
longer answer, and flat both answers. It brings its media twice. The loss is a mean over pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.measure import count_supervised, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.llamafactory.stages.stage import MEDIA, Stage, media_cost, probe_answer, probe_collation
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

SIDES = ("chosen", "rejected")
DIVIDES_BY_LENGTH = ("ipo", "orpo", "simpo")
"""Losses (`pref_loss`) that take the mean log-probability of an answer, which an empty one does not have."""


class Pairs(Stage):
    unit = "pair"
    column = "chosen_input_ids"
    collator = "PairwiseDataCollatorWithPadding"
    dropped = "the turns do not end in two answers to a prompt"
    equal_weights = True
    rows = len(SIDES)
    batches = ("",)

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        return [features[f"{side}_input_ids"] for side in SIDES]

    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        once = media_cost(features, media, features["chosen_input_ids"])
        lengths = [len(ids) for ids in self.answers(features)]
        return Cost(
            tokens=sum(lengths),
            row_tokens=self.rows * max(lengths),
            units=self._units(features),
            **(once | {"patches": 2 * once["patches"]}),
        )

    def _units(self, features: Mapping[str, Any]) -> int:
        return 1

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """batch: as the collator returned it, also where it is laid flat for the model."""
        found = measure_batch(batch, patch_size)
        rows, length = (1, sum(segments)) if segments else (found.rows, found.length)
        return Measured(rows, length, found.patches, found.rows // self.rows, segments)

    def collation(self, collator: Any, patch_size: int) -> Collation:
        answer = probe_answer(collator)
        pair = {f"{side}_{name}": value for side in SIDES for name, value in answer.items()}
        return probe_collation(collator, pair | dict.fromkeys(MEDIA), patch_size, self.rows, self.batches)


class Rm(Pairs):
    """`stage: rm`."""

    name = "rm"
    trainer = ("llamafactory.train.rm.trainer", "PairwiseTrainer")

    def refuse(self, value_of: Callable[..., Any]) -> str | None:
        if value_of("include_effective_tokens_per_second"):
            return (
                "include_effective_tokens_per_second: True would preprocess the whole dataset once more, as odb counts "
                "the tokens of a pair with their padding; read odb/tokens_per_micro_step and remove the key."
            )
        return None


class Dpo(Pairs):
    """`stage: dpo`, with every `pref_loss`. Each micro-batch goes through the reference model as well, which keeps no
    activations: budgets are those of the model that is trained."""

    name = "dpo"
    trainer = ("llamafactory.train.dpo.trainer", "CustomDPOTrainer")
    needs_labels: tuple[str, ...] = ()

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        stage = copy.copy(self)
        if finetuning_args.pref_loss in DIVIDES_BY_LENGTH:
            stage.needs_labels = SIDES
        elif finetuning_args.pref_ftx > 0:
            stage.needs_labels = ("chosen",)
        return stage

    def _units(self, features: Mapping[str, Any]) -> int:
        """0 where an answer has no token left and the loss would divide by their number."""
        return int(all(count_supervised(features[f"{side}_labels"]) for side in self.needs_labels))

    def prepare(self, trainer: Any) -> Callable[[], None]:
        from odb_factory.training.pair_metrics import PairMetrics

        metrics = PairMetrics(trainer)
        metrics.install()
        return metrics.uninstall
