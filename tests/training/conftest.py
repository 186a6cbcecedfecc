from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import once


@pytest.fixture(scope="session")
def models(tiny_text: Path, tiny_vl: Path) -> dict[str, str]:
    return {"text": str(tiny_text), "vl": str(tiny_vl)}


@pytest.fixture(scope="module")
def trained(request: Any, models: dict[str, str], tmp_path_factory: Any) -> Callable[[str, str], tuple[Path, list]]:
    """`trained("2_ranks", "flat")`: folder and ends (`on_ranks`) of one training of the module's `SETS`, which are run
    once: of each (number of ranks, trainings)."""
    from training.trainings import on_ranks

    @once
    def run(name: str) -> dict[str, tuple[Path, list[Any]]]:
        world_size, trainings = request.module.SETS[name]
        return on_ranks(trainings, models, tmp_path_factory.mktemp("ranks"), world_size)

    return lambda name, of: run(name)[of]
