"""Rows, batches and costs equal stock's with every multimodal plugin that can be built offline, with tiny processors.

docs/families.md has a table of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, NOT_OFFLINE, PROCESSORS, Family, make_tokenizer
from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
from llamafactory.data.mm_plugin import PLUGINS
from llamafactory.data.processor import SupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams import DataArguments, ModelArguments
from llamafactory.model.patcher import patch_processor
from PIL import Image
from support import noise

from odb_factory.config import ODBConfig
from odb_factory.data.flat import flatten
from odb_factory.data.observe import measure_batch
from odb_factory.data.samples import pack, unpack
from odb_factory.errors import ConfigError, LayoutError
from odb_factory.llamafactory.attach import PADS_TILES, _check_tiles
from odb_factory.llamafactory.dataset import OnlineDataset, OpenMedia, RowObserver
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES
from odb_factory.planner import VIDEO, Budget, Cost, Media

NEWEST = "0.9.5"
GRID = ("gemma3n", "gemma4n")
"""Slow families, which only the nightly run tests."""
SIZES = ((121, 83), (64, 200), (240, 130), (97, 97))
CASES: dict[str, list[tuple[int, int, int]]] = {
    "text": [(0, 0, 0), (0, 0, 0)],
    "image": [(1, 0, 0)],
    "images": [(2, 0, 0)],
    "images and text": [(1, 0, 0), (2, 0, 0), (0, 0, 0)],
    "video": [(0, 1, 0)],
    "video and text": [(0, 1, 0), (0, 0, 0)],
    "image and video": [(1, 0, 0), (0, 1, 0)],
    "audio": [(0, 0, 1)],
    "audio and text": [(0, 0, 1), (0, 0, 0), (0, 0, 2)],
    "image with audio": [(1, 0, 1), (1, 0, 0), (0, 0, 1)],
}
"""Numbers of images, videos and audio clips for each row of a batch."""


class Setting:
    """A family's template, processor, collator and observer."""

    def __init__(self, family: Family):
        tokenizer = make_tokenizer(family)
        processor = PROCESSORS[family.template](tokenizer)
        patch_processor(processor, tokenizer, ModelArguments(model_name_or_path="none", image_max_pixels=200 * 200))
        data_args = DataArguments(template=family.template, cutoff_len=8192)
        template = get_template_and_fix_tokenizer(tokenizer, data_args)
        self.plugin = template.mm_plugin
        self.rows = SupervisedDatasetProcessor(template, tokenizer, processor, data_args)
        self.media = MediaObserver(template.mm_plugin, tokenizer, processor)
        self.collator = SFTDataCollatorWith4DAttentionMask(
            template=template, tokenizer=tokenizer, processor=processor, pad_to_multiple_of=8, label_pad_token_id=-100
        )

    def takes(self, case: str) -> bool:
        counts = np.array(CASES[case]).any(0)
        tokens = (self.plugin.image_token, self.plugin.video_token, self.plugin.audio_token)
        return all(token is not None for count, token in zip(counts, tokens) if count)

    def stock(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            key: values[0] for key, values in self.rows.preprocess_dataset({k: [v] for k, v in row.items()}).items()
        }

    def observed(self, rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Cost]]:
        dataset = OnlineDataset(rows, self.rows, self.media, STAGES["sft"])
        observer = RowObserver(self.media, STAGES["sft"])
        return [observer(dataset[index]) for index in range(len(rows))]


def of_template(name: str) -> Setting:
    return Setting(next(family for family in FAMILIES if family.template == name))


def why_not_here(family: Family) -> str | None:
    """Why a family does not exist in these releases; None if it does."""
    if family.plugin not in PLUGINS or family.template not in TEMPLATES:
        return f"LLaMA-Factory {version('llamafactory')} has no {family.template}"
    try:
        PROCESSORS[family.template](make_tokenizer(family))
    except AttributeError as error:
        return f"transformers {version('transformers')} cannot build it: {error}"
    return None


def make_rows(case: str, folder: Path, whole: bool = True) -> list[dict[str, Any]]:
    """Converted rows of LLaMA-Factory. whole: if false, image files have only their header."""
    generator = np.random.default_rng(7)

    def image(name: str, size: tuple[int, int]) -> str:
        path = folder / f"{name}_{whole}.png"
        if not path.exists():
            pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            if not whole:
                path.write_bytes(path.read_bytes()[:60])
        return str(path)

    rows = []
    for number, (images, videos, audios) in enumerate(CASES[case]):
        question = "<image>" * images + "<video>" * videos + "<audio>" * audios + "what is it?"
        sizes = [SIZES[(number + k) % len(SIZES)] for k in range(images)]
        row: dict[str, Any] = {
            "_prompt": [{"role": "user", "content": question}],
            "_response": [{"role": "assistant", "content": "noise " * (number + 1)}],
            "_system": "",
            "_tools": "",
            "_images": [image(f"{width}x{height}", (width, height)) for width, height in sizes] or None,
            "_videos": [[image("frame", (80, 60))] * 4 for _ in range(videos)] or None,
            "_audios": [generator.standard_normal(4000 * (number + k + 1)).astype("f4") for k in range(audios)] or None,
        }
        rows.append(row)
    return rows


