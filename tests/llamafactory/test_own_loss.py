"""Models that compute their loss by code of their own train as in stock LLaMA-Factory (I9): Qwen2-Audio and Mamba.

Both ignore `num_items_in_batch`: stock takes the mean over micro-batches of Qwen2-Audio, and the sum of Mamba's.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio
from families import FAMILIES, make_tokenizer
from same_training import check_same_training, report, side_by_side
from support import training_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
)

NUM_ROWS, RATE = 24, 16_000
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def write_qwen2_audio(folder: Path) -> Path:
    family = next(one for one in FAMILIES if one.template == "qwen2_audio")
    tokenizer = make_tokenizer(family)
    processor = family.make(tokenizer)
    sound = processor.feature_extractor
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"num_mel_bins": sound.feature_size, "max_source_positions": sound.nb_max_frames // 2}
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), **TEXT},
        audio_config={"model_type": "qwen2_audio_encoder", **audio},
        audio_token_index=tokenizer.audio_token_id,
    )
    torch.manual_seed(0)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_mamba(folder: Path, tokenizer_of: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_rows(folder: Path) -> Path:
    """`sounds`: rows with no sound, one, or two; `texts`: the same without."""
    folder.mkdir()
    generator = np.random.default_rng(3)
    sounds, texts = [], []
    for number in range(NUM_ROWS):
        names = []
        for clip in range((0, 1, 2)[number % 3]):
            names.append(str(folder / f"{number}_{clip}.wav"))
            with wave.open(names[-1], "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                samples = generator.normal(0, 3000, 3000 + 700 * number)
                file.writeframes(samples.astype("<i2").tobytes())
        answer = {"from": "gpt", "value": "noise " * (1 + number * 7 % 13)}
        asked = {"from": "human", "value": "<audio>" * len(names) + "what is it?"}
        sounds.append({"conversations": [asked, answer], "audios": names})
        texts.append({"conversations": [{"from": "human", "value": "what is it?"}, answer]})
    columns = {"messages": "conversations"}
    info: dict[str, Any] = {}
    for name, rows, more in (("sounds", sounds, {"audios": "audios"}), ("texts", texts, {})):
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns | more}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def load_wav(path: str) -> tuple[torch.Tensor, int]:
    """In the place of torchaudio's, which needs torchcodec and FFmpeg."""
    with wave.open(path, "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return torch.from_numpy(samples.astype("f4") / 2**15)[None], file.getframerate()


AUDIO = {"token_budget": 512, "max_patches": 1000}
MAMBA = {"token_budget": 256}
ON_EACH = {"average_tokens_across_devices": False}


@pytest.mark.parametrize(
    ("family", "odb", "num_ranks", "changes"),
    [
        ("qwen2_audio", AUDIO, 1, {}),
        ("mamba", MAMBA, 1, {}),
        pytest.param("mamba", MAMBA, 2, {}, marks=pytest.mark.full_grid),
        pytest.param("mamba", MAMBA, 2, ON_EACH, marks=pytest.mark.full_grid),
    ],
)
def test_it_trains_as_stock_does(
    family: str,
    odb: dict[str, Any],
    num_ranks: int,
    changes: dict[str, Any],
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torchaudio, "load", load_wav)
    has_sounds = family == "qwen2_audio"
    model = write_qwen2_audio(tmp_path / "model") if has_sounds else write_mamba(tmp_path / "model", tiny_text)
    rows = write_rows(tmp_path / "rows")
    config = training_config(
        model,
        rows,
        tmp_path,
        template="qwen2_audio" if has_sounds else "qwen",
        dataset="sounds" if has_sounds else "texts",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        dataloader_num_workers=0,
        num_train_epochs=2,
        disable_gradient_checkpointing=True,
        **changes,
    )
    report(family, check_same_training(*side_by_side(config, odb, num_ranks)))
    assert not [line for line in caplog.messages if line.startswith("loss: with logits")]
