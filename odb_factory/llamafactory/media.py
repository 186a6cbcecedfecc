"""Learn what media cost without processing their pixels.

A copy of LLaMA-Factory's multimodal plugin is used for observation. Its call of the image
processor is answered from image sizes (`ImagesBySize`), its call for audio from the lengths of clips (`ClipsByLength`).
Both are compared with the real processor at start; if they differ, and for videos, the processor is asked each time,
and its pixels are dropped. The plugin that collates is never touched.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import datasets
import numpy as np
import torch
from llamafactory.extras.constants import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from odb_factory.data.observe import AUDIO_KEYS, DEFAULT_PATCH_SIZE, count_media
from odb_factory.errors import DataError
from odb_factory.log import get_logger
from odb_factory.planner import Media

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# Images as LLaMA-Factory takes them, and image cells of a dataset, which stay encoded until they are collated.

EXIF_ORIENTATION, EXIF_ROTATED = 0x0112, (5, 6, 7, 8)
LOSSLESS = (None, "PNG")
"""Formats of an opened image, none if it was turned, that `datasets` encodes without changing a pixel."""
_FEATURE = datasets.Image()


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image cell of a dataset with an `Image` column, as stored: the file's bytes, or its path.

    encodings: how often stock would have decoded and encoded it again by the time it is collated, in its passes over
    the dataset. The pixels of a JPEG change by that, so it is done when the image is opened.
    """

    bytes: bytes | None
    path: str | None
    encodings: int = 0

    @property
    def cell(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "path": self.path}

    def open(self) -> Image.Image:
        """The decoded image, as `datasets` would have given it."""
        image = _FEATURE.decode_example(self.cell)
        has_name = bool(getattr(image, "filename", ""))  # such a file is kept as it is
        for _ in range(0 if has_name or image.format in LOSSLESS else self.encodings):
            image = _FEATURE.decode_example(_FEATURE.encode_example(image))
        return image

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) after the rotation its EXIF data asks for; reads the header only, if its file is here."""
        stored = BytesIO(self.bytes) if self.bytes is not None else self.path
        if stored is None or (isinstance(stored, str) and not os.path.isfile(stored)):
            return self.open().size
        with Image.open(stored) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(EXIF_ORIENTATION) in EXIF_ROTATED else (width, height)


def decoded(images: Sequence[Any] | None) -> list[Any]:
    """The images as LLaMA-Factory takes them: encoded cells are opened, all else stays."""
    return [image.open() if isinstance(image, EncodedImage) else image for image in images or []]


def check_sizes(images: Sequence[Any], sizes: Sequence[tuple[int, int] | None]) -> None:
    """Raise `DataError` if an image file has another size than when it was observed, so that its tokens do not fit."""
    for image, observed in zip(images, sizes):
        if observed is not None and (size := _size_of(image)) != tuple(observed):
            raise DataError(
                f"image {image} has changed since it was observed (was {observed[0]}x{observed[1]}, is "
                f"{size[0]}x{size[1]})"
            )


def _size_of(image: Any) -> tuple[int, int]:
    if isinstance(image, Image.Image | EncodedImage):
        return image.size
    with _opened(image) as opened:
        return opened.size


def _opened(image: Any) -> AbstractContextManager[Image.Image]:
    """An image in any form LLaMA-Factory takes: path, bytes, file, {bytes, path}, PIL image, encoded cell."""
    if isinstance(image, EncodedImage):
        return image.open()
    if isinstance(image, Image.Image):
        return nullcontext(image)
    if isinstance(image, dict):
        image = image["bytes"] if image["bytes"] is not None else image["path"]
    return Image.open(BytesIO(image) if isinstance(image, bytes) else image)


# ----------------------------------------------------------------------------------------------------------------------
# What an image processor answers, by image size: token and patch counts depend on the sizes of images, not on their
# pixels. Processors of Qwen-VL and the like have a formula; others are asked once for each size, with blank images, and
# the answer is remembered. Whether that holds is tried at start, with images of noise.


MAX_REMEMBERED = 2048
"""Answers; when there are more, the oldest is forgotten. COCO has some hundred image sizes."""
MAX_DIMENSIONS_KEPT = 2
"""Integer tensors of at most this many dimensions are grids, sizes and counts, which plugins read; others are masks."""
CHECK_SIZES = ((37, 211), (900, 700), (400, 90), (64, 64), (37, 211))

Size = tuple[int, int]
Answer = dict[str, Any]


class SizeOnlyImage(Image.Image):
    """An image without pixels: LLaMA-Factory's own resizing rules can be run on its size."""

    def __init__(self, size: Size):
        super().__init__()
        self._size, self._mode = size, "RGB"

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(tuple(size))


