"""The pin of LLaMA-Factory lets releases and its main branch be installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

from odb_factory.llamafactory.activation import NEWEST_TESTED, SUPPORTED

ROOT = Path(__file__).parents[2]


def test_the_pin_lets_the_main_branch_live() -> None:
    """pip would take away a clone whose version the pin does not hold."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [line for line in extras["llamafactory"] if line.startswith("llamafactory")]
    supported = SpecifierSet(pin.removeprefix("llamafactory"))
    assert supported == SpecifierSet(SUPPORTED)
    for version in ("0.9.5", NEWEST_TESTED, "0.9.6"):
        assert supported.contains(version, prereleases=True)
