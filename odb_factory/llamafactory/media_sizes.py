"""What images, videos and audio cost, from their sizes and lengths alone."""

from __future__ import annotations

import math
import os
import tempfile
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from odb_factory.data.measure import AUDIO_KEYS
from odb_factory.log import get_logger

if TYPE_CHECKING:
    from av.video.stream import VideoStream


# ----------------------------------------------------------------------------------------------------------------------
# Vision patches of images and videos from their sizes alone, and the checks that this is exact for a plugin.

logger = get_logger(__name__)

SIZE_IS_ENOUGH = ("Qwen2VLPlugin", "Qwen3VLPlugin", "Qwen2OmniPlugin", "GLM4VPlugin", "ErnieVLPlugin")
CHECK_SIZES = ((37, 211), (640, 480), (1500, 90), (64, 64))


class SizeOnlyImage(Image.Image):
    """An image without pixels: LLaMA-Factory's own resizing rules can be run on its size."""

    def __init__(self, size: tuple[int, int], mode: str = "RGB"):
        super().__init__()
        self._size, self._mode = size, mode

    def resize(self, size: Any, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(tuple(size), self.mode)

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> SizeOnlyImage:
        return SizeOnlyImage(self.size, mode or self.mode)


def grid_from_size(plugin: Any, processor: Any, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[images, 3] whose rows multiply to the patches of each image (their own shape does not matter here).

    sizes: (width, height) of each image in pixels.
    """
    regular = plugin._regularize_images(
        [SizeOnlyImage(size) for size in sizes],
        image_max_pixels=getattr(processor, "image_max_pixels", 768 * 768),
        image_min_pixels=getattr(processor, "image_min_pixels", 32 * 32),
    )["images"]
    count = processor.image_processor.get_number_of_image_patches
    return torch.tensor([[1, 1, count(image.height, image.width, {})] for image in regular])


def size_is_exact(plugin: Any, processor: Any) -> bool:
    """Whether sizes alone give the real processor's patch counts; tried on a few blank images."""
    if type(plugin).__name__ not in SIZE_IS_ENOUGH:
        return False
    blanks = [Image.new("RGB", size, "white") for size in CHECK_SIZES]
    try:
        real = plugin._get_mm_inputs(blanks, [], [], processor)["image_grid_thw"].prod(-1)
        by_size = grid_from_size(plugin, processor, CHECK_SIZES).prod(-1)
    except (AttributeError, KeyError, TypeError) as error:
        logger.debug("sizes of images do not give their patches (%s: %s)", type(error).__name__, error)
        return False
    if not torch.equal(real, by_size):
        logger.debug("sizes of images give other patches than the real processor")
        return False
    return True


def metadata_is_exact(plugin: Any, processor: Any) -> bool:
    """Whether the grid of a video is known from its metadata, as newer releases have it; tried on a tiny one.

    Where none can be made here (no encoder), LLaMA-Factory, which expands placeholders by these metadata, is believed.
    """
    if not hasattr(plugin, "_get_video_token_metadata"):
        return False
    try:
        with tempfile.TemporaryDirectory() as folder:
            video = write_video(Path(folder, "tiny.avi"))
            known = plugin._get_video_token_metadata([video], processor)["video_grid_thw"]
            real = plugin._get_mm_inputs([], [video], [], processor)["video_grid_thw"]
    except Exception as error:
        logger.debug("metadata of videos were not tried (%s: %s)", type(error).__name__, error)
        return True
    if torch.equal(torch.as_tensor(known).prod(-1), torch.as_tensor(real).prod(-1)):
        return True
    logger.info("videos are observed through the real processor: their metadata give other patch counts")
    return False


def write_video(path: Path) -> str:
    """Eight blank frames, one second."""
    import av

    with av.open(str(path), "w") as container:
        stream: VideoStream = container.add_stream("mjpeg", rate=8)  # type: ignore[assignment]
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48)))))
        container.mux(stream.encode())
    return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# What an image processor answers, by image size: it is asked once, with blank images, and the answer is remembered.
# Token and patch counts depend on the sizes of images, not on their pixels. Whether that holds is tried at start,
# with images of noise.


