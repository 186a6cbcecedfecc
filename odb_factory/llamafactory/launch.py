"""`llamafactory-cli train` with an `odb:` block: what can be checked of a YAML is checked before processes start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from omegaconf import OmegaConf

from odb_factory.errors import ConfigError, one_line
from odb_factory.llamafactory import block, uncaught
from odb_factory.llamafactory.activation import LAUNCH_RECORD

BLOCK_KEY = re.compile(r"""^["']?odb["']?\s*:""", re.MULTILINE)
MEANT_KEY = re.compile(r"""^(["'-]*odb(\.\w+)?|[^#\n]*\btoken_budget)["']?\s*:""", re.MULTILINE | re.IGNORECASE)
"""A key in the place of the block, or the budget in a block of another name, a typo for ours perhaps."""
WITHOUT_TRAINING = ("api", "chat", "eval", "export", "webchat")
"""Commands of LLaMA-Factory that read a YAML and do not train."""
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


def launch(original: Callable[[], Any]) -> Any:
    """Around LLaMA-Factory's `launcher.launch`."""
    command, *given = [*sys.argv[1:], ""]
    path, overrides = Path(given[0] if given else ""), given[1:-1]
    has_block = _has_block(path, overrides)
    if command in WITHOUT_TRAINING and has_block:
        uncaught.install()
        raise ConfigError(f"odb: `llamafactory-cli {command}` does not train; remove the odb: block from {path}.")
    if command != "train" or not (has_block or _matches(MEANT_KEY, path)):
        return original()
    uncaught.install()
    check_yaml(path, overrides)
    if block.is_enabled("USE_RAY"):  # workers on other nodes must not see the record
        return original()
    return _launched(original)


def _launched(original: Callable[[], Any]) -> Any:
    with _launch_record(), _sigterm_for_launcher():
        try:
            return original()
        except subprocess.CalledProcessError as ended:
            if ended.returncode < 0:  # torchrun itself was killed, and has not reported why
                raise
            sys.exit(ended.returncode)


def launch_v1(original: Callable[[], Any]) -> Any:
    """Around the launcher of LLaMA-Factory's next trainer (`USE_V1=1`)."""
    if len(sys.argv) < 3 or not _has_block(Path(sys.argv[2]), sys.argv[3:]):
        return original()
    uncaught.install()
    if sys.argv[1] not in ("train", *block.V1_COMMANDS):
        raise ConfigError(
            f"odb: `llamafactory-cli {sys.argv[1]}` of v1 does not train; remove the odb: block from {sys.argv[2]}."
        )
    check_yaml(Path(sys.argv[2]), sys.argv[3:], block.check_v1)
    return _launched(original)


def v1_arguments(args: Any) -> dict[str, Any]:
    """What v1 reads from a YAML and its overrides, as it does; {} where it is given none."""
    if args is None and len(sys.argv) > 1 and sys.argv[1].endswith((".yaml", ".yml")):
        args = OmegaConf.to_container(
            OmegaConf.merge(OmegaConf.load(Path(sys.argv[1]).absolute()), OmegaConf.from_cli(sys.argv[2:]))
        )
    return block.without_null(dict(args)) if isinstance(args, dict) else {}


def _check_block(args: dict[str, Any]) -> None:
    block.check_keys(args)
    if "odb" in args:
        block.check_block(block.rewritten(args, logs=False))


def check_yaml(path: Path, overrides: Sequence[str], check: Callable[[dict[str, Any]], Any] = _check_block) -> None:
    """Raise a one-line `ConfigError` for what is wrong with the block, or known not to go with it.

    Nothing but the YAML is looked at: what needs LLaMA-Factory's arguments is checked where they are read. check: of
    the arguments by name.
    """
    for override in overrides:
        if _is_ours(override):
            _check_override(override)
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        loaded = OmegaConf.load(path)
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None and _is_in_block(text, error.problem_mark.line):
            line = min(error.problem_mark.line, max(len(text.splitlines()) - 1, 0))  # it may lie after the last one
            problem = "has a tab; indent it by spaces" if "\t" in text.splitlines()[line] else error.problem
            raise ConfigError(f"odb: the block cannot be read: {path}, line {line + 1}: {problem}.") from None
        return  # LLaMA-Factory reports it
    except Exception as error:  # a set, a null key, a number of thousands of digits, a byte that is no text
        raise ConfigError(f"{path}: this YAML cannot be read ({one_line(error)}).") from None
    args = OmegaConf.to_container(OmegaConf.merge(loaded, OmegaConf.from_cli(list(overrides))))
    if isinstance(args, dict):
        check(block.without_null({str(key): value for key, value in args.items()}, overrides))
    _check_numbers(text)


def _has_block(path: Path, overrides: Sequence[str]) -> bool:
    is_given = _matches(BLOCK_KEY, path) or (_is_yaml(path) and any(map(_is_ours, overrides)))
    return is_given and block.WITHOUT not in overrides


def _matches(pattern: re.Pattern[str], path: Path) -> bool:
    return _is_yaml(path) and pattern.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _is_ours(override: str) -> bool:
    return bool(re.match(r"-*odb[.=]", override))


def _check_override(override: str) -> None:
    try:
        OmegaConf.from_cli([override])
    except yaml.YAMLError as error:
        raise ConfigError(f"{override}: cannot be read ({' '.join(str(error).split())[:100]}); quote it.") from None
    _, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"{override}: has no value; write {override}=VALUE.")
    _check_decimal(override.partition("=")[0], yaml.compose(value, Loader=yaml.SafeLoader))


def _check_numbers(text: str) -> None:
    """Refuse numbers that YAML 1.1 reads as others than people do: `010000` is 4096 to it, `10:30` is 630."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "odb" and isinstance(value, yaml.MappingNode):
            for name, number in value.value:
                _check_decimal(f"odb.{name.value}", number)


def _check_decimal(name: str, node: Any) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int" and not DECIMAL.fullmatch(node.value):
        read = yaml.safe_load(node.value)
        raise ConfigError(f"{name}: {node.value} is {read} to YAML (1.1); write {read} if you mean that.")


def _is_in_block(text: str, line: int) -> bool:
    """Whether a line (from 0) belongs to `odb:`, the nearest key above it, or on it, that is not indented."""
    lines = text.splitlines()[: line + 1]
    top = next((line for line in reversed(lines) if line[:1] not in ("", " ", "\t", "#")), "")
    return BLOCK_KEY.match(top) is not None


@contextmanager
def _sigterm_for_launcher() -> Iterator[None]:
    """Within it SIGTERM ends torchrun, if this process waits for it, and with it this process: a job scheduler or a
    container would end all ranks with this process, before they have saved what `enable_jit_checkpoint` promises."""

    def pass_on(*_: object) -> None:
        is_passed_on = False
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                if any("torchrun" in word for word in child.cmdline()):
                    is_passed_on = True
                    child.terminate()
        if not is_passed_on:  # this process trains
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # no other may handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _launch_record() -> Iterator[None]:
    """The file that `uncaught` writes to, for as long as processes run that were started from here: in memory, so that
    nothing is left behind however this process ends. A system without such files has none, and torchrun reports all."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    record = os.memfd_create("odb_factory_launch")
    os.environ[LAUNCH_RECORD] = f"/proc/{os.getpid()}/fd/{record}"
    try:
        yield
    finally:
        del os.environ[LAUNCH_RECORD]
        os.close(record)
