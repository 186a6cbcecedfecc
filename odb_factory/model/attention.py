"""Attention in a flat row: `odb_varlen`, an attention function and a mask function registered with transformers.

| kernel | used for |
|---|---|
| flash or flex attention of the model | models configured with it; `odb_varlen` is not installed |
| `aten::_flash_attention_forward` | sdpa on CUDA (Ampere or newer): bf16, fp16, head size up to 256, no dropout |
| `sdpa` on runs of samples of equal length | all other sdpa; exact, and not quadratic in the row |
| the model's eager function on the same runs | eager, including score caps and attention sinks |

The operator is torch's own variable-length flash kernel, which `torch.nn.attention.varlen` also calls. One call with
scale, windows and grouped heads works on torch 2.5 to 2.13; support is detected from the operator's schema, never from
the version. Head sizes that are not a multiple of `HEAD_MULTIPLE` are padded with zeros. If no flat row is in progress
(evaluation), both functions call `sdpa` or `eager`. The sample lengths come from `flat_row`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from odb_factory.errors import LayoutError
from odb_factory.model.flat_row import FlatRow, row_in_progress

NAME, EAGER_NAME = "odb_varlen", "odb_varlen_eager"
"""Names of the attention functions that replace sdpa and eager."""
FLASH, RUNS = "torch's aten::_flash_attention_forward", "sdpa on runs of samples of equal length"
EAGER_RUNS = "the model's eager function on runs of samples of equal length"
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Limits of torch's flash kernels: the largest head size, and the number that divides every head size."""
FIRST_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability that has flash kernels (Ampere)."""
OVERLAYS = ("gemma3", "gemma4", "paligemma")
"""Models that extend the causal mask so that the tokens of an image attend to each other."""


_FUNCTIONS, _MASKS = AttentionInterface(), AttentionMaskInterface()


def make_mask(base: str, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """None for a flat row; else, or if the model adds its own mask to the causal mask, the mask of `base`."""
    overlaid = kwargs.get("use_vmap", False)
    if row_in_progress() is not None and attention_mask is None and not overlaid:
        return None
    mask: Tensor | None = _MASKS[base](*args, attention_mask=attention_mask, **kwargs)
    return mask


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head size], key and value [1, key heads, tokens, head size] -> [1, tokens, heads, size].

    Raises `LayoutError` if the shapes do not match the flat row in progress: attention would cross samples.
    """
    row = None if attention_mask is not None else _row_of(module, query, key)
    if row is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    states = query, key, value
    if not serves_flash(query, value, kwargs.get("dropout")):
        return _run_by_run(row, sdpa, module, states, kwargs), None
    longest = row.tokens if torch.compiler.is_compiling() else row.longest  # else one graph per length
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    ends, window = row.ends(query.device), kwargs.get("sliding_window")
    return flash(ends, longest, window, states, kwargs.get("scaling"), causal), None


