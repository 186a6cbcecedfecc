"""Learn what media cost without processing their pixels.

A copy of LLaMA-Factory's multimodal plugin is used for observation. Its call of the image
processor is answered from image sizes: by a formula where there is one, else by what the real
processor said of blank images of these sizes. Both are checked against the real processor at start;
where they fail, and for videos, it is asked each time, its pixels thrown away. The same holds for
the lengths of audio clips. The plugin that collates is never touched.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import datasets
import torch
from llamafactory.extras.constants import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from PIL import Image

from odb_factory.data.measure import DEFAULT_PATCH_SIZE, count_patches
from odb_factory.data.serialize import register_dataclass
from odb_factory.errors import DataError
from odb_factory.llamafactory.media_sizes import (
    clips_by_length,
    grid_from_size,
    memory_of_sizes,
    metadata_is_exact,
    size_is_exact,
)

EXIF_ORIENTATION, EXIF_ROTATED = 0x0112, (5, 6, 7, 8)
LOSSLESS = (None, "PNG")
"""Formats of an opened image, none if it was turned, that `datasets` encodes without changing a pixel."""
WRITTEN_FOR_MEDIA = (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER)
_WRITTEN_OUT = (
    "it has {found} of the tokens {name} where its media take {expected}: its text has such a token written out, "
    "which the model would take for a medium"
)
_FEATURE = datasets.Image()


@register_dataclass
@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image cell of a dataset with an `Image` column, as stored: the file's bytes, or its path.

    encodings: times that stock would have decoded it and encoded it anew by the time it is collated, in its passes
    over the dataset. The pixels of a JPEG change by that, so it is done when the image is opened.
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
        is_kept = image.format in LOSSLESS or bool(
            getattr(image, "filename", "")
        )  # a file with a name is kept as it is
        for _ in range(0 if is_kept else self.encodings):
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


class MediaObserver:
    """Observes the media of one row at a time. `plugin` stands in for the template's mm plugin.

    The stand-in keeps what it learnt about the current row, so that token expansion and patch
    count share one look at each file; call `begin_row` between rows.
    """

    def __init__(self, plugin: Any, tokenizer: Any, processor: Any):
        self.original, self.processor = plugin, processor
        self._token_ids = _placeholder_ids(plugin, tokenizer)
        self._by_size = size_is_exact(plugin, processor)
        self._memory = None if self._by_size else memory_of_sizes(plugin, processor)
        self._clips = clips_by_length(plugin, processor)
        self._metadata_is_exact = self._by_size and metadata_is_exact(plugin, processor)
        self._answers: dict[Any, dict[str, Any]] = {}
        self._expected: list[Counter[str]] = []
        self._inserted: list[Counter[str]] = []
        self._written: set[str] = set()
        self._sizes: dict[str, tuple[int, int]] = {}
        self.plugin = copy.copy(plugin)
        self.plugin._get_mm_inputs = self._get_mm_inputs
        self.plugin.process_messages = self._process_messages
        self.plugin.process_token_ids = self._process_token_ids

    def begin_row(self) -> None:
        self._answers.clear()
        self._expected.clear()
        self._inserted.clear()
        self._written.clear()
        self._sizes.clear()

    def sizes_of(self, images: Sequence[Any] | None) -> list[tuple[int, int] | None]:
        """(width, height) of the image files of the row that have been looked at; None for others."""
        return [self._sizes.get(image) if isinstance(image, str) else None for image in images or []]

    def _size_of(self, image: Any) -> tuple[int, int]:
        size = _size_of(image)
        if isinstance(image, str):
            self._sizes[image] = size
        return size

    def placeholders_cut(self, answers: Sequence[list[int]]) -> bool:
        """Whether any of the `answers` holds fewer placeholders than the row's media take in its messages.

        answers: the token ids that the last calls of `process_messages` have led to, one each.
        Raises `ValueError` where one holds more: a text, a system prompt or a tool has a placeholder written out.
        """
        not_asked = [Counter[str]()] * len(answers)
        expected = [*not_asked, *self._expected][-len(answers) :] if answers else []
        inserted = sum(self._inserted[-1:], Counter[str]())
        are_cut = [self._is_cut(ids, one + inserted) for ids, one in zip(answers, expected, strict=True)]
        return any(are_cut)  # only once all have been looked at

    def _is_cut(self, input_ids: Sequence[int], of_media: Counter[str]) -> bool:
        is_cut = False
        for name, token_id in self._token_ids.items():
            found, expected = input_ids.count(token_id), of_media[name]
            # As many as expected, some of them written out, is what a cut may leave as well.
            if found > expected or (found == expected > 0 and name in self._written):
                raise ValueError(_WRITTEN_OUT.format(name=name, found=found, expected=expected))
            is_cut |= found < expected
        return is_cut

    def tokenized_placeholders_cut(self, images: Any, videos: Any, audios: Any, input_ids: Sequence[int]) -> bool:
        """The same for a row of which no more is known than its media, as far as their sizes tell what they take."""
        found = sum(input_ids.count(token_id) for token_id in self._token_ids.values())
        if not (images or videos or audios):
            expected = 0
        elif self._by_size and not audios:
            expected = self.count_patches(images, videos, None, []) // self.processor.image_processor.merge_size**2
        else:
            return False
        if found > expected:
            raise ValueError(_WRITTEN_OUT.format(name=" or ".join(self._token_ids), found=found, expected=expected))
        return found < expected

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

    def count_patches(self, images: Any, videos: Any, audios: Any, input_ids: list[int]) -> int:
        """Patches of one row, as the collator would make them and the model would take them."""
        images, videos, audios = images or [], videos or [], audios or []
        total = self._count_audio(audios) if audios else 0
        if self._memory and self._memory.one_by_one and not videos:
            answers = [self._memory.answer([self._size_of(image)]) for image in images]
            return total + sum(count_patches(answer, self.patch_size) for answer in answers)
        if (images or videos) and not self._by_size:
            inputs = self.plugin.get_mm_inputs(
                images, videos, [], [len(images)], [len(videos)], [0], [input_ids], self.processor
            )
            return total + count_patches(inputs, self.patch_size)
        if images:
            total += count_patches(self._get_mm_inputs(images, [], [], self.processor))
        if videos:
            known = self._metadata_is_exact
            from_metadata = self.plugin._get_video_token_metadata(videos, self.processor) if known else None
            total += count_patches(from_metadata or self._get_mm_inputs([], videos, [], self.processor))
        return total

    def _count_audio(self, audios: Any) -> int:
        inputs = self._get_mm_inputs([], [], audios, self.processor)
        if hasattr(getattr(self.processor, "image_processor", None), "merge_size"):
            inputs["image_grid_thw"] = torch.zeros((0, 3), dtype=torch.long)  # as every batch of such a model has it
        return count_patches(inputs)

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
        if images and self._by_size:
            sizes = [self._size_of(image) for image in images]
            inputs["image_grid_thw"] = grid_from_size(self.original, processor, sizes)
            images = []
        elif images and self._memory and not videos:
            inputs |= self._memory.answer([self._size_of(image) for image in images], *args, **kwargs)
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
        """What the real processor says of images, videos and audio of this row; it is asked once."""
        key = tuple(tuple(id(item) for item in kind) for kind in media), repr((args, kwargs))
        if key not in self._answers:
            images, videos, audios = media
            answer = self.original._get_mm_inputs(decoded(images), videos, audios, processor, *args, **kwargs)
            self._answers[key] = dict(answer)
        return self._answers[key]

    def _process_messages(self, messages: Any, *args: Any, **kwargs: Any) -> list[dict[str, str]]:
        written = [message["content"] for message in messages]
        messages = type(self.plugin).process_messages(self.plugin, messages, *args, **kwargs)
        expected = Counter[str]()
        for name in self._token_ids:
            # Where a placeholder is what people write for a medium, LLaMA-Factory counts them itself.
            literal = 0 if name in WRITTEN_FOR_MEDIA else sum(text.count(name) for text in written)
            expected[name] = sum(message["content"].count(name) for message in messages) - literal
            if literal:
                self._written.add(name)
        self._expected.append(expected)
        return messages

    def _process_token_ids(self, input_ids: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int] | None]:
        before = {name: input_ids.count(token_id) for name, token_id in self._token_ids.items()}
        answer = type(self.plugin).process_token_ids(self.plugin, input_ids, *args, **kwargs)
        inserted = Counter[str]()
        for name, token_id in self._token_ids.items():
            inserted[name] = answer[0].count(token_id) - before[name]
        self._inserted.append(inserted)
        return answer


def _placeholder_ids(plugin: Any, tokenizer: Any) -> dict[str, int]:
    """The placeholders of a plugin that are tokens of this tokenizer, and their ids."""
    names = [name for name in (plugin.image_token, plugin.video_token, plugin.audio_token) if name is not None]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    known = {name: token_id for name, token_id in ids.items() if isinstance(token_id, int)}
    return {name: token_id for name, token_id in known.items() if tokenizer.convert_ids_to_tokens(token_id) == name}


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
