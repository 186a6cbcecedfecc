"""`odb_varlen`: attention within each segment of a flat row, where neither flash nor flex attention is configured.

An attention function and a mask function, registered with transformers by its public interfaces. On a CUDA device
torch's own variable-length kernel computes it (`torch.nn.attention.varlen`, torch >= 2.10), in bfloat16 and float16;
everything else goes through transformers' `sdpa` function, one run of equal segments after the other: exact, and not
quadratic in the row. Where no flat row is under way (an evaluation), both functions are those of `sdpa`.

The segments come from the run, not from arguments that each model would have to hand down (see `flat_row`): a
model cannot lose them on the way, and no position is read back from the device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from odb_factory.errors import ConfigError

NAME = "odb_varlen"
LARGEST_HEAD = 256
"""Values of a head that the kernel takes at most; their number is a multiple of 8."""
FIRST_CAPABILITY = (8, 0)
"""Of a CUDA device that has the kernel."""
OVERLAYS = ("gemma3", "gemma4", "paligemma")
"""Models in which the tokens of an image see each other, which lies over the causal mask."""


class FlatRow:
    """The row under way. segments: their lengths (tokens), in order; they fill the row."""

    def __init__(self, segments: Sequence[int]):
        self.segments = tuple(segments)
        self.tokens, self.longest = sum(segments), max(segments)
        self.runs = [(len(list(run)), length) for length, run in itertools.groupby(segments)]
        """Neighbours of one length: how many, and that length."""
        self._ends: dict[torch.device, Tensor] = {}

    def ends(self, device: torch.device) -> Tensor:
        """int32[segments + 1] there, copied once for all layers and without waiting for the device."""
        if device not in self._ends:
            ends = torch.tensor([0, *itertools.accumulate(self.segments)], dtype=torch.int32)
            if device.type == "cuda":
                ends = ends.pin_memory()
            self._ends[device] = ends.to(device, non_blocking=True)
        return self._ends[device]


_FUNCTIONS, _MASKS = AttentionInterface(), AttentionMaskInterface()
_row: FlatRow | None = None
"""One for the process: checkpointed layers are computed again in the threads of autograd, which have no context."""


@contextlib.contextmanager
def flat_row(segments: Sequence[int]) -> Iterator[None]:
    """Within it forward and backward are those of one flat row; of a padded micro-batch where there are no segments.

    with flat_row((5, 3)):
        model(input_ids=ids, position_ids=positions).loss.backward()  # ids: [1, 8]
    """
    global _row
    before, _row = _row, FlatRow(segments) if segments else None
    try:
        yield
    finally:
        _row = before


def register() -> None:
    """Make both functions known to transformers; safe to call twice."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for a flat row; all others are those of sdpa, as is one that a model lays over the causal one."""
    overlaid = kwargs.get("use_vmap", False)
    if _row is not None and attention_mask is None and not overlaid:
        return None
    mask: Tensor | None = _MASKS["sdpa"](*args, attention_mask=attention_mask, **kwargs)
    return mask


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head size], key and value [1, key heads, tokens, head size] -> [1, tokens, heads, size].

    Raises `ConfigError` where a flat row is under way and these are not its tokens: it must not attend across samples.
    """
    if _row is None or attention_mask is not None:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    if not query.shape[0] == 1 or not query.shape[2] == key.shape[2] == _row.tokens:
        raise ConfigError(
            f"layout: {type(module).__name__} attends from {list(query.shape)} to {list(key.shape)}, which is not the "
            f"flat row of {_row.tokens} tokens that is under way (prompt or prefix tuning adds tokens of its own); set "
            "`layout: padded`."
        )
    window: int | None = kwargs.get("sliding_window")
    if window is not None and window >= _row.longest:
        window = None
    dtype = _kernel_dtype(query, value, kwargs)
    if dtype is None:
        return _run_by_run(module, query, key, value, _row.runs, window, **kwargs), None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return _kernel(query.to(dtype), key.to(dtype), value.to(dtype), _row, window, causal, kwargs.get("scaling")), None


def _sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = _FUNCTIONS["sdpa"](*args, **kwargs)
    return result


# Run by run


def _run_by_run(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Sequence[tuple[int, int]],
    window: int | None,
    **kwargs: Any,
) -> Tensor:
    """The segments of a run go together, as rows of a padded micro-batch do."""
    tokens = [rows * length for rows, length in runs]
    parts = []
    for run, *states in zip(runs, *(_parts(states[0], tokens) for states in (query, key, value))):
        q, k, v = (heads.unflatten(1, run).transpose(0, 1) for heads in states)
        length = q.shape[2]
        if window is None or length <= window:
            part = _sdpa(module, q, k, v, None, **kwargs)[0]
        else:
            part = _sdpa(module, q, k, v, _band(length, window, q.device), **kwargs | {"is_causal": False})[0]
        parts.append(part.flatten(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _parts(heads: Tensor, tokens: Sequence[int]) -> Sequence[Tensor]:
    """heads: [heads, tokens, size]. One part is the whole, of which neither this nor its backward makes a copy."""
    return heads.split(list(tokens), dim=1) if len(tokens) > 1 else (heads,)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool[1, 1, length, length]: each token sees itself and the `window - 1` before it."""
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    return square.tril().triu(1 - window)[None, None]


