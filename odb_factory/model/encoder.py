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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from odb_factory.errors import DataError
from odb_factory.model.flat_row import call_all, copy_to, replace_forward
from odb_factory.model.known import Known
from odb_factory.model.tower import FAMILIES, TWICE

BY_GRID: tuple[str, ...] = (*FAMILIES, "glm4v", "glm4v_moe", "glm46v")
"""By the `model_type` of their config: the tower takes patches of all images in one tensor [patches, ...], and a grid
(frames, height, width) of each."""
LAST = "last"
BY_IMAGE = ("llava", "llava_next", "vipllava", "internvl")
"""It takes images (or tiles) of one size, [images, 3, height, width]."""
TOWERS = ("visual", "vision_tower")
PROJECTOR = "multi_modal_projector"
"""Between tower and language model, if it is a module of its own."""
WINDOW = 64
"""Patches of an attention window (Qwen2.5-VL: 112 x 112 pixels) if the config does not say."""


class Assignment(Protocol):
    """ranks: for each rank, int64[its images], the rank that encodes each. moves: any of them is another."""

    @property
    def ranks(self) -> Sequence[np.ndarray]: ...
    @property
    def moves(self) -> bool: ...


Assign = Callable[[list[np.ndarray], list[int]], Assignment]
"""patches of the images of each rank, tokens of each rank's micro-batch -> who encodes what; the same on all ranks."""


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


