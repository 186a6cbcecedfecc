"""What the ranks of a LLaMA-Factory training compare, before a model is loaded and before the first step (I11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from odb_factory.comm.agreement import MayDiffer, compare, of_block, releases
from odb_factory.comm.gloo import gather_once
from odb_factory.config import ODBConfig
from odb_factory.data.content import checksum
from odb_factory.data.observe import Observer
from odb_factory.errors import ODBError
from odb_factory.llamafactory.dataset import OnlineDataset, TokenizedDataset
from odb_factory.training.agreement import of_arguments

ROWS_COMPARED = 3


def compare_arguments(owners: Sequence[Any], training_args: Any, config: ODBConfig, problem: ODBError | None) -> None:
    """Compare all arguments, the block and the releases of the ranks before a model is loaded. Collective.

    owners: LLaMA-Factory's model, data and finetuning arguments. problem: why this rank is refused; the others end too.
    """
    own = of_arguments(*owners)
    settings = {**releases(), **own, **of_block(config), **of_arguments(training_args)}
    # The loader compares releases, block and training arguments again, and warns of those that may differ.
    settings = {key: value for key, value in settings.items() if key in own or not isinstance(value, MayDiffer)}
    compare(
        settings,
        lambda message: gather_once(message, config.exchange_timeout_s),
        rank=training_args.process_index,
        problem=problem,
    )


def settings_of(dataset: OnlineDataset | TokenizedDataset, observer: Observer) -> dict[str, object]:
    """What the first rows say once template and tokenizer have run."""
    settings = dataset.stage.settings if isinstance(dataset, OnlineDataset) else {}
    rows = range(min(len(dataset), ROWS_COMPARED))
    return settings | {"what the first rows say": [_content(dataset, observer, index) for index in rows]}


def _content(dataset: Any, observer: Observer, index: int) -> object:
    """A checksum of a row; for one that cannot be read, the kind of its error: it is the loader's to report."""
    try:
        return checksum(*observer(dataset, index))
    except Exception as error:
        return type(error).__name__
