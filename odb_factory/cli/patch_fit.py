"""How a diff fits a tree of LLaMA-Factory: each hunk by itself, tried with `git apply` on copies of the files.

A hunk may be found at other line numbers, and by fewer of the lines around it if that leaves one place only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odb_factory.errors import ODBError

AROUND = (3, 2, 1)
"""How many lines before and after a change have to be as in the release, tried in this order."""
AROUND_TO_REMOVE = (*AROUND, 0)
"""To find a change that is in place: its own lines are enough, also where they were added by hand."""
THERE, FITS = "is in it", "fits"


@dataclass(frozen=True)
class Hunk:
    """One change of one file. diff: that change as a diff of its own."""

    file: str
    number: int
    diff: str

    def __str__(self) -> str:
        return f"{self.file}, hunk {self.number}"

    @property
    def body(self) -> str:
        return self.diff[self.diff.index("@@ ") :]


def read_hunks(patch: Path) -> list[Hunk]:
    hunks = []
    for of_file in re.split(r"(?m)^(?=--- a/)", patch.read_text(encoding="utf-8"))[1:]:
        header, *bodies = re.split(r"(?m)^(?=@@ )", of_file)
        file = header.splitlines()[1].removeprefix("+++ b/")
        hunks += [Hunk(file, number, header + body) for number, body in enumerate(bodies, start=1)]
    return hunks


@dataclass(frozen=True)
class Fit:
    """What was found for every hunk (`THERE`, `FITS` or what is in the way), and the files with and without all."""

    release: str
    found: dict[Hunk, str]
    files_with: dict[str, bytes]
    files_without: dict[str, bytes]

    @property
    def num_there(self) -> int:
        return sum(state == THERE for state in self.found.values())

    @property
    def in_the_way(self) -> list[Hunk]:
        return [hunk for hunk, state in self.found.items() if state not in (THERE, FITS)]


def fit(patch: Path, release: str, source: Path) -> Fit:
    """Try every hunk of the patch on copies of the files below `source`, the folder that holds `llamafactory`."""
    hunks = read_hunks(patch)
    names = dict.fromkeys(hunk.file for hunk in hunks)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        with_patch, without = Path(scratch, "with").resolve(), Path(scratch, "without").resolve()
        for name in names:
            for copy in (with_patch, without):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                if (source / _below_source(name)).is_file():
                    shutil.copyfile(source / _below_source(name), copy / name)
        for hunk in hunks:
            if not (without / hunk.file).exists():
                found[hunk] = "there is no such file"
            elif _change(without, hunk, AROUND_TO_REMOVE, "--reverse") is None:
                found[hunk] = THERE
            else:
                found[hunk] = _change(with_patch, hunk, AROUND) or FITS
        contents = [
            {_below_source(name): (copy / name).read_bytes() for name in names if (copy / name).exists()}
            for copy in (with_patch, without)
        ]
    return Fit(release, found, *contents)


def write_files(source: Path, contents: dict[str, bytes]) -> None:
    """Write all of the files below `source` or none: new ones beside the old first, which then take their places."""
    targets = {(source / name).resolve(): content for name, content in contents.items()}
    before = {target: target.read_bytes() for target in targets}
    fresh = {target: target.with_name(f".{target.name}.odb") for target in targets}
    replaced = []
    try:
        for target, content in targets.items():
            fresh[target].write_bytes(content)
            shutil.copymode(target, fresh[target])
        for target in targets:
            os.replace(fresh[target], target)
            replaced.append(target)
    except OSError as error:
        for target in replaced:
            target.write_bytes(before[target])
        for path in fresh.values():
            path.unlink(missing_ok=True)
        raise ODBError(
            f"{error.filename}: {error.strerror}; nothing has been changed. Run it as the user who may write there."
        ) from error


def _below_source(name: str) -> str:
    return name.removeprefix("src/")


def _change(folder: Path, hunk: Hunk, arounds: Sequence[int], *options: str) -> str | None:
    """Apply one hunk to a copy; returns what is in the way, none if it is done."""
    for around in arounds:
        if _git_apply(folder, hunk, f"-C{around}", *options):
            # What could be done once more had another place to be done at.
            again = _git_apply(folder, hunk, f"-C{around}", *options, "--check")
            return "fits in more than one place" if again else None
    return "neither it nor its place was found"


def _git_apply(folder: Path, hunk: Hunk, *options: str) -> bool:
    """`git apply` with the settings and repository of nobody; it needs none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    command = ["git", "apply", *options, "-"]
    ended = subprocess.run(command, cwd=folder, input=hunk.diff.encode(), capture_output=True, env=environment)
    return ended.returncode == 0
