"""What `mkdocs build` needs beside mkdocs.yml: README.md as home, links that leave docs/, docstrings as Markdown."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from posixpath import normpath
from typing import Any

from griffe import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!\w+:)([^)#\s]+)((?:#[^)]*)?)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    config.repo_url = urls.get("Repository")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links inside docs/ as mkdocs wants them; others to the repository, or their text alone where none is known."""
    home = "" if page.file.src_uri == "index.md" else "docs/" + page.file.src_uri.rpartition("/")[0]

    def link(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        path = normpath(f"{home}/{target}".lstrip("/"))
        if path == "README.md":
            return f"[{text}](index.md{anchor})"
        if path.startswith("docs/"):
            return found[0] if home else f"{picture}[{text}]({path.removeprefix('docs/')}{anchor})"
        return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})" if config.repo_url else text

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


class Docstrings(Extension):
    """Paragraphs of `name: meaning` become lists, and blocks after `Example::` code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


NAMES = re.compile(
    r"([a-z_]\w*(?:, [a-z_]\w*)*(?: and every other key of `ODBConfig`|, or its keys one by one)?): (.*)"
)


def as_markdown(docstring: str) -> str:
    text, *codes = re.split(r"\n\n?Example::\n\n|(?<=:):\n\n(?= {4})", docstring.rstrip() + "\n")
    parts = [_listed(text)]
    for code in codes:
        lines = code.splitlines()
        end = next((i for i, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
        fence = "\n".join(line.removeprefix("    ") for line in lines[:end]).rstrip()
        parts += ["```python\n" + fence + "\n```", _listed("\n".join(lines[end:]))]
    return "\n\n".join(part for part in parts if part)


def _listed(text: str) -> str:
    """The first paragraph stays as it is."""
    first, *paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join([first, *map(_list_of, paragraphs)])


def _list_of(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not NAMES.match(lines[0]):
        return paragraph
    found: list[str] = []
    for line, before in zip(lines, ["", *lines]):
        if name := NAMES.match(line):
            found.append(f"- **{name[1]}**: {name[2]}")
        elif line[0].isupper() and before.endswith("."):
            found.append(f"\n{line}")
        else:
            found.append(f"  {line.strip()}" if found[-1].startswith(("- ", "  ")) else line)
    return "\n".join(found)
