"""The vision tower: images and videos of a micro-batch together, all images in one call of attention, and its patch
embedding as a matrix product.

A model of transformers runs its tower once for the images of a batch and once for its videos. ZeRO-3 and FSDP gather
parameters in each run of a module, with all ranks, so that all must run it equally often: a rank that holds a row with
both would wait for the others for ever. DDP does not take two runs of a module whose activations are computed again by
reentrant checkpoints, which are LLaMA-Factory's. Here the tower runs once for both, as it does on every other rank. In
the families of `FAMILIES` both go through the same weights, each frame by itself, so nothing else changes.

Attention of a tower in transformers is one call for each image, or window of an image, in each layer, unless the name
of the attention function has "flash" in it: then it gets all images at once and the places where they end.

A patch embedding is a convolution whose kernel is its stride, so its windows do not overlap, and it is one product of
the pixels of the windows with the same weights. Kernels of convolutions take many times as long: 21 times those of the
product for the Conv3d of Qwen3-VL on an H200.
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
"""By the `model_type` of their config. GLM-4V and InternVL are none: with one token for images and for frames, a model
refuses a batch with both, or gives the features to the wrong rows."""
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
    will_shard = is_deepspeed_zero3_enabled() or trainer.is_fsdp_enabled  # the model may not be wrapped yet
    return trainer.args.world_size > 1 and (will_shard or engine_of(trainer.model_wrapped) == "sharded")


def check_batch(trainer: Any, batch: Any, ids: tuple[int, ...]) -> None:
    """Raise `DataError` before a forward for which the other ranks would wait. ids: rows of the batch."""
    family = getattr(getattr(trainer.model, "config", None), "model_type", type(trainer.model).__name__)
    if has_both(batch) and shards_parameters(trainer) and not takes_both(family):
        rows = f"row {ids[0]}" if len(ids) == 1 else f"the micro-batch of rows {', '.join(map(str, ids))}"
        raise DataError(TWICE.format(rows, family))


@contextlib.contextmanager
def one_pass(*models: Any) -> Iterator[None]:
    """Within it these models run their vision tower once for a batch with images and videos.

    If a model has none, or is of another family, it stays as it is.

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
    """Replaces the forward (own) of a module that calls its tower for images, then for videos."""
    if not has_both(kwargs):
        return own(*args, **kwargs)
    tower, videos = module.visual, kwargs[PIXELS[1]]
    of_videos: list[Any] = []

    def together(pixels: Tensor, grid_thw: Tensor, **more: Any) -> Any:
        """The tower's forward in this batch: the first call, for the images, computes the videos too."""
        if of_videos:
            return of_videos[0]
        total = len(pixels) + len(videos)

        def parts(features: Any) -> tuple[Any, Any]:
            """Split features into those of images and of videos. features: one row for one or more patches."""
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
"""The attention function of towers that replaces sdpa."""


def attend_images(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention within each image or window of a tower: query, key, value [1, heads, patches, size] -> [1, patches,
    heads, size]. cu_seq_lens_q among kwargs: int[images + 1], where they end. Without it: sdpa.

    One call of torch's variable-length flash kernel if it serves; elsewhere sdpa image by image, as in transformers.
    """
    ends: Tensor | None = kwargs.pop("cu_seq_lens_q", None)
    longest, *_ = (kwargs.pop(name, None) for name in ("max_length_q", "max_length_k", "cu_seq_lens_k"))
    if ends is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    states = query, key, value
    if serves_flash(query, value, kwargs.get("dropout")):
        most = longest if isinstance(longest, int) else max(_lengths(ends))  # newer releases have read it
        return flash(ordinary(ends).to(torch.int32), most, None, states, kwargs.get("scaling"), causal=False), None
    images = zip(*(heads.split(_lengths(ends), dim=2) for heads in states))
    return torch.cat([sdpa(module, *image, attention_mask, **kwargs)[0] for image in images], dim=1), None


def _lengths(ends: Tensor) -> list[int]:
    """Patches of each image, read once for all layers."""
    lengths: list[int] | None = getattr(ends, "odb_lengths", None)
    if lengths is None:
        ends.odb_lengths = lengths = (ends[1:] - ends[:-1]).tolist()  # type: ignore[attr-defined]
    return lengths


# At import: a model that is unpickled in another process asks for it, too.
AttentionInterface.register(IMAGES, attend_images)


@contextlib.contextmanager
def images_at_once(*models: Any) -> Iterator[None]:
    """Within it the towers of these models that attend image by image, by sdpa, do it in one call a layer, and the
    windows of a tower that has them are known to the host, if transformers lets them be handed in (from 5.24 on).

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
    """The function of the tower's module that computes windows, if the tower takes them as arguments."""
    return getattr(sys.modules[type(tower).__module__], "get_vision_window_index", None)


def hand_in_windows(tower: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a tower's forward with the windows of its images, if the host knows the grid."""
    grid = kwargs.get("grid_thw", args[1] if len(args) > 1 else None)
    get = _window_function(tower)
    if get is None or not isinstance(grid, Known):
        return args, kwargs
    sizes = {name: getattr(tower, name) for name in ("spatial_merge_size", "window_size", "patch_size")}
    windows = (Known(index, grid.device) for index in get(grid.host, **sizes))
    return args, kwargs | dict(zip(("window_index", "cu_window_seqlens"), windows))


@contextlib.contextmanager
def patch_products(*models: Any) -> Iterator[None]:
    """Within it the patch embeddings of these models are matrix products of the same weights.

    A patch embedding is a `Conv2d` or `Conv3d`, wherever it stands, whose kernel is its stride, without padding,
    dilation and groups. Subclasses, layers of adapters and layers whose forward is replaced stay as they are. The
    weight is taken from the module in each call, so an engine may gather it (ZeRO-3, FSDP) or replace it.

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
    """pixels [N, channels, (frames,) height, width] -> [N, out channels, windows along each of these dimensions]."""
    kernel = module.kernel_size
    counts = [size // side for size, side in zip(pixels.shape[2:], kernel)]
    if pixels.dim() != 2 + len(kernel) or 0 in counts:
        return convolve(pixels)
    # 1. the pixels of each window in a row; a convolution leaves out what is beyond the last whole window
    within = [slice(count * side) for count, side in zip(counts, kernel)]
    inside = pixels[:, :, *within]
    windows = inside.reshape(*pixels.shape[:2], *(size for pair in zip(counts, kernel) for size in pair))
    last = windows.dim()
    rows = windows.permute(0, *range(2, last, 2), 1, *range(3, last, 2)).flatten(-len(kernel) - 1)
    # 2. the product
    return functional.linear(rows, module.weight.flatten(1), module.bias).movedim(-1, 1)
