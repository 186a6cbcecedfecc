"""Each probe fires where what it tries means something else, and all are silent on the releases that are supported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer, mm_plugin
from llamafactory.data import loader as stock_loader
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from llamafactory.train.callbacks import LogCallback
from PIL import Image
from support import training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import media, media_sizes, probes

pytestmark = pytest.mark.versions

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_vl: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_vl, data_dir, tmp_path / "out", dataset="pictures", odb=BLOCK)


def load(config: dict[str, Any]) -> Any:
    """The training dataset as a run has it, before the model is loaded."""
    model_args, data_args, training_args, _, _ = get_train_args(dict(config))
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    dataset = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizer_module)
    get_train_args({key: value for key, value in config.items() if key != "odb"})
    return dataset["train_dataset"]


def changed(function: Callable, change: Callable[[Any], Any]) -> Callable:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


@pytest.mark.parametrize(("module", "path"), probes.PARAMETERS)
def test_another_order_of_arguments_is_found(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: str, path: str
) -> None:
    owner: Any = importlib.import_module(f"llamafactory.{module}")
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        pytest.skip(f"this release has no {name}")
    monkeypatch.setattr(owner, name, lambda images, self, other=None: None)
    with pytest.raises(ConfigError, match=rf"{name} takes images, self, other instead of .*doctor"):
        get_train_args(config)


def test_other_arguments_of_the_parser_are_found(config: dict[str, Any]) -> None:
    parsed = get_train_args({key: value for key, value in config.items() if key != "odb"})
    probes.check_arguments(parsed)
    with pytest.raises(ConfigError, match="DataArguments where model_args was"):
        probes.check_arguments((parsed[1], parsed[0], *parsed[2:]))


def test_another_conversion_is_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's pass does more than the converter that is called by row."""
    from odb_factory.llamafactory import attach

    def with_system(rows: Any) -> Any:
        return rows.map(lambda row: {"_system": "be brief"})

    monkeypatch.setattr(attach, "align_dataset", changed(attach.align_dataset, with_system))
    with pytest.raises(ConfigError, match="conversion of its format gives another _system by row"):
        load(config)


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("input_ids", lambda row: {"input_ids": row["input_ids"][:-1]}),
        ("labels", lambda row: {"labels": row["input_ids"]}),
        ("weights", lambda row: {"weights": 1.0}),
    ],
)
def test_another_preprocessing_is_found(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, column: str, change: Callable
) -> None:
    from odb_factory.llamafactory import attach

    stock = stock_loader._get_preprocessed_dataset
    monkeypatch.setattr(attach, "_get_preprocessed_dataset", changed(stock, lambda rows: rows.map(change)))
    with pytest.raises(ConfigError, match=f"preprocessing gives another {column} by row"):
        load(config)


def test_another_processor_of_rows_is_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`_get_dataset_processor` gives one that stock does not use for this stage."""
    from odb_factory.llamafactory import attach

    stock = attach._get_dataset_processor
    monkeypatch.setattr(attach, "_get_dataset_processor", lambda args, stage, *rest: stock(args, "pt", *rest))
    with pytest.raises((ConfigError, KeyError)):
        load(config)


def test_other_sizes_of_images_turn_to_the_real_processor(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_regularize_images` answers otherwise than the processor resizes: patches are then counted by pixels."""
    patches = media.MediaObserver.count_patches
    online = load(config)
    assert online.media._by_size
    expected = patches(online.media, online[1]["images"], None, None, [])
    regular = mm_plugin.Qwen2VLPlugin._regularize_images

    def halved(self: Any, images: Any, **kwargs: Any) -> Any:
        answer = regular(self, images, **kwargs)
        if isinstance(images[0], media_sizes.SizeOnlyImage):
            answer["images"] = [image.resize((image.width // 2, image.height // 2)) for image in answer["images"]]
        return answer

    for owner in (mm_plugin.MMPluginMixin, mm_plugin.Qwen2VLPlugin, mm_plugin.Qwen3VLPlugin):
        if "_regularize_images" in vars(owner):
            monkeypatch.setattr(owner, "_regularize_images", halved)
    observer = load(config).media
    assert not observer._by_size
    assert patches(observer, online[1]["images"], None, None, []) == expected


def test_another_meaning_of_video_metadata_turns_to_the_real_processor(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin = mm_plugin.Qwen3VLPlugin
    if not hasattr(plugin, "_get_video_token_metadata"):
        pytest.skip("this release decodes videos to know their size")
    video = media_sizes.write_video(tmp_path / "tiny.avi")
    observer = load(config).media
    real = int(observer.original._get_mm_inputs([], [video], [], observer.processor)["video_grid_thw"].prod())
    assert real > 0 and observer._metadata_is_exact
    twice = changed(plugin._get_video_token_metadata, lambda known: {"video_grid_thw": known["video_grid_thw"] * 2})
    monkeypatch.setattr(plugin, "_get_video_token_metadata", twice)
    observer = load(config).media
    assert observer._by_size and not observer._metadata_is_exact
    assert observer.count_patches(None, [video], None, []) == real


@pytest.mark.parametrize(
    ("owner", "name", "change"),
    [
        (datasets.Image, "decode_example", lambda image: image.rotate(180)),
        (datasets.Image, "decode_example", lambda image: None),
        (datasets.Image, "encode_example", lambda cell: cell["bytes"]),
        (media_sizes, "SizeOnlyImage", lambda image: Image.new("RGB", (1, 1))),
    ],
)
def test_other_images_are_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable) -> None:
    probes.check_images()
    monkeypatch.setattr(owner, name, changed(getattr(owner, name), change))
    with pytest.raises((ConfigError, AttributeError)):
        probes.check_images()


def test_another_log_callback_is_found() -> None:
    callback = LogCallback()
    probes.check_progress(callback)
    del callback.max_steps
    with pytest.raises(ConfigError, match="max_steps"):
        probes.check_progress(callback)


def test_a_launcher_that_starts_another_file_is_found() -> None:
    from llamafactory import launcher

    probes.check_launcher(launcher)
    with pytest.raises(ConfigError, match="another file"):
        probes.check_launcher(SimpleNamespace(launch=lambda: None))


def test_max_patches_below_the_fake_image_is_refused_before_the_model_is_loaded(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"odb\.max_patches: 1 is less than the \d+ patches of the fake image"):
        load(config | {"odb": BLOCK | {"max_patches": 1}})
