"""Attention of a flat row: `odb_varlen`, an attention function and a mask function that transformers calls.

Each call is computed by the first kernel of `KERNELS` that lacks nothing the call needs:

| kernel | where | what it takes |
|---|---|---|
| flash or flex attention of the model | as configured; `odb_varlen` is not installed there | |
| `torch.nn.attention.varlen.varlen_attn` | CUDA, torch >= 2.10 | 2.10: no scale, no window; 2.11, 2.12: all |
| `aten::_flash_attention_forward` | CUDA, torch >= 2.5 | all |
| `sdpa` on runs of samples of equal length | everywhere | all; exact, and not quadratic in the row |

What a release of torch takes is read from the signature and the schema, never from the version. Both kernels of torch
need bfloat16 or float16, and heads of at most 256 values; smaller heads of odd sizes are filled with zeros. No kernel
caps scores (`why_unusable`). Where no flat row is under way (an evaluation), both functions are those of `sdpa`.

The lengths of the samples come from `flat_row`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.model.flat_row import FlatRow, row_in_progress

logger = get_logger(__name__)

NAME = "odb_varlen"
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Values of a head in torch's flash kernels: the largest number, and what it is a multiple of."""
FIRST_CAPABILITY = (8, 0)
"""The oldest CUDA devices that have flash kernels (Ampere)."""
OVERLAYS = ("gemma3", "gemma4", "paligemma")
"""Models in which the tokens of an image see each other, which lies over the causal mask."""


_FUNCTIONS, _MASKS = AttentionInterface(), AttentionMaskInterface()


