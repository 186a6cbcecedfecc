"""Count the tokens and patches of media without processing their pixels.

Observation uses a copy of LLaMA-Factory's multimodal plugin. `ImagesBySize` replaces its image processor and answers
from image sizes, after a comparison with the real processor at the start. If they differ, and for videos and audio, the
real processor runs for each medium, and its pixels are dropped. The plugin that collates is not changed.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import datasets
import numpy as np
import torch
from llamafactory.extras.constants import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from odb_factory.data.observe import DEFAULT_PATCH_SIZE, count_media
from odb_factory.log import get_logger
from odb_factory.planner import Media

logger = get_logger(__name__)

EXIF_ORIENTATION, EXIF_ROTATED = 0x0112, (5, 6, 7, 8)
LOSSLESS = (None, "PNG")
"""Formats of an opened image (None: it was rotated) that `datasets` encodes without changing a pixel."""
_FEATURE = datasets.Image()


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A cell of an `Image` column of `datasets`: the bytes of the file, or its path.

    encodings: how often stock decodes the image and encodes it again in its passes over the dataset. This changes the
    pixels of a JPEG, so `open` does the same.
    """

    bytes: bytes | None
    path: str | None
    encodings: int = 0

    def open(self) -> Image.Image:
        """The decoded image, with the pixels that stock trains on."""
        image = _FEATURE.decode_example(asdict(self))
        has_name = bool(getattr(image, "filename", ""))  # `datasets` does not encode such a file again
        for _ in range(0 if has_name or image.format in LOSSLESS else self.encodings):
            image = _FEATURE.decode_example(_FEATURE.encode_example(image))
        return image

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) after the rotation that its EXIF data name; reads only the header if the file is local."""
        stored = BytesIO(self.bytes) if self.bytes is not None else self.path
        if stored is None or (isinstance(stored, str) and not os.path.isfile(stored)):
            return self.open().size
        with Image.open(stored) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(EXIF_ORIENTATION) in EXIF_ROTATED else (width, height)


def decoded(images: Sequence[Any] | None) -> list[Any]:
    """The images with `EncodedImage`s opened."""
    return [image.open() if isinstance(image, EncodedImage) else image for image in images or []]


def _size_of(image: Any) -> tuple[int, int]:
    """(width, height) of an image: a path, bytes, file, {bytes, path} or PIL image, as LLaMA-Factory takes them."""
    if isinstance(image, Image.Image | EncodedImage):
        return image.size
    if isinstance(image, dict):
        image = image["bytes"] if image["bytes"] is not None else image["path"]
    with Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
        return opened.size


# The answer of an image processor by image sizes: counts of tokens and patches depend on the sizes of images, not on
# their pixels. Processors such as Qwen-VL's have a formula; others process blank images once for the sizes of a row,
# and the answer is remembered. Images of noise test both at the start.

MAX_REMEMBERED = 2048
"""Answers to keep; the oldest is dropped first. COCO has some hundred image sizes."""
MAX_DIMENSIONS_KEPT = 2
"""Integer tensors with at most this many dimensions are grids, sizes and counts, which plugins read."""
CHECK_SIZES = ((37, 211), (900, 700), (400, 90), (64, 64), (37, 211))

Size = tuple[int, int]
Answer = dict[str, Any]


class SizeOnlyImage(Image.Image):
    """An image without pixels, whose size LLaMA-Factory's own rules can change."""

    def __init__(self, size: Size):
        super().__init__()
        self._size, self._mode = size, "RGB"

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(tuple(size))


