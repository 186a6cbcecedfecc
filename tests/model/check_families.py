"""The table of families in docs/families.md: the check of a tiny copy, run on model classes of transformers.

    PYTHONPATH=.:tests python -m model.check_families > table.md            # all, some minutes
    PYTHONPATH=.:tests python -m model.check_families qwen3 doge            # some

A family has the default config of its class, of full size, with the `SWITCHES` of the family.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from odb_factory.model import attention
from odb_factory.model.check import LENGTHS, check, compare_copy, quiet, why_refused
from odb_factory.model.mixers import has_attention
from odb_factory.model.tiny_copy import tiny_copy

_TEXT = """
llama mistral ministral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text
gemma gemma2 gemma3_text gemma3n_text gemma4_text phi phi3 phimoe glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa granite
granitemoe granitemoeshared granitemoehybrid cohere cohere2 olmo olmo2 olmo3 olmoe flex_olmo olmo_hybrid deepseek_v2
deepseek_v3 longcat_flash youtu gpt_oss llama4_text smollm3 starcoder2 stablelm falcon falcon_h1 falcon_mamba mamba
mamba2 bamba jamba lfm2 lfm2_moe nemotron nemotron_h zamba zamba2 recurrent_gemma ernie4_5 ernie4_5_moe
hunyuan_v1_dense hunyuan_v1_moe exaone4 exaone_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj codegen
opt biogpt bloom mpt xglm persimmon helium seed_oss arcee apertus afmoe bitnet cwm dots1 doge diffllama dbrx jais2
jetmoe minimax minimax_m2 nanochat solar_open vaultgemma hy_v3 modernbert-decoder rwkv xlstm openai-gpt
"""
_VISION = """
aria aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe fuyu gemma3 gemma4 glm46v glm4v
glm4v_moe glm_ocr got_ocr2 idefics2 idefics3 internvl lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video
llava_onevision mistral3 mllama ovis2 paddleocr_vl paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
qwen3_vl_moe smolvlm video_llama_3 video_llava vipllava qwen2_audio voxtral qwen2_5_omni_thinker
qwen3_omni_moe_thinker
"""
TEXT, VISION = _TEXT.split(), _VISION.split()
CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""Classes that are in no table of transformers."""


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}}


def _in_text(**switches: Any) -> dict[str, Any]:
    return {"text_config": switches}


def _longrope(size: int) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    factors = {"short_factor": [1.0] * (size // 2), "long_factor": [4.0] * (size // 2)}
    context = {"original_max_position_embeddings": 4096}
    return {"rope_parameters": rope | factors | context, "max_position_embeddings": 131072} | context


_WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}
_EXPERTS = {"n_routed_experts": 32, "n_shared_experts": 2, "num_experts_per_tok": 4}
_SPECIAL = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
SWITCHES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": _EXPERTS,
    "dots1": _EXPERTS | {"sliding_window": 4096, "max_window_layers": 31},
    "ernie4_5_vl_moe": _in_text(**_mrope(22, 22, 20)),
    "glm46v": _in_text(**_mrope(8, 12, 12, partial_rotary_factor=0.5)),
    "glm4v": _in_text(**_mrope(8, 12, 12, partial_rotary_factor=0.5)),
    "glm4v_moe": _in_text(num_attention_heads=32, **_mrope(8, 12, 12, partial_rotary_factor=0.5)),
    "glm_ocr": _in_text(**_mrope(8, 12, 12)),
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "llama, dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "ministral": {"head_dim": 128},
    "mixtral": {"sliding_window": 4096},
    "nemotron": {"num_key_value_heads": 8},
    "paddleocr_vl": _in_text(**_mrope(16, 24, 24)),
    "phi3, longrope": _longrope(96),
    "phimoe": {"sliding_window": 2047},
    "qwen2": _WINDOW,
    "qwen2_5_omni_thinker": _in_text(**_mrope(16, 24, 24)) | _SPECIAL,
    "qwen2_5_vl": _in_text(**_mrope(16, 24, 24)),
    "qwen2_moe": _WINDOW,
    "qwen2_vl": _in_text(**_mrope(16, 24, 24)),
    "qwen3": _WINDOW,
    "qwen3_moe": _WINDOW,
    "qwen3_omni_moe_thinker": _in_text(**_mrope(24, 20, 20, mrope_interleaved=True)) | _SPECIAL,
    "starcoder2": {"sliding_window": 4096},
    "zamba": {"use_mamba_kernels": False},
}
"""Settings that the default config of a class leaves off or without a value. A variant has a name after a comma."""
ALL = [*TEXT, *(name for name in SWITCHES if "," in name), *VISION]
_FEW = "qwen3 phimoe gemma3_text deepseek_v2 llama4_text doge opt bloom qwen3_vl qwen2_audio"
FEW = (*_FEW.split(), "phi3, longrope", "llama, dynamic rope")
"""Families that are not nightly."""


class Family(NamedTuple):
    """A row of the table. why: flat rows are refused, by name or by the check. difference: of a flat row of the copy,
    as a multiple of the allowed one; ignored: the same if lengths are ignored. An error is a text."""

    name: str
    kernel: str
    why: str | None
    difference: float | str
    ignored: float | str


def class_and_config(name: str) -> tuple[Any, Any]:
    family = name.split(",")[0]
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family in TEXT else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    model_class = getattr(transformers, CLASSES.get(family) or names[family])
    config_class = CONFIG_MAPPING[family] if family in TEXT else model_class.config_class
    config = config_class(**{key: value for key, value in SWITCHES.get(name, {}).items() if key not in _SPECIAL})
    for key in _SPECIAL.keys() & SWITCHES.get(name, {}).keys():
        setattr(config, key, _SPECIAL[key])  # the config class of the thinkers takes no such arguments
    return model_class, config


def look_at(name: str) -> Family:
    model_class, config = class_and_config(name)
    with quiet():
        copy = tiny_copy(model_class, config, None)
        kernel = attention.text_config(copy)._attn_implementation
        why = why_refused(copy, SimpleNamespace())
        # Like `resolve_layout`: the model keeps its kernel if `odb_varlen` computes something else.
        installs = has_attention(copy) and attention.why_unusable(copy) is None
        installs = installs and check(model_class, config, kernel, installs=True) is None
        why = why or check(model_class, config, kernel, installs=installs)

        def difference(segments: Sequence[int]) -> float | str:
            try:
                largest, allowed = compare_copy(model_class, config, kernel, installs=installs, segments=segments)
            except Exception as error:
                return type(error).__name__
            return largest / allowed

        return Family(
            name, attention.NAME if installs else kernel, why, difference(LENGTHS), difference((sum(LENGTHS),))
        )


def main() -> None:
    print("| family | layout | attention | difference | lengths ignored | why |\n|---|---|---|---|---|---|")
    for family in map(look_at, sys.argv[1:] or ALL):
        numbers = [n if isinstance(n, str) else f"{n:.0e}" for n in (family.difference, family.ignored)]
        layout = "flat" if family.why is None else "padded"
        print("|", " | ".join((family.name, layout, family.kernel, *numbers, family.why or "")), "|", flush=True)


if __name__ == "__main__":
    main()
