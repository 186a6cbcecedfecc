"""The `odb-factory` command: its sub-commands and their arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from odb_factory.errors import ConfigError, ODBError, one_line
from odb_factory.version import __version__

SAMPLES = 2000
EXTRAS = {"llamafactory": ("llamafactory",), "tools": ("matplotlib", "rich")}
"""Packages of the extras that commands need."""
NEEDS = {"compare": (), "demo": EXTRAS, "doctor": (), "plan": EXTRAS, "train": ("llamafactory",)}
"""Extras by command."""
CHILD = Path(__file__).with_name("train_child.py")
QUIET = {"LLAMAFACTORY_VERBOSITY": "ERROR", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment of `plan`, which trains nothing; tokenizers would warn because its workers are forked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 1 failed with a message, 2 not understood or refused."""
    parser = argparse.ArgumentParser(
        prog="odb-factory",
        description="Online dynamic batching for LLaMA-Factory.",
        epilog="`odb-factory COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning, add_help=False)  # the command's own parser answers --help
    # Whatever follows the command's name is the command's to read.
    arguments, rest = parser.parse_known_args(argv)
    try:
        if not {"-h", "--help"}.intersection(rest):
            _check_extras(arguments.command)
        return COMMANDS[arguments.command][0](rest)
    except ODBError as error:
        print(f"odb-factory {arguments.command}: {error}", file=sys.stderr)
        return 1


def compare(argv: Sequence[str]) -> int:
    return importlib.import_module("odb_factory.cli.compare").main(argv)


def demo(argv: Sequence[str]) -> int:
    return importlib.import_module("odb_factory.demo.demo").main(argv) or 0


def train(argv: Sequence[str]) -> int:
    """Activate odb_factory, then be `llamafactory-cli train` with the same arguments.

    Returns 2 without training if `ODB_FACTORY_DISABLE` is set. Errors of LLaMA-Factory pass through.
    """
    parser = argparse.ArgumentParser(
        prog="odb-factory train",
        description="Run `llamafactory-cli train` with odb_factory activated explicitly: for "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or an installation without metadata.",
        usage="odb-factory train CONFIG.yaml [key=value ...]",
    )
    _add_yaml(parser)
    given = parser.parse_args(argv)
    if not _activated("train", "unset it, or use `llamafactory-cli train` to train without odb."):
        return 2

    from llamafactory import cli, launcher

    # The file that the launcher gives to torchrun, where it starts several processes.
    launcher.__file__ = str(CHILD)
    sys.argv = ["llamafactory-cli", "train", str(given.config), *given.overrides]
    cli.main()
    return 0


def plan(argv: Sequence[str]) -> int:
    """Print what a training of this YAML would do. Returns 2 if `ODB_FACTORY_DISABLE` is set; raises `ODBError`."""
    parser = argparse.ArgumentParser(
        prog="odb-factory plan",
        description="Look before you train: observe a sample of the data, plan it as a training would, and say what "
        "its budgets, and others, do with it. Nothing is trained.",
    )
    _add_yaml(parser)
    parser.add_argument(
        "--ranks", type=_at_least_one, metavar="N", help="plan for N ranks (default: those of a training started here)"
    )
    parser.add_argument(
        "--samples", type=_at_least_one, metavar="N", default=SAMPLES, help=f"rows to observe (default: {SAMPLES})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw one picture there")
    given = parser.parse_intermixed_args(argv)
    if not _activated("plan", "unset it."):
        return 2
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)

    from odb_factory.llamafactory.uncaught import TRACEBACK, shows_tracebacks

    try:
        _plan(given)
    except ODBError:
        raise
    except Exception as error:
        if shows_tracebacks():
            raise
        raise ODBError(f"{one_line(error)} ({TRACEBACK}=1 shows where)") from None
    return 0


def _plan(given: argparse.Namespace) -> None:
    from rich.console import Console

    from odb_factory.plan.arguments import parsed, read_yaml

    for path in (given.json, given.png):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}; make it, or name another file.")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path}: this is a folder; name a file in it.")
    if given.png is not None and given.png.suffix.lower() != ".png":
        raise ConfigError(f"--png: {given.png} does not end in .png; name a file that does.")
    console = Console()
    read_yaml(given.config, given.overrides)  # a mistake in it shows before anything heavy is imported
    with console.status("reading the data"), parsed(given.config, given.overrides, given.ranks) as asked:
        from odb_factory.plan.look import advise, look
        from odb_factory.plan.show import draw, show, to_dict

        found = look(asked, given.samples)
    advice = advise(found)
    show(console, found, advice)
    if given.json is not None:
        given.json.write_text(json.dumps(to_dict(found, advice), indent=2) + "\n", encoding="utf-8")
    if given.png is not None:
        draw(found, given.png)


def doctor(argv: Sequence[str]) -> int:
    return importlib.import_module("odb_factory.cli.doctor").main(argv)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "compare": (compare, "show what a training has done, or compare two"),
    "demo": (demo, "train a tiny model with and without odb and compare"),
    "doctor": (doctor, "say whether odb will be active here, and what to fix"),
    "plan": (plan, "say what the budgets will do with a sample of the data"),
    "train": (train, "`llamafactory-cli train` with odb activated explicitly"),
}
"""name: (function of its arguments that returns an exit code, what it does)."""


def _add_yaml(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path, help="a LLaMA-Factory training YAML")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to it, such as odb.token_budget=4096"
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _check_extras(command: str) -> None:
    for extra in NEEDS[command]:
        missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
        if missing:
            what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
            raise ODBError(f'{what}, which the extra `{extra}` brings: pip install "odb_factory[{extra}]"')


def _activated(command: str, fix: str) -> bool:
    """Activate odb_factory, or print why it cannot be."""
    from odb_factory.llamafactory import activation

    activation.activate()
    if not activation.is_active():
        switch = f"{activation.DISABLE}={os.environ.get(activation.DISABLE)}"
        print(f"odb-factory {command}: {switch} switches odb_factory off; {fix}", file=sys.stderr)
    return activation.is_active()


if __name__ == "__main__":
    sys.exit(main())
