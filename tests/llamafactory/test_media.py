"""A multimodal plugin without a formula for its image sizes: the real processor is asked once for each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
from llamafactory.data.processor import SupervisedDatasetProcessor
from llamafactory.hparams import DataArguments
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

from odb_factory.data.serialize import pack, unpack
from odb_factory.llamafactory.dataset import OnlineDataset, OpenMedia, RowObserver, StoredRows
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES

SIDE, PATCH = 56, 14


@pytest.fixture
def llava(tiny_text: Path, tmp_path: Path) -> SimpleNamespace:
    """LLaVA's plugin and processor on the tiny tokenizer, with rows of none, one and two images."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_text)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
    )
    data_args = DataArguments(template="llava", cutoff_len=512)
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    rows = []
    for count in (0, 1, 2):
        names = [str(tmp_path / f"{count}_{k}.png") for k in range(count)]
        for name in names:
            Image.effect_noise((90, 70), 50).convert("RGB").save(name)
        question = [{"role": "user", "content": "<image>" * count + "what is it?"}]
        answer = [{"role": "assistant", "content": "noise " * (count + 3)}]
        rows.append({"_prompt": question, "_response": answer, "_system": "", "_tools": "", "_images": names})
    rows = [row | {"_videos": None, "_audios": None} for row in rows]
    processor_of_rows = SupervisedDatasetProcessor(
        template=template, tokenizer=tokenizer, processor=processor, data_args=data_args
    )
    media = MediaObserver(template.mm_plugin, tokenizer, processor)
    return SimpleNamespace(
        rows=rows,
        stock=[processor_of_rows.preprocess_dataset({key: [row[key]] for key in row}) for row in rows],
        online=OnlineDataset(
            StoredRows(datasets.Dataset.from_list(rows), "_images", 0), processor_of_rows, media, STAGES["sft"]
        ),
        observer=RowObserver(media, STAGES["sft"], decode=False),
        collator=SFTDataCollatorWith4DAttentionMask(
            template=template, tokenizer=tokenizer, processor=processor, pad_to_multiple_of=8, label_pad_token_id=-100
        ),
    )


def stock_features(llava: SimpleNamespace, index: int) -> dict[str, Any]:
    return {key: values[0] for key, values in llava.stock[index].items()}


def test_rows_costs_and_batches_equal_stock(llava: SimpleNamespace) -> None:
    features = []
    for index, count in enumerate((0, 1, 2)):
        own, cost = llava.observer(llava.online[index])
        stock = stock_features(llava, index)
        assert (own["input_ids"], own["labels"]) == (stock["input_ids"], stock["labels"])
        assert cost.tokens == len(stock["input_ids"])
        assert cost.patches == count * (SIDE // PATCH) ** 2
        assert cost.has_media == (count > 0)
        assert not any(isinstance(value, torch.Tensor) for value in own.values())
        features.append(pack(own))
    ours = OpenMedia(llava.collator)([unpack(own) for own in features])
    stock = llava.collator([stock_features(llava, index) for index in range(3)])
    assert set(ours) == set(stock)
    assert all(torch.equal(ours[key], stock[key]) for key in stock)


def test_filler_of_a_text_only_group_is_the_fake_image(llava: SimpleNamespace) -> None:
    collation = STAGES["sft"].collation(llava.collator, 14)
    batch = llava.collator([stock_features(llava, 0)])
    length = len(llava.stock[0]["input_ids"][0])
    assert batch["input_ids"].shape[1] == collation.length(length, length, collation.dummy_media_tokens)
    assert collation.dummy_media_patches == (SIDE // PATCH) ** 2 and collation.dummy_media_tokens > 0
