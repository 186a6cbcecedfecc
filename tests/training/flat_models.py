"""Tiny random models of many classes, and the same samples padded, alone and as a flat row."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from model.check_families import class_and_config
from packaging.version import parse
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from odb_factory.model.check import quiet
from odb_factory.model.flat_row import flat_row
from odb_factory.model.tiny_copy import tiny_copy

VOCABULARY = 97
LENGTHS = (3, 17, 9, 26, 12)
WINDOW = 7
"""Of sliding attention (tokens): shorter than most samples."""
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
"""Models that compute a flat row wrong with the installed releases: newer ones compute Falcon and Llama 4 right."""
_OF_A_CLASS = "qwen3_5_text mamba mamba2 bamba falcon_h1 granitemoehybrid lfm2 recurrent_gemma minimax rwkv"
_MORE = "qwen3_next qwen3_5_moe_text jamba nemotron_h lfm2_moe falcon_mamba olmo_hybrid zamba zamba2"
OF_A_CLASS = _OF_A_CLASS.split()
MIXERS = [*OF_A_CLASS, *_MORE.split()]
"""Families whose mixers carry state along the row. OF_A_CLASS: one family for each class of mixers."""
EAGER = ("gpt_oss",)


def make_model(kind: str, dtype: torch.dtype = torch.float32, kernel: str | None = None) -> Any:
    """A model without dropout, with weights so large that a leak between samples shows; a tiny copy for `MIXERS`."""
    if kind in MIXERS:
        with quiet():
            return tiny_copy(*class_and_config(kind), kernel).to(dtype)
    config = AutoConfig.for_model(kind, **COMMON | (ALLOWED | REFUSED)[kind])
    for name in [name for name in vars(config) if "dropout" in name or "pdrop" in name]:
        setattr(config, name, 0.0)
    config._experts_implementation = "eager"  # grouped matrix products do not support float64
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
    """(ids, labels) of each sample. The first third of the labels is masked."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [(ids, torch.where(torch.arange(len(ids)) < max(len(ids) // 3, 1), -100, ids)) for ids in rows]


def padded_batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = zip(*rows)
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def flat_batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat([ids for ids, _ in rows])[None],
        "labels": torch.cat([labels for _, labels in rows])[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None],
    }


def sum_of_losses(model: Any, batch: dict[str, torch.Tensor], segments: tuple[int, ...] = ()) -> torch.Tensor:
    """The sum over all supervised tokens; the parameters have its gradient."""
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
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def largest_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm, without tensors of zeros."""
    assert some.keys() == others.keys()
    norms = {name: tensor.norm() for name, tensor in others.items() if tensor.norm() > 1e-12}
    return max(float((some[name] - others[name]).norm() / norm) for name, norm in norms.items())