class ImagesBySize:
    """`plugin._get_mm_inputs` for images of given sizes: (width, height) in pixels.

    by_formula: the processor has a formula for patches; the answer has no pixels, and images and videos are processed
    separately. Otherwise pixels are tensors of the right shape that take no memory.
    """

    def __init__(self, plugin: Any, processor: Any, *, by_formula: bool):
        self.plugin, self.processor, self.by_formula = plugin, processor, by_formula
        self._answers: dict[str, Answer] = {}

    def answer(self, sizes: Sequence[Size], *args: Any, **kwargs: Any) -> Answer:
        """args, kwargs: the arguments of `_get_mm_inputs` after the processor."""
        if self.by_formula:  # only the product of a grid's row counts
            regular = self.plugin._regularize_images(
                [SizeOnlyImage(size) for size in sizes],
                image_max_pixels=getattr(self.processor, "image_max_pixels", 768 * 768),
                image_min_pixels=getattr(self.processor, "image_min_pixels", 32 * 32),
            )["images"]
            count = self.processor.image_processor.get_number_of_image_patches
            grids = [[1, 1, count(image.height, image.width, {})] for image in regular]
            return {"image_grid_thw": torch.tensor(grids)}
        key = repr((sizes, args, kwargs))
        if key not in self._answers:
            blanks = [Image.new("RGB", size, "white") for size in sizes]
            if len(self._answers) >= MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = _ask(self.plugin, self.processor, blanks, *args, **kwargs)
        return dict(self._answers[key])


def images_by_size(plugin: Any, processor: Any) -> ImagesBySize | None:
    """The fastest `ImagesBySize` that equals the real processor; None if none does (logged) or without images."""
    if plugin.image_token is None or processor is None:
        return None
    try:
        noise = [Image.effect_noise(size, 50).convert("RGB") for size in CHECK_SIZES]
        real = _ask(plugin, processor, noise)
        if real.keys() == {"pixel_values", "image_grid_thw"}:
            formula = ImagesBySize(plugin, processor, by_formula=True)
            with contextlib.suppress(AttributeError, TypeError):  # this processor has no formula
                grids = formula.answer(CHECK_SIZES)["image_grid_thw"]
                if torch.equal(grids.prod(-1), torch.as_tensor(real["image_grid_thw"]).prod(-1)):
                    return formula
        memory = ImagesBySize(plugin, processor, by_formula=False)
        if _are_equal(memory.answer(CHECK_SIZES), real):
            return memory
        why = "its answers depend on pixels"
    except Exception as error:  # the real processor will raise the same error for an image
        why = f"{type(error).__name__}: {error}"
    logger.info("images are observed through the real processor (%s)", why)
    return None


def _ask(plugin: Any, processor: Any, images: Sequence[Any], *args: Any, **kwargs: Any) -> Answer:
    """The real processor's answer for these images; tensors that plugins do not read take no memory."""

    def light(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.dim() > MAX_DIMENSIONS_KEPT):
            return value
        # Each pixel, or each tile of an image, refers to one number: 0 for a tile of padding, else 1.
        marks = value.flatten(2).any(-1)[..., None, None, None] if value.dim() == 5 else torch.ones(())
        return marks.to(value.dtype).expand(value.shape)

    answer: Answer = tree_map(light, dict(plugin._get_mm_inputs(list(images), [], [], processor, *args, **kwargs)))
    return answer


def _are_equal(first: Answer, second: Answer) -> bool:
    def is_same(value: Any, other: Any) -> bool:
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            return value.dtype == other.dtype and torch.equal(value, other)
        return bool(value == other)

    (leaves, structure), (other_leaves, other_structure) = tree_flatten(first), tree_flatten(second)
    return structure == other_structure and all(map(is_same, leaves, other_leaves))


# One row at a time: placeholders and patches.

WRITTEN_FOR_MEDIA = (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER)
WRITTEN_OUT = "its text contains the placeholder {}, which the model would read as a medium"