def attend_eager(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """`attend` with the eager function from the model's own module, which may cap scores or use sinks."""
    row = None if attention_mask is not None else _row_of(module, query, key)
    eager = _eager_of(module)
    if row is None:
        return eager(module, query, key, value, attention_mask, **kwargs)
    return _run_by_run(row, eager, module, (query, key, value), kwargs), None


@torch.compiler.disable
def _eager_of(module: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(function for file in files if (function := getattr(file, "eager_attention_forward", None)) is not None)


def _row_of(module: torch.nn.Module, query: Tensor, key: Tensor) -> FlatRow | None:
    """The flat row in progress, or None. Raises `LayoutError` if query and key do not have the row's length."""
    row = row_in_progress()
    if row is None:
        return None
    if not query.shape[0] == 1 or not query.shape[2] == key.shape[2] == row.tokens:
        raise LayoutError(
            f"{type(module).__name__} attends from {list(query.shape)} to {list(key.shape)}, which is not the flat row "
            f"of {row.tokens} tokens in progress (prompt or prefix tuning adds tokens)"
        )
    return row


def sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = _FUNCTIONS["sdpa"](*args, **kwargs)
    return result


def _dtype_of_sdpa(query: Tensor) -> torch.dtype:
    """The dtype that sdpa computes in: the autocast dtype if autocast is on."""
    device = query.device.type
    # "meta" has no autocast. torch.compile before 2.12 cannot trace torch.amp.is_autocast_available.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


# Kernel selection


def serves_flash(query: Tensor, value: Tensor, dropout: float | None) -> bool:
    """Whether torch's flash kernel can compute this call of an attention function."""
    size = max(query.shape[-1], value.shape[-1])
    return why_no_flash(query.device, _dtype_of_sdpa(query), size, dropout or 0.0) is None


def kernel_of(device: torch.device, dtype: torch.dtype, size: int = 128, dropout: float = 0.0) -> str:
    """The kernel that replaces sdpa, and the reason for a fallback. dtype: compute dtype; size: values per head.

    kernel_of(torch.device("cuda", 0), torch.bfloat16)  # "torch's aten::_flash_attention_forward"
    """
    why = why_no_flash(device, dtype, size, dropout)
    return FLASH if why is None else f"{RUNS}, because {why}"


def why_no_flash(device: torch.device, dtype: torch.dtype, size: int, dropout: float) -> str | None:
    """Why torch's flash kernel cannot compute a call; None if it can."""
    if (why := device_lacks(device)) is not None:
        return why
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the model computes in {str(dtype).removeprefix('torch.')}, not in bf16 or fp16"
    if size > LARGEST_HEAD:
        return f"heads have {size} values, more than {LARGEST_HEAD}"
    if dropout:
        return f"attention has dropout ({dropout:g})"
    return None if FLASH_FORWARD else "aten::_flash_attention_forward of this torch has an unknown schema"


def device_lacks(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if torch.version.hip is not None:
        return "the device is an AMD GPU"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch is built without flash attention"
    try:
        capability = torch.cuda.get_device_capability(device)
    except RuntimeError:  # no driver: a plan for another machine
        return None
    if capability < FIRST_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, below 8.0"
    return None


FLASH_ARGUMENTS = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip


def find_flash_forward() -> Callable[..., Any] | None:
    """The flash operator of this torch (a private name); None if its schema does not match the call in `flash`."""
    operator: Any = getattr(getattr(torch.ops.aten, "_flash_attention_forward", None), "default", None)
    names = [] if operator is None else [argument.name for argument in operator._schema.arguments]
    is_known = tuple(names[: len(FLASH_ARGUMENTS)]) == FLASH_ARGUMENTS
    return operator if is_known and {"scale", "window_size_left", "window_size_right"} <= set(names) else None


FLASH_FORWARD = find_flash_forward()
"""Looked up once at import, outside of code that torch.compile traces."""


def flash(
    ends: Tensor, longest: int, window: int | None, states: Sequence[Tensor], scale: float | None, causal: bool
) -> Tensor:
    """Call the flash kernel. ends: int32[samples + 1], sample boundaries. longest: upper bound of the sample lengths.
    window: sliding window. states: query, key, value as in `attend`. scale: score scale; None: head size ** -0.5."""
    assert FLASH_FORWARD is not None, "`why_no_flash` has asked"
    query, _, value = states
    window = None if window is not None and window >= longest else window
    size, value_size, dtype = query.shape[-1], value.shape[-1], _dtype_of_sdpa(query)
    filled = -(-max(size, value_size) // HEAD_MULTIPLE) * HEAD_MULTIPLE  # zero-padded
    scale = size**-0.5 if scale is None else scale
    packed = (  # [tokens, heads, filled]
        functional.pad(heads[0].to(dtype), (0, filled - heads.shape[-1])).transpose(0, 1).contiguous()
        for heads in states
    )
    attended: Tensor = FLASH_FORWARD(
        *packed,
        *(ends, ends, longest, longest),
        0.0,  # dropout
        causal and window is None,
        False,  # debug mask
        scale=None if scale == filled**-0.5 else scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return attended[None, ..., :value_size]


@torch.compiler.disable
def _run_by_run(
    row: FlatRow,
    function: Callable[..., Any],
    module: torch.nn.Module,
    states: Sequence[Tensor],
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention with sdpa or an eager function, outside of compiled graphs: a graph would fit one row only.

    One call computes all samples of a run, as the rows of a batch. states: query, key, value, as in `attend`.
    """
    window, parts = kwargs.get("sliding_window"), []
    tokens = [rows * length for rows, length in row.runs]
    for (rows, length), *of_run in zip(row.runs, *(heads[0].split(tokens, dim=1) for heads in states)):
        # [samples, heads, length, size] -> [samples, length, heads, size]
        query, key, value = (heads.unflatten(1, (rows, length)).transpose(0, 1) for heads in of_run)
        mask = None
        if function is not sdpa or (window is not None and window < length):
            visible = query.new_ones(length, length, dtype=torch.bool).tril()
            visible = visible if window is None else visible.triu(1 - window)
            mask = query.new_zeros(()).masked_fill(~visible, torch.finfo(query.dtype).min)[None, None]
        parts.append(function(module, query, key, value, mask, **kwargs)[0].flatten(0, 1))
    return torch.cat(parts)[None]


# Installation in a model


# Registered at import, because a model unpickled in another process also needs these functions.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, functools.partial(make_mask, "sdpa"))
AttentionInterface.register(EAGER_NAME, attend_eager)
AttentionMaskInterface.register(EAGER_NAME, functools.partial(make_mask, "eager"))


def why_unusable(model: Any) -> str | None:
    """Why `odb_varlen` cannot replace sdpa or eager in this model (a `PreTrainedModel`); None if it can."""
    if not hasattr(model, "set_attn_implementation") or _key(model) is None:
        return "its attention function cannot be chosen for its language model alone"
    if not getattr(type(model), "_can_set_attn_implementation", lambda: False)():
        return "it does not take attention functions of others"
    if getattr(model.config, "model_type", "") in OVERLAYS:
        return "the tokens of an image see each other, which takes a mask"
    return None


def install(model: Any) -> Callable[[], None]:
    """Replace sdpa or eager in the language model by `odb_varlen`; returns a function that undoes the change.

    Raises `LayoutError` if transformers ignores the new name; the model is then unchanged.
    """
    key, config = _key(model), text_config(model)
    assert key is not None, "why_unusable comes first"
    before = config._attn_implementation
    name = EAGER_NAME if before == "eager" else NAME
    model.set_attn_implementation({key: name})
    undo = functools.partial(model.set_attn_implementation, {key: before})
    if text_config(model)._attn_implementation != name:
        undo()
        raise LayoutError(f"transformers has not taken {name} for {type(model).__name__}")
    return undo


def expected(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that training `model` will use, according to its config."""
    config = text_config(model)
    if config._attn_implementation == "eager":
        return EAGER_RUNS
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dropout = getattr(config, "attention_dropout", None) or 0.0
    return kernel_of(device, dtype, size, dropout)


def text_config(model: Any) -> Any:
    """The config of the language model in `model`: `model.config` or a part of it."""
    return model.config.get_text_config(decoder=True)


def _key(model: Any) -> str | None:
    """The key that selects the language model in `set_attn_implementation`; None if no such key exists."""
    config = text_config(model)
    if config is model.config:
        return ""
    return next((key for key in model.config.sub_configs if getattr(model.config, key, None) is config), None)
