"""Observe: make light samples with a known cost from dataset items; count the cost of a sample or a collated batch."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from numbers import Real
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from odb_factory.config import ODBConfig
from odb_factory.data.samples import Measured, Rejection, Sample, describe_cost, pack, unpack
from odb_factory.errors import DataError, one_line
from odb_factory.planner import FRAMES_PER_PATCH, VIDEO, Budget, Cost, Media

# The cost of a mapping of model inputs: one processed sample or one collated batch.

IGNORE_INDEX = -100
VIDEO_KEYS = ("video_grid_thw", "pixel_values_videos")
GRID_KEYS = ("image_grid_thw", "video_grid_thw", "image_grid_hws", "spatial_shapes")
PIXEL_KEYS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
AUDIO_KEYS = ("feature_attention_mask", "input_features_mask")
"""Masks [clips, frames] of spectrograms."""
DEFAULT_PATCH_SIZE = 14
Measure = Callable[[Mapping[str, Any], int, tuple[int, ...]], Measured]
"""`measure_batch`, or a function that counts other units."""


def count_media(inputs: Mapping[str, Any], patch_size: int = DEFAULT_PATCH_SIZE) -> Media:
    """Patches of images and of videos (input of the vision tower), and frames of spectrograms, in `inputs`.

    Videos that a processor hands over as images count as images. Patches are the products of the patch grids ([media,
    2 or 3]), if there are any; else they are counted from the size of the pixel tensors, 3 x patch_size x patch_size
    values a patch. With `image_sizes` the padding of images and of tiles is not counted: towers leave it out.
    """
    grids = {key: np.asarray(inputs[key]) for key in GRID_KEYS if inputs.get(key) is not None}
    if grids:
        unit = 1
        amounts = {
            key: int(grid.reshape(-1, grid.shape[-1]).prod(-1).sum()) for key, grid in grids.items() if len(grid)
        }
    else:
        tensors = {key: inputs[key] for key in PIXEL_KEYS if inputs.get(key) is not None}
        sizes, unit = inputs.get("image_sizes"), 3 * patch_size * patch_size
        amounts = {key: _numel(pixels) - _num_padding(key, pixels, sizes) for key, pixels in tensors.items()}
    videos = sum(amount for key, amount in amounts.items() if key in VIDEO_KEYS)
    frames, mask = 0, next((inputs[key] for key in AUDIO_KEYS if inputs.get(key) is not None), None)
    if mask is not None:  # models with patch grids take media without padding, others compute it
        mask = np.asarray(mask)
        lengths = mask.sum(-1) if grids else np.full(len(mask), mask.shape[-1])
        frames = FRAMES_PER_PATCH * int((-(-lengths // FRAMES_PER_PATCH)).sum())
    return Media((sum(amounts.values()) - videos) // unit, videos // unit, frames)


def _num_padding(key: str, pixels: Any, sizes: Any) -> int:
    """Values of a tensor of images that the tower does not see. sizes: `image_sizes`, [images, 2]."""
    if key != "pixel_values" or sizes is None or not isinstance(pixels, Tensor):
        return 0
    if pixels.dim() == 4:  # [images, 3, height, width]
        return pixels.numel() - 3 * int(np.asarray(sizes).reshape(-1, 2).prod(-1).sum())
    if pixels.dim() == 5:  # [images, tiles, 3, height, width]: missing tiles are zeros
        suspects = pixels[pixels[:, :, 0, 0, 0] == 0]
        return sum(not tile.any() for tile in suspects) * math.prod(pixels.shape[2:])
    return 0


def count_supervised(labels: Any) -> int:
    """Labels that carry loss ([length] or [rows, length]). Nothing predicts the first label of a row."""
    if is_ints(labels):
        return len(labels) - 1 - labels.count(IGNORE_INDEX) + (labels[0] == IGNORE_INDEX)
    array = np.asarray(labels)
    _check_labels(array.shape, 1)
    return int((array[..., 1:] != IGNORE_INDEX).sum())


def has_leading_label(labels: Any) -> bool:
    """Whether the first label ([length] or [1, length]) is not ignored, though nothing predicts it."""
    if is_ints(labels):
        return bool(labels[0] != IGNORE_INDEX)
    return bool(np.any(np.asarray(labels).reshape(-1)[:1] != IGNORE_INDEX))


def is_ints(values: Any) -> bool:
    """Whether `values` is a list of ints, as a tokenizer returns it: counting the list is faster than an array."""
    return isinstance(values, list) and bool(values) and isinstance(values[0], int)


def batch_shape(batch: Any) -> tuple[int, int]:
    """(rows, length) of a collated batch. Raises `TypeError` if it has no `input_ids`."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise TypeError(
            f"collate_fn must return a mapping with `input_ids` [rows, length], it returned {describe_batch(batch)}"
        )
    rows, length = batch["input_ids"].shape[:2]
    return rows, length


