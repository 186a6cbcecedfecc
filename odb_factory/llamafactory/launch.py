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
from omegaconf import OmegaConf

from odb_factory.errors import ConfigError, one_line
from odb_factory.llamafactory import block, uncaught
from odb_factory.llamafactory.activation import LAUNCH_RECORD

BLOCK_KEY = re.compile(r"""^["']?odb["']?\s*:""", re.MULTILINE)
MEANT_KEY = re.compile(r"""^(["'-]*odb(\.\w+)?|[^#\n]*\btoken_budget)["']?\s*:""", re.MULTILINE | re.IGNORECASE)
"""A key in the place of the block, or the budget in a block of another name, a typo for ours perhaps."""
WITHOUT_TRAINING = ("api", "chat", "eval", "export", "webchat")
"""Commands of LLaMA-Factory that read a YAML and do not train."""


def launch(original: Callable[[], Any]) -> Any:
    """Around LLaMA-Factory's `launcher.launch`."""
    command, *arguments = [*sys.argv[1:], ""]
    path, overrides = Path(arguments[0] if arguments else ""), arguments[1:-1]
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
        args = _read(Path(sys.argv[1]), sys.argv[2:])
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
    try:
        args = _read(path, overrides)
    except Exception as error:  # no YAML, a set, a null key, a number of thousands of digits, a byte that is no text
        overridden = f" with {' '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{path}{overridden}: this YAML cannot be read ({one_line(error)}).") from None
    if isinstance(args, dict):
        check(block.without_null({str(key): value for key, value in args.items()}, overrides))


def _read(path: Path, overrides: Sequence[str]) -> Any:
    return OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(list(overrides))))


def _has_block(path: Path, overrides: Sequence[str]) -> bool:
    is_given = _matches(BLOCK_KEY, path) or (_is_yaml(path) and any(map(_is_ours, overrides)))
    return is_given and block.WITHOUT not in overrides


def _matches(pattern: re.Pattern[str], path: Path) -> bool:
    return _is_yaml(path) and pattern.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _is_ours(override: str) -> bool:
    return bool(re.match(r"-*odb[.=]", override))


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
