"""What odb_factory relies on in LLaMA-Factory, datasets and Pillow without their promise, with every release.

Rows made one at a time are also compared with stock's pass in every run: another meaning stops it before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from llamafactory.data import mm_plugin
from llamafactory.hparams import get_train_args
from PIL import Image
from stock import load_data
from support import training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import dataset, hooks, media

pytestmark = pytest.mark.versions

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_vl: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_vl, data_dir, tmp_path / "out", dataset="pictures", odb=BLOCK)


def load(config: dict[str, Any]) -> Any:
    """The training dataset as a run has it, before the model is loaded."""
    return load_data(config)["train_dataset"]


def mapped(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any], Any]:
    return lambda stock: lambda *args, **kwargs: stock(*args, **kwargs).map(change)


def of_another_stage(stock: Any) -> Any:
    return lambda args, stage, *rest: stock(args, "pt", *rest)


CHANGED: dict[str, tuple[str, Any, str]] = {
    "rows": ("align_dataset", mapped(lambda row: {"_system": "be brief"}), "input_ids"),
    "ids": ("_get_preprocessed_dataset", mapped(lambda row: {"input_ids": row["input_ids"][:-1]}), "input_ids"),
    "labels": ("_get_preprocessed_dataset", mapped(lambda row: {"labels": row["input_ids"]}), "labels"),
    "weights": ("_get_preprocessed_dataset", mapped(lambda row: {"weights": 1.0}), "weights"),
    "processor": ("_get_dataset_processor", of_another_stage, ""),
}
"""A function of LLaMA-Factory that does something else than what is called by row, and the column that is named."""


@pytest.mark.parametrize("case", CHANGED)
def test_a_pass_that_does_something_else_is_found(config, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, change, column = CHANGED[case]
    monkeypatch.setattr(dataset, name, change(getattr(dataset, name)))
    with pytest.raises((ConfigError, KeyError) if case == "processor" else ConfigError, match=column):
        load(config)


def test_other_sizes_of_images_turn_to_the_real_processor(config, monkeypatch) -> None:
    """`_regularize_images` answers otherwise than the processor resizes: patches are then counted by pixels."""
    patches = media.MediaObserver.count_media
    online = load(config)
    assert online.media._by_formula
    expected = patches(online.media, online[1]["images"], None, None, [])
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
    assert patches(observer, online[1]["images"], None, None, []) == expected


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
    assert observer.count_media(None, [video], None, []).video_patches == real > 0 and observer._by_formula


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """`logged()`: what has been said of the release."""
    hooks.log_if_newer.cache_clear()
    yield lambda: [message for message in caplog.messages if "is newer than" in message]
    hooks.log_if_newer.cache_clear()


def test_a_newer_release_is_logged_once_and_trained_with(config, tmp_path: Path, monkeypatch, logged) -> None:
    get_train_args(dict(config))
    assert logged() == [], "the release that is installed is known"
    hooks.log_if_newer.cache_clear()
    (tmp_path / "llamafactory-0.9.7.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: llamafactory\nVersion: 0.9.7\n"
    (tmp_path / "llamafactory-0.9.7.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    get_train_args({key: value for key, value in config.items() if key != "odb"})
    assert logged() == [], "nothing is said without a block"
    for _ in range(2):
        get_train_args(dict(config))
    (message,) = logged()
    assert "0.9.7" in message and "0.9.6.dev0" in message
