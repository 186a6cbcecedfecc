"""Tiny random models that LLaMA-Factory trains on a CPU, offline: a Qwen3-VL and a text-only Qwen2.

Their folders have the same files as the real models (config, weights, tokenizer, processor, chat template). The weights
are random: the models serve to test data flow and speed, not the quality of answers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB_SIZE = 4096  # tokens, special tokens included
MODEL_MAX_LENGTH = 32768  # tokens
PATCH_SIZE = 16  # pixels; MERGE_SIZE x MERGE_SIZE patches become one image token
MERGE_SIZE = 2
MAX_IMAGE_PIXELS = 320 * 320  # at most 400 patches, 100 tokens
MAX_VIDEO_PIXELS = 2 * 320 * 320  # over all sampled frames; two frames share a patch: about 400 patches

# Qwen's order of token ids, after the vocabulary. The tokens in _ADDED are not "special": `skip_special_tokens` keeps
# them.
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def train_tokenizer(text: str) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer like Qwen's; it is lossless for NFC-normalised text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast  # type: ignore[attr-defined]  # a lazy name

    # Transformers 5 applies these rules to every Qwen2 tokenizer it loads, so the tokenizer must be trained with them.
    rules = Qwen2TokenizerFast().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.decoder = rules.normalizer, rules.decoder
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - len(_ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL[1:],
        model_max_length=MODEL_MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
    )


def write_processor(folder: Path) -> None:
    """Write the image and video processor files of a Qwen3-VL, for smaller pictures."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    common: dict[str, Any] = {"patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": MERGE_SIZE}
    common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Despite their names, both values are numbers of pixels of the whole picture.
    images = {"shortest_edge": 64 * 64, "longest_edge": MAX_IMAGE_PIXELS}
    videos = {"shortest_edge": 4 * 64 * 64, "longest_edge": MAX_VIDEO_PIXELS}
    Qwen2VLImageProcessor(**common, size=images).save_pretrained(folder)
    Qwen3VLVideoProcessor(**common, size=videos).save_pretrained(folder)


_MARKER = "tiny_model.json"


def build_tiny_qwen3_vl(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random Qwen3-VL of under a million parameters, its processor and tokenizer; return `folder`.

    text: training text of the tokenizer (None: CPython's help topics, about 460,000 characters). seed: for the weights.
    An image has at most 400 patches (100 tokens), a video about as many. A folder that already holds this model is
    kept. Raises `FileExistsError` if the folder holds anything else.

        build_tiny_qwen3_vl(Path("tiny_qwen3_vl"))
    """
    return _build(folder, text, seed, _qwen3_vl)


def build_tiny_qwen2(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random text-only Qwen2 with the same tokenizer and no processor; see `build_tiny_qwen3_vl`."""
    return _build(folder, text, seed, _qwen2)


def _build(
    folder: Path, text: str | None, seed: int, make: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
) -> Path:
    if text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    identity = {"kind": make.__name__, "seed": seed, "text": hashlib.sha256(text.encode()).hexdigest()}
    identity["transformers"] = version("transformers")  # 4 cannot read the config that 5 writes
    folder, marker = Path(folder), Path(folder, _MARKER)
    if marker.is_file() and json.loads(marker.read_text()) == identity:
        return folder
    if folder.exists() and not marker.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not a tiny model; choose another folder or remove it.")

    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if make is _qwen3_vl:
        write_processor(folder)
    marker.write_text(json.dumps(identity, indent=2) + "\n")
    return folder


# The language model of both models.
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MODEL_MAX_LENGTH,
    "tie_word_embeddings": True,
}


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text_config: dict[str, Any] = _TEXT | _token_ids(tokenizer)
    # mrope_section splits half of head_dim into time, height and width.
    text_config |= {
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": _TEXT["hidden_size"],
        "num_position_embeddings": 20 * 20,  # the grid of the largest square picture
        "deepstack_visual_indexes": [0],
    }
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()
    }
    config = Qwen3VLConfig(text_config=text_config, vision_config=vision_config, tie_word_embeddings=True, **ids)
    return Qwen3VLForConditionalGeneration(config)


def _qwen2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_TEXT, **_token_ids(tokenizer)))
