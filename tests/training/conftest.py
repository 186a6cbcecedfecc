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
    """`trained("2_ranks", "flat")`: folder and results (`on_ranks`) of a training of the module's `SETS`, which maps
    names to (number of ranks, trainings). Each set runs once."""
    from training.trainings import on_ranks

    @once
    def run(name: str) -> dict[str, tuple[Path, list[Any]]]:
        world_size, trainings = request.module.SETS[name]
        return on_ranks(trainings, models, tmp_path_factory.mktemp("ranks"), world_size)

    return lambda name, case: run(name)[case]
