"""`odb-factory patch`: odb inside a fork of LLaMA-Factory, for those who keep one. Without a fork, it is not needed."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from odb_factory.cli.patch_fit import Fit, fit, write_files
from odb_factory.errors import ODBError

PATCHES = {path.stem.removeprefix("llamafactory-"): path for path in Path(__file__).parents[1].glob("patches/*.diff")}
"""The diff of each release, by its number."""


def main(argv: Sequence[str]) -> int:
    """Check, apply or revert. Returns 0 if that is possible or done, 1 if something is in the way."""
    parser = argparse.ArgumentParser(
        prog="odb-factory patch",
        description="Put odb into a fork of LLaMA-Factory, where the plugin shall not be what hooks it in: "
        f"an `odb` argument and calls into odb_factory. Made for releases {' and '.join(sorted(PATCHES))}.",
    )
    parser.add_argument(
        "action",
        choices=["check", "apply", "revert"],
        help="check: say whether the patch is there or fits, and change nothing; apply: put it in; revert: take it out",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkout, or a site-packages folder")
    given = parser.parse_args(argv)
    if shutil.which("git") is None:
        raise ODBError(
            "git is not on PATH, whose `git apply` puts a diff on files (no repository is needed); install it, or use "
            f"another tool on the diffs in {next(iter(PATCHES.values())).parent}."
        )
    source = find_source(given.path)
    version = read_version(source)
    chosen = choose([fit(PATCHES[release], release, source) for release in _by_likelihood(version)])
    print(f"{source / 'llamafactory'}: LLaMA-Factory {version or 'of unknown version'}")
    if chosen.in_the_way and (chosen.num_there or given.action != "revert"):
        return refuse(chosen)
    if given.action == "check":
        check(chosen, given.path)
    elif given.action == "apply":
        apply(chosen, source)
    else:
        revert(chosen, source)
    return 0


def find_source(path: Path) -> Path:
    """The folder that holds `llamafactory`: `path/src` in a checkout, `path` itself in site-packages."""
    for source in (path / "src", path):
        if (source / "llamafactory").is_dir():
            return source
    raise ODBError(
        f"{path}: neither src/llamafactory nor llamafactory is in it; name a checkout of LLaMA-Factory or the "
        "site-packages folder where it is installed."
    )


def read_version(source: Path) -> str | None:
    """What the tree says of itself; a fork may have a number of its own."""
    home = source / "llamafactory" / "extras" / "env.py"
    said = re.search(r'(?m)^VERSION = "(.+)"', home.read_text(encoding="utf-8")) if home.is_file() else None
    return said[1] if said else None


def choose(fits: list[Fit]) -> Fit:
    """The first with the fewest hunks in the way."""
    return min(fits, key=lambda one: len(one.in_the_way))


def check(chosen: Fit, path: Path) -> None:
    num_missing = len(chosen.found) - chosen.num_there
    if not num_missing:
        print(f"The patch of {chosen.release} is in it. To take it out: odb-factory patch revert {path}")
    elif chosen.num_there:
        print(
            f"The patch of {chosen.release} is in it but for {num_missing} of {len(chosen.found)} hunks, which fit. "
            f"To put them in: odb-factory patch apply {path}"
        )
    else:
        print(f"The patch of {chosen.release} fits. To put it in: odb-factory patch apply {path}")


def apply(chosen: Fit, source: Path) -> None:
    if chosen.num_there == len(chosen.found):
        print(f"The patch of {chosen.release} is in it already; nothing to do.")
        return
    write_files(source, chosen.files_with)
    print(f"The patch of {chosen.release} has been applied. `llamafactory-cli train` takes an odb: block from now on.")


def revert(chosen: Fit, source: Path) -> None:
    if not chosen.num_there:
        print("The patch is not in it; nothing to do.")
        return
    write_files(source, chosen.files_without)
    print(f"The patch of {chosen.release} has been taken out.")


def refuse(chosen: Fit) -> int:
    """Say what was found for each hunk, and show those that are for a person to decide; returns the exit code."""
    print(f"The patch of {chosen.release} is the nearest, but not all of it fits; nothing has been changed:")
    for hunk, state in chosen.found.items():
        print(f"  {hunk}: {state}")
    print(
        "By hand: add the lines marked + below where they belong (and remove those marked -), then apply the rest; "
        "to be without the patch, take them out instead, then revert the rest."
    )
    for hunk in chosen.in_the_way:
        print(f"\n{hunk}\n{hunk.body}", end="")
    return 1


def _by_likelihood(version: str | None) -> list[str]:
    """The releases, the tree's own first, then from new to old."""
    return sorted(PATCHES, key=lambda release: ((version or "").startswith(release), release), reverse=True)