class _Step(NamedTuple):
    """One run of the tower on all ranks. images: of each rank."""

    images: list[_Images]
    assignment: Assignment


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
        self,
        tower: tuple[Any, str],
        group: dist.ProcessGroup,
        gather: Callable[[Any], list[Any]],
        assign: Assign,
    ):
        self._module, self._name = tower
        self.group, self._gather, self._assign = group, gather, assign
        self._rank = dist.get_rank(group)
        self._by_grid = self._module.config.model_type in BY_GRID
        self._is_on, self._lacks_images, self._has_run, self._tokens = False, False, False, 0
        self._knows = False
        self._agreed: _Step | None = None
        self._assigned: list[Any] = []
        hooks = (
            self._module.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._module.get_input_embeddings().register_forward_hook(self._embedded),
        )
        self._undo = [replace_forward(getattr(*tower), self._encode), *(hook.remove for hook in hooks)]

    def undo(self) -> None:
        """The model is as before."""
        call_all(self._undo)

    @contextlib.contextmanager
    def balanced(self) -> Iterator[list[Any]]:
        """Within it every forward of the model is one in which all ranks take part. Yields what they have agreed on so
        far, by `assign`."""
        self._is_on, self._assigned = True, []
        try:
            yield self._assigned
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
        non_empty = [images for images in self._agreed.images if len(images.shapes)]
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

    def _layers(self) -> Any:
        config = self._module.config
        layers = getattr(config, "vision_feature_layer", getattr(config, "vision_feature_layers", None))
        # InternVL reads `last_hidden_state` for the last layer, whether the tower returns all hidden states or not.
        return LAST if layers == -1 and config.model_type == "internvl" else layers

    def _agree(self, images: _Images) -> _Step:
        """Collective."""
        all_images = self._gather(images)
        patches = [rank_images.shapes.prod(1) for rank_images in all_images]
        self._assigned.append(self._assign(patches, [rank_images.tokens for rank_images in all_images]))
        return _Step(all_images, self._assigned[-1])

    def _encode(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the tower's forward."""
        if not self._is_on:
            return own(*args, **kwargs)
        if self._has_run:
            raise DataError(TWICE.format("the micro-batch", self._module.config.model_type))
        self._has_run = True
        names = [name for name in ("hidden_states", "pixel_values") if name in kwargs]
        pixels: Tensor = args[0] if args else kwargs.pop(names[0])
        grid: Tensor | None = args[1] if len(args) > 1 else kwargs.pop("grid_thw", None)
        step, self._agreed = self._agreed or self._agree(self._images_of(pixels, grid)), None
        if not step.assignment.moves and len(step.images[self._rank].shapes):
            return own(pixels, **({} if grid is None else {"grid_thw": grid}), **kwargs)
        move = _Journey(step, self._rank, self.group, by_grid=grid is not None)
        pixels = move.there(pixels)
        if move.is_idle:
            pixels = pixels.new_zeros((move.rows(move.smallest), *pixels.shape[1:]))
        if grid is not None:
            shapes = torch.from_numpy(move.smallest if move.is_idle else move.arrived).to(grid.dtype)
            shapes = nn.functional.pad(shapes, (1, 0), value=1)
            kwargs["grid_thw"] = Known(shapes, grid.device) if self._knows else copy_to(shapes, grid.device)
        parts, structure = tree_flatten(_read(own(pixels, **kwargs), self._layers()))
        returned = iter(move.back([part for part in parts if isinstance(part, Tensor)], len(pixels)))
        return tree_unflatten([next(returned) if isinstance(part, Tensor) else part for part in parts], structure)

    def _images_of(self, pixels: Tensor, grid: Tensor | None) -> _Images:
        if grid is None:
            patch = getattr(self._module.config.vision_config, "patch_size", 1)
            side = patch if isinstance(patch, int) else patch[0]
            shapes = np.tile(np.array([[math.prod(pixels.shape[-2:]) // side**2, 1]]), (len(pixels), 1))
        else:
            rows = np.array(grid.tolist(), np.int64).reshape(-1, 3)
            shapes = np.repeat(rows[:, 1:], rows[:, 0], axis=0)
        return _Images(shapes, tuple(pixels.shape[1:]), pixels.dtype, self._tokens)


class _Journey:
    """Where the rows of a rank's tensors go and come from, for one run of the tower.

    arrived: int64[images, 2], the shapes of what this rank encodes, by the rank that holds them, in its order.
    is_idle: there is none. smallest: int64[1, 2], of all images.
    """

    def __init__(self, step: _Step, rank: int, group: dist.ProcessGroup | None, *, by_grid: bool):
        self.group, self._by_grid = group, by_grid
        own_shapes, targets = step.images[rank].shapes, step.assignment.ranks
        self._order = np.argsort(targets[rank], kind="stable")
        self._sizes = self._rows(own_shapes)
        self._sent = [self.rows(own_shapes[targets[rank] == target_rank]) for target_rank in range(len(targets))]
        coming = [images.shapes[target == rank] for images, target in zip(step.images, targets)]
        self._received = [self.rows(shapes) for shapes in coming]
        self.arrived = np.concatenate(coming)
        self.is_idle = not len(self.arrived)
        every = np.concatenate([images.shapes for images in step.images])
        self.smallest = every[every.prod(1).argmin()][None]
        self._moves = step.assignment.moves

    def rows(self, shapes: np.ndarray) -> int:
        """Of the pixels of these images."""
        return int(self._rows(shapes).sum())

    def _rows(self, shapes: np.ndarray) -> np.ndarray:
        return shapes.prod(1) if self._by_grid else np.ones(len(shapes), np.int64)

    def there(self, pixels: Tensor) -> Tensor:
        """Pixels of the images that this rank holds -> of those that it encodes."""
        if not self._moves:
            return pixels
        order = copy_to(torch.from_numpy(self._index(1)), pixels.device)
        return _move(pixels.index_select(0, order), self._sent, self._received, self.group)

    def back(self, features: list[Tensor], rows: int) -> list[Tensor]:
        """Features of what this rank has encoded -> of the images that it holds, in their order.

        features: [rows / c, ...] each, c of one image's rows giving one row of features. rows: of the pixels encoded.
        """
        merged = rows // max(len(features[0]), 1) if features else 1
        if not features or any(len(feature) * merged != rows for feature in features) or (self._sizes % merged).any():
            raise DataError(
                f"balance_encoder: the vision tower made {[tuple(feature.shape) for feature in features]} of {rows} "
                "rows of pixels, which cannot be matched to images; set `balance_encoder: false`."
            )
        flat = [feature[: 0 if self.is_idle else None].flatten(1) for feature in features]
        if self._moves:
            widths, joined = [part.shape[1] for part in flat], torch.cat(flat, 1)
            sent, received = ([count // merged for count in counts] for counts in (self._received, self._sent))
            joined = _move(joined, sent, received, self.group)
            inverse = copy_to(torch.from_numpy(np.argsort(self._index(merged))), joined.device)
            flat = list(joined.index_select(0, inverse).split(widths, 1))
        return [part.reshape(-1, *feature.shape[1:]) for part, feature in zip(flat, features)]

    def _index(self, merged: int) -> np.ndarray:
        """int64[rows]: the rows of this rank's own images in the order in which they are sent."""
        sizes = self._sizes // merged
        starts = np.cumsum(sizes) - sizes
        parts = [np.arange(starts[image], starts[image] + sizes[image]) for image in self._order]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class _Move(torch.autograd.Function):
    """Rows [n, width] to other ranks, and their gradients back. sent, received: rows for, and from, each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(gradients[0], sent, received, ctx.group), None, None, None


def _move(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    moved: Tensor = _Move.apply(rows.flatten(1), sent, received, group)
    return moved.reshape(-1, *rows.shape[1:])


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """As bytes, which every backend takes."""
    sent_rows = rows.contiguous()
    received_rows = sent_rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(received_rows.view(torch.uint8), sent_rows.view(torch.uint8), received, sent, group=group)
    return received_rows


def _width(projector: nn.Module) -> int:
    """Of its input. By numbers that stay the same if parameters are sharded."""
    for module in projector.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.LayerNorm):
            return int(module.normalized_shape[-1])
    raise DataError(f"balance_encoder: the input of {type(projector).__name__} is not known; set it to false.")


def _read(output: Any, layers: Any) -> Any:
    """A tower's output with what a model reads of it: the rest would be of other images. layers: of the hidden states,
    a number or several, if the model takes those; LAST: it takes `last_hidden_state`."""
    if not isinstance(output, Mapping):  # the features alone
        return output
    kind: Any = type(output)
    if output.get("hidden_states") is not None and layers not in (None, LAST):
        states = output["hidden_states"]
        numbers = {number % len(states) for number in ([layers] if isinstance(layers, int) else layers)}
        return kind(hidden_states=tuple(s if n in numbers else None for n, s in enumerate(states)))
    if layers is not None:  # the last, of which a model reads no pooled ones
        return kind(last_hidden_state=output["last_hidden_state"])
    key = "pooler_output" if output.get("pooler_output") is not None else "last_hidden_state"
    deepstack = output.get("deepstack_features") or ()
    return kind(**{key: output[key]}, **({"deepstack_features": list(deepstack)} if deepstack else {}))