def describe_batch(batch: Any) -> str:
    """The value that a collator returned, for messages."""
    return f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"


def measure_batch(
    batch: Mapping[str, Any], patch_size: int = DEFAULT_PATCH_SIZE, segments: tuple[int, ...] = ()
) -> Measured:
    """Measure a collated batch with `input_ids` [rows, length] and, if any, `labels` of the same shape.

    segments: of a flat batch. Raises `DataError` for labels that are not those of a causal language model.
    """
    rows, length = batch_shape(batch)
    labels, units_by_row = batch.get("labels"), None
    if labels is not None:
        labels = np.asarray(labels)
        _check_labels(labels.shape, 2)
        carry = labels != IGNORE_INDEX
        if (carry & (labels < 0)).any():
            raise DataError(
                f"a label is negative and not {IGNORE_INDEX}, so it is neither a token nor left out of the loss; make "
                f"it {IGNORE_INDEX}"
            )
        # Nothing predicts the first label of a row or of a segment.
        by_row = np.split(carry[0], np.cumsum(segments)[:-1]) if segments else carry
        units_by_row = tuple(int(row[1:].sum()) for row in by_row)
    return Measured(
        rows=rows,
        length=length,
        media=count_media(batch, patch_size),
        units=sum(units_by_row or ()),
        segments=segments,
        units_by_row=units_by_row,
    )


def _check_labels(shape: tuple[int, ...], min_dimensions: int) -> None:
    if len(shape) < min_dimensions:
        raise DataError(
            f"labels of shape {list(shape)}: odb trains causal language models, with one label for each token of "
            "`input_ids` (-100 if no loss is wanted); another loss needs a custom loop with cost_fn=..."
        )


def _numel(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_numel, value))
    return int(np.prod(np.shape(value)))


# The interface of observers, and the dataset of the observe workers.


