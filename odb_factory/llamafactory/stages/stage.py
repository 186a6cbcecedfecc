"""`Stage`: what differs between LLaMA-Factory's stages of training."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odb_factory.data.measure import IGNORE_INDEX, count_patches, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.llamafactory.media import MediaObserver

MEDIA = ("images", "videos", "audios")
PROBE_TOKENS = 8


class Stage(ABC):
    """One object a stage; it holds no state of a run, and is sent to worker processes.

    collator: its class, among LLaMA-Factory's that take a template; other stages make theirs themselves.
    name: as in the YAML. unit: what stock's loss is a mean over, for messages. column: what every processed row has.
    dropped: why LLaMA-Factory's preprocessing leaves a row out. trainer: where its trainer is, module and class.
    pads_to: its workflow has rows padded to a multiple of so many tokens.
    takes_media: its collator does. equal_weights: the loss of a micro-batch is one mean whose units cannot be weighed
    one by one, so samples that stock weighs differently do not share one.
    prepares_steps: it looks at all micro-batches of an optimizer step before the first is trained on.
    rows: that its collator makes of a sample. batches: of `Collation`.
    """

    name: str
    unit: str
    trainer: tuple[str, str]
    collator: str
    column: str = "input_ids"
    dropped: str = "the turns do not end in one answer to a prompt"
    pads_to: int = 8
    takes_media: bool = True
    equal_weights: bool = False
    prepares_steps: bool = False
    rows: int = 1
    batches: tuple[str, ...] = ()

    def of_training(self, finetuning_args: Any, tokenizer: Any) -> Stage:
        """The stage as a training has it: what `cost` and `measure` know of its arguments."""
        return self

    def of_rows(self, data_args: Any, num_rows: int) -> Stage:
        """The stage as a training dataset of so many rows has it: what `together` and `settings` know of it."""
        return self

    @property
    def settings(self) -> dict[str, object]:
        """What ranks must have in common for their rows to be the same, beside the arguments that they compare."""
        return {}

    def refuse(self, value_of: Callable[..., Any]) -> str | None:
        """Why an argument of this stage cannot be right, in one line; None: they can.

        value_of(key, default): an argument of LLaMA-Factory's, as it stands in the YAML or as it has been read.
        """
        return None

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
            pad_to_multiple_of=self.pads_to,
            label_pad_token_id=IGNORE_INDEX,
        )

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
        "has_media": media.has_media(images, videos),
        "has_audio": bool(audios),
    }


def _dummies(collator: Any, sample: Mapping[str, Any], patch_size: int) -> tuple[int, int, int, int]:
    """Tokens and patches of the fake image, then of the fake audio, that a collator injects.

    sample: text of `PROBE_TOKENS` tokens, collated alone.
    """
    template = getattr(collator, "template", None)
    if template is None:  # a collator of the user's own, which injects nothing
        return 0, 0, 0, 0
    unpadded = copy.copy(collator)
    unpadded.pad_to_multiple_of = None
    plugin = template.mm_plugin
    both = _injected(unpadded, sample, patch_size)
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
        image = _injected(without, sample, patch_size)
    return (*image, both[0] - image[0], both[1] - image[1])


def _injected(collator: Any, sample: Mapping[str, Any], patch_size: int) -> tuple[int, int]:
    """Tokens of the first row, and patches."""
    batch = collator([copy.deepcopy(dict(sample))])
    return batch["input_ids"].shape[1] - PROBE_TOKENS, count_patches(batch, patch_size)


def probe_answer(collator: Any) -> dict[str, list[int]]:
    """A short row of nothing but padding tokens. collator: one without a tokenizer is not asked to collate it."""
    tokenizer = getattr(collator, "tokenizer", None)
    return {
        "input_ids": [0 if tokenizer is None else tokenizer.pad_token_id] * PROBE_TOKENS,
        "attention_mask": [1] * PROBE_TOKENS,
        "labels": [IGNORE_INDEX] * PROBE_TOKENS,
    }


def probe_collation(
    collator: Any, sample: Mapping[str, Any], patch_size: int, rows: int = 1, batches: tuple[str, ...] = ()
) -> Collation:
    """What this collator makes of one sample of `PROBE_TOKENS` tokens without media. rows, batches: of `Collation`."""
    image_tokens, image_patches, audio_tokens, audio_patches = _dummies(collator, sample, patch_size)
    return Collation(
        pad_to_multiple_of=getattr(collator, "pad_to_multiple_of", None) or 1,
        dummy_media_tokens=image_tokens,
        dummy_media_patches=image_patches,
        dummy_audio_tokens=audio_tokens,
        dummy_audio_patches=audio_patches,
        rows=rows,
        batches=batches,
    )
