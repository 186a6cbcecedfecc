"""What `odb-factory report` says of a training of LLaMA-Factory's beside its training arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from odb_factory.llamafactory.dataset import OnlineDataset
from odb_factory.llamafactory.sources import IndexedRows

FINETUNING = ("stage", "finetuning_type")
OF_KIND = {"lora": ("lora_rank", "lora_target"), "dpo": ("pref_loss", "pref_beta")}
"""Arguments that mean something with this finetuning_type or stage alone."""
DATA = (
    "template", "cutoff_len", "train_on_prompt", "mask_history", "dataset", "eval_dataset", "mix_strategy",
    "interleave_probs", "max_samples", "val_size", "streaming",
)  # fmt: skip


def about(trainer: Any, dataset: Any) -> dict[str, object]:
    """JSON types, except for `rows_of`. dataset: what it trains on.

    rows_of: the names of several data sets, and of each row the number of its own (int16); see `training.run_log`.
    """
    said = _values(trainer.finetuning_args, FINETUNING)
    for kind in list(said.values()):
        said |= _values(trainer.finetuning_args, OF_KIND.get(str(kind), ()))
    processor = getattr(dataset, "processor", None)
    if processor is not None:
        said |= _values(processor.data_args, DATA)
    if isinstance(dataset, OnlineDataset) and isinstance(dataset.rows, IndexedRows):
        names, numbers = dataset.rows.by_source()
        if len(names) > 1:
            said["rows_of"] = {"names": names, "numbers": numbers}
    return said


def _values(arguments: Any, names: Iterable[str]) -> dict[str, object]:
    """Those that are set."""
    found = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, False, [], "", 0)}