class RowDropped(Exception):
    """The framework itself drops this row; it is counted under `reason`."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class MediaCut(Exception):
    """Truncation cut visual placeholders, so the sample cannot be trained on in any micro-batch."""


class ItemError(DataError):
    """The observer cannot read this kind of item, so probably no item of the dataset; the message says what to do."""


class Observer(Protocol):
    """Makes light features of one item of a dataset and counts their cost."""

    def __call__(self, item: Any, /) -> tuple[Mapping[str, Any], Cost]:
        """Light features and cost of `dataset[index]`. May raise `RowDropped`, `MediaCut` or anything else."""

    def describe(self, dataset: Any, index: int) -> str:
        """The origin of `dataset[index]` for messages: dataset, row, files."""


def _packed(features: Any) -> bytes:
    try:
        return pack(features)
    except Exception as error:
        message = f"it cannot be sent to another process ({one_line(error)}); let it hold picklable objects"
        raise ItemError(message) from error


class RawItem:
    """An item of a stream; `self[id]` is the item, as if the stream were a dataset with an index.

    id: the position of the item in the stream. content: the item packed for a worker process, or why it cannot be.
    """

    def __init__(self, id: int, item: Any):
        self.id = id
        self.content: bytes | ItemError
        try:
            self.content = _packed(item)
        except ItemError as error:
            self.content = error

    def __getitem__(self, id: int) -> Any:
        if isinstance(self.content, ItemError):
            raise self.content
        return unpack(self.content)


T = TypeVar("T")
RETRY_PAUSE_S = 0.1


def retried(call: Callable[[], T], final: tuple[type[Exception], ...] = ()) -> T:
    """`call()`, repeated once if it raises: a second read of a network disk often succeeds. final: errors that are not
    repeated."""
    try:
        return call()
    except final:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            time.sleep(RETRY_PAUSE_S)
    return call()


class ObservedDataset:
    """`self[i]` observes `dataset[i]`, `self[raw_item]` an item of a stream. Never raises for a row.

    Returns a `Sample`, or a `Rejection` if the row cannot be used. is_evaluated: the dataset is for evaluation, and no
    policy of the block leaves rows out.
    """

    def __init__(
        self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget, *, is_evaluated: bool = False
    ):
        self.dataset, self.observer, self.config, self.budget = dataset, observer, config, budget
        self.is_evaluated = is_evaluated

    def __getstate__(self) -> dict[str, Any]:
        """Workers do not get a stream: the training process iterates it."""
        return self.__dict__ | ({"dataset": None} if isinstance(self.dataset, IterableDataset) else {})

    def where(self, index: int, source: Any = None) -> str:
        """The origin of a row; its number alone if the origin cannot be read. source: in place of the dataset."""
        try:
            text = self.observer.describe(self.dataset if source is None else source, index)
        except Exception:
            text = f"row {index} of the training dataset"
        return text.replace("the training dataset", "the evaluation dataset", 1) if self.is_evaluated else text

    def __getitem__(self, row: int | RawItem) -> Sample | Rejection:
        index, source = (row.id, row) if isinstance(row, RawItem) else (row, self.dataset)

        def reject(reason: str, problem: str, *ways_out: str, fatal: bool = False) -> Rejection:
            """ways_out: advice if the row stops the training; the last is a policy, which evaluation does not have."""
            message = f"{self.where(index, source)}: {problem.rstrip('.')}"
            if fatal and (advice := ", or ".join(ways_out[:-1] if self.is_evaluated else ways_out)):
                message += f"; {advice}"
            return Rejection(index, reason, f"{message}.", fatal)

        # Rows that cannot be observed.
        try:
            features, cost = retried(lambda: self.observer(source[index]), (RowDropped, MediaCut, ItemError))
            sample = Sample(index, cost, _packed(features))
        except RowDropped as error:
            return reject(error.reason, str(error))
        except MediaCut as error:
            return reject(
                "media_cut",
                str(error),
                "such a sample cannot travel as a singleton either: raise cutoff_len, or shrink the media "
                "(image_max_pixels, video_maxlen)",
                "set `overlong: drop`",
                fatal=self.config.overlong != "drop",
            )
        except ItemError as error:
            return reject("unreadable", str(error), fatal=self.config.on_error == "raise")
        except Exception as error:
            return reject(
                "unreadable",
                one_line(error),
                "fix or remove the row",
                "set `on_error: skip` to leave such rows out",
                fatal=self.config.on_error == "raise",
            )
        # Rows that train nothing, and rows that break a budget alone.
        counts = cost.units or (cost.leading_label and getattr(self.observer, "counts_first_labels", False))
        if not counts and not getattr(self.observer, "keeps_unsupervised", False):
            return reject("unsupervised", "no label carries loss (truncation may have cut them off)")
        if self.config.overlong != "singleton" and self.budget.overlong(cost):
            rows, length, _ = self.budget.shape([cost])
            return reject(
                "overlong",
                f"{describe_cost(rows * length, cost.by_modality)} break the budget of {self.budget} alone",
                "raise the budget",
                "set `overlong: singleton` or `drop`",
                fatal=self.config.overlong == "error",
            )
        return sample


# The observer of datasets whose items are model inputs.

PATCHES_KEY = "odb_n_patches"
"""The key of the number of vision patches of an item; the collator does not get it."""
GIVE_COST_FN = (
    "give cost_fn=..., a function from an item to its size (tokens, pixels, frames) or to odb_factory.Cost(tokens, "
    "patches, units); in a custom loop the collated batch then needs neither `input_ids` nor `labels`"
)
EXPECTED = "expected a mapping with `input_ids` of shape [length] or [1, length] (list, array or tensor)"
LARGEST_COST = np.iinfo(np.int32).max
"""Costs are planned as 32-bit integers."""
UnitsFrom = Literal["labels", "cost_fn", "items"]


class ItemObserver:
    """The `Observer` of a dataset whose items are mappings with `input_ids`, or anything that `cost_fn` accepts.

    `input_ids` and `labels`: list, array or tensor of shape [length] or [1, length]. Patches are read from
    `odb_n_patches`, or counted from the patch grids or pixel tensors. An item without `labels` is collated alone, and
    the labels of this batch are counted. An item without `input_ids` (text and images that the collator tokenizes and
    processes) is collated alone, and the whole cost is counted from this batch.

    cost_fn: item -> `Cost`, or int (tokens; patches are then counted as without `cost_fn`). Labels are counted if it
        gives no units.
    loss_scaling: if it weighs by units, units must be known; otherwise they may be 0 without labels.
    takes_any_loss: with a `cost_fn` the loss need not be that of a language model. A sample then has the units of its
        `Cost`; without these its label tokens, if it has `input_ids` and one label for each of them, else one unit.
    units_from: the source of units: labels of tokens, the `cost_fn`, or one an item; None: unknown before the first
        item.
    keeps_unsupervised: samples without a unit are kept, too: evaluation has them.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        cost_fn: Callable[[Any], Cost | int] | None = None,
        patch_size: int = DEFAULT_PATCH_SIZE,
        loss_scaling: str = "exact",
        takes_any_loss: bool = False,
    ):
        self.collate_fn, self.cost_fn, self.patch_size = collate_fn, cost_fn, patch_size
        self.loss_scaling = loss_scaling
        self.units_from: UnitsFrom | None = None if takes_any_loss and cost_fn is not None else "labels"
        self.keeps_unsupervised = False
        self._longest_same, self._shortest_changed = 0, LARGEST_COST

    def __call__(self, item: Any) -> tuple[Any, Cost]:
        cost = self._cost(item)
        changed = self._changed_by_collator(item, cost)
        cost = changed or cost
        if cost.tokens == 0 and self.cost_fn is None and not self.keeps_unsupervised:
            raise RowDropped("unsupervised", "it has no tokens, so none that carries loss.")
        sizes = cost.tokens, cost.patches, cost.units
        if cost.tokens < 1 or min(sizes) < 0 or max(sizes) > LARGEST_COST:
            raise ItemError(
                f"its cost is {cost.tokens} tokens, {cost.patches} patches and {cost.units} units, but the least are "
                f"1, 0 and 0, and the most {LARGEST_COST}; fix cost_fn or {PATCHES_KEY!r}"
            )
        # Units: from the labels, from cost_fn, or one an item, as the first item decides.
        features = item
        if isinstance(item, Mapping):
            features = {key: value for key, value in item.items() if key != PATCHES_KEY}
        if changed is not None:
            return features, cost
        if self.units_from is None:
            self.units_from = "cost_fn" if cost.units else "labels" if self._has_token_labels(features) else "items"
        if cost.units == 0 and self.units_from == "items":
            cost = replace(cost, units=1)
        elif cost.units == 0 and self.units_from == "labels":
            labels = self._labels(features)
            cost = replace(cost, units=cost.tokens) if labels is None else _with_units(cost, labels)
        elif self.units_from == "labels" and isinstance(features, Mapping) and features.get("labels") is not None:
            is_leading = cost.leading_label or has_leading_label(features["labels"])
            cost = replace(cost, leading_label=is_leading)
        return features, cost

    @property
    def counts_labels(self) -> bool:
        return self.units_from == "labels"

    def describe(self, dataset: Any, index: int) -> str:
        return f"row {index} of the training dataset"

    def _cost(self, item: Any) -> Cost:
        result = None if self.cost_fn is None else _in_python(self.cost_fn(item))
        if isinstance(result, Cost):
            return Cost(*(_in_python(getattr(result, attribute.name)) for attribute in fields(result)))
        if self.cost_fn is not None and not isinstance(result, Real):
            raise ItemError(
                f"cost_fn returned {result!r}; let it return the size of an item (a whole number of at least 1) or an "
                "odb_factory.Cost(tokens, patches, units)"
            )
        if result is None and isinstance(item, Mapping) and item.get("input_ids") is None:
            return self._collated_cost(item)
        tokens = _length(item) if result is None else int(result)
        if not isinstance(item, Mapping):
            return Cost(tokens)
        return self._with_media(tokens, item, item.get(PATCHES_KEY))

    def _with_media(self, tokens: int, inputs: Mapping[str, Any], declared_patches: Any = None) -> Cost:
        modality = VIDEO if any(inputs.get(key) is not None for key in VIDEO_KEYS) else 0
        media = count_media(inputs, self.patch_size)
        if declared_patches is not None and media.patches != int(declared_patches):
            media = Media(video_patches=int(declared_patches)) if modality == VIDEO else Media(int(declared_patches))
        return Cost(tokens, media.patches, has_media=media.patches > 0, modality=modality, media=media)

    def _changed_by_collator(self, item: Any, cost: Cost) -> Cost | None:
        """The cost of the collated item if the collator changes it (truncates, or adds tokens); None if not.

        An item is collated for this check only if it is longer than all items found unchanged, or at least as long as
        an item found changed.
        """
        tokens = cost.tokens
        if self.cost_fn is not None or not isinstance(item, Mapping) or item.get("labels") is None:
            return None
        if item.get("input_ids") is None or self._longest_same >= tokens < self._shortest_changed:
            return None
        try:
            if self._alone(item).get("attention_mask") is None:
                return None
            own, collated = _with_units(cost, item["labels"]), self._collated_cost(item)
        except Exception:  # reported when the item is collated with others
            return None
        if (own.tokens, own.units, own.leading_label) == (collated.tokens, collated.units, collated.leading_label):
            self._longest_same = max(self._longest_same, tokens)
            return None
        self._shortest_changed = min(self._shortest_changed, tokens)
        return collated

    def _collated_cost(self, item: Mapping[str, Any]) -> Cost:
        """The cost of an item whose collator makes the model inputs."""
        try:
            batch = self._alone(item)
        except Exception as error:
            raise ItemError(f"{_not_an_item(item)}, and its collator fails on it: {one_line(error)}") from error
        if np.shape(batch.get("input_ids", ()))[:-1] != (1,):
            way_out = GIVE_COST_FN
            if not item.keys().isdisjoint(("chosen_input_ids", "completion_input_ids")):
                way_out = (
                    "for TRL's DPOTrainer call odb_factory.integrations.trl.enable_odb_dpo in place of enable_odb; no "
                    "other trainer of TRL for preferences is supported (LLaMA-Factory's stages dpo, kto and rm are)"
                )
            raise ItemError(f"{_not_an_item(item)}, and its collator makes no row of `input_ids`; {way_out}")
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        tokens = _length(batch) if mask is None or np.ndim(mask) != 2 else int(np.asarray(mask).sum())
        cost = self._with_media(tokens, batch)
        _check_one_a_token(batch)
        return cost if labels is None else _with_units(cost, labels)

    def _alone(self, item: Any) -> Mapping[str, Any]:
        """The batch of one item; empty if the collator returns no mapping."""
        batch = self.collate_fn([copy.copy(item)])
        return batch if isinstance(batch, Mapping) else {}

    def _inputs(self, features: Any, *keys: str) -> Mapping[str, Any]:
        """The item if it has all keys, else its batch."""
        is_complete = isinstance(features, Mapping) and all(features.get(key) is not None for key in keys)
        return features if is_complete else self._alone(features)

    def _has_token_labels(self, features: Any) -> bool:
        """Whether an item, or its batch, has one label for each of its `input_ids`."""
        inputs = self._inputs(features, "labels", "input_ids")
        labels, ids = np.asarray(inputs.get("labels")), np.asarray(inputs.get("input_ids"))
        return labels.dtype.kind == "i" and labels.shape == ids.shape != ()

    def _labels(self, features: Any) -> Any:
        """The labels of an item, or of its batch; None if there are no labels and none are needed."""
        inputs = self._inputs(features, "labels")
        labels = inputs.get("labels")
        if labels is None and self.loss_scaling not in ("approx", "none"):
            raise ItemError(
                f"loss_scaling {self.loss_scaling!r} weighs by units (supervised tokens), and neither the item nor its "
                "collated batch has `labels`; add them (-100 if no loss is wanted), give cost_fn=... returning "
                "odb_factory.Cost(tokens, patches, units), or choose loss_scaling 'approx' or 'none'"
            )
        _check_one_a_token(inputs)
        return labels


