"""Vision tower: one run for images and videos of a micro-batch, one attention call for all images, and the patch
embedding as a matrix product.

A transformers model runs its tower once for the images of a batch and once for the videos. With ZeRO-3 and FSDP, all
ranks gather parameters in each run of a module, so all ranks must run the tower equally often: a rank with both images
and videos would wait for the others forever. DDP does not support two runs of a module with reentrant checkpointing,
which LLaMA-Factory uses. Here the tower runs once for both, as on every other rank. In the families of `FAMILIES`,
images and videos use the same weights and each frame is computed separately, so the results do not change.

In transformers, a tower calls attention once per image, or window of an image, in each layer, unless the name of the
attention function contains "flash": then one call gets all images and the positions of their ends.

A patch embedding is a convolution with kernel size equal to stride, so its windows do not overlap, and it equals one
matrix product of the pixels of each window with the same weights. Convolution kernels are much slower: they take 21
times as long as the matrix product for the Conv3d of Qwen3-VL on an H200.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import AttentionInterface
from transformers.integrations import is_deepspeed_zero3_enabled

from odb_factory.errors import DataError
from odb_factory.model.attention import flash, sdpa, serves_flash
from odb_factory.model.engine import engine_of
from odb_factory.model.flat_row import replace_forward
from odb_factory.model.head import StandIn
from odb_factory.model.known import Known, ordinary

FAMILIES: tuple[str, ...] = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker",
)  # fmt: skip
"""`model_type` of configs whose tower takes images and videos in one run. GLM-4V and InternVL are excluded: they use
the same token for images and frames, so they reject a batch with both or assign features to the wrong rows."""
PIXELS = ("pixel_values", "pixel_values_videos")
TWICE = (
    "{} has both images and videos, for which this model ({}) runs its vision tower twice, and under ZeRO-3 and FSDP, "
    "and with `balance_encoder`, all ranks must run it equally often; train with ZeRO-2 or DDP and without that key, "
    "or part them."
)


def takes_both(model_type: str) -> bool:
    """Whether images and videos can share a micro-batch of this family."""
    return model_type in FAMILIES


def has_both(batch: Any) -> bool:
    return isinstance(batch, Mapping) and all(batch.get(key) is not None for key in PIXELS)


def shards_parameters(trainer: Any) -> bool:
    """Whether ranks gather parameters in each run of a module. trainer: a `transformers.Trainer`."""
    will_shard = is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled  # valid before the model is wrapped
    return trainer.args.world_size > 1 and (will_shard or engine_of(trainer.model_wrapped) == "sharded")


def check_batch(trainer: Any, batch: Any, ids: tuple[int, ...]) -> None:
    """Raise `DataError` for a batch whose forward would block all ranks. ids: dataset rows of the batch."""
    family = getattr(getattr(trainer.model, "config", None), "model_type", type(trainer.model).__name__)
    if has_both(batch) and shards_parameters(trainer) and not takes_both(family):
        rows = f"row {ids[0]}" if len(ids) == 1 else f"the micro-batch of rows {', '.join(map(str, ids))}"
        raise DataError(TWICE.format(rows, family))


@contextlib.contextmanager
def one_pass(*models: Any) -> Iterator[None]:
    """Inside this context, the models run their vision tower once for a batch with images and videos.

    A model without a vision tower, or of a family not in `FAMILIES`, stays unchanged.

        with one_pass(model):
            model(**batch).loss.backward()  # with both pixel_values and pixel_values_videos
    """
    with contextlib.ExitStack() as stack:
        for module in _modules(models):
            family = getattr(getattr(module, "config", None), "model_type", None)
            if family in FAMILIES and "visual" in dict(module.named_children()):  # its forward calls the tower
                stack.callback(replace_forward(module, functools.partial(_once, module)))
        yield


def _modules(models: Sequence[Any]) -> list[nn.Module]:
    return [module for model in models if isinstance(model, nn.Module) for module in model.modules()]


@torch.compiler.disable(recursive=False)
def _once(module: Any, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward (`own`) of a module that calls its tower first for images, then for videos."""
    if not has_both(kwargs):
        return own(*args, **kwargs)
    tower, videos = module.visual, kwargs[PIXELS[1]]
    of_videos: list[Any] = []

    def together(pixels: Tensor, grid_thw: Tensor, **more: Any) -> Any:
        """The tower's forward for this batch: the first call (images) also computes the videos."""
        if of_videos:
            return of_videos[0]
        total = len(pixels) + len(videos)

        def parts(features: Any) -> tuple[Any, Any]:
            """Split features into image features and video features. features: each row covers one or more patches."""
            if not isinstance(features, Tensor):
                return features, features
            of_images, rest = divmod(len(pixels) * len(features), total)
            if rest:
                raise DataError(
                    f"the vision tower's features of images and videos together are {list(features.shape)}, of {total} "
                    "patches: this release of transformers computes them in another way; take one that docs/engines.md "
                    "names, or leave rows with videos out."
                )
            return features[:of_images], features[of_images:]

        # One forward for both; whatever structure the tower returns is split leaf by leaf.
        patches = torch.cat([pixels, videos.to(pixels.dtype)])
        grids = torch.cat([grid_thw, kwargs["video_grid_thw"]])
        leaves, structure = tree_flatten(tower(patches, grid_thw=grids, **more))
        first, second = zip(*map(parts, leaves))
        of_videos.append(tree_unflatten(second, structure))
        return tree_unflatten(first, structure)

    module.visual = StandIn(tower, together)
    try:
        return own(*args, **kwargs)
    finally:
        module.visual = tower


