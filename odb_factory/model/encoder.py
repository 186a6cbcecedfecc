"""The ranks share the work of the vision tower: images move to the rank that encodes them, features move back.

The door is the forward of the tower. Within `balanced`, all ranks exchange the shapes of their images, agree on which
rank encodes which image (by a function of the caller), and send pixels there; each rank runs the tower once, and the
features return in the order in which the model expects them, with gradients. The model notices nothing.

A rank without an image, whose model would not call its tower, runs the tower after its token embedding. A rank that has
nothing to encode runs the smallest image of all, without pixels, and drops the features: parameters are gathered, and
gradients reduced, by all ranks alike (ZeRO-3, FSDP, DDP).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from odb_factory.errors import DataError
from odb_factory.model.flat_row import call_all, copy_to, replace_forward
from odb_factory.model.known import Known
from odb_factory.model.tower import FAMILIES, TWICE, hand_in_windows

BY_GRID: tuple[str, ...] = (*FAMILIES, "glm4v", "glm4v_moe", "glm46v")
"""Families by the `model_type` of their config. Their tower, `visual`, takes the patches of all images in one tensor
[patches, ...], and a grid (frames, height, width) of each image."""
WINDOW = 64
"""Patches of an attention window (Qwen2.5-VL: 112 x 112 pixels) if the config does not say."""


Assign = Callable[[list[np.ndarray], list[int]], Any]
"""(patches of the images of each rank, tokens of each rank's micro-batch) -> a plan; the same on all ranks.
`plan.ranks`: for each rank int64[its images], the rank that encodes each image; `plan.moves`: whether any moves."""


def find_tower(model: nn.Module) -> tuple[Any, str] | None:
    """The module that calls the vision tower, and the tower's name in it; None for other families than `BY_GRID`."""
    for module in model.modules():
        family = getattr(getattr(module, "config", None), "model_type", None)
        if family in BY_GRID and "visual" in dict(module.named_children()):
            return module, "visual"
    return None


def cost_of(config: Any, *, trains_tower: bool) -> tuple[int, int, int]:
    """Multiplications of all layers: for a pair of patches, for a patch, for a token of the language model.

    config: of the module that calls the tower. A backward counts as two forwards.
    """
    vision, text = config.vision_config, config.get_text_config()
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    whole = getattr(vision, "fullatt_block_indexes", None)
    num_whole = depth if whole is None else len(whole)
    times = 3 if trains_tower else 1
    pair = times * num_whole * 2 * width
    patch = times * (depth * (4 * width**2 + 2 * width * inner) + (depth - num_whole) * 2 * width * WINDOW)
    experts = getattr(text, "num_experts_per_tok", None)
    inner = (getattr(text, "moe_intermediate_size", None) or text.intermediate_size) * (experts or 1)
    token = 3 * text.num_hidden_layers * (4 * text.hidden_size**2 + 3 * text.hidden_size * inner)
    return pair, patch, token


class _Images(NamedTuple):
    """The images and frames that a rank holds, in the order of its pixels.

    shapes: int64[images, 2], height and width in patches. entry: shape of an entry of the pixels (dim 0 left out).
    dtype: of the pixels. tokens: of the micro-batch.
    """

    shapes: np.ndarray
    entry: tuple[int, ...]
    dtype: torch.dtype
    tokens: int


class EncoderDoor:
    """Lets the ranks share the work of a model's vision tower, within `balanced`.

    tower: the result of `find_tower`. group: all ranks, for tensors, used by nothing else. gather: (object) -> the
    objects of all ranks, in rank order. assign: chooses the rank that encodes each image.

    Example::

        door = EncoderDoor(find_tower(model), dist.new_group(), gather, assign)
        with door.balanced():  # on all ranks
            model(**batch).loss.backward()
        door.undo()
    """

    def __init__(
        self, tower: tuple[Any, str], group: dist.ProcessGroup, gather: Callable[[Any], list[Any]], assign: Assign
    ):
        self._module, self._name = tower
        self.group, self._gather, self._assign = group, gather, assign
        self._rank = dist.get_rank(group)
        self._is_on, self._lacks_images, self._has_run, self._tokens = False, False, False, 0
        self._knows = False
        self._agreed: tuple[list[_Images], Any] | None = None
        hooks = (
            self._module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._module.get_input_embeddings().register_forward_hook(self._embedded),
        )
        self._tower = getattr(*tower)
        self._undo = [replace_forward(self._tower, self._encode), *(hook.remove for hook in hooks)]

    def undo(self) -> None:
        """Restore the model."""
        call_all(self._undo)

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """Within it all ranks take part in every forward of the model."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = self._lacks_images = False

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave out pixels without an image: some models call their tower with them, others do not."""
        if not self._is_on:
            return None
        kwargs = {
            key: None if key.startswith("pixel_values") and value is not None and not value.numel() else value
            for key, value in kwargs.items()
        }
        ids = next((kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None), None)
        ids = args[0] if ids is None and args else ids
        self._tokens = 0 if ids is None else math.prod(ids.shape[:2])
        self._knows = isinstance(ids, Known)
        self._has_run = False
        self._lacks_images = all(kwargs[key] is None for key in kwargs if key.startswith("pixel_values"))
        return args, kwargs

    def _embedded(self, embedding: Any, args: Any, output: Tensor) -> Tensor | None:
        """Let a rank without images take part. Its output depends on the tower, so that its backward takes part too."""
        if not self._lacks_images:
            return None
        self._lacks_images = False
        self._agreed = self._agree(_Images(np.zeros((0, 2), np.int64), (), output.dtype, self._tokens))
        non_empty = [images for images in self._agreed[0] if len(images.shapes)]
        if not non_empty:
            self._agreed = None
            return None
        pixels = output.new_empty((0, *non_empty[0].entry), dtype=non_empty[0].dtype)
        grid = torch.zeros((0, 3), dtype=torch.long, device=output.device)
        features = getattr(self._module, self._name)(pixels, grid_thw=grid)  # an engine may have wrapped it (FSDP)
        nothing: Any = sum(part.sum() for part in tree_leaves(features) if isinstance(part, Tensor))
        return output + nothing.to(output.dtype)

    def _agree(self, images: _Images) -> tuple[list[_Images], Any]:
        """The images of all ranks, and the plan that says which rank encodes each. Collective."""
        all_images = self._gather(images)
        patches = [rank_images.shapes.prod(1) for rank_images in all_images]
        return all_images, self._assign(patches, [rank_images.tokens for rank_images in all_images])

    def _encode(self, own: Callable[..., Any], pixels: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Replaces the tower's forward. own: that forward."""
        if not self._is_on:
            return own(pixels, grid_thw=grid_thw, **kwargs)
        rank = self._rank
        if self._has_run:
            raise DataError(TWICE.format("the micro-batch", self._module.config.model_type))
        self._has_run = True
        (images, plan), self._agreed = self._agreed or self._agree(self._images_of(pixels, grid_thw)), None
        if not plan.moves and len(images[rank].shapes):
            return own(pixels, grid_thw=grid_thw, **kwargs)
        # 1. pixels move to the rank that encodes them
        sizes, targets = images[rank].shapes.prod(1), plan.ranks[rank]
        order = np.argsort(targets, kind="stable")  # the order in which this rank's images are sent
        shapes = [held.shapes[target == rank] for held, target in zip(images, plan.ranks)]
        sent = [int(sizes[targets == target].sum()) for target in range(len(images))]
        received = [int(arriving.prod(1).sum()) for arriving in shapes]
        arrived = np.concatenate(shapes)
        if plan.moves:
            pixels = self._move(_in_order(pixels, sizes, order), sent, received)
        if is_idle := not len(arrived):
            every = np.concatenate([held.shapes for held in images])
            arrived = every[every.prod(1).argmin()][None]
            pixels = pixels.new_zeros((int(arrived.prod()), *pixels.shape[1:]))
        # 2. the tower
        grids = nn.functional.pad(torch.from_numpy(arrived).to(grid_thw.dtype), (1, 0), value=1)
        grids = Known(grids, grid_thw.device) if self._knows else copy_to(grids, grid_thw.device)
        if "window_index" in kwargs:  # those of this rank's own images
            _, kwargs = hand_in_windows(self._tower, (pixels, grids), kwargs)
        parts, structure = tree_flatten(_read(own(pixels, grid_thw=grids, **kwargs)))
        features, rows = [part for part in parts if isinstance(part, Tensor)], len(pixels)
        # 3. features move back: some rows of an image's pixels (`merged`) give one row of features
        merged = rows // max(len(features[0]), 1) if features else 1
        if not features or any(len(feature) * merged != rows for feature in features) or (sizes % merged).any():
            raise DataError(
                f"balance_encoder: the vision tower made {[tuple(feature.shape) for feature in features]} of {rows} "
                "rows of pixels, which cannot be matched to images; set `balance_encoder: false`."
            )
        flat = [feature[: 0 if is_idle else None].flatten(1) for feature in features]
        if plan.moves:
            widths = [part.shape[1] for part in flat]
            counts = ([rows // merged for rows in by_rank] for by_rank in (received, sent))
            joined = _in_order(self._move(torch.cat(flat, 1), *counts), sizes[order] // merged, np.argsort(order))
            flat = list(joined.split(widths, 1))
        returned = iter(part.reshape(-1, *feature.shape[1:]) for part, feature in zip(flat, features))
        return tree_unflatten([next(returned) if isinstance(part, Tensor) else part for part in parts], structure)

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to other ranks; their gradients return. sent, received: number of rows for, and from, each rank."""
        flat = rows.flatten(1).contiguous()
        moved = all_to_all_single(flat.new_empty((sum(received), flat.shape[1])), flat, received, sent, self.group)
        return moved.reshape(-1, *rows.shape[1:])

    def _images_of(self, pixels: Tensor, grid_thw: Tensor) -> _Images:
        grids = np.array(grid_thw.tolist(), np.int64).reshape(-1, 3)
        shapes = np.repeat(grids[:, 1:], grids[:, 0], axis=0)
        return _Images(shapes, tuple(pixels.shape[1:]), pixels.dtype, self._tokens)


def _in_order(rows: Tensor, sizes: np.ndarray, order: np.ndarray) -> Tensor:
    """The rows of the images in another order. sizes: number of rows of each image; order: numbers of the images."""
    images = rows.split(sizes.tolist()) if len(sizes) else ()
    return torch.cat([images[number] for number in order]) if images else rows


def _read(output: Any) -> Any:
    """The features that a model reads of its tower's output; the other entries would belong to other images."""
    if not isinstance(output, Mapping):  # the features alone
        return output
    kind: Any = type(output)
    key = "pooler_output" if output.get("pooler_output") is not None else "last_hidden_state"
    deepstack = output.get("deepstack_features") or ()
    return kind(**{key: output[key]}, **({"deepstack_features": list(deepstack)} if deepstack else {}))