def register() -> None:
    """Make both functions known to transformers; safe to call twice."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for a flat row; all others are those of sdpa, as is one that a model lays over the causal one."""
    overlaid = kwargs.get("use_vmap", False)
    if row_in_progress() is not None and attention_mask is None and not overlaid:
        return None
    mask: Tensor | None = _MASKS["sdpa"](*args, attention_mask=attention_mask, **kwargs)
    return mask


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head size], key and value [1, key heads, tokens, head size] -> [1, tokens, heads, size].

    Raises `ConfigError` where a flat row is under way and these are not its tokens: it must not attend across samples.
    """
    row = row_in_progress()
    if row is None or attention_mask is not None:
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    if not query.shape[0] == 1 or not query.shape[2] == key.shape[2] == row.tokens:
        raise ConfigError(
            f"layout: {type(module).__name__} attends from {list(query.shape)} to {list(key.shape)}, which is not the "
            f"flat row of {row.tokens} tokens that is under way (prompt or prefix tuning adds tokens of its own); set "
            "`layout: padded`."
        )
    window: int | None = kwargs.get("sliding_window")
    if window is not None and window >= row.longest:
        window = None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    need = Need(
        device=query.device,
        dtype=_dtype_of_sdpa(query),
        size=query.shape[-1],
        value_size=value.shape[-1],
        scale=kwargs.get("scaling"),
        window=window is not None,
        grouped=query.shape[1] != key.shape[1],
        dropout=kwargs.get("dropout") or 0.0,
    )
    choice = choose(need)
    if not row.is_trial:
        announce(choice)
    return choice.kernel.compute(Call(module, query, key, value, kwargs, row, window, causal, need)), None


def _sdpa(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    result: tuple[Tensor, None] = _FUNCTIONS["sdpa"](*args, **kwargs)
    return result


def _dtype_of_sdpa(query: Tensor) -> torch.dtype:
    """The dtype that sdpa computes in, which autocast may choose."""
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


# The table of kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one call of attention needs of a kernel.

    dtype: the one sdpa would compute in. size: values of a head of query and key. scale: None for size ** -0.5.
    window: samples are longer than the sliding window. grouped: fewer key heads than heads.
    """

    device: torch.device
    dtype: torch.dtype
    size: int = 128
    value_size: int = 128
    scale: float | None = None
    window: bool = False
    grouped: bool = False
    dropout: float = 0.0

    @property
    def kernel_size(self) -> int:
        """Values of a head as torch's flash kernels get them, filled up with zeros."""
        return -(-max(self.size, self.value_size) // HEAD_MULTIPLE) * HEAD_MULTIPLE

    @property
    def kernel_scale(self) -> float | None:
        """The factor of the scores where it is not the one that follows from `kernel_size`."""
        scale = self.size**-0.5 if self.scale is None else self.scale
        return None if scale == self.kernel_size**-0.5 else scale


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention. query, key, value, kwargs: as the model gives them to `attend`. window: None for all."""

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    kwargs: dict[str, Any]
    row: FlatRow
    window: int | None
    causal: bool
    need: Need

    def for_flash(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        """query, key, value: [tokens, heads, kernel_size], contiguous; ends of samples, twice; the longest, twice."""
        query, key, value = (
            functional.pad(states[0].to(self.need.dtype), (0, self.need.kernel_size - states.shape[-1]))
            .transpose(0, 1)
            .contiguous()
            for states in (self.query, self.key, self.value)
        )
        ends = self.row.ends(query.device)
        return query, key, value, ends, ends, self.row.longest, self.row.longest

    def of_flash(self, attended: Tensor) -> Tensor:
        """[tokens, heads, kernel_size] -> [1, tokens, heads, value size]"""
        return attended[None, ..., : self.need.value_size]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute the attention of a flat row. lacks: the reason why it cannot meet a need; None: it can."""

    name: str
    lacks: Callable[[Need], str | None]
    compute: Callable[[Call], Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel for a need. why: what the kernels before it lack; empty for the first."""

    kernel: Kernel
    why: str

    def __str__(self) -> str:
        return f"{self.kernel.name}, because {self.why}" if self.why else self.kernel.name


def choose(need: Need) -> Choice:
    """The first kernel of the table that can meet `need`.

    str(choose(Need(device=torch.device("cpu"), dtype=torch.float32)))
    """
    reasons: list[str] = []
    for kernel in KERNELS:
        reason = kernel.lacks(need)
        if reason is None:
            return Choice(kernel, "; ".join(dict.fromkeys(reasons)))
        reasons.append(reason)
    raise AssertionError("the last kernel of the table can meet every need")


_announced: set[Choice] = set()
"""The choices that the log has named in this training."""


def announce(choice: Choice) -> None:
    """Log a kernel the first time that it is used in a training, but not in a compiled graph, which would break."""
    if not torch.compiler.is_compiling() and choice not in _announced:
        _announced.add(choice)
        logger.info("attention of flat rows: %s", choice)


def why_no_flash(need: Need) -> str | None:
    """What keeps torch's flash kernels from `need` whatever function calls them; None: nothing."""
    return device_lacks(need.device) or _need_lacks(need)


def device_lacks(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}, not CUDA"
    if torch.version.hip is not None:
        return "the device is an AMD GPU"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch is built without flash attention"
    try:
        capability = torch.cuda.get_device_capability(device)
    except RuntimeError:  # a plan for another machine, made where there is no driver
        return None
    if capability < FIRST_CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, below 8.0"
    return None


def _need_lacks(need: Need) -> str | None:
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"the model computes in {str(need.dtype).removeprefix('torch.')}, not in bf16 or fp16"
    if need.kernel_size > LARGEST_HEAD:
        return f"heads have {need.size} values, more than {LARGEST_HEAD}"
    if need.dropout:
        return f"attention has dropout ({need.dropout:g})"
    return None


# torch.nn.attention.varlen.varlen_attn


def find_varlen_attn() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """The function of this torch and the names of its keyword arguments; None where there is no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn as function
    except ImportError:
        return None
    names = list(inspect.signature(function).parameters)
    known = names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    return (function, frozenset(names[7:])) if known else None


VARLEN_ATTN = find_varlen_attn()
"""Found once, outside of what torch.compile traces."""


def _varlen_attn_lacks(need: Need) -> str | None:
    if (why := why_no_flash(need)) is not None:
        return why
    takes = frozenset() if VARLEN_ATTN is None else VARLEN_ATTN[1]
    if not takes & {"window_size", "is_causal"}:
        return "this torch has no varlen_attn that is known"
    if need.window and "window_size" not in takes:
        return "varlen_attn of this torch takes no sliding window"
    if need.kernel_scale is not None and "scale" not in takes:
        return "varlen_attn of this torch takes no scale"
    return None


def _by_varlen_attn(call: Call) -> Tensor:
    assert VARLEN_ATTN is not None, "the table has asked"
    (function, takes), need = VARLEN_ATTN, call.need
    given: dict[str, Any] = {}
    if "window_size" in takes:
        before = -1 if call.window is None else call.window - 1
        given["window_size"] = (before, 0 if call.causal or need.window else -1)
    else:
        given["is_causal"] = call.causal
    if need.kernel_scale is not None:
        given["scale"] = need.kernel_scale
    if need.grouped and "enable_gqa" in takes:
        given["enable_gqa"] = True
    attended: Tensor = function(*call.for_flash(), **given)
    return call.of_flash(attended)


# aten::_flash_attention_forward


FLASH_ARGUMENTS = (
    "query",
    "key",
    "value",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
    "return_debug_mask",
)


def find_flash_forward() -> Callable[..., Any] | None:
    """The operator of this torch, whose name is private; None where its schema is not the one that is called here."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None:
        return None
    names = [argument.name for argument in operator.default._schema.arguments]
    known = tuple(names[: len(FLASH_ARGUMENTS)]) == FLASH_ARGUMENTS
    if not known or not {"scale", "window_size_left", "window_size_right"} <= set(names):
        return None
    function: Callable[..., Any] = operator.default
    return function


FLASH_FORWARD = find_flash_forward()


def _flash_forward_lacks(need: Need) -> str | None:
    why = why_no_flash(need)
    if why is None and FLASH_FORWARD is None:
        why = "aten::_flash_attention_forward of this torch has an unknown schema"
    return why


def _by_flash_forward(call: Call) -> Tensor:
    assert FLASH_FORWARD is not None, "the table has asked"
    window = call.window
    attended: Tensor = FLASH_FORWARD(
        *call.for_flash(),
        0.0,  # dropout
        call.causal and window is None,
        False,  # debug mask
        scale=call.need.kernel_scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return call.of_flash(attended)


# sdpa, run by run


def _run_by_run(call: Call) -> Tensor:
    """The samples of a run go together, as rows of a padded micro-batch do."""
    tokens = [rows * length for rows, length in call.row.runs]
    parts = []
    for run, *states in zip(call.row.runs, *(_parts(heads[0], tokens) for heads in (call.query, call.key, call.value))):
        q, k, v = (heads.unflatten(1, run).transpose(0, 1) for heads in states)
        length = q.shape[2]
        if call.window is None or length <= call.window:
            part = _sdpa(call.module, q, k, v, None, **call.kwargs)[0]
        else:
            band = _band(length, call.window, q.device)
            part = _sdpa(call.module, q, k, v, band, **call.kwargs | {"is_causal": False})[0]
        parts.append(part.flatten(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _parts(heads: Tensor, tokens: Sequence[int]) -> Sequence[Tensor]:
    """heads: [heads, tokens, size]. A single part is the whole tensor: neither this nor its backward copies it."""
    return heads.split(list(tokens), dim=1) if len(tokens) > 1 else (heads,)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool[1, 1, length, length]: each token sees itself and the `window - 1` before it."""
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    return square.tril().triu(1 - window)[None, None]


KERNELS = (
    Kernel("torch's varlen_attn", _varlen_attn_lacks, _by_varlen_attn),
    Kernel("torch's aten::_flash_attention_forward", _flash_forward_lacks, _by_flash_forward),
    Kernel("sdpa on runs of samples of equal length", lambda need: None, _run_by_run),
)


def kernels_of(device: torch.device, dtype: torch.dtype) -> str:
    """The kernels for flat rows there, with and without a sliding window, in a few words.

    kernels_of(torch.device("cuda", 0), torch.bfloat16)  # "torch's varlen_attn"
    """
    plain, window = (str(choose(Need(device=device, dtype=dtype, window=window))) for window in (False, True))
    return plain if plain == window else f"{plain}; with a sliding window {window}"


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


def expected(model: Any, device: torch.device, dtype: torch.dtype) -> Choice:
    """The kernel for the training of `model`, by its config. A layer that needs another one announces that itself."""
    config = text_config(model)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    need = Need(
        device=device,
        dtype=dtype,
        size=size,
        value_size=size,
        window=bool(getattr(config, "sliding_window", None)),
        grouped=(getattr(config, "num_key_value_heads", None) or heads) != heads,
        dropout=getattr(config, "attention_dropout", None) or 0.0,
    )
    choice = choose(need)
    _announced.clear()
    _announced.add(choice)
    return choice


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
    """Whether its attention hands its sliding window on. Otherwise only the mask has it (Phi-MoE, Qwen2-MoE)."""
    config = text_config(model)
    parts = {type(part) for part in model.modules() if getattr(part, "config", None) is config}
    forwards = [inspect.getsource(part.forward) for part in parts if part.__name__.endswith("Attention")]
    return bool(forwards) and all("sliding_window" in source for source in forwards)
