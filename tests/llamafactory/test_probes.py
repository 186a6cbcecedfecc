"""Behaviour of LLaMA-Factory on which odb_factory relies, tested with every release.

Every run also compares rows made one at a time with stock's pass, and ends before training if they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
from llamafactory.data import mm_plugin
from PIL import Image
from stock import load_data
from support import training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import dataset, media

pytestmark = pytest.mark.versions

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_vl: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_vl, data_dir, tmp_path / "out", dataset="pictures", odb=BLOCK)


def load(config: dict[str, Any]) -> Any:
    """The training dataset of a run with a block."""
    return load_data(config)["train_dataset"]


def test_a_formula_that_differs_is_not_used(config, monkeypatch) -> None:
    """`_regularize_images` gives other sizes than the processor: patches are then counted from its output."""
    patches = media.MediaObserver.count_media
    online = load(config)
    assert online.media._by_formula
    expected = patches(online.media, online[1], [])
    regular = mm_plugin.Qwen2VLPlugin._regularize_images

    def halved(self: Any, images: Any, **kwargs: Any) -> Any:
        answer = regular(self, images, **kwargs)
        if isinstance(images[0], media.SizeOnlyImage):
            answer["images"] = [image.resize((image.width // 2, image.height // 2)) for image in answer["images"]]
        return answer

    for owner in (mm_plugin.MMPluginMixin, mm_plugin.Qwen2VLPlugin, mm_plugin.Qwen3VLPlugin):
        if "_regularize_images" in vars(owner):
            monkeypatch.setattr(owner, "_regularize_images", halved)
    observer = load(config).media
    assert not observer._by_formula
    assert patches(observer, online[1], []) == expected


def test_metadata_of_videos_give_their_patches(config: dict[str, Any], tmp_path: Path) -> None:
    if not hasattr(mm_plugin.Qwen3VLPlugin, "_get_video_token_metadata"):
        pytest.skip("this release decodes videos to know their size")
    video = str(tmp_path / "tiny.avi")
    with av.open(video, "w") as container:  # eight blank frames, one second
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48)))))
        container.mux(stream.encode())
    observer = load(config).media
    real = int(observer.original._get_mm_inputs([], [video], [], observer.processor)["video_grid_thw"].prod())
    assert observer.count_media({"videos": [video]}, []).video_patches == real > 0 and observer._by_formula


CHANGED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "_system": ("align_dataset", lambda row: {"_system": "be brief"}),
    "input_ids": ("_get_preprocessed_dataset", lambda row: {"input_ids": row["input_ids"][:-1]}),
    "labels": ("_get_preprocessed_dataset", lambda row: {"labels": row["input_ids"]}),
    "weights": ("_get_preprocessed_dataset", lambda row: {"weights": 1.0}),
}
"""By column: a pass of stock that does more than the functions that odb calls for each row."""


@pytest.mark.parametrize("column", CHANGED)
def test_a_pass_that_does_more_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    name, change = CHANGED[column]
    stock = getattr(dataset, name)
    monkeypatch.setattr(dataset, name, lambda *args, **kwargs: stock(*args, **kwargs).map(change))
    with pytest.raises(ConfigError, match=f"gives another {column.replace('_system', 'input_ids')} "):
        load(config)