class MediaObserver:
    """Observes the media of one row at a time. `plugin` replaces the template's mm plugin.

    `plugin` keeps the answers about a row until its media are counted, so that token expansion and patch count read
    each file once.
    """

    def __init__(self, plugin: Any, tokenizer: Any, processor: Any):
        self.original, self.processor = plugin, processor
        names = [name for name in (plugin.image_token, plugin.video_token, plugin.audio_token) if name is not None]
        vocabulary = tokenizer.get_vocab() if names else {}
        self._token_ids = {name: vocabulary[name] for name in names if name in vocabulary}
        self._images = images_by_size(plugin, processor)
        self._by_formula = self._images is not None and self._images.by_formula
        self._answers: dict[Any, tuple[Any, Answer]] = {}
        self.plugin = copy.copy(plugin)
        self.plugin._get_mm_inputs = self._get_mm_inputs

    def check_text(self, row: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the text of a converted row contains a placeholder of the model. LLaMA-Factory itself
        counts the placeholders in messages that people write for media."""
        messages = [message["content"] or "" for message in (*row["_prompt"], *row["_response"])]
        for name in self._token_ids:
            texts = (row["_system"], row["_tools"], *([] if name in WRITTEN_FOR_MEDIA else messages))
            if any(name in text for text in texts if text):
                raise ValueError(WRITTEN_OUT.format(name))

    def num_placeholders(self, input_ids: Sequence[int]) -> int:
        return sum(input_ids.count(token_id) for token_id in self._token_ids.values())

    def cost_of(self, features: Mapping[str, Any], input_ids: list[int], rows: int = 1) -> dict[str, Any]:
        """The arguments of `Cost` for media. rows: how often the collator takes the media of a sample."""
        counts = self.count_media(features, input_ids).times(rows)
        # The collator injects a fake image only for a model with images.
        has_media = self.original.image_token is None or bool(features.get("images") or features.get("videos"))
        has_audio = bool(features.get("audios"))
        return {"patches": counts.patches, "media": counts, "has_media": has_media, "has_audio": has_audio}

    def count_media(self, features: Mapping[str, Any], input_ids: list[int]) -> Media:
        """The media of a row, as collated."""
        images, videos, audios = (features.get(kind) or [] for kind in ("images", "videos", "audios"))
        inputs: Answer = {}
        if videos and self._by_formula:
            # LLaMA-Factory also expands placeholders by the metadata of videos.
            by_metadata = getattr(self.plugin, "_get_video_token_metadata", None)
            inputs |= (by_metadata and by_metadata(videos, self.processor)) or {}
        media = [images, [] if inputs else videos, audios]
        if any(media):
            inputs |= self.plugin.get_mm_inputs(*media, *([len(kind)] for kind in media), [input_ids], self.processor)
        if audios and hasattr(getattr(self.processor, "image_processor", None), "merge_size"):
            # Frames of audio are then counted without padding, as for every batch of such a model.
            inputs.setdefault("image_grid_thw", torch.zeros((0, 3), dtype=torch.long))
        self._answers.clear()
        return count_media(inputs, self.patch_size)

    @property
    def patch_size(self) -> int:
        """Side of a vision patch, in pixels."""
        for owner in (getattr(self.processor, "image_processor", None), self.processor):
            size = getattr(owner, "patch_size", None)
            height = size.get("height") if isinstance(size, Mapping) else getattr(size, "height", size)
            if isinstance(height, int):
                return height
        return DEFAULT_PATCH_SIZE

    def _get_mm_inputs(self, images: Any, videos: Any, audios: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the plugin's method: images by their sizes if possible, other media by the real processor, once for
        each medium of a row."""
        by_size = self._images if self._by_formula or not videos else None
        kinds: Any = ((images, videos, []), ([], [], audios))
        if by_size is not None:
            kinds = ((images, [], []), ([], videos, []), ([], [], audios))
        inputs: Answer = {}
        for media in filter(any, kinds):
            key = tuple(tuple(id(item) for item in kind) for kind in media), repr((args, kwargs))
            if key not in self._answers:
                pictures, *others = media
                if pictures and by_size is not None:
                    answer = by_size.answer([_size_of(image) for image in pictures], *args, **kwargs)
                else:
                    answer = dict(self.original._get_mm_inputs(decoded(pictures), *others, processor, *args, **kwargs))
                self._answers[key] = media, answer  # keeps the media alive, so that their ids stay unique
            inputs |= self._answers[key][1]
        return inputs