def _in_python(value: Any) -> Any:
    """`value` as a Python number: numpy's and torch's can go neither to another rank nor into a file."""
    if isinstance(value, Media):
        return Media(*map(_in_python, value))
    return value.item() if isinstance(value, np.generic | Tensor) else value


def _check_one_a_token(inputs: Mapping[str, Any]) -> None:
    """Raise `ItemError` for labels that are not those of a causal language model."""
    labels, ids = inputs.get("labels"), inputs.get("input_ids")
    if labels is None or ids is None:
        return
    num_labels, num_ids = (len(values) if is_ints(values) else _numel(values) for values in (labels, ids))
    if num_labels != num_ids:
        raise ItemError(
            f"{num_labels} labels for {num_ids} `input_ids`, but a causal language model has one label for each token; "
            "for another loss (of an encoder-decoder model) give cost_fn=... returning odb_factory.Cost(tokens, "
            "units=...)"
        )


def _with_units(cost: Cost, labels: Any) -> Cost:
    return replace(cost, units=count_supervised(labels), leading_label=has_leading_label(labels))


def _not_an_item(item: Mapping[str, Any]) -> str:
    return f"{EXPECTED}, found the keys {', '.join(map(str, item)) or 'none'}"


def _length(item: Any) -> int:
    """Tokens of an item. Raises `ItemError` if its `input_ids` are not as expected."""
    if not isinstance(item, Mapping):
        raise ItemError(f"{EXPECTED}, found {type(item).__name__}; {GIVE_COST_FN}")
    shape = (len(item["input_ids"]),) if is_ints(item["input_ids"]) else np.shape(item["input_ids"])
    if len(shape) == 0 or len(shape) > 2 or (len(shape) == 2 and shape[0] != 1):
        raise ItemError(f"{EXPECTED}, found shape {list(shape)}")
    return int(shape[-1])
