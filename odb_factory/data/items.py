"""Observe processed samples: datasets whose items already are model inputs, of any kind and origin."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from odb_factory.data.measure import DEFAULT_PATCH_SIZE, count_patches, count_supervised, has_leading_label, is_ints
from odb_factory.data.observe import ItemError
from odb_factory.errors import ConfigError, one_line
from odb_factory.planning import VIDEO, Cost

PATCHES_KEY = "odb_n_patches"
"""An item may bring its vision patches under this key; the collator does not see it."""
EXPECTED = "expected a mapping with `input_ids` of shape [length] or [1, length] (list, array or tensor)"


class ItemObserver:
    """The `Observer` of a dataset whose items are mappings with `input_ids`, or anything that `cost_fn` can tell of.

    `input_ids` and `labels`: list, array or tensor of shape [length] or [1, length]. Patches are taken from
    `odb_n_patches`, or counted from the patch grids or pixel tensors. Where an item has no `labels`, it is
    collated alone and the labels of that batch are counted; where it has no `input_ids` (text and images that the
    collator tokenizes and processes), all its cost is that of this batch.

    cost_fn: item -> `Cost`, or int (tokens; patches are then counted as without it). Where it gives no units,
    labels are counted all the same.
    loss_scaling: if it weighs by units, they must be known; else they may be 0 for want of labels.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        cost_fn: Callable[[Any], Cost | int] | None = None,
        patch_size: int = DEFAULT_PATCH_SIZE,
        loss_scaling: str = "exact",
    ):
        self.collate_fn, self.cost_fn, self.patch_size = collate_fn, cost_fn, patch_size
        self.loss_scaling = loss_scaling
        self.needs_units = loss_scaling not in ("approx", "none")

    def __call__(self, dataset: Any, index: int) -> tuple[Any, Cost]:
        item = dataset[index]
        cost = self._cost(item)
        if cost.tokens < 1 or min(cost.patches, cost.units) < 0:
            raise ItemError(
                f"its cost is {cost.tokens} tokens, {cost.patches} patches and {cost.units} units, "
                f"and there are no fewer than 1, 0 and 0 of them; mend cost_fn or {PATCHES_KEY!r}"
            )
        features = item
        if isinstance(item, Mapping):
            features = {key: value for key, value in item.items() if key != PATCHES_KEY}
        if cost.units == 0:
            labels = self._labels(features)
            cost = dataclasses.replace(
                cost,
                units=cost.tokens if labels is None else count_supervised(labels),
                leading_label=labels is not None and has_leading_label(labels),
            )
        return features, cost

    def describe(self, dataset: Any, index: int) -> str:
        return f"row {index} of the training dataset"

    def _cost(self, item: Any) -> Cost:
        given = None if self.cost_fn is None else self.cost_fn(item)
        if isinstance(given, Cost):
            return given
        if given is None and isinstance(item, Mapping) and item.get("input_ids") is None:
            return self._collated_cost(item)
        tokens = _length(item) if given is None else int(given)
        if not isinstance(item, Mapping):
            return Cost(tokens)
        patches = item.get(PATCHES_KEY)
        patches = count_patches(item, self.patch_size) if patches is None else int(patches)
        return Cost(tokens, patches, has_media=patches > 0, modality=_modality(item))

    def _collated_cost(self, item: Mapping[str, Any]) -> Cost:
        """Of an item that its collator makes model inputs of."""
        try:
            batch = self.collate_fn([copy.copy(item)])
        except Exception as error:
            raise ItemError(f"{_not_an_item(item)}, which its collator cannot take alone: {one_line(error)}") from error
        if not isinstance(batch, Mapping) or np.shape(batch.get("input_ids", ()))[:-1] != (1,):
            way_out = "give cost_fn=..., which tells the cost of an item"
            if "chosen_input_ids" in item:
                way_out = "for TRL's DPOTrainer call odb_factory.integrations.trl.enable_odb_dpo in place of enable_odb"
            raise ItemError(f"{_not_an_item(item)}, of which its collator makes no row of `input_ids`; {way_out}")
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        patches = count_patches(batch, self.patch_size)
        return Cost(
            tokens=_length(batch) if mask is None or np.ndim(mask) != 2 else int(np.asarray(mask).sum()),
            patches=patches,
            units=0 if labels is None else count_supervised(labels),
            has_media=patches > 0,
            modality=_modality(batch),
            leading_label=labels is not None and has_leading_label(labels),
        )

    def _labels(self, features: Any) -> Any:
        """Those of an item, or of the batch that it makes alone; None if there are none and none are needed."""
        labels = features.get("labels") if isinstance(features, Mapping) else None
        if labels is None:
            batch = self.collate_fn([copy.copy(features)])
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if labels is None and self.needs_units:
            raise ItemError(
                f"loss_scaling {self.loss_scaling!r} weighs by units (supervised tokens), and neither the item nor its "
                "collated batch has `labels`; add them (-100 where no loss is wanted), give cost_fn=... returning "
                "odb_factory.Cost(tokens, patches, units), or choose loss_scaling 'approx' or 'none'"
            )
        return labels


def _modality(inputs: Mapping[str, Any]) -> int:
    return VIDEO if any(inputs.get(key) is not None for key in ("video_grid_thw", "pixel_values_videos")) else 0


def _not_an_item(item: Mapping[str, Any]) -> str:
    return f"{EXPECTED}, found the keys {', '.join(map(str, item)) or 'none'}"


def _length(item: Any) -> int:
    """Tokens of an item; says what was found where it is not what was expected."""
    if not isinstance(item, Mapping):
        raise ItemError(f"{EXPECTED}, found {type(item).__name__}; give cost_fn=... for items of another kind")
    shape = (len(item["input_ids"]),) if is_ints(item["input_ids"]) else np.shape(item["input_ids"])
    if len(shape) == 0 or len(shape) > 2 or (len(shape) == 2 and shape[0] != 1):
        raise ItemError(f"{EXPECTED}, found shape {list(shape)}")
    return int(shape[-1])


def check_dataset(dataset: Any, sampler: Any = None) -> None:
    """Raise `ConfigError` where a DataLoader could not read `dataset`."""
    if isinstance(dataset, IterableDataset):
        return
    kind = type(dataset)
    reads_rows = hasattr(kind, "__getitem__") and kind.__getitem__ is not Dataset.__getitem__
    if not reads_rows:
        raise ConfigError(
            f"dataset: a {kind.__name__} can be iterated only once or has no `__getitem__`; wrap it in a "
            "torch.utils.data.IterableDataset whose `__iter__` begins anew, or give a dataset with `__getitem__` and "
            "`__len__`."
        )
    if sampler is None and not hasattr(kind, "__len__"):
        raise ConfigError(f"dataset: a {kind.__name__} has no `__len__`; add one, or give sampler=.")
