"""What odb_factory relies on in LLaMA-Factory, datasets and Pillow without their promise, with every release.

That rows made one at a time are those of stock's pass: `test_conversion.py`.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import av
import pytest
from llamafactory import launcher
from llamafactory.data import mm_plugin
from llamafactory.hparams import get_train_args
from llamafactory.train.callbacks import LogCallback
from PIL import Image
from stock import load_data
from support import training_config

from odb_factory.llamafactory import media

pytestmark = pytest.mark.versions

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_vl: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_vl, data_dir, tmp_path / "out", dataset="pictures", odb=BLOCK)


def load(config: dict[str, Any]) -> Any:
    """The training dataset as a run has it, before the model is loaded."""
    return load_data(config)["train_dataset"]


@pytest.mark.parametrize(
    ("path", "expected"),
    {
        "data.loader:_get_preprocessed_dataset": (
            "dataset data_args training_args stage template tokenizer processor is_eval"
        ),
        "data.loader:_get_dataset_processor": "data_args stage template tokenizer processor",
        "data.loader:align_dataset": "dataset dataset_attr data_args training_args",
        "data.mm_plugin:BasePlugin.process_messages": "self messages images videos audios processor",
        "data.mm_plugin:BasePlugin.process_token_ids": (
            "self input_ids labels images videos audios tokenizer processor"
        ),
        "data.mm_plugin:BasePlugin._get_mm_inputs": "self images videos audios processor",
        "data.mm_plugin:BasePlugin._regularize_images": "self images",
        "data.mm_plugin:Qwen2VLPlugin._get_video_token_metadata": "self videos processor",
        "train.kto.trainer:CustomKTOTrainer.forward": "self model batch prefix",
        "train.kto.trainer:CustomKTOTrainer.concatenated_forward": "self model batch",
        "train.kto.trainer:CustomKTOTrainer.compute_reference_log_probs": "self model batch",
        "train.kto.trainer:CustomKTOTrainer.get_batch_loss_metrics": "self model batch",
        "train.kto.trainer:CustomKTOTrainer.kto_loss": (
            "self policy_chosen_logps policy_rejected_logps policy_KL_logps reference_chosen_logps "
            "reference_rejected_logps reference_KL_logps"
        ),
    }.items(),
)
def test_functions_take_what_they_did(path: str, expected: str) -> None:
    """The first parameters that functions of LLaMA-Factory have, in their order."""
    module, names = path.split(":")
    function: Any = importlib.import_module(f"llamafactory.{module}")
    for name in names.split("."):
        function = getattr(function, name, None)
    if function is None:
        pytest.skip(f"this release has no {names}")
    found = list(inspect.signature(function).parameters)
    assert found[: len(expected.split())] == expected.split()


def test_what_is_replaced_is_where_it_was(config: dict[str, Any]) -> None:
    """The order in which arguments are parsed, the steps that the log callback has read, the launcher's own file."""
    parsed = get_train_args({key: value for key, value in config.items() if key != "odb"})
    fields = ("model_name_or_path", "cutoff_len", "output_dir", "stage")
    assert [hasattr(one, name) for one, name in zip(parsed, fields)] == [True] * 4
    assert isinstance(LogCallback().max_steps, int)
    assert "__file__" in inspect.unwrap(launcher.launch).__code__.co_names, "torchrun is given another file"


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
