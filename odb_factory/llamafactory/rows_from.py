"""What the rows of a LLaMA-Factory training are made with, by name: a resume says which of it has changed."""

from __future__ import annotations

import zlib
from typing import Any

from odb_factory.comm.agreement import MayDiffer
from odb_factory.llamafactory.dataset import OnlineDataset, TokenizedDataset
from odb_factory.training.agreement import of_arguments

OTHERS = ("eval_", "preprocessing_", "buffer_size")
"""Beginnings of the names of data arguments that no training row depends on, beside those in which ranks may differ."""
MEDIA = (
    "image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels",
    "video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate",
)  # fmt: skip
"""Attributes that LLaMA-Factory gives the processor from its model arguments."""
TEXT = "The quick brown fox, 1234567890; äöü ßéñ 漢字かな 한글 العربية \N{GRINNING FACE}\n\tend"


def rows_from(dataset: OnlineDataset | TokenizedDataset, tokenizer: Any, processor: Any) -> dict[str, object]:
    """Plain values by the names of the YAML."""
    found: dict[str, object] = {}
    if isinstance(dataset, OnlineDataset):
        found = {
            key: value
            for key, value in of_arguments(dataset.processor.data_args).items()
            if not isinstance(value, MayDiffer) and not key.startswith(OTHERS)
        }
    found |= {name: getattr(processor, name) for name in MEDIA if hasattr(processor, name)}
    checksum = zlib.crc32(repr(tokenizer(TEXT)["input_ids"]).encode())
    return found | {"tokenizer": f"{type(tokenizer).__name__} of {len(tokenizer)} tokens, {checksum:08x}"}
