"""What audio costs, by the length of each clip: read from the header of its file, where the format tells it.

LLaMA-Factory pads every clip to one length; what differs is how much of that its mask says is real. Whether that
follows from the length is tried at start, on a few clips of noise.
"""

from __future__ import annotations

import math
import os
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from odb_factory.data.measure import AUDIO_KEYS
from odb_factory.llamafactory.media_memory import Answer, equal, stand_in, without_pixels
from odb_factory.log import get_logger

logger = get_logger(__name__)

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
