"""What an image processor answers, by image size: it is asked once, with blank images, and the answer is remembered.

Token and patch counts depend on the sizes of images, not on their pixels. Whether that holds is tried at start, with
images of noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from odb_factory.log import get_logger

logger = get_logger(__name__)

MAX_REMEMBERED = 2048
"""Answers; when there are more, the oldest is forgotten. COCO has some hundred image sizes."""
MAX_DIMENSIONS_KEPT = 2
"""Whole numbers in so many dimensions are grids, sizes and counts, which plugins read; more are masks of pixels."""
CHECK_SIZES = ((37, 211), (900, 500), (400, 90), (64, 64), (37, 211))

Size = tuple[int, int]
Answer = dict[str, Any]


class MemoryOfSizes:
    """`plugin._get_mm_inputs` for images, given their sizes alone: (width, height) in pixels.

    In place of pixels it gives tensors of their shape that take no memory.

    one_by_one: the answer for several images is that for each, put together; else it is remembered for all together.
    """

    def __init__(self, plugin: Any, processor: Any, *, one_by_one: bool):
        self.plugin, self.processor, self.one_by_one = plugin, processor, one_by_one
        self._known: dict[Any, Answer] = {}

    def answer(self, sizes: Sequence[Size], *args: Any, **kwargs: Any) -> Answer:
        """args, kwargs: of `_get_mm_inputs`, behind the processor."""
        if self.one_by_one and len(sizes) > 1 and not (args or kwargs):
            return _put_together([self._of((size,)) for size in sizes])
        return dict(self._of(tuple(sizes), *args, **kwargs))

    def _of(self, sizes: tuple[Size, ...], *args: Any, **kwargs: Any) -> Answer:
        key = sizes, repr((args, kwargs))
        if key not in self._known:
            blanks = [Image.new("RGB", size, "white") for size in sizes]
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = ask(self.plugin, self.processor, blanks, *args, **kwargs)
        return self._known[key]


def ask(plugin: Any, processor: Any, images: Sequence[Image.Image], *args: Any, **kwargs: Any) -> Answer:
    """What the real processor says of these images, its pixels taken out."""
    answer: Answer = without_pixels(plugin._get_mm_inputs(list(images), [], [], processor, *args, **kwargs))
    return answer


def memory_of_sizes(plugin: Any, processor: Any) -> MemoryOfSizes | None:
    """For a plugin that takes images and whose answers follow from their sizes; None for any other, which is told."""
    if plugin.image_token is None or processor is None:
        return None
    noise = [Image.effect_noise(size, 50).convert("RGB") for size in CHECK_SIZES]
    try:
        found = MemoryOfSizes(plugin, processor, one_by_one=False)
        alone = [ask(plugin, processor, [image]) for image in noise]
        together = ask(plugin, processor, noise)
        is_exact = equal(found.answer(CHECK_SIZES), together) and all(
            equal(found.answer([size]), real) for size, real in zip(CHECK_SIZES, alone)
        )
        if is_exact:
            found.one_by_one = _can_be_put_together(alone, together)
    except Exception as error:  # whatever a processor raises, it is asked for each image, which says it again
        logger.info("images are observed through the real processor (%s: %s)", type(error).__name__, error)
        return None
    if not is_exact:
        logger.info("images are observed through the real processor: it says more of them than their sizes tell")
    return found if is_exact else None


def _can_be_put_together(alone: Sequence[Answer], together: Answer) -> bool:
    try:
        return equal(_put_together(alone), together)
    except (TypeError, ValueError, RuntimeError):
        return False


def _put_together(answers: Sequence[Answer]) -> Answer:
    """Of single images, the answer for all of them: they follow each other, padded to the largest."""
    if any(answer.keys() != answers[0].keys() for answer in answers):
        raise ValueError("answers of different kinds")
    return {key: _joined([answer[key] for answer in answers]) for key in answers[0]}


def _joined(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) for value in values):
        return [one for value in values for one in value]
    if all(isinstance(value, Tensor) for value in values) and values[0].dim():
        if _is_kept(values[0]):
            return torch.cat(list(values))
        rest = [max(sides) for sides in zip(*(value.shape[1:] for value in values), strict=True)]
        return stand_in(torch.Size([sum(len(value) for value in values), *rest]), values[0].dtype)
    raise TypeError("neither lists nor tensors")


def without_pixels(value: Any) -> Any:
    """An answer, or a part of one, with stand-ins for what is large."""
    if isinstance(value, Mapping):
        return {key: without_pixels(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_pixels(one) for one in value]
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype != object else value
    if isinstance(value, Tensor) and not _is_kept(value):
        return stand_in(value.shape, value.dtype)
    return value


def _is_kept(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dim() <= MAX_DIMENSIONS_KEPT


def stand_in(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Of this shape, in the memory of one number; not zeros, which tell tiles that are not there."""
    return torch.ones((), dtype=dtype).expand(shape)


def equal(first: Any, second: Any) -> bool:
    """Whether two answers are, pixels aside, the same."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, Tensor):
        same_kind = isinstance(second, Tensor) and first.shape == second.shape and first.dtype == second.dtype
        return same_kind and (not _is_kept(first) or torch.equal(first, second))
    if isinstance(first, list):
        return isinstance(second, list) and len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)
