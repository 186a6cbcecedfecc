"""More tiny random models for LLaMA-Factory's trainings than `conftest.py` has: `TinyModels` makes each once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from families import FAMILIES, PROCESSORS, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"num_hidden_layers": 2}
TEXT_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "tie_word_embeddings", "vocab_size", "eos_token_id", "pad_token_id", "head_dim",
)  # fmt: skip
DELTA = {"layer_types": ["linear_attention", "full_attention"]} | {
    f"linear_{name}": value
    for name, value in {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}.items()
}


class TinyModels:
    """`models("text")` is the folder of that model, made at its first use.

    text, vl: Qwen2 and Qwen3-VL with untied heads; tied, tied_vl: with tied heads. text_delta, vl_delta: like Qwen3.5.
    """

    def __init__(self, tiny_text: Path, tiny_vl: Path, folder: Path):
        self.tied, self.tied_vl, self.folder = tiny_text, tiny_vl, folder

    def __call__(self, name: str) -> Path:
        folder = self.folder / name
        if name in ("tied", "tied_vl"):
            return {"tied": self.tied, "tied_vl": self.tied_vl}[name]
        if not folder.exists():
            MAKERS[name](self, folder)
        return folder


def untied(tiny: Path, folder: Path, auto: Any = AutoModelForCausalLM) -> None:
    """An untied head, which stock can save together with a value head; no dropout, which depends on the cut."""
    copytree(tiny, folder)
    config = AutoConfig.from_pretrained(folder)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings, part.summary_dropout_prob = False, 0.0
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)


def with_gated_delta_net(tiny: Path, folder: Path) -> None:
    """The tiny Qwen2 or Qwen3-VL as Qwen3.5: every other layer is a Gated DeltaNet."""
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    copytree(tiny, folder)
    config = AutoConfig.from_pretrained(tiny)
    text = {key: value for key, value in config.get_text_config().to_dict().items() if key in TEXT_KEYS} | DELTA
    torch.manual_seed(0)
    if hasattr(config, "vision_config"):
        ids = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id")}
        vision = config.vision_config.to_dict()
        del vision["model_type"], vision["deepstack_visual_indexes"]
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **ids))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    model.save_pretrained(folder)


def write_qwen2_audio(folder: Path) -> None:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    tokenizer, processor = _of_family("qwen2_audio", folder)
    sound = processor.feature_extractor
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    audio |= {"num_mel_bins": sound.feature_size, "max_source_positions": sound.nb_max_frames // 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), **TEXT, **ids},
        audio_config={"model_type": "qwen2_audio_encoder", **audio},
        audio_token_index=tokenizer.audio_token_id,
    )
    torch.manual_seed(0)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)


def write_qwen2_5_vl(folder: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, _ = _of_family("qwen2_vl", folder)
    text = TEXT | {"vocab_size": len(tokenizer), "max_window_layers": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    ids = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")}
    ids["vision_start_token_id"] = tokenizer.convert_tokens_to_ids("<|vision_start|>")
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def _of_family(template: str, folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the processor of a family; the processor is saved in the folder."""
    (family,) = [family for family in FAMILIES if family.template == template]
    tokenizer = make_tokenizer(family)
    processor = PROCESSORS[template](tokenizer)
    processor.save_pretrained(folder)
    return tokenizer, processor


def write_mamba(tokenizer_of: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


MAKERS: dict[str, Callable[[TinyModels, Path], None]] = {
    "text": lambda models, folder: untied(models.tied, folder),
    "vl": lambda models, folder: untied(models.tied_vl, folder, AutoModelForImageTextToText),
    "text_delta": lambda models, folder: with_gated_delta_net(models.tied, folder),
    "vl_delta": lambda models, folder: with_gated_delta_net(models.tied_vl, folder),
    "qwen2_audio": lambda models, folder: write_qwen2_audio(folder),
    "qwen2_5_vl": lambda models, folder: write_qwen2_5_vl(folder),
    "mamba": lambda models, folder: write_mamba(models.tied, folder),
}
