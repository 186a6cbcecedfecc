"""The requirements of the metadata, and the line that names an extra whose packages are missing."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from odb_factory.cli.main import COMMANDS, EXTRAS, main
from odb_factory.llamafactory.activation import NEWEST_TESTED, SUPPORTED

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_core_is_small_and_has_no_upper_bounds() -> None:
    core = [Requirement(text) for text in PROJECT["dependencies"]]
    assert len(core) <= 8
    assert {bound.operator for requirement in core for bound in requirement.specifier} <= {">="}


def test_the_test_extra_repeats_the_llamafactory_extra() -> None:
    """With `odb_factory[llamafactory]` alone in the extra, pip reads these bounds last and backtracks for minutes."""
    extras = PROJECT["optional-dependencies"]
    assert set(extras["llamafactory"]) < set(extras["test"])


def test_the_pin_lets_the_main_branch_live() -> None:
    """pip would replace a clone whose version is outside the pin."""
    extra = map(Requirement, PROJECT["optional-dependencies"]["llamafactory"])
    (pin,) = [requirement.specifier for requirement in extra if requirement.name == "llamafactory"]
    assert pin == SpecifierSet(SUPPORTED)
    assert all(pin.contains(version, prereleases=True) for version in ("0.9.5", NEWEST_TESTED, "0.9.6"))


def test_the_packages_of_commands_are_those_of_the_extras() -> None:
    for extra, packages in EXTRAS.items():
        named = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
        assert set(packages) <= named, extra


NEEDS = [(name, extra) for name, command in COMMANDS.items() for extra in command.extras]


@pytest.mark.parametrize(("command", "extra"), NEEDS)
def test_a_command_without_its_extra_ends_in_one_line(command: str, extra: str, capsys, monkeypatch) -> None:
    for package in EXTRAS[extra]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert main([command, *["none.yaml"] * (command != "demo")]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and package in error and f'"odb_factory[{extra}]"' in error
