"""A release of LLaMA-Factory that nobody has tried is logged once and trained with, as long as it has every seam."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import get_train_args
from packaging.specifiers import SpecifierSet
from support import training_config

from odb_factory.llamafactory import hooks
from odb_factory.llamafactory.activation import NEWEST_TESTED, SUPPORTED

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """`logged()`: what has been said of the release."""
    hooks.log_if_newer.cache_clear()
    yield lambda: [message for message in caplog.messages if "is newer than" in message]
    hooks.log_if_newer.cache_clear()


def pretend(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version of LLaMA-Factory seem to be installed."""
    info = folder / f"llamafactory-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llamafactory\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_newer_release_is_told_once_and_goes_on(tiny_text, data_dir, tmp_path, monkeypatch, logged) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 64})
    get_train_args(dict(config))
    assert logged() == [], "the release that is installed is known"
    hooks.log_if_newer.cache_clear()
    pretend(tmp_path, "0.9.7", monkeypatch)
    get_train_args({key: value for key, value in config.items() if key != "odb"})
    assert logged() == [], "nothing is said without a block"
    for _ in range(2):
        get_train_args(dict(config))
    (message,) = logged()
    assert "LLaMA-Factory 0.9.7" in message and "0.9.6.dev0" in message


def test_the_pin_lets_the_main_branch_live() -> None:
    """pip would take away a clone whose version the pin does not hold."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [line for line in extras["llamafactory"] if line.startswith("llamafactory")]
    supported = SpecifierSet(pin.removeprefix("llamafactory"))
    assert supported == SpecifierSet(SUPPORTED)
    for version in ("0.9.5", NEWEST_TESTED, "0.9.6"):
        assert supported.contains(version, prereleases=True)