MAX_REMEMBERED = 2048
"""Answers; when there are more, the oldest is forgotten. COCO has some hundred image sizes."""
MAX_DIMENSIONS_KEPT = 2
"""Whole numbers in so many dimensions are grids, sizes and counts, which plugins read; more are masks of pixels."""
CACHED_CHECK_SIZES = ((37, 211), (900, 500), (400, 90), (64, 64), (37, 211))

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
    noise = [Image.effect_noise(size, 50).convert("RGB") for size in CACHED_CHECK_SIZES]
    try:
        found = MemoryOfSizes(plugin, processor, one_by_one=False)
        alone = [ask(plugin, processor, [image]) for image in noise]
        together = ask(plugin, processor, noise)
        is_exact = equal(found.answer(CACHED_CHECK_SIZES), together) and all(
            equal(found.answer([size]), real) for size, real in zip(CACHED_CHECK_SIZES, alone)
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


# ----------------------------------------------------------------------------------------------------------------------
# What audio costs, by the length of each clip: read from the header of its file, where the format tells it.
# LLaMA-Factory pads every clip to one length; what differs is how much of that its mask says is real. Whether that
# follows from the length is tried at start, on a few clips of noise.


CHECK_LENGTHS = (1600, 161, 40_001, 480_161)
"""Samples of a clip (at the sampling rate of the model); the last is longer than the 30 s that most models take."""
FLAC_INFO_BYTES = 26


class ClipsByLength:
    """`plugin._get_mm_inputs` for audio, given the length of each clip in samples."""

    def __init__(self, plugin: Any, processor: Any):
        extractor: Any = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        self.rate: int = getattr(processor, "audio_sampling_rate", 16000)
        self.hop: int = extractor.hop_length
        self._one = _ask(plugin, processor, CHECK_LENGTHS[:1])
        self._mask = next(key for key in AUDIO_KEYS if self._one.get(key) is not None)

    def lengths_of(self, clips: Sequence[Any]) -> list[int] | None:
        """In samples as the model takes them; None where a file must be decoded to know."""
        lengths = [_length_of(clip, self.rate) for clip in clips]
        return None if None in lengths else [length for length in lengths if length is not None]

    def answer(self, lengths: Sequence[int]) -> Answer:
        """Features are tensors of the right shape that take no memory."""
        mask = self._one[self._mask]
        real = torch.tensor([-(-length // self.hop) for length in lengths])
        inputs: Answer = {
            key: None if value is None else stand_in(torch.Size([len(lengths), *value.shape[1:]]), value.dtype)
            for key, value in self._one.items()
        }
        return inputs | {self._mask: (torch.arange(mask.shape[1]) < real[:, None]).to(mask.dtype)}


def clips_by_length(plugin: Any, processor: Any) -> ClipsByLength | None:
    """For a plugin that takes audio whose masks follow from the lengths of clips; None for any other, which is told."""
    if plugin.audio_token is None or processor is None:
        return None
    try:
        found = ClipsByLength(plugin, processor)
        real, ours = _ask(plugin, processor, CHECK_LENGTHS), found.answer(CHECK_LENGTHS)
        is_exact = equal(real, ours)
    except Exception as error:  # whatever a processor raises, it is asked for each clip, which says it again
        logger.info("audio is observed through the real processor (%s: %s)", type(error).__name__, error)
        return None
    if not is_exact:
        logger.info("audio is observed through the real processor: it says more of clips than their length tells")
    return found if is_exact else None


def _ask(plugin: Any, processor: Any, lengths: Sequence[int]) -> Answer:
    noise = np.random.default_rng(0)
    clips = [noise.standard_normal(length).astype(np.float32) for length in lengths]
    answer: Answer = without_pixels(plugin._get_mm_inputs([], [], clips, processor))
    return answer


def _length_of(clip: Any, rate: int) -> int | None:
    """Samples of a clip at this rate, as resampling makes them."""
    if isinstance(clip, np.ndarray):
        return len(clip)  # LLaMA-Factory takes arrays as they are
    if not isinstance(clip, str | os.PathLike) or not os.path.isfile(clip):
        return None
    found = _of_wav(clip) or _of_flac(clip)
    if found is None:
        return None
    samples, own_rate = found
    divisor = math.gcd(rate, own_rate)  # as torchaudio does it, in single precision
    return int(torch.ceil(torch.as_tensor(rate // divisor * samples / (own_rate // divisor))))


def _of_wav(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(samples, rate) of a file of plain WAV; None for any other, and for one whose header says more than it holds."""
    try:
        with open(path, "rb") as file, wave.open(file) as clip:
            num_bytes = clip.getnframes() * clip.getnchannels() * clip.getsampwidth()
            is_whole = clip.getnframes() > 0 and num_bytes <= os.path.getsize(path)
            return (clip.getnframes(), clip.getframerate()) if is_whole else None
    except (wave.Error, EOFError):
        return None


def _of_flac(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """(samples, rate) of a FLAC file whose header says how many it has."""
    with open(path, "rb") as file:
        head = file.read(FLAC_INFO_BYTES)
    if len(head) < FLAC_INFO_BYTES or head[:4] != b"fLaC" or head[4] & 0x7F:
        return None
    packed = int.from_bytes(head[18:26], "big")  # rate: 20 bits, channels - 1: 3, bits of a sample - 1: 5, samples: 36
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return (samples, rate) if samples and rate else None
