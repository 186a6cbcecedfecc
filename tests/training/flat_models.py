"""Tiny random models of many classes, and the same samples given to them padded, alone and in a flat row."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import parse
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from odb_factory.model.flat_row import flat_row

VOCABULARY = 97
LENGTHS = (3, 17, 9, 26, 12)
WINDOW = 7
"""Of sliding attention: shorter than most samples."""
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
HEAD = {"head_dim": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ONE_CHUNK = 32
"""For families whose torch code (transformers 5.6) sums chunks along the wrong axis: with samples longer than a chunk
their loss depends on the padding, in stock too."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
ALLOWED: dict[str, dict[str, Any]] = {
    "llama": HEAD,
    "qwen2": {},
    "qwen3": HEAD,
    "mistral": HEAD | {"sliding_window": WINDOW},
    "phi3": {},
    "gemma3_text": HEAD | SLIDING | {"query_pre_attn_scalar": 8},
    "glm4": HEAD,
    "granite": {},
    "olmo2": {},
    "qwen3_moe": HEAD | MOE,
    "mixtral": HEAD | {"num_local_experts": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": HEAD | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
REFUSED: dict[str, dict[str, Any]] = {
    "llama4_text": HEAD
    | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 0]},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {"alibi": False},
}
WRONG = ("bloom",) if parse(transformers.__version__) >= parse("5.10") else tuple(REFUSED)
"""On a flat row, with the releases that are installed: newer ones compute Falcon and Llama 4 right."""
MIXERS: dict[str, dict[str, Any]] = {
    "qwen3_next": HEAD | MOE | DELTA | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": HEAD | DELTA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1], "mamba_expand": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": ONE_CHUNK,
    },
    "minimax": HEAD | {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "qwen3_5_moe_text": HEAD | MOE | DELTA | {"shared_expert_intermediate_size": 16},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "olmo_hybrid": DELTA,
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 8,
        "chunk_size": ONE_CHUNK,
        "use_mem_rope": True,
        "num_mem_blocks": 1,
    },
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
}
"""Their mixers carry state along the row."""
EAGER = ("gpt_oss",)


def make_model(kind: str, dtype: torch.dtype = torch.float32, kernel: str | None = None) -> Any:
    """Without dropout, its weights large enough for samples to matter to each other."""
    config = AutoConfig.for_model(kind, **COMMON | (ALLOWED | REFUSED | MIXERS)[kind])
    for name in ("attention_dropout", "residual_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config._experts_implementation = "eager"  # grouped matrix products know no float64
    torch.manual_seed(1)
    how = {} if kernel is None and kind not in EAGER else {"attn_implementation": kernel or "eager"}
    model = AutoModelForCausalLM.from_config(config, **how).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


# The same samples


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of each, the first third of the labels without loss."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [(ids, torch.where(torch.arange(len(ids)) < max(len(ids) // 3, 1), -100, ids)) for ids in rows]


def padded_batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    length = max(len(ids) for ids, _ in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    of_row = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels} for ids, labels in rows]
    return {
        key: torch.stack([functional.pad(row[key], (0, length - len(row[key])), value=value) for row in of_row])
        for key, value in fill.items()
    }


def flat_batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat([ids for ids, _ in rows])[None],
        "labels": torch.cat([labels for _, labels in rows])[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
    }


def sum_of_losses(model: Any, batch: dict[str, torch.Tensor], segments: tuple[int, ...] = ()) -> torch.Tensor:
    """Of all supervised tokens, with its gradient in the parameters."""
    model.zero_grad()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with flat_row(segments):
        logits = model(**inputs).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
    return loss.detach()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def largest_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Of the norm of each tensor, where it has a gradient at all."""
    assert some.keys() == others.keys()
    norms = {name: tensor.norm() for name, tensor in others.items() if tensor.norm() > 1e-12}
    return max(float((some[name] - others[name]).norm() / norm) for name, norm in norms.items())