class ImagesBySize:
    """`plugin._get_mm_inputs` for images, given their sizes alone: (width, height) in pixels.

    In place of pixels it gives tensors of their shape that take no memory, or by the formula nothing.

    by_formula: patches follow from the size, and images and videos are processed apart from each other.
    one_by_one: the answer for several images is that for each, put together; else it is remembered for all together.
    """

    def __init__(self, plugin: Any, processor: Any, *, by_formula: bool, one_by_one: bool):
        self.plugin, self.processor, self.by_formula, self.one_by_one = plugin, processor, by_formula, one_by_one
        self._answers: dict[Any, Answer] = {}

    def answer(self, sizes: Sequence[Size], *args: Any, **kwargs: Any) -> Answer:
        """args, kwargs: of `_get_mm_inputs`, after the processor."""
        if self.by_formula:
            return {"image_grid_thw": self._grids(sizes)}
        if self.one_by_one and len(sizes) > 1 and not (args or kwargs):
            return _put_together([self._of((size,)) for size in sizes])
        return dict(self._of(tuple(sizes), *args, **kwargs))

    def _grids(self, sizes: Sequence[Size]) -> Tensor:
        """[images, 3] whose rows multiply to the patches of each image (their own shape does not matter here)."""
        regular = self.plugin._regularize_images(
            [SizeOnlyImage(size) for size in sizes],
            image_max_pixels=getattr(self.processor, "image_max_pixels", 768 * 768),
            image_min_pixels=getattr(self.processor, "image_min_pixels", 32 * 32),
        )["images"]
        count = self.processor.image_processor.get_number_of_image_patches
        return torch.tensor([[1, 1, count(image.height, image.width, {})] for image in regular])

    def _of(self, sizes: tuple[Size, ...], *args: Any, **kwargs: Any) -> Answer:
        key = sizes, repr((args, kwargs))
        if key not in self._answers:
            blanks = [Image.new("RGB", size, "white") for size in sizes]
            if len(self._answers) >= MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = _ask(self.plugin, self.processor, blanks, *args, **kwargs)
        return self._answers[key]


def _ask(plugin: Any, processor: Any, images: Sequence[Any], *args: Any, **kwargs: Any) -> Answer:
    """The answer of the real processor for these images, its pixels taken out."""
    return without_pixels(plugin._get_mm_inputs(list(images), [], [], processor, *args, **kwargs))


def images_by_size(plugin: Any, processor: Any) -> ImagesBySize | None:
    """For a plugin that takes images and whose answers follow from their sizes; None, with a log line, for others."""
    if plugin.image_token is None or processor is None:
        return None

    def make() -> ImagesBySize | None:
        noise = [Image.effect_noise(size, 50).convert("RGB") for size in CHECK_SIZES]
        together = _ask(plugin, processor, noise)
        if together.keys() == {"pixel_values", "image_grid_thw"}:
            formula = ImagesBySize(plugin, processor, by_formula=True, one_by_one=True)
            with contextlib.suppress(AttributeError, TypeError):  # this processor has none
                grids = formula.answer(CHECK_SIZES)["image_grid_thw"]
                if torch.equal(grids.prod(-1), torch.as_tensor(together["image_grid_thw"]).prod(-1)):
                    return formula
        alone = [_ask(plugin, processor, [image]) for image in noise]
        memory = ImagesBySize(plugin, processor, by_formula=False, one_by_one=False)
        if not equal([memory.answer(CHECK_SIZES), *map(memory.answer, zip(CHECK_SIZES))], [together, *alone]):
            return None
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            memory.one_by_one = equal(_put_together(alone), together)
        return memory

    by_size: ImagesBySize | None = _if_exact(make, "images")
    return by_size


