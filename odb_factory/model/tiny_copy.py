"""A tiny random copy of a model's architecture: same class and switches, small sizes, short windows and contexts.

The copy is made from the config alone, on the host, in float64, with weights so large that attention matters. The rules
of `_Sizes` match the names of sizes in transformers, so new families need no entry here. Settings without a rule
(activations, norms, scales, kinds of layers) are kept.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.integrations import deepspeed

VOCABULARY, WORDS = 128, (8, 96)
"""Size of the vocabulary; range of the ids that no config uses as special tokens."""
HIDDEN, HEADS, GROUPS, HEAD_SIZE = 64, 4, 2, 16
"""Width, heads, key heads if queries share them, and size of a head."""
MECHANISM = 16
"""Tokens of windows, chunks, top-k and original contexts."""
POSITIONS = 512
"""Rows of learned tables of positions."""
LAYERS_OF_A_KIND, MOST_LAYERS = 2, 8
MOST_WEIGHTS = 20_000_000
WEIGHT, SHIFT = 0.2, 0.1
"""Standard deviation of matrices, and of random numbers added to vectors."""

PERIOD = r"(period|interval|step|pattern|every_n_layers|frequency)$"
FIRST = r"offset$|first_k_dense|dense_layers$|layer_start_index|max_window_layers|kv_shared_layers"
"""Settings that make kinds of layers depend on layer numbers."""
SMALL: tuple[tuple[str, int], ...] = (
    (r"per_layer_input$", 8),
    (r"topk_group|n_group|shared_experts$", 1),
    (r"per_tok$|moe_k$|moe_top_?k$|^top_?k$|router_top_?k$", 2),
    (r"experts$", 4),
    (PERIOD, 2),
    (FIRST, 1),
    (r"original_max_position|window|chunk|floor_scale|topk$|block_size|local_attention$", MECHANISM),
    (r"max_.*positions?(_embeddings)?$|n_positions|n_ctx|max_seq_len|context_length|max_source", POSITIONS),
    (r"linear_num_key_heads$", GROUPS),
    (r"linear_num_value_heads$|heads?$", HEADS),
    (r"linear_.*head_dim$|state(_size)?$|ssm_state_size$", 8),
    (r"rank$", 16),
    (r"(size|dim|width|d_model|d_ff|n_embd|n_inner|channels)$", HIDDEN),
)
"""Name of a size, and its largest value in the copy. The first rule that matches is used."""
LAYERS = r"^(num_hidden_layers|n_layers?|num_layers|depth|(encoder|decoder)_layers)$"
LAYER_NUMBERS = r"(layers|indices|indexes|layer_ids)$"
HEAD_SIZES = r"head_dim$|head_size$|^kv_channels$|^d_kv$|^rotary_dim$"
MIXER_HEADS, MIXER_SIZES = r"mamba.*heads$", r"mamba.*(d_head|head_?dim)$"
KEY_HEADS = r"key_value_heads$|num_kv_heads$|^kv_n_heads$|num_query_groups$"
OFF = r"dropout|pdrop|jitter|drop_path|layer_?drop|aux_loss"
LIKE_HIDDEN = r"hidden_size$|d_model$|n_embd$|embed_dim$|embedding_size$|proj_dim$|lru_width$|projection_dim$"


def tiny_copy(model_class: Any, config: Any, attention: str | None) -> Any:
    """The copy. model_class: a `PreTrainedModel`; config: its config, not changed. attention: the attention function of
    the language model; None: the default of the class.

    Does not change random state, default dtype and devices. ZeRO-3 does not partition the copy. Raises the errors of
    the class if the sizes do not fit.
    """
    small = small_config(config)
    for part in parts_of(small):
        part._attn_implementation_internal = None
    small.get_text_config(decoder=True)._attn_implementation = attention
    # With ZeRO-3 set, transformers partitions parts of a model (the vision tower) when they are made.
    zero3 = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    weights = 0
    try:
        with contextlib.suppress(Exception), torch.device("meta"):  # some classes can only be made with weights
            weights = sum(parameter.numel() for parameter in model_class(copy.deepcopy(small)).parameters())
        if weights > MOST_WEIGHTS:
            raise ValueError(f"the copy would have {weights:,} weights: not all of its sizes have a rule")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = model_class(small)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero3
    model = model.double().train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(random * WEIGHT if parameter.dim() > 1 else parameter + random * SHIFT)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def small_config(config: Any) -> Any:
    """A copy of `config` with small sizes, in all its sub-configs too."""
    small = copy.deepcopy(config)
    for part in parts_of(small):
        before = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        sizes = _Sizes(before)
        for name, value in before.items():
            if (new := sizes.small(name, value)) is not value:
                with contextlib.suppress(AttributeError):  # a property without a setter follows from other settings
                    setattr(part, name, new)
        for name in {"use_cache", "output_router_logits"} & before.keys():
            setattr(part, name, False)
        if hasattr(part, "_experts_implementation"):
            part._experts_implementation = "eager"  # the grouped kernels do not support float64
    return small


def parts_of(config: Any) -> Iterator[Any]:
    """The config and its sub-configs."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value)


