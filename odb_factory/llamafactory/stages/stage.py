"""`Stage`: what differs between LLaMA-Factory's stages of training."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.measure import IGNORE_INDEX, count_patches, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.planning import VIDEO, Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

MEDIA = ("images", "videos", "audios")
PROBE_TOKENS = 8


class Stage(ABC):
    """One object a stage; it holds no state of a run, and is sent to worker processes.

    name: as in the YAML. unit: what stock's loss is a mean over, for messages. column: what every processed row has.
    dropped: why LLaMA-Factory's preprocessing leaves a row out. trainer: where its trainer is, module and class.
    takes_media: its collator does. equal_weights: the loss of a micro-batch is one mean whose units cannot be weighed
    one by one, so samples that stock weighs differently do not share one.
    why_not_flat: why its rows cannot follow each other in one; None: they can.
    """

    name: str
    unit: str
    trainer: tuple[str, str]
    column: str = "input_ids"
    dropped: str = "the turns do not end in one answer to a prompt"
    takes_media: bool = True
    equal_weights: bool = False
    why_not_flat: str | None = None

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        """The stage as a training has it: what `cost` and `measure` know of its arguments."""
        return self

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        """The stage as a training dataset of so many rows has it: what `together` knows of it."""
        return self

    def refuse(self, value_of: Callable[..., Any]) -> str | None:
        """Why an argument of this stage cannot be right, in one line; None: they can.

        value_of(key, default): an argument of LLaMA-Factory's, as it stands in the YAML or as it has been read.
        """
        return None

    def together(self, index: int) -> Sequence[int]:
        """The rows that go through preprocessing as one batch to make this one; itself is the last."""
        return (index,)

    def answers(self, features: Mapping[str, Any]) -> Sequence[list[int]]:
        """The token ids of all that media placeholders were put into, in the order of preprocessing."""
        return (features[self.column],)

    @abstractmethod
    def cost(self, features: Mapping[str, Any], media: MediaObserver) -> Cost:
        """Of a processed row, as it will be collated."""

    def measure(self, batch: Mapping[str, Any], patch_size: int = 14, segments: tuple[int, ...] = ()) -> Measured:
        """Of a collated micro-batch. patch_size, segments: of `measure_batch`."""
        return measure_batch(batch, patch_size, segments)

    @abstractmethod
    def make_collator(self, template: Any, tokenizer: Any, processor: Any) -> Any:
        """As its workflow makes it, for a look before there is a model."""

    @abstractmethod
    def collation(self, collator: Any, patch_size: int) -> Collation:
        """What this collator adds to a micro-batch; learnt by collating one short sample without media."""

    def prepare(self, trainer: Any) -> Callable[[], None]:
        """Change on a trainer what its run needs; returns what undoes it. Its evaluations must stay stock's."""
        return lambda: None


def media_cost(features: Mapping[str, Any], media: MediaObserver, input_ids: list[int]) -> dict[str, Any]:
    """The arguments of `Cost` that media decide, where the collator takes those of a row once."""
    images, videos, audios = (features.get(key) for key in MEDIA)
    return {
        "patches": media.count_patches(images, videos, audios, input_ids),
        "has_media": media.has_media(images, videos, audios),
        "modality": VIDEO if videos else 0,
    }


def probe_answer(collator: Any) -> dict[str, list[int]]:
    """A short row of nothing but padding tokens."""
    return {
        "input_ids": [collator.tokenizer.pad_token_id] * PROBE_TOKENS,
        "attention_mask": [1] * PROBE_TOKENS,
        "labels": [IGNORE_INDEX] * PROBE_TOKENS,
    }


def probe_collation(collator: Any, sample: Mapping[str, Any], patch_size: int, rows: int = 1) -> Collation:
    """What this collator makes of one sample of `PROBE_TOKENS` tokens without media. rows: that it makes of a sample,
    which is planned as one row of their length together."""
    unpadded = copy.copy(collator)
    unpadded.pad_to_multiple_of = None
    batch = unpadded([dict(sample)])
    return Collation(
        pad_to_multiple_of=rows * (collator.pad_to_multiple_of or 1),
        dummy_media_tokens=rows * (batch["input_ids"].shape[1] - PROBE_TOKENS),
        dummy_media_patches=count_patches(batch, patch_size),
    )
