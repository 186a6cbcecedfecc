"""What is observed by size and by length is what the real processor says; if not, the processor is asked."""

from __future__ import annotations

import logging
import wave
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import torchaudio
from families import FAMILIES, make_tokenizer
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.hparams import ModelArguments
from llamafactory.model.patcher import patch_processor
from PIL import Image
from support import noise

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.attach import _check_tiles
from odb_factory.llamafactory.media import MediaObserver, clips_by_length, images_by_size
from odb_factory.planner import Media

TOKENS = {"image_token": "<image>", "audio_token": None}


def build(name: str) -> tuple[Any, Any, Any]:
    """Plugin, tokenizer and processor of a family."""
    family = next(family for family in FAMILIES if family.template == name)
    tokenizer = make_tokenizer(family)
    processor = family.make(tokenizer)
    patch_processor(processor, tokenizer, ModelArguments(model_name_or_path="none"))
    tokens = {"audio_token": "<|AUDIO|>"} if name == "qwen2_audio" else TOKENS
    return get_mm_plugin(name, **tokens), tokenizer, processor


def test_an_answer_that_depends_on_pixels_is_asked_for_each_image(caplog, monkeypatch) -> None:
    """A processor that leaves out white borders, as none of LLaMA-Factory's does today."""
    plugin, tokenizer, processor = build("llava_next")
    real = plugin._get_mm_inputs

    def by_content(images: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(real([image for image in images if np.asarray(image).mean() < 250], *args, **kwargs))

    monkeypatch.setattr(plugin, "_get_mm_inputs", by_content, raising=False)
    with caplog.at_level(logging.INFO, logger="odb_factory"):
        assert images_by_size(plugin, processor) is None
        media = MediaObserver(plugin, tokenizer, processor)
    assert sum("observed through the real processor" in message for message in caplog.messages) == 2
    blank, noisy = Image.new("RGB", (90, 91), "black"), noise((90, 91)).convert("RGB")
    assert media.count_media([blank], None, None, []) == media.count_media([noisy], None, None, []) > Media()


def test_a_cap_that_would_not_be_kept_is_refused() -> None:
    """mllama's tower computes what pads images and tiles over the rows."""
    refused = pytest.raises(ConfigError, match="^odb.max_patches: ")
    for name, expected in {"mllama": refused, "llava_next": nullcontext()}.items():
        media = MediaObserver(*build(name))
        _check_tiles(ODBConfig(token_budget=1024), media)
        with expected:
            _check_tiles(ODBConfig(token_budget=1024, max_patches=4096), media)


def write_wav(path: Path, samples: int, rate: int) -> str:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(samples, dtype="<i2").tobytes())
    return str(path)


def write_flac(path: Path, samples: int, rate: int) -> str:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("flac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, samples), dtype="<i2"), format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    return str(path)


@pytest.mark.parametrize("write", [write_wav, write_flac])
@pytest.mark.parametrize("rate", [16000, 44100, 8000])
def test_the_header_of_a_file_tells_the_length_of_its_clip(tmp_path: Path, write: Any, rate: int) -> None:
    plugin, _, processor = build("qwen2_audio")
    clips = clips_by_length(plugin, processor)
    assert clips is not None
    for samples in (4000, 4001, 12_345):
        file = write(tmp_path / f"{samples}.audio", samples, rate) if write is write_wav else None
        file = file or write(tmp_path / f"{samples}.flac", samples, rate)
        taken = torchaudio.functional.resample(torch.zeros(samples), rate, 16000)
        assert clips.lengths_of([file, taken.numpy()]) == [len(taken)] * 2
        real = plugin._get_mm_inputs([], [], [taken.numpy()], processor)
        assert torch.equal(clips.answer([len(taken)])["feature_attention_mask"], real["feature_attention_mask"])


def test_a_file_whose_header_cannot_be_believed_is_decoded(tmp_path: Path) -> None:
    plugin, _, processor = build("qwen2_audio")
    clips = clips_by_length(plugin, processor)
    assert clips is not None
    other = tmp_path / "other.mp3"
    other.write_bytes(b"ID3" + bytes(100))
    whole = write_wav(tmp_path / "whole.wav", 4000, 16000)
    for file in (str(other), str(tmp_path / "none.wav"), b"bytes"):
        assert clips.lengths_of([whole, file]) is None
