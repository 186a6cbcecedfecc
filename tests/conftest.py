"""Fixtures of all tests (tiny random models, small datasets) and the choice of tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from odb_factory.cli.demo import build_tiny_qwen2, build_tiny_qwen3_vl

# Set before torch is imported, which then counts its threads. Tiny models gain nothing from threads, and worker
# processes need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadlines: a machine may be busy. Every run has the same examples, except with `--hypothesis-profile=search`.
hypothesis.settings.register_profile("odb", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("odb")

# A garbage collection looks through all imported modules, which takes 0.7 s, so they are frozen below.
gc.disable()

HERE = Path(__file__).parent
INTEGRATION = {"cli", "distributed", "examples", "integrations", "llamafactory", "test_yaml_configs.py"}
"""Folders and files of integration tests: torchrun, LLaMA-Factory, commands, whole trainings."""
OTHER_THAN_FOLDER = {
    "data/test_epochs.py",
    "data/test_loader.py",
    "data/test_resume.py",
    "llamafactory/test_families.py",
    "loop/test_own_loop_ranks.py",
    "training/test_budgets.py",
    "training/test_exact_gradient.py",
    "training/test_resume.py",
    "training/test_same_training.py",
    "training/test_stock_losses.py",
    "training/test_trl.py",
}
"""Unit tests in folders of integration tests, and integration tests in folders of unit tests."""
UNIT_TIER = "not integration and not nightly"
SLOW = {"distributed", "examples", "training", "llamafactory", "integrations", "cli", "loop"}
"""Folders of slow tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m`: the unit tests, or all but the nightly tests of the paths on the command line."""
    if not config.option.markexpr:
        are_named = config.args_source == pytest.Config.ArgsSource.ARGS
        config.option.markexpr = "not nightly" if are_named else UNIT_TIER


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import integration tests if only unit tests run."""
    is_file = collection_path.suffix == ".py"
    return True if is_file and config.option.markexpr == UNIT_TIER and is_integration(collection_path) else None


def is_integration(path: Path) -> bool:
    path = path.relative_to(HERE)
    return (path.parts[0] in INTEGRATION) != (path.as_posix() in OTHER_THAN_FOLDER)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """0 for paths on the command line, so that a debugger works; else two to four."""
    are_named = config.args_source == pytest.Config.ArgsSource.ARGS
    return 0 if are_named else min(max(os.cpu_count() or 2, 2), 4)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark integration tests by their paths, and order the files for xdist: short files last, so that its workers end
    together; others by name, which mixes tests/distributed, where processes mostly wait, with other folders."""
    for item in items:
        if is_integration(item.path) and item.get_closest_marker("nightly") is None:
            item.add_marker("integration")
    items.sort(key=lambda item: (item.path.relative_to(HERE).parts[0] not in SLOW, item.path.name, item.path))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def restored_environment() -> Iterator[None]:
    """Remove the process group of a training of several ranks, and variables such as MASTER_PORT: later trainings
    would join the group."""
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


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
