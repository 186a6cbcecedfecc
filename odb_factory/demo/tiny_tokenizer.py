"""Tokenizer and processor of the tiny models: Qwen's rule, special tokens and files, over a small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 4096  # tokens, the special ones included
MODEL_MAX_LENGTH = 32768  # tokens
PATCH_SIZE = 16  # pixels; MERGE_SIZE x MERGE_SIZE patches become one image token
MERGE_SIZE = 2
MAX_IMAGE_PIXELS = 320 * 320  # at most 400 patches, 100 tokens
MAX_VIDEO_PIXELS = 2 * 320 * 320  # over all sampled frames; two frames share a patch: about 400 patches

# In the order in which Qwen numbers them, after the vocabulary. The last four are not "special":
# they survive `skip_special_tokens`.
_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
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
    from transformers import Qwen2TokenizerFast  # type: ignore[attr-defined]  # made when it is asked for

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
