"""`llamafactory-cli train` with an `odb:` block: what can be checked of a YAML is checked before processes start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from odb_factory.errors import ConfigError, one_line
from odb_factory.llamafactory import block, uncaught
from odb_factory.llamafactory.activation import LAUNCHED

MEANT = re.compile(r"odb|token_budget", re.IGNORECASE)
"""What a YAML, or an override, has in it that has a block, or a typo for ours."""


def launch(original: Callable[[], Any]) -> Any:
    """Around the functions `launch` of LLaMA-Factory's launcher and of that of its next trainer (`USE_V1=1`)."""
    command, *arguments = sys.argv[1:] or [""]
    args = read(*arguments[:1], overrides=arguments[1:])
    if not block.is_given(args):
        return original()
    is_v1 = ".v1." in original.__module__
    if command not in ("train", *(block.V1_COMMANDS if is_v1 else ())):
        uncaught.install()
        raise ConfigError(
            f"odb: `llamafactory-cli {command}` does not train; remove the odb: block from {arguments[0]}."
        )
    block.check_v1(args) if is_v1 else block.checked(args, logs=False)
    launcher: Any = sys.modules[original.__module__]
    if os.name == "posix":
        launcher.subprocess = SimpleNamespace(**{**vars(subprocess), "run": become_torchrun})
    try:
        return original()
    finally:
        launcher.subprocess = subprocess


def become_torchrun(command: list[str], env: Mapping[str, str], **_: Any) -> None:
    """In place of `subprocess.run`. A signal of a job scheduler, a container or the keyboard then reaches torchrun, and
    with it the ranks, which save first what `enable_jit_checkpoint` promises."""
    sys.stdout.flush()
    os.execvpe(command[0], command, {**env, LAUNCHED: "1"})


def read(path: str = "", *, overrides: Sequence[str]) -> dict[str, Any]:
    """As `arguments_of`; none for what is not a YAML, or has no word in it that is meant for odb_factory."""
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        return {}
    if not any(map(MEANT.search, [Path(path).read_text(encoding="utf-8", errors="replace"), *overrides])):
        return {}
    return arguments_of(path, overrides)


def arguments_of(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The arguments that a YAML and its overrides give; none if it holds no mapping. Raises `ConfigError` for a YAML
    that cannot be read."""
    try:
        args: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides))))
    except Exception as error:  # no YAML, a set, a null key, a number of thousands of digits, a byte that is not text
        uncaught.install()
        overridden = f" with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{path}{overridden}: this YAML cannot be read ({one_line(error)}).") from None
    return {str(key): value for key, value in args.items()} if isinstance(args, dict) else {}
