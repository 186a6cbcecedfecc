"""Tiny random models that LLaMA-Factory trains on a CPU: a Qwen3-VL and its text-only twin, Qwen2.

They are laid out as the real models on the hub are (config, weights, tokenizer, processor, chat
template), so `AutoProcessor` and LLaMA-Factory's loaders find what they expect, offline. The
weights are random: the models show how data flows and how fast, not what a good answer is.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer and processor of the tiny models: Qwen's rule, special tokens and files, over a small vocabulary.

VOCAB_SIZE = 4096  # tokens, the special ones included
MODEL_MAX_LENGTH = 32768  # tokens
PATCH_SIZE = 16  # pixels; MERGE_SIZE x MERGE_SIZE patches become one image token
MERGE_SIZE = 2
MAX_IMAGE_PIXELS = 320 * 320  # at most 400 patches, 100 tokens
MAX_VIDEO_PIXELS = 2 * 320 * 320  # over all sampled frames; two frames share a patch: about 400 patches

# In the order in which Qwen numbers them, after the vocabulary. The last four are not "special":
# they survive `skip_special_tokens`.
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

# Transformers 5 rebuilds a Qwen2 tokenizer around this very rule when it loads one, so it must be
# trained with it: contractions, words with one leading mark, single digits, runs of marks, line ends.
SPLIT_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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
    """A byte-level BPE tokenizer of Qwen's make; it loses no byte of NFC-normalised text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast  # type: ignore[attr-defined]  # a lazy name

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_RULE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
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
    """The two processor files of a Qwen3-VL on the hub, with smaller pictures."""
    common = {
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = common | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 64 * 64, "longest_edge": MAX_IMAGE_PIXELS},  # pixels of a picture, not of an edge
    }
    video = common | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4 * 64 * 64, "longest_edge": MAX_VIDEO_PIXELS},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")


_LAYOUT = 1  # raise when what is written changes, so that a folder of an older layout is rebuilt
_MARKER = "tiny_model.json"


def build_tiny_qwen3_vl(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random Qwen3-VL of under a million parameters, its processor and tokenizer; return `folder`.

    `text` trains the tokenizer (none: CPython's help topics, about 460,000 characters); `seed` makes
    the weights. An image gives at most 400 patches (100 tokens), a video about as many. Returns at
    once when `folder` holds this model already. Raises `FileExistsError` when it holds anything else.
    """
    return _build(Path(folder), "qwen3_vl", text, seed, _qwen3_vl, with_processor=True)


def build_tiny_qwen2(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random text-only Qwen2 with the same tokenizer and no processor; see `build_tiny_qwen3_vl`."""
    return _build(Path(folder), "qwen2", text, seed, _qwen2, with_processor=False)


def _build(
    folder: Path,
    kind: str,
    text: str | None,
    seed: int,
    make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel],
    *,
    with_processor: bool,
) -> Path:
    if text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    identity = {
        "kind": kind,
        "layout": _LAYOUT,
        "seed": seed,
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "transformers": version("transformers"),  # 4 cannot read the config that 5 writes
    }
    marker = folder / _MARKER
    if marker.is_file() and json.loads(marker.read_text()) == identity:
        return folder
    if folder.exists() and not marker.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no tiny model; choose another folder or remove it.")

    import torch

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        draft = Path(scratch, "draft")
        tokenizer = train_tokenizer(text)
        tokenizer.save_pretrained(draft)
        if with_processor:
            write_processor(draft)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            make_model(tokenizer).save_pretrained(draft)
        (draft / _MARKER).write_text(json.dumps(identity, indent=2) + "\n")
        if folder.exists():
            os.rename(folder, Path(scratch, "replaced"))
        os.rename(draft, folder)
    return folder


# The language model of both.
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
    # Half of head_dim is shared out between time, height and width.
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
