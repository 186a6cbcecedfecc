"""The `odb-factory` command: its sub-commands and their arguments. Module NAME has the `run` of sub-command NAME."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from odb_factory.errors import ODBError
from odb_factory.refusals import __version__

EXTRAS = {"llamafactory": ("llamafactory",), "tools": ("matplotlib", "rich")}
"""Extra of odb_factory -> packages of this extra that commands need."""


class Command(NamedTuple):
    """A sub-command. extras: required extras. arguments: name or flag, and options for `add_argument`."""

    meaning: str
    example: str
    extras: tuple[str, ...] = ()
    arguments: tuple[tuple[str, dict[str, Any]], ...] = ()


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


YAML = (
    ("config", {"metavar": "CONFIG.yaml", "type": Path, "help": "a LLaMA-Factory training YAML"}),
    ("overrides", {"metavar": "key=value", "nargs": "*", "help": "changes to it, such as odb.token_budget=4096"}),
)
JSON = (("--json", {"action": "store_true", "help": "print the figures as JSON instead of text"}),)
COMMANDS = {
    "compare": Command(
        "show one training, or two side by side: a table, and one HTML page with the curves",
        "odb-factory compare saves/my_run saves/stock_run",
        arguments=(
            ("a", {"metavar": "OUTPUT_DIR", "type": Path, "help": "output_dir of a training, or its YAML"}),
            ("b", {"metavar": "OTHER_DIR", "type": Path, "nargs": "?", "help": "output_dir of another one"}),
            ("--html", {"metavar": "FILE", "type": Path, "help": "the page (default: in OUTPUT_DIR)"}),
            *JSON,
        ),
    ),
    "demo": Command(
        "train a tiny vision-language model on a CPU without and with odb, and compare",
        "odb-factory demo --short",
        extras=("llamafactory", "tools"),
        arguments=(
            ("--output", {"metavar": "FOLDER", "type": Path, "default": Path("odb_demo"), "help": "(%(default)s)"}),
            ("--ranks", {"type": int, "choices": (1, 2), "default": 1, "help": "processes that train (%(default)s)"}),
            ("--short", {"action": "store_true", "help": "a fifth of the data"}),
            *JSON,
        ),
    ),
    "doctor": Command(
        "check versions, hooks, the attention kernel and wrong installs, and name what fixes a problem",
        "odb-factory doctor",
        arguments=JSON,
    ),
    "plan": Command(
        "show what five token budgets make of a sample of the training data; nothing is trained",
        "odb-factory plan my.yaml --ranks 8 odb.token_budget=16384",
        extras=("llamafactory", "tools"),
        arguments=(
            *YAML,
            (
                "--ranks",
                {"metavar": "N", "type": at_least_one, "help": "data-parallel ranks (default: as started here)"},
            ),
            ("--samples", {"metavar": "N", "type": at_least_one, "default": 2000, "help": "rows (%(default)s)"}),
            ("--png", {"metavar": "FILE", "type": Path, "help": "draw fill and padding there"}),
            *JSON,
        ),
    ),
    "train": Command(
        "run `llamafactory-cli train` with odb_factory activated explicitly",
        "odb-factory train my.yaml odb.token_budget=16384",
        extras=("llamafactory",),
        arguments=YAML,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command. Exit codes: 0 success, 1 error with a message, 2 invalid arguments or odb_factory disabled."""
    parser = argparse.ArgumentParser(
        prog="odb-factory",
        description="Online dynamic batching for LLaMA-Factory.",
        epilog="`odb-factory COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.meaning, add_help=False)  # `of_command` handles --help
    known, remaining = parser.parse_known_args(argv)
    name, command = known.command, COMMANDS[known.command]
    of_command = argparse.ArgumentParser(
        prog=f"odb-factory {name}", description=f"{command.meaning}.", epilog=f"example: {command.example}"
    )
    for argument, options in command.arguments:
        of_command.add_argument(argument, **options)
    arguments = of_command.parse_intermixed_args(remaining)
    try:
        for extra in command.extras:
            if missing := [package for package in EXTRAS[extra] if find_spec(package) is None]:
                raise ODBError(f'not installed: {", ".join(missing)}; pip install "odb_factory[{extra}]"')
        if name in ("plan", "train"):
            from odb_factory.llamafactory import activation

            activation.activate()
            if not activation.is_active():
                print(f"odb-factory {name}: ODB_FACTORY_DISABLE switches odb_factory off; unset it.", file=sys.stderr)
                return 2
        result: int = (
            train(arguments) if name == "train" else importlib.import_module(f"{__package__}.{name}").run(arguments)
        )
        sys.stdout.flush()
    except BrokenPipeError:  # e.g. `| head`; without dup2, Python would write the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ODBError as error:
        print(f"odb-factory {name}: {error}", file=sys.stderr)
        return 1
    return result


def train(arguments: argparse.Namespace) -> int:
    """Run `llamafactory-cli train` with the same arguments. Errors of LLaMA-Factory pass through."""
    from llamafactory import cli

    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # so that torch activates odb_factory in torchrun's ranks
    sys.argv = ["llamafactory-cli", "train", str(arguments.config), *arguments.overrides]
    cli.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
