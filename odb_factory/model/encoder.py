"""The vision tower's work shared out among the ranks: images move to the rank that encodes them, features move back.

The door is the forward of the tower. Within `balanced`, all ranks tell each other the shapes of their images, agree on
who encodes which (a function that is given), and send pixels there; each runs the tower once, and the features return
in the order in which the model expects them, with gradients. The model notices nothing. A rank without an image, whose
model would not call its tower, runs it behind its token embedding, as the others do, and its projector with no rows.
Who has nothing to encode runs the smallest image of all, without pixels, and drops what comes of it: parameters are
gathered, and gradients reduced, by all ranks alike (ZeRO-3, FSDP, DDP).
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
from odb_factory.model.tower import FAMILIES, TWICE

BY_GRID: tuple[str, ...] = (*FAMILIES, "glm4v", "glm4v_moe", "glm46v")
"""By the `model_type` of their config: the tower takes patches of all images in one tensor [patches, ...], and a grid
(frames, height, width) of each."""
BY_IMAGE = ("llava", "llava_next", "vipllava", "internvl")
"""It takes images (or tiles) of one size, [images, 3, height, width]."""
TOWERS = ("visual", "vision_tower")
PROJECTOR = "multi_modal_projector"
"""Between tower and language model, if it is a module of its own."""
WINDOW = 64
"""Patches of an attention window (Qwen2.5-VL: 112 x 112 pixels) if the config does not say."""


Assign = Callable[[list[np.ndarray], list[int]], Any]
"""patches of the images of each rank, tokens of each rank's micro-batch -> who encodes what; the same on all ranks.
`ranks`: for each rank, int64[its images], the rank that encodes each; `moves`: any of them is another."""


def find_tower(model: nn.Module) -> tuple[Any, str] | None:
    """The module that calls the vision tower, and the tower's name in it; None for a family whose features are not
    known to follow the order of its images."""
    for module in model.modules():
        family, children = getattr(getattr(module, "config", None), "model_type", None), dict(module.named_children())
        if family in (*BY_GRID, *BY_IMAGE):
            for name in TOWERS:
                if name in children:
                    return module, name
    return None


def cost_of(config: Any, *, trains_tower: bool) -> tuple[int, int, int]:
    """What the layers compute, in multiplications: for a pair of patches, a patch, a token of the language model.

    config: of the module that calls the tower; a backward counts twice a forward.
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

    shapes: int64[images, 2], height and width in patches (without a grid: all of its patches, 1). entry: shape of an
    entry of the pixels (dim 0 left out). dtype: of the pixels. tokens: of the micro-batch.
    """

    shapes: np.ndarray
    entry: tuple[int, ...]
    dtype: torch.dtype
    tokens: int


class EncoderDoor:
    """Lets the ranks share the work of a model's vision tower, within `balanced`.

    tower: what `find_tower` has found in the model. group: of the ranks, for tensors, used by nothing else.
    gather: (object) -> the objects of all ranks in rank order. assign: who encodes what.

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
        self._by_grid = self._module.config.model_type in BY_GRID
        self._is_on, self._lacks_images, self._has_run, self._tokens = False, False, False, 0
        self._knows = False
        self._agreed: tuple[list[_Images], Any] | None = None
        hooks = (
            self._module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._module.get_input_embeddings().register_forward_hook(self._embedded),
        )
        self._undo = [replace_forward(getattr(*tower), self._encode), *(hook.remove for hook in hooks)]

    def undo(self) -> None:
        """The model is as before."""
        call_all(self._undo)

    @contextlib.contextmanager
    def balanced(self) -> Iterator[None]:
        """Within it every forward of the model is one in which all ranks take part."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = self._lacks_images = False

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pixels of no image are left out: some models call their tower with them, some do not."""
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
        """A rank without images: it takes part, and its own output depends on that, so that its backward does too."""
        if not self._lacks_images:
            return None
        self._lacks_images = False
        self._agreed = self._agree(_Images(np.zeros((0, 2), np.int64), (), output.dtype, self._tokens))
        non_empty = [images for images in self._agreed[0] if len(images.shapes)]
        if not non_empty:
            self._agreed = None
            return None
        pixels = output.new_empty((0, *non_empty[0].entry), dtype=non_empty[0].dtype)
        grid = {"grid_thw": torch.zeros((0, 3), dtype=torch.long, device=output.device)} if self._by_grid else {}
        tower = getattr(self._module, self._name)  # what wraps it by now (FSDP)
        features = tower(pixels, **grid, **({} if self._by_grid else {"output_hidden_states": True}))
        nothing: Any = sum(part.sum() for part in tree_leaves(features) if isinstance(part, Tensor))
        projector = dict(self._module.named_children()).get(PROJECTOR)
        if projector is not None:  # else a part of the tower
            nothing = nothing + projector(output.new_zeros((1, 0, _width(projector)))).sum()
        # LLaVA-NeXT's `image_newline`
        parameters = [parameter for parameter in self._module.parameters(recurse=False) if parameter.numel()]
        nothing = nothing + sum(parameter.sum() * 0 for parameter in parameters)
        return output + torch.as_tensor(nothing).to(output.dtype)

    def _agree(self, images: _Images) -> tuple[list[_Images], Any]:
        """The images of all ranks, and who encodes them. Collective."""
        all_images = self._gather(images)
        patches = [rank_images.shapes.prod(1) for rank_images in all_images]
        return all_images, self._assign(patches, [rank_images.tokens for rank_images in all_images])

    def _encode(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the tower's forward."""
        if not self._is_on:
            return own(*args, **kwargs)
        config, rank = self._module.config, self._rank
        if self._has_run:
            raise DataError(TWICE.format("the micro-batch", config.model_type))
        self._has_run = True
        names = [name for name in ("hidden_states", "pixel_values") if name in kwargs]
        pixels: Tensor = args[0] if args else kwargs.pop(names[0])
        grid: Tensor | None = args[1] if len(args) > 1 else kwargs.pop("grid_thw", None)
        (images, plan), self._agreed = self._agreed or self._agree(self._images_of(pixels, grid)), None
        if not plan.moves and len(images[rank].shapes):
            return own(pixels, **({} if grid is None else {"grid_thw": grid}), **kwargs)

        def rows_of(shapes: np.ndarray) -> np.ndarray:
            """int64[images]: rows of the pixels of each."""
            return np.ones(len(shapes), np.int64) if grid is None else shapes.prod(1)

        # 1. pixels move to the rank that encodes them
        sizes, targets = rows_of(images[rank].shapes), plan.ranks[rank]
        order = np.argsort(targets, kind="stable")  # in which this rank's images are sent
        shapes = [of_rank.shapes[target == rank] for of_rank, target in zip(images, plan.ranks)]
        sent = [int(sizes[targets == target].sum()) for target in range(len(images))]
        received = [int(rows_of(of_rank).sum()) for of_rank in shapes]
        arrived = np.concatenate(shapes)
        if plan.moves:
            pixels = self._move(_in_order(pixels, sizes, order), sent, received)
        if is_idle := not len(arrived):
            every = np.concatenate([of_rank.shapes for of_rank in images])
            arrived = every[every.prod(1).argmin()][None]
            pixels = pixels.new_zeros((int(rows_of(arrived).sum()), *pixels.shape[1:]))
        # 2. the tower
        if grid is not None:
            grids = nn.functional.pad(torch.from_numpy(arrived).to(grid.dtype), (1, 0), value=1)
            kwargs["grid_thw"] = Known(grids, grid.device) if self._knows else copy_to(grids, grid.device)
        parts, structure = tree_flatten(_read(own(pixels, **kwargs), config))
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
            counts = ([count // merged for count in some] for some in (received, sent))
            joined = _in_order(self._move(torch.cat(flat, 1), *counts), sizes[order] // merged, np.argsort(order))
            flat = list(joined.split(widths, 1))
        returned = iter(part.reshape(-1, *feature.shape[1:]) for part, feature in zip(flat, features))
        return tree_unflatten([next(returned) if isinstance(part, Tensor) else part for part in parts], structure)

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows to other ranks, and their gradients back. sent, received: rows for, and from, each rank."""
        flat = rows.flatten(1).contiguous()
        moved = all_to_all_single(flat.new_empty((sum(received), flat.shape[1])), flat, received, sent, self.group)
        return moved.reshape(-1, *rows.shape[1:])

    def _images_of(self, pixels: Tensor, grid: Tensor | None) -> _Images:
        if grid is None:
            patch = getattr(self._module.config.vision_config, "patch_size", 1)
            side = patch if isinstance(patch, int) else patch[0]
            shapes = np.tile(np.array([[math.prod(pixels.shape[-2:]) // side**2, 1]]), (len(pixels), 1))
        else:
            rows = np.array(grid.tolist(), np.int64).reshape(-1, 3)
            shapes = np.repeat(rows[:, 1:], rows[:, 0], axis=0)
        return _Images(shapes, tuple(pixels.shape[1:]), pixels.dtype, self._tokens)


def _in_order(rows: Tensor, sizes: np.ndarray, order: np.ndarray) -> Tensor:
    """The rows of images in another order. sizes: rows of each; order: numbers of images."""
    images = rows.split(sizes.tolist()) if len(sizes) else ()
    return torch.cat([images[number] for number in order]) if images else rows


def _width(projector: nn.Module) -> int:
    """Of its input. By numbers that stay the same if parameters are sharded."""
    for module in projector.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
    raise DataError(f"balance_encoder: the input of {type(projector).__name__} is not known; set it to false.")


def _read(output: Any, config: Any) -> Any:
    """A tower's output with what a model reads of it: the rest would be of other images."""
    if not isinstance(output, Mapping):  # the features alone
        return output
    kind: Any = type(output)
    layers = getattr(config, "vision_feature_layer", getattr(config, "vision_feature_layers", None))
    # InternVL reads `last_hidden_state` for the last layer, whether the tower returns all hidden states or not.
    reads_last = layers == -1 and config.model_type == "internvl"
    if output.get("hidden_states") is not None and layers is not None and not reads_last:
        states = output["hidden_states"]
        numbers = {number % len(states) for number in ([layers] if isinstance(layers, int) else layers)}
        return kind(hidden_states=tuple(s if n in numbers else None for n, s in enumerate(states)))
    if layers is not None:  # the last, of which a model reads no pooled ones
        return kind(last_hidden_state=output["last_hidden_state"])
    key = "pooler_output" if output.get("pooler_output") is not None else "last_hidden_state"
    deepstack = output.get("deepstack_features") or ()
    return kind(**{key: output[key]}, **({"deepstack_features": list(deepstack)} if deepstack else {}))