# torch's kernel


def _kernel_dtype(query: Tensor, value: Tensor, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that torch's kernel would compute this in, which is that of sdpa; None where it cannot."""
    device, size = query.device, query.shape[-1]
    if device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else query.dtype
    able = (
        torch.version.hip is None
        and dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1] <= LARGEST_HEAD
        and size % 8 == 0
        and not kwargs.get("dropout")
        and _has_kernel()
        and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    )
    return dtype if able else None


def _has_kernel() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, row: FlatRow, window: int | None, causal: bool, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    ends = row.ends(query.device)
    before = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        row.longest,
        row.longest,
        scale=scale,
        window_size=(before, 0 if causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


# Into a model and out of it


def why_unusable(model: Any) -> str | None:
    """What of this model (a `PreTrainedModel`) `odb_varlen` cannot compute as sdpa does; None: nothing."""
    config = text_config(model)
    if not hasattr(model, "set_attn_implementation") or _key(model) is None:
        return "its attention function cannot be chosen for its language model alone"
    if not getattr(type(model), "_can_set_attn_implementation", lambda: False)():
        return "it does not take attention functions of others"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention logits, which sdpa does not"
    if _overlays_images(model):
        return "the tokens of an image see each other, which takes a mask"
    if getattr(config, "sliding_window", None) and not _tells_windows(model):
        return "it does not tell attention functions its sliding window"
    return None


def install(model: Any) -> Callable[[], None]:
    """Choose `odb_varlen` for the language model of `model`; returns what puts the former function back.

    Raises `ConfigError` where transformers does not do it.
    """
    register()
    key, config = _key(model), text_config(model)
    assert key is not None, "why_unusable comes first"
    before = config._attn_implementation
    model.set_attn_implementation({key: NAME})
    if text_config(model)._attn_implementation != NAME:
        raise ConfigError(
            f"layout: transformers has not taken {NAME} for {type(model).__name__}; set `layout: padded`, or install a "
            "tested release (`odb-factory doctor` names them)."
        )
    return lambda: model.set_attn_implementation({key: before})


def text_config(model: Any) -> Any:
    """The config of the language model of `model`: its own, or a part of it."""
    return model.config.get_text_config(decoder=True)


def _key(model: Any) -> str | None:
    """Under which name `set_attn_implementation` knows the language model; None: under none."""
    config = text_config(model)
    if config is model.config:
        return ""
    return next((key for key in model.config.sub_configs if getattr(model.config, key, None) is config), None)


def _overlays_images(model: Any) -> bool:
    """`make_mask` would return the mask with them, which transformers 4 does not let it see."""
    return getattr(model.config, "model_type", "") in OVERLAYS


def _tells_windows(model: Any) -> bool:
    """Flash attention has windows from the same argument, so a model that supports it passes them on."""
    return any(
        getattr(part, "_supports_flash_attn", False)
        for part in model.modules()
        if getattr(part, "config", None) is text_config(model)
    )