class _Sizes:
    """The small sizes of one config, which depend on each other. before: its attributes."""

    def __init__(self, before: dict[str, Any]):
        def first(*names: str) -> int | None:
            return next((before[name] for name in names if isinstance(before.get(name), int)), None)

        self._num_layers = next((value for name, value in before.items() if re.search(LAYERS, name)), 0)
        self._layers = self._choose_layers(before)
        self._hidden = first("hidden_size", "d_model", "n_embd") or HIDDEN
        self._heads = first("num_attention_heads", "n_head", "n_heads", "num_heads") or HEADS
        rope = first("qk_rope_head_dim")
        self._head_factor = rope / 8 if rope else (first("head_dim") or self._hidden / self._heads) / HEAD_SIZE
        """Size of a head in the model / in the copy."""
        self._expand = first("mamba_expand", "expand") or 2
        self._is_mixer = "expand" in before
        rotations = str(before.get("rope_parameters") or before.get("rope_scaling"))
        self._context_acts = "dynamic" in rotations or "longrope" in rotations
        self._tokens = {0: 0}
        """Token id in the model: id in the copy."""

    def _choose_layers(self, before: dict[str, Any]) -> list[int]:
        """`LAYERS_OF_A_KIND` layers of each kind. Layers are of one kind if all settings of single layers are equal; if
        kinds follow from layer numbers, the first few layers are chosen."""
        lists = {name: value for name, value in before.items() if isinstance(value, (list, tuple)) and value}
        kinds: dict[str, list[int]] = {}
        for layer in range(self._num_layers):
            kind = [
                layer in value if _numbers_layers(name, value) else value[layer]
                for name, value in lists.items()
                if _numbers_layers(name, value) or len(value) == self._num_layers
            ]
            kinds.setdefault(repr(kind), []).append(layer)
        by_number = any(
            type(value) is int and ((value > 1 and re.search(PERIOD, name)) or (value > 0 and re.search(FIRST, name)))
            for name, value in before.items()
        )
        if len(kinds) == 1 and by_number:
            return list(range(min(self._num_layers, 2 * LAYERS_OF_A_KIND)))
        return sorted(layer for layers in kinds.values() for layer in layers[:LAYERS_OF_A_KIND])[:MOST_LAYERS]

    def small(self, name: str, value: Any) -> Any:
        """The value in the small config; the same object if the value is kept."""
        if isinstance(value, dict) and "rope" in name:
            return self._rope(value)
        if isinstance(value, (list, tuple)) and self._layers:
            if _numbers_layers(name, value):
                return [at for at, layer in enumerate(self._layers) if layer in value]
            of_layers = len(value) == self._num_layers
            return [
                item if isinstance(item, (list, tuple)) else self.small(name, item)
                for item in ([value[layer] for layer in self._layers] if of_layers else value)
            ]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if re.search(r"token_(id|index)$", name):
            return value if value <= 0 else self._tokens.setdefault(int(value), VOCABULARY - len(self._tokens))
        if re.search(OFF, name):
            return type(value)(0)
        if not isinstance(value, int) or value <= 0:
            return value
        if re.search(LAYERS, name):
            return len(self._layers)
        if "vocab_size" in name:  # also if the vocabulary is smaller
            return VOCABULARY
        # sizes that follow from other sizes
        if re.search(MIXER_SIZES, name) or (self._is_mixer and name == "head_dim"):
            return HEAD_SIZE
        if re.search(MIXER_HEADS, name) or (self._is_mixer and name == "num_heads"):
            return self._expand * HIDDEN // HEAD_SIZE
        if name.endswith("d_ssm"):
            return self._expand * HIDDEN
        if re.search(KEY_HEADS, name):
            return value if value == 1 else min(self._heads, HEADS) if value >= self._heads else GROUPS
        if re.search(HEAD_SIZES, name) and not name.startswith("linear_"):
            return max(2, round(value / self._head_factor) // 2 * 2)
        if re.search(LIKE_HIDDEN, name) and value in (self._hidden, 2 * self._hidden):
            return HIDDEN * value // self._hidden
        if name == "max_position_embeddings" and self._context_acts:
            return 2 * MECHANISM
        return min(value, next((size for rule, size in SMALL if re.search(rule, name)), value))

    def _rope(self, value: dict[str, Any]) -> dict[str, Any]:
        """Settings of rotary positions: sections, factors by frequency, original context."""
        small: dict[str, Any] = {}
        for name, setting in value.items():
            if isinstance(setting, dict):
                setting = self._rope(setting)
            elif name == "original_max_position_embeddings":
                setting = min(setting, MECHANISM)
            elif name == "mrope_section":
                ends = [0, *(round(end / self._head_factor) for end in itertools.accumulate(setting))]
                setting = [end - start for start, end in itertools.pairwise(ends)]
            elif name in ("short_factor", "long_factor"):
                setting = setting[: round(len(setting) / self._head_factor)]
            small[name] = setting
        return small


def _numbers_layers(name: str, value: Sequence[Any]) -> bool:
    """Whether a list is one of layer numbers."""
    numbers = all(type(number) is int for number in value) and list(value) == sorted(set(value))
    return bool(re.search(LAYER_NUMBERS, name)) and numbers