def _if_exact(make: Callable[[], Any], media: str) -> Any:
    """What `make` makes; None, with a log line, if it raises or makes nothing: the processor is asked each time."""
    try:
        if (exact := make()) is not None:
            return exact
        why = "its answers hold more than sizes tell"
    except Exception as error:  # whatever a processor raises: it raises it again for the medium
        why = f"{type(error).__name__}: {error}"
    logger.info("%s are observed through the real processor (%s)", media, why)
    return None


def _put_together(answers: Sequence[Answer]) -> Answer:
    """Of single images, the answer for all of them: they follow each other, padded to the largest."""
    if any(answer.keys() != answers[0].keys() for answer in answers):
        raise ValueError("answers of different kinds")
    return {key: _joined([answer[key] for answer in answers]) for key in answers[0]}


def _joined(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if all(isinstance(value, Tensor) for value in values) and values[0].dim():
        if _is_kept(values[0]):
            return torch.cat(list(values))
        rest = [max(sides) for sides in zip(*(value.shape[1:] for value in values), strict=True)]
        return stand_in(torch.Size([sum(len(value) for value in values), *rest]), values[0].dtype)
    raise TypeError("neither lists nor tensors")


def without_pixels(answer: Mapping[str, Any]) -> Answer:
    """An answer with stand-ins for what is large."""

    def light(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        return stand_in(value.shape, value.dtype) if isinstance(value, Tensor) and not _is_kept(value) else value

    lightened: Answer = tree_map(light, dict(answer))
    return lightened


def _is_kept(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dim() <= MAX_DIMENSIONS_KEPT


def stand_in(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape in the memory of one number; ones, because zeros mark tiles that do not exist."""
    return torch.ones((), dtype=dtype).expand(shape)


def equal(first: Any, second: Any) -> bool:
    """Whether two answers are, pixels aside, the same."""
    (first_leaves, first_structure), (second_leaves, second_structure) = tree_flatten(first), tree_flatten(second)
    return first_structure == second_structure and all(map(_is_same, first_leaves, second_leaves))


def _is_same(first: Any, second: Any) -> bool:
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return bool(first == second)
    same_kind = first.shape == second.shape and first.dtype == second.dtype
    return same_kind and (not _is_kept(first) or torch.equal(first, second))


# ----------------------------------------------------------------------------------------------------------------------
# What audio costs, by the length of each clip: read from the header of its file, if the format has it.
# LLaMA-Factory pads every clip to one length; what differs is how much of that its mask says is real. Whether that
# follows from the length is tried at start, on a few clips of noise.


CHECK_LENGTHS = (1600, 161, 40_001, 480_161)
"""Samples of a clip (at the sampling rate of the model); the last is longer than the 30 s that most models take."""


class ClipsByLength:
    """`plugin._get_mm_inputs` for audio, given the length of each clip in samples."""

    def __init__(self, plugin: Any, processor: Any):
        extractor: Any = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        self.rate: int = getattr(processor, "audio_sampling_rate", 16000)
        self.hop: int = extractor.hop_length
        self._example = _ask_clips(plugin, processor, CHECK_LENGTHS[:1])
        self._mask = next(key for key in AUDIO_KEYS if self._example.get(key) is not None)

    def lengths_of(self, clips: Sequence[Any]) -> list[int] | None:
        """In samples as the model takes them; None if a file must be decoded to know."""
        lengths = [_length_of(clip, self.rate) for clip in clips]
        return None if None in lengths else [length for length in lengths if length is not None]

    def answer(self, lengths: Sequence[int]) -> Answer:
        """Features are tensors of the right shape that take no memory."""
        mask = self._example[self._mask]
        real = torch.tensor([-(-length // self.hop) for length in lengths])
        inputs: Answer = {
            key: None if value is None else stand_in(torch.Size([len(lengths), *value.shape[1:]]), value.dtype)
            for key, value in self._example.items()
        }
        return inputs | {self._mask: (torch.arange(mask.shape[1]) < real[:, None]).to(mask.dtype)}


def clips_by_length(plugin: Any, processor: Any) -> ClipsByLength | None:
    """For a plugin that takes audio whose masks follow from the lengths of clips; None, with a log line, for others."""
    if plugin.audio_token is None or processor is None:
        return None

    def make() -> ClipsByLength | None:
        clips = ClipsByLength(plugin, processor)
        real = _ask_clips(plugin, processor, CHECK_LENGTHS)
        return clips if equal(real, clips.answer(CHECK_LENGTHS)) else None

    by_length: ClipsByLength | None = _if_exact(make, "audio clips")
    return by_length


def _ask_clips(plugin: Any, processor: Any, lengths: Sequence[int]) -> Answer:
    noise = np.random.default_rng(0)
    clips = [noise.standard_normal(length).astype(np.float32) for length in lengths]
    return without_pixels(plugin._get_mm_inputs([], [], clips, processor))


def _length_of(clip: Any, rate: int) -> int | None:
    """Samples of a clip at this rate, as resampling makes them."""
    if isinstance(clip, np.ndarray):
        return len(clip)  # LLaMA-Factory takes arrays as they are
    if not isinstance(clip, str | os.PathLike) or not os.path.isfile(clip):
        return None
    try:
        with av.open(os.fspath(clip)) as file:
            stream = file.streams.audio[0]
            samples, own_rate, codec = stream.duration, stream.rate, stream.codec_context.codec.name
    except (OSError, ValueError, IndexError):  # av's errors are these as well
        return None
    if not samples or stream.time_base != Fraction(1, own_rate) or not codec.startswith(("pcm_", "flac")):
        return None  # codecs with a delay or padding have more samples than their header says
    divisor = math.gcd(rate, own_rate)  # as torchaudio does it, in single precision
    return int(torch.ceil(torch.as_tensor(rate // divisor * samples / (own_rate // divisor))))


# ----------------------------------------------------------------------------------------------------------------------
# One row at a time: placeholders and patches.

WRITTEN_FOR_MEDIA = (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER)
WRITTEN_OUT = "its text contains the placeholder {}, which the model would read as a medium"


class MediaObserver:
    """Observes the media of one row at a time. `plugin` stands in for the template's mm plugin.

    The stand-in keeps what it learnt about the current row, so that token expansion and patch
    count share one look at each file; call `begin_row` between rows.
    """

    def __init__(self, plugin: Any, tokenizer: Any, processor: Any):
        self.original, self.processor = plugin, processor
        self._token_ids = _placeholder_ids(plugin, tokenizer)
        self._images = images_by_size(plugin, processor)
        self._clips = clips_by_length(plugin, processor)
        self._by_formula = self._images is not None and self._images.by_formula
        self._answers: dict[Any, dict[str, Any]] = {}
        """Of the real processor for media of the row."""
        self._sizes: dict[str, tuple[int, int]] = {}
        """Of image files of the row."""
        self.plugin = copy.copy(plugin)
        self.plugin._get_mm_inputs = self._get_mm_inputs

    def begin_row(self) -> None:
        self._answers, self._sizes = {}, {}

    def check_text(self, row: Mapping[str, Any]) -> None:
        """Raise `ValueError` if a converted row has a placeholder written out. If that is what people write for a
        medium, LLaMA-Factory counts those of messages itself."""
        messages = [message["content"] or "" for message in (*row["_prompt"], *row["_response"])]
        for name in self._token_ids:
            texts = (row["_system"], row["_tools"], *([] if name in WRITTEN_FOR_MEDIA else messages))
            if any(name in text for text in texts if text):
                raise ValueError(WRITTEN_OUT.format(name))

    def num_placeholders(self, input_ids: Sequence[int]) -> int:
        return sum(input_ids.count(token_id) for token_id in self._token_ids.values())

    def sizes_of(self, images: Sequence[Any] | None) -> list[tuple[int, int] | None]:
        """(width, height) of the image files of the row that have been looked at; None for others."""
        return [self._sizes.get(image) if isinstance(image, str) else None for image in images or []]

    def _size_of(self, image: Any) -> tuple[int, int]:
        size = _size_of(image)
        if isinstance(image, str):
            self._sizes[image] = size
        return size

    def tokenized_placeholders_cut(self, images: Any, videos: Any, audios: Any, input_ids: Sequence[int]) -> bool:
        """Whether a row that was tokenized before holds fewer placeholders than its media take, if their sizes give the
        number. Raises `ValueError` if it holds more."""
        count = self.num_placeholders(input_ids)
        if not (images or videos or audios):
            expected = 0
        elif self._by_formula and not audios:
            expected = (
                self.count_media(images, videos, None, []).patches // self.processor.image_processor.merge_size**2
            )
        else:
            return False
        if count > expected:
            raise ValueError(WRITTEN_OUT.format(" or ".join(self._token_ids)))
        return count < expected

    def check_decodable(self, images: Any, videos: Any, audios: Any) -> None:
        """Decode all media once; raises what their decoders raise."""
        for image in images or []:
            with _opened(image) as opened:
                opened.load()
        if videos or audios:
            self.original._get_mm_inputs([], videos or [], audios or [], self.processor)

    def has_media(self, images: Any, videos: Any) -> bool:
        """Whether the collator injects no fake image beside this row."""
        return self.original.image_token is None or bool(images or videos)

    def count_media(self, images: Any, videos: Any, audios: Any, input_ids: list[int]) -> Media:
        """Media of one row, as the collator would make them and the model would take them."""
        all_inputs = self._inputs_to_count(images or [], videos or [], audios or [], input_ids)
        return Media(*map(sum, zip(Media(), *(count_media(inputs, self.patch_size) for inputs in all_inputs))))

    def _inputs_to_count(
        self, images: Any, videos: Any, audios: Any, input_ids: list[int]
    ) -> Iterator[Mapping[str, Any]]:
        """Model inputs whose media together are those of the row."""
        if audios:
            inputs = self._get_mm_inputs([], [], audios, self.processor)
            if hasattr(getattr(self.processor, "image_processor", None), "merge_size"):
                inputs["image_grid_thw"] = torch.zeros((0, 3), dtype=torch.long)  # as in every batch of such a model
            yield inputs
        if self._images and self._images.one_by_one and (self._by_formula or not videos):
            yield from (self._images.answer([self._size_of(image)]) for image in images)
        elif images or videos:
            yield self.plugin.get_mm_inputs(
                images, videos, [], [len(images)], [len(videos)], [0], [input_ids], self.processor
            )
        if videos and self._by_formula:
            # Newer releases of LLaMA-Factory expand placeholders by the metadata of videos.
            by_metadata = getattr(self.plugin, "_get_video_token_metadata", None)
            counted = by_metadata and by_metadata(videos, self.processor)
            yield counted or self._get_mm_inputs([], videos, [], self.processor)

    @property
    def patch_size(self) -> int:
        """Side of a vision patch, in pixels."""
        for owner in (getattr(self.processor, "image_processor", None), self.processor):
            size = getattr(owner, "patch_size", None)
            height = size.get("height") if isinstance(size, Mapping) else getattr(size, "height", size)
            if isinstance(height, int):
                return height
        return DEFAULT_PATCH_SIZE

    def _get_mm_inputs(self, images: Any, videos: Any, audios: Any, processor: Any, *args: Any, **kwargs: Any) -> dict:
        inputs: dict[str, Any] = {}
        if images and self._images and (self._by_formula or not videos):
            inputs |= self._images.answer([self._size_of(image) for image in images], *args, **kwargs)
            images = []
        if images or videos:
            inputs |= self._asked((images, videos, []), processor, *args, **kwargs)
        lengths = self._clips.lengths_of(audios) if self._clips and audios and not (args or kwargs) else None
        if self._clips and lengths:
            inputs |= self._clips.answer(lengths)
        elif audios:
            inputs |= self._asked(([], [], audios), processor, *args, **kwargs)
        return inputs

    def _asked(self, media: tuple[Any, Any, Any], processor: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The answer of the real processor for images, videos and audio of this row; it is asked once."""
        key = tuple(tuple(id(item) for item in kind) for kind in media), repr((args, kwargs))
        if key not in self._answers:
            images, videos, audios = media
            answer = self.original._get_mm_inputs(decoded(images), videos, audios, processor, *args, **kwargs)
            self._answers[key] = dict(answer)
        return self._answers[key]


def _placeholder_ids(plugin: Any, tokenizer: Any) -> dict[str, int]:
    """The placeholders of a plugin that are tokens of this tokenizer, and their ids."""
    names = [name for name in (plugin.image_token, plugin.video_token, plugin.audio_token) if name is not None]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    known = {name: token_id for name, token_id in ids.items() if isinstance(token_id, int)}
    return {name: token_id for name, token_id in known.items() if tokenizer.convert_ids_to_tokens(token_id) == name}