def compare(setting: Setting, case: str, folder: Path) -> str:
    """The differences from stock in a batch of these rows ("": none), or "stock: ..." if stock itself fails."""
    rows = make_rows(case, folder)
    try:
        stock = [setting.stock(row) for row in rows]
        batch = setting.collator(copy.deepcopy(stock))
    except Exception as error:
        return f"stock: {type(error).__name__}: {error}"
    observed = setting.observed(rows)
    features, costs = [features for features, _ in observed], [cost for _, cost in observed]
    wrong = []
    if any(ours[key] != theirs[key] for ours, theirs in zip(features, stock) for key in ("input_ids", "labels")):
        wrong.append("token ids or labels")
    ours = OpenMedia(setting.collator)([unpack(pack(row)) for row in features])
    if not equal(dict(ours), dict(batch)):
        wrong.append("batch")
    if case in ("image", "images", "images and text") and not equal(
        [(row["input_ids"], cost) for row, cost in setting.observed(make_rows(case, folder, whole=False))],
        [(row["input_ids"], cost) for row, cost in observed],
    ):
        wrong.append("observed without pixels")
    collation = STAGES["sft"].collation(setting.collator, setting.media.patch_size)
    measured = measure_batch(batch, setting.media.patch_size)
    shape = measured.rows, measured.length, measured.patches
    planned = Budget(1 << 40, collation=collation).shape(costs)
    if type(setting.plugin).__name__ == PADS_TILES:  # its patches are not planned
        planned = *planned[:2], max(planned[2], shape[2])
    if planned != shape:
        wrong.append(f"planned {planned}, collated {shape}")
    num_dummy, _ = collation.dummies(sum(cost.has_media for cost in costs), sum(cost.has_audio for cost in costs))
    try:
        flat, _ = flatten(batch, [cost.tokens for cost in costs], num_dummy)
    except LayoutError:
        return "; ".join(wrong)
    measured = measure_batch(flat, setting.media.patch_size)
    planned = Budget(1, collation=collation, layout="flat").shape(costs)
    if planned != (measured.rows, measured.length, measured.patches):
        wrong.append(f"flat: planned {planned}, laid {(measured.rows, measured.length, measured.patches)}")
    return "; ".join(wrong)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, torch.Tensor | np.ndarray):
        return type(first) is type(second) and first.dtype == second.dtype and np.array_equal(first, second)
    if dataclasses.is_dataclass(first):  # the metadata of a video
        return type(first) is type(second) and equal(dataclasses.asdict(first), dataclasses.asdict(second))
    return bool(first == second)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.template, marks=[pytest.mark.nightly] * (family.template in GRID))
        for family in FAMILIES
    ],
)
def test_rows_batches_and_costs_equal_stock(family: Family, tmp_path: Path) -> None:
    if why := why_not_here(family):
        pytest.skip(why)
    setting = Setting(family)
    cases = {case: compare(setting, case, tmp_path) for case in CASES if setting.takes(case)}
    assert not {case: wrong for case, wrong in cases.items() if wrong and not wrong.startswith("stock: ")}
    assert not any(cases[case] for case in ("text", "image", "images", "audio") if case in cases)
    images = setting.media._images
    assert images or not setting.plugin.image_token, "images are observed by size"


def test_every_plugin_is_tested_or_cannot_be_built_offline() -> None:
    if version("llamafactory") != NEWEST:
        pytest.skip(f"the families are those of LLaMA-Factory {NEWEST}")
    assert {family.plugin for family in FAMILIES} | set(NOT_OFFLINE) == set(PLUGINS) - {"base"}
    left_out = {PLUGINS[name] for name in ("base", *NOT_OFFLINE)}
    tested = {name for family in FAMILIES for name in (family.template, *family.templates)}
    assert tested == {name for name, template in TEMPLATES.items() if type(template.mm_plugin) not in left_out}


@pytest.mark.parametrize(("model_type", "apart"), [(None, False), ("qwen2_vl", False), ("glm4v", True)])
def test_videos_are_apart_from_images_if_the_model_runs_its_tower_for_each(
    tmp_path: Path, model_type: str | None, apart: bool
) -> None:
    setting = of_template("qwen2_vl")
    rows = make_rows("image and video", tmp_path)
    dataset = OnlineDataset(rows, setting.rows, setting.media, STAGES["sft"])
    observer = RowObserver(setting.media, STAGES["sft"], model_type=model_type)
    assert [observer(dataset[index])[1].modality for index in range(2)] == [0, VIDEO if apart else 0]


def test_a_processor_whose_answer_depends_on_pixels_runs_for_each_image(caplog, monkeypatch) -> None:
    """A processor that omits white images; no processor of LLaMA-Factory does."""
    setting = of_template("llava_next")
    real = setting.plugin._get_mm_inputs

    def by_content(images: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(real([image for image in images if np.asarray(image).mean() < 250], *args, **kwargs))

    monkeypatch.setattr(setting.plugin, "_get_mm_inputs", by_content, raising=False)
    with caplog.at_level("INFO", logger="odb_factory"):
        media = MediaObserver(setting.plugin, setting.rows.tokenizer, setting.rows.processor)
    assert media._images is None and "observed through the real processor" in caplog.text
    pictures = (Image.new("RGB", (90, 91), "black"), noise((90, 91)).convert("RGB"))
    blank, noisy = (media.count_media({"images": [picture]}, []) for picture in pictures)
    assert blank == noisy > Media()


@pytest.mark.parametrize("template", ["mllama", "llava_next"])
def test_a_cap_that_cannot_be_kept_is_refused(template: str) -> None:
    """The tower of mllama also computes padding images and tiles."""
    media = of_template(template).media
    _check_tiles(ODBConfig(token_budget=1024), media)
    with pytest.raises(ConfigError, match="^odb.max_patches: ") if template == "mllama" else nullcontext():
        _check_tiles(ODBConfig(token_budget=1024, max_patches=4096), media)
