"""What the tests stand on: tiny random models and a small data set of their own."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from odb_factory.cli.tiny_model import build_tiny_qwen2, build_tiny_qwen3_vl

# Here, where the process that starts those of pytest-xdist reads it: torch counts its threads when it is imported.
# Tiny models gain nothing from threads, and worker processes share the cores with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No timed assertions: a machine may be busy. The same examples in every run, so that a change is judged by what it
# changes; `pytest --hypothesis-profile=search` draws others.
hypothesis.settings.register_profile("odb", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("odb")

# Modules, once imported, stay: a collection that looks through them takes .7 s, and every training makes some.
gc.disable()


HERE = Path(__file__).parent
INTEGRATION = {"cli", "distributed", "examples", "integrations", "llamafactory", "test_yaml_configs.py"}
"""Folders and files of integration tests: torchrun, LLaMA-Factory, commands, whole trainings. Others are unit tests."""
OTHER_THAN_FOLDER = {
    "cli/test_tiny_model.py",
    "data/test_epochs.py",
    "data/test_loader.py",
    "data/test_resume.py",
    "data/test_workers.py",
    "llamafactory/test_families.py",
    "loop/test_own_loop_ranks.py",
    "loop/test_replicas.py",
    "training/test_auto_budget.py",
    "training/test_exact_gradient.py",
    "training/test_layout_falls_back.py",
    "training/test_lifetime.py",
    "training/test_oom.py",
    "training/test_recompute.py",
    "training/test_resume.py",
    "training/test_same_training.py",
    "training/test_saving.py",
    "training/test_step_loss.py",
    "training/test_stock_losses.py",
    "training/test_trl.py",
    "training/test_without_logits.py",
}
"""Unit tests in folders of integration tests, and the reverse."""
UNIT_TIER = "not integration and not nightly"
SLOW = {"distributed", "examples", "training", "llamafactory", "integrations", "cli", "loop"}
"""Folders whose files take long."""


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m`: the unit tests, or all but the nightly ones of the paths that are named."""
    if not config.option.markexpr:
        are_named = config.args_source == pytest.Config.ArgsSource.ARGS
        config.option.markexpr = "not nightly" if are_named else UNIT_TIER


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Unit tests do not wait for the imports of the others."""
    is_file = collection_path.suffix == ".py"
    return True if is_file and config.option.markexpr == UNIT_TIER and is_integration(collection_path) else None


def is_integration(path: Path) -> bool:
    path = path.relative_to(HERE)
    return (path.parts[0] in INTEGRATION) != (path.as_posix() in OTHER_THAN_FOLDER)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests of named paths run in this process, where a debugger works; all others in two to four."""
    are_named = config.args_source == pytest.Config.ArgsSource.ARGS
    return 0 if are_named else min(max(os.cpu_count() or 2, 2), 4)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark integration tests by their paths, and set the order in which xdist hands out files: short ones last, so that
    its workers end at the same time; the others by their names, so that those of tests/distributed, which mostly wait,
    run beside some that do not."""
    for item in items:
        if is_integration(item.path) and item.get_closest_marker("nightly") is None:
            item.add_marker("integration")
    items.sort(key=lambda item: (item.path.relative_to(HERE).parts[0] not in SLOW, item.path.name, item.path))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts` (48 rows) and `pictures` (24 rows with none, one or two images)."""
    from distributed.rows import write_uneven_rows

    return write_uneven_rows(tmp_path_factory.mktemp("data"), {"texts": 48, "pictures": 24})


@pytest.fixture(scope="session")
def config_of(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`same_training.configurations` of LLaMA-Factory's stages, with models and rows for each."""
    from same_training import configurations, write_rows
    from tiny_models import TinyModels

    folder = tmp_path_factory.mktemp("cells")
    return configurations(TinyModels(tiny_text, tiny_vl, folder), write_rows(folder / "rows"))
