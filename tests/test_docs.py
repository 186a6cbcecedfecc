"""README, docs/ and the metadata are consistent: links resolve, snippets are valid, every public name is documented, an
extra has the packages of its commands."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from toy import a_micro_batch

import odb_factory
from odb_factory import accounting
from odb_factory.cli.main import COMMANDS, EXTRAS, main
from odb_factory.config import ODBConfig, ODBKeys
from odb_factory.data.samples import Measured
from odb_factory.llamafactory.activation import NEWEST_TESTED, SUPPORTED
from odb_factory.loader import ODBStepInfo
from odb_factory.planner import Media

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REFERENCE = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("keys.md", "metrics.md", "commands.md", "api.md")
)


def text_of(page: Path) -> str:
    """The page without code blocks, which have no headings and links."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_column(title: str) -> set[str]:
    """The names in the tables of a section of the reference pages."""
    _, section = REFERENCE.split(f"\n## {title}\n")
    cells = re.findall(r"^\| (`.+?`) \|", section.split("\n## ")[0], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_and_snippets_are_valid(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(code)
        if language == "yaml" and "odb" in (content := yaml.safe_load(code)):
            ODBConfig.from_block(content["odb"])


def test_every_public_name_is_in_the_api_page() -> None:
    """mkdocstrings makes the entries from docstrings; `mkdocs build --strict` (.ci/run) finds names that are gone."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"^::: odb_factory\.(\w+)$", page, re.MULTILINE))
    assert entries == set(odb_factory.__all__) - {"__version__"}
    assert sorted(dir(odb_factory)) == sorted(odb_factory.__all__)
    assert all(getattr(odb_factory, name) is not None for name in odb_factory.__all__)


def test_guarantees_name_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"\(\.\./(tests/[\w/]+\.py)\)`::(\w+)`", page)
    assert len(named) > 15
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


def test_reference_has_every_public_name() -> None:
    """These pages freeze the public names: a change affects every user."""
    assert first_column("The `odb:` block") == {item.name for item in dataclasses.fields(ODBConfig)}
    assert get_type_hints(ODBKeys) == get_type_hints(ODBConfig)
    defaults = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)", REFERENCE.split("\n### ")[0], re.MULTILINE))
    values = ODBConfig(token_budget=1).to_dict() | {"token_budget": "required"}
    words = {True: "true", False: "false", None: "none"}
    written = {key: words[value] if isinstance(value, bool | None) else str(value) for key, value in values.items()}
    assert defaults == written
    fields = {item.name for item in dataclasses.fields(ODBStepInfo) if item.repr}
    assert first_column("Step info") == fields | {"loss_scale"}
    metrics = accounting.metrics_of(defaultdict(float), token_budget=8, world_size=1).keys()
    assert first_column("Metrics") == metrics | {"odb/peak_memory_gib"}
    assert {*accounting.SUMMARY, *accounting.ratios_of(defaultdict(float))} < first_column("Summary")
    measured = Measured(rows=2, length=3, media=Media(), units=3)
    line = accounting.audit_line(accounting.Computing(a_micro_batch(), measured, 1.0), 0, 2, 0.25)
    assert first_column("Audit") == line.keys()
    assert (accounting.AUDIT_FILE, accounting.SUMMARY_FILE) == ("odb_audit_rank{rank}.jsonl", "odb_summary.json")
    assert {command.split()[1] for command in first_column("Commands")} == COMMANDS.keys()


# Metadata

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRA = {extra: list(map(Requirement, texts)) for extra, texts in PROJECT["optional-dependencies"].items()}


def test_requirements() -> None:
    """The core is small and has no upper bounds. pip would replace a clone of the main branch that is outside the pin;
    an extra has the packages of its commands. The changelog begins with this version."""
    core = list(map(Requirement, PROJECT["dependencies"]))
    assert len(core) <= 8 and {bound.operator for package in core for bound in package.specifier} <= {">="}
    (pin,) = [package.specifier for package in EXTRA["llamafactory"] if package.name == "llamafactory"]
    assert pin == SpecifierSet(SUPPORTED)
    assert all(pin.contains(version, prereleases=True) for version in ("0.9.5", NEWEST_TESTED, "0.9.6"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)$", changelog, re.MULTILINE)[0] == odb_factory.__version__
    for extra, packages in EXTRAS.items():
        assert set(packages) <= {package.name for package in EXTRA[extra]}, extra


NEEDS = [(name, extra) for name, command in COMMANDS.items() for extra in command.extras]


@pytest.mark.parametrize(("command", "extra"), NEEDS)
def test_a_command_without_its_extra_ends_in_one_line(command: str, extra: str, capsys, monkeypatch) -> None:
    for package in EXTRAS[extra]:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert main([command, *["none.yaml"] * (command != "demo")]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and package in error and f'"odb_factory[{extra}]"' in error
