"""Where what is observed by size is not what the real processor says, the processor is asked."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, make_tokenizer
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.hparams import ModelArguments
from llamafactory.model.patcher import patch_processor
from PIL import Image
from support import noise

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.attach import _check_tiles
from odb_factory.llamafactory.media import MediaObserver, images_by_size
from odb_factory.planner import Media


def build(name: str) -> tuple[Any, Any, Any]:
    """Plugin, tokenizer and processor of a family."""
    family = next(family for family in FAMILIES if family.template == name)
    tokenizer = make_tokenizer(family)
    processor = family.make(tokenizer)
    patch_processor(processor, tokenizer, ModelArguments(model_name_or_path="none"))
    return get_mm_plugin(name, image_token="<image>"), tokenizer, processor


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
    assert media.count_media({"images": [blank]}, []) == media.count_media({"images": [noisy]}, []) > Media()


def test_a_cap_that_would_not_be_kept_is_refused() -> None:
    """mllama's tower computes what pads images and tiles over the rows."""
    refused = pytest.raises(ConfigError, match="^odb.max_patches: ")
    for name, expected in {"mllama": refused, "llava_next": nullcontext()}.items():
        media = MediaObserver(*build(name))
        _check_tiles(ODBConfig(token_budget=1024), media)
        with expected:
            _check_tiles(ODBConfig(token_budget=1024, max_patches=4096), media)