IMAGES = "odb_flash_images"
"""Name of the attention function that replaces sdpa in towers."""


def attend_images(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention within each image or window of a tower: query, key, value [1, heads, patches, size] -> [1, patches,
    heads, size]. cu_seq_lens_q in kwargs: int[images + 1], boundaries of the images; if missing, plain sdpa.

    Calls torch's variable-length flash kernel once if supported; otherwise sdpa per image, as transformers does.
    """
    ends: Tensor | None = kwargs.pop("cu_seq_lens_q", None)
    longest, *_ = (kwargs.pop(name, None) for name in ("max_length_q", "max_length_k", "cu_seq_lens_k"))
    if ends is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    states = query, key, value
    if serves_flash(query, value, kwargs.get("dropout")):
        most = longest if isinstance(longest, int) else max(_lengths(ends))  # an int in newer transformers
        return flash(ordinary(ends).to(torch.int32), most, None, states, kwargs.get("scaling"), causal=False), None
    images = zip(*(heads.split(_lengths(ends), dim=2) for heads in states))
    return torch.cat([sdpa(module, *image, attention_mask, **kwargs)[0] for image in images], dim=1), None


def _lengths(ends: Tensor) -> list[int]:
    """Number of patches of each image, read from the device once for all layers."""
    lengths: list[int] | None = getattr(ends, "odb_lengths", None)
    if lengths is None:
        ends.odb_lengths = lengths = (ends[1:] - ends[:-1]).tolist()  # type: ignore[attr-defined]
    return lengths


# Registered at import, because a model unpickled in another process also needs this function.
AttentionInterface.register(IMAGES, attend_images)


@contextlib.contextmanager
def images_at_once(*models: Any) -> Iterator[None]:
    """Inside this context, towers of these models that call sdpa per image call attention once per layer instead. If a
    tower uses windows and accepts them as arguments (transformers 5.24 or newer), the windows are `Known` tensors.

    with images_at_once(model):
        model(**batch).loss.backward()
    """
    modules = _modules(models)
    configs: dict[int, Any] = {
        id(module.config): module.config
        for module in modules
        if hasattr(module, "config") and "cu_seqlens" in inspect.signature(module.forward).parameters
    }
    with contextlib.ExitStack() as stack:
        for tower in modules:
            if hasattr(tower, "window_size") and _window_function(tower) is not None:
                stack.callback(tower.register_forward_pre_hook(hand_in_windows, with_kwargs=True).remove)
        for config in configs.values():
            if getattr(config, "_attn_implementation", None) == "sdpa":
                config._attn_implementation = IMAGES
                stack.callback(setattr, config, "_attn_implementation", "sdpa")
        yield


def _window_function(tower: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The function in the tower's Python module that computes windows; None if towers do not accept windows."""
    return getattr(sys.modules[type(tower).__module__], "get_vision_window_index", None)


def hand_in_windows(tower: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the windows of the images to the arguments of a tower's forward, if the grid is `Known`."""
    grid = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
    get = _window_function(tower)
    if get is None or not isinstance(grid, Known):
        return args, kwargs
    sizes = {name: getattr(tower, name) for name in ("spatial_merge_size", "window_size", "patch_size")}
    windows = (Known(index, grid.device) for index in get(grid.host, **sizes))
    return args, kwargs | dict(zip(("window_index", "cu_window_seqlens"), windows))


@contextlib.contextmanager
def patch_products(*models: Any) -> Iterator[None]:
    """Inside this context, the patch embeddings of these models are matrix products with the same weights.

    A patch embedding is any `Conv2d` or `Conv3d` in the model with kernel size equal to stride, without padding,
    dilation or groups. Subclasses, adapter layers and layers with a replaced forward stay unchanged. Each call reads
    the weight from the module, so an engine may gather (ZeRO-3, FSDP) or replace the weight.

        with patch_products(model):
            model(**batch).loss.backward()
    """
    modules = _modules(models)
    of_adapters = {part for module in modules if hasattr(module, "base_layer") for part in module.modules()}
    with contextlib.ExitStack() as stack:
        for module in modules:
            if (
                (type(module) is nn.Conv2d or type(module) is nn.Conv3d)
                and module.kernel_size == module.stride
                and max(module.kernel_size) > 1
                and set(module.dilation) == {1}
                and module.groups == 1
                and (module.padding == "valid" or set(module.padding) == {0})
                and module not in of_adapters
                and "forward" not in vars(module)
            ):
                stack.callback(replace_forward(module, functools.partial(_product, module)))
        yield


def _product(module: nn.Conv2d | nn.Conv3d, convolve: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """pixels [N, channels, (frames,) height, width] -> [N, out channels, windows per dimension (frames, ...)]."""
    kernel = module.kernel_size
    counts = [size // side for size, side in zip(pixels.shape[2:], kernel)]
    if pixels.dim() != 2 + len(kernel) or 0 in counts:
        return convolve(pixels)
    # 1. one row of pixels per window; a convolution ignores pixels after the last complete window
    within = [slice(count * side) for count, side in zip(counts, kernel)]
    inside = pixels[:, :, *within]
    windows = inside.reshape(*pixels.shape[:2], *(size for pair in zip(counts, kernel) for size in pair))
    last = windows.dim()
    rows = windows.permute(0, *range(2, last, 2), 1, *range(3, last, 2)).flatten(-len(kernel) - 1)
    # 2. the matrix product
    return functional.linear(rows, module.weight.flatten(1), module.bias).movedim(-1, 1)
