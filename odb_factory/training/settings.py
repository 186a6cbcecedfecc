"""What `enable_odb` was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from odb_factory.config import ODBConfig
from odb_factory.data.measure import Measure
from odb_factory.data.observe import Observer
from odb_factory.memory import PeakMeter
from odb_factory.planning import Collation


@dataclass(frozen=True, kw_only=True)
class ODBSettings:
    """The arguments of `enable_odb`."""

    config: ODBConfig
    observer: Observer | None
    collation: Collation | None
    patch_size: int
    measure: Measure
    equal_weights: bool
    cost_fn: Callable[..., Any] | None
    process_group: dist.ProcessGroup | None
    agree_on: Mapping[str, object]
    rows_from: Mapping[str, object]
    not_flat: str | None
    memory_meter: PeakMeter | None
    about: Mapping[str, object]
