"""Every multimodal plugin of LLaMA-Factory that can be built offline: a template, and a tiny processor for it.

All share one tokenizer: single characters, and the special tokens of all families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIDE = 56
"""Side of the images, in pixels, in families that resize all images to one size."""
_WRITTEN = """
<image> <video> <audio> <|image_pad|> <|video_pad|> <|audio_pad|> <|vision_start|> <|vision_end|> <|im_start|>
<|im_end|> <|endoftext|> <|image|> <|video|> <|audio|> <|AUDIO|> <|VIDEO|> <|IMAGE|> <|audio_bos|> <|audio_eos|>
<|vision_bos|> <|vision_eos|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>
<image_soft_token> <start_of_image> <end_of_image> <audio_soft_token> <start_of_audio> <end_of_audio> [IMG]
[IMG_BREAK] [IMG_END] <IMG_CONTEXT> <img> </img> <|image_start|> <|image_end|> <|patch|> <|tile_x_separator|>
<|tile_y_separator|> <|fake_token_around_image|> <|eot_id|> <|eom_id|> <|user|> <|assistant|> <start_of_turn>
<end_of_turn> <|turn> <turn|> <|image> <image|> <|audio> <audio|> <|IMAGE_PLACEHOLDER|> <|VIDEO_PLACEHOLDER|>
<|IMAGE_START|> <|IMAGE_END|> <|VIDEO_START|> <|VIDEO_END|> <|img_thumbnail|> <|audio_start|> <|audio_end|>
"""
SPECIAL = _WRITTEN.split() + [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
NAMES = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""Attributes of a tokenizer that processors read; a family may replace some."""


@dataclass(frozen=True)
class Family:
    """A plugin with one of its templates. names: placeholders that differ from `NAMES`. templates: more templates of
    the plugin, for the table."""

    plugin: str
    template: str
    names: dict[str, str] = field(default_factory=dict)
    templates: tuple[str, ...] = ()


def make_tokenizer(family: Family) -> Any:
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    for token in (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary.setdefault(token, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL),
        padding_side="right",
    )
    for name, token in (NAMES | family.names).items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


SQUARE = {"height": SIDE, "width": SIDE}
_PLACES: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def _pixels(factor: int) -> dict[str, int]:
    return {"shortest_edge": factor**2 * 4, "longest_edge": factor**2 * 64}


def _qwen_images(patch_size: int = 14) -> Any:
    return hf.Qwen2VLImageProcessor(patch_size=patch_size, merge_size=2, size=_pixels(2 * patch_size))


def _clip_like(name: str, **options: Any) -> Any:
    return getattr(hf, name)(size={"shortest_edge": SIDE}, crop_size=SQUARE, **options)


def _tiles() -> Any:
    return _clip_like("LlavaNextImageProcessor", image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]])


def _whisper() -> Any:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)


def _paligemma(tokenizer: Any) -> Any:
    images = hf.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 16
    return hf.PaliGemmaProcessor(images, tokenizer)


PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "qwen2_vl": lambda t: hf.Qwen2VLProcessor(_qwen_images(), t, hf.Qwen2VLVideoProcessor()),
    "qwen3_vl": lambda t: hf.Qwen3VLProcessor(_qwen_images(16), t, hf.Qwen3VLVideoProcessor()),
    "glm4v": lambda t: hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(size={"shortest_edge": 3136, "longest_edge": 100352}), t, hf.Glm4vVideoProcessor()
    ),
    "ernie_vl": lambda t: hf.Ernie4_5_VLMoeProcessor(
        hf.Ernie4_5_VLMoeImageProcessor(size=_pixels(28)), t, hf.Ernie4_5_VLMoeVideoProcessor()
    ),
    "qwen2_omni": lambda t: hf.Qwen2_5OmniProcessor(_qwen_images(), hf.Qwen2VLVideoProcessor(), _whisper(), t),
    "qwen3_omni": lambda t: hf.Qwen3OmniMoeProcessor(_qwen_images(16), hf.Qwen2VLVideoProcessor(), _whisper(), t),
    "qwen2_audio": lambda t: hf.Qwen2AudioProcessor(_whisper(), t),
    "llava": lambda t: hf.LlavaProcessor(_clip_like("CLIPImageProcessor"), t, **_PLACES),
    "llava_next": lambda t: hf.LlavaNextProcessor(_tiles(), t, **_PLACES),
    "llava_next_video": lambda t: hf.LlavaNextVideoProcessor(
        _clip_like("LlavaNextVideoVideoProcessor"), _tiles(), t, **_PLACES
    ),
    "video_llava": lambda t: hf.VideoLlavaProcessor(
        _clip_like("VideoLlavaImageProcessor"), _clip_like("VideoLlavaVideoProcessor"), t, **_PLACES
    ),
    "intern_vl": lambda t: hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4),
        t,
        hf.InternVLVideoProcessor(size=SQUARE),
        image_seq_length=4,
    ),
    "gemma3": lambda t: hf.Gemma3Processor(hf.Gemma3ImageProcessor(size=SQUARE), t, image_seq_length=4),
    "gemma3n": lambda t: hf.Gemma3nProcessor(
        hf.Gemma3nAudioFeatureExtractor(),
        hf.SiglipImageProcessor(size=SQUARE),
        t,
        image_seq_length=4,
        audio_seq_length=4,
    ),
    "gemma4": lambda t: hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(), hf.Gemma4ImageProcessor(), t, hf.Gemma4VideoProcessor()
    ),
    "paligemma": _paligemma,
    "pixtral": lambda t: hf.PixtralProcessor(
        hf.PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}),
        t,
        patch_size=16,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    ),
    "mllama": lambda t: hf.MllamaProcessor(hf.MllamaImageProcessor(size=SQUARE, max_image_tiles=4), t),
    "llama4": lambda t: hf.Llama4Processor(
        hf.Llama4ImageProcessor(size=SQUARE, max_patches=4), t, patch_size=14, pixel_shuffle_ratio=0.5
    ),
    "lfm2_vl": lambda t: hf.Lfm2VlProcessor(hf.Lfm2VlImageProcessor(), t),
}
PROCESSORS["gemma4n"] = PROCESSORS["gemma4"]


_PADS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|audio_pad|>"}
_OMNI = {"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>"}
_BARS = {"image_token": "<|image|>", "video_token": "<|video|>", "audio_token": "<|audio|>"}
_GEMMA = {"image_token": "<image_soft_token>", "audio_token": "<audio_soft_token>"}
_GEMMA4 = _BARS | {"boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_ERNIE = {"image_token": "<|IMAGE_PLACEHOLDER|>", "video_token": "<|VIDEO_PLACEHOLDER|>"}
_ERNIE |= {
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
_LLAVA_NEXT = ("granite3_vision", "llava_next_llama3", "llava_next_mistral", "llava_next_qwen", "llava_next_yi")
_LLAVA_NEXT_VIDEO = ("llava_next_video_mistral", "llava_next_video_yi")

FAMILIES = (
    Family("qwen2_vl", "qwen2_vl", _PADS, ("mimo_vl", "keye_vl", "dots_ocr")),
    Family("qwen3_vl", "qwen3_vl", _PADS, ("qwen3_vl_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_6")),
    Family("qwen2_omni", "qwen2_omni", _OMNI),
    Family("qwen2_omni", "qwen3_omni", _PADS, ("qwen3_omni_nothink",)),
    Family("qwen2_audio", "qwen2_audio", _OMNI),
    Family("glm4v", "glm4v", _BARS, ("glm4_5v", "glm_ocr")),
    Family("ernie_vl", "ernie_vl", _ERNIE),
    Family("intern_vl", "intern_vl", {}, ("intern_s1",)),
    Family("llava", "llava", {}, ("yi_vl",)),
    Family("llava_next", "llava_next", {}, _LLAVA_NEXT),
    Family("llava_next_video", "llava_next_video", {}, _LLAVA_NEXT_VIDEO),
    Family("video_llava", "video_llava"),
    Family("gemma3", "gemma3", _GEMMA),
    Family("gemma3n", "gemma3n", _GEMMA),
    Family("gemma4", "gemma4", _GEMMA4),
    Family("gemma4", "gemma4n", _GEMMA4),
    Family("paligemma", "paligemma", {}, ("paligemma_chat",)),
    Family("pixtral", "pixtral", {"image_token": "[IMG]"}, ("mistral_small", "ministral3")),
    Family("mllama", "mllama", _BARS),
    Family("llama4", "llama4", _BARS),
    Family("lfm2_vl", "lfm2_vl"),
)
NOT_OFFLINE = {
    "kimi_vl": "its processor is remote code",
    "minicpm_v": "its processor is remote code",
    "minicpm_v_4_6": "its processor is remote code",
    "youtu_vl": "its processor is remote code",
}
