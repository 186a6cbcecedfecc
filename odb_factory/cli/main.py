"""The `odb-factory` command: finds the sub-command and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from odb_factory.errors import ODBError
from odb_factory.version import __version__

# name: (module with a `main(argv)` that returns an exit code (None: 0), what it does). A module is imported only when
# it is called for.
COMMANDS = {
    "demo": ("odb_factory.demo.demo", "train a tiny model with and without odb and compare"),
    "doctor": ("odb_factory.cli.doctor", "say whether odb will be active here, and what to fix"),
    "report": ("odb_factory.cli.report", "show what a run has done, or two side by side, as one HTML page"),
    "plan": ("odb_factory.cli.plan", "say what the budgets will do with a sample of the data"),
    "train": ("odb_factory.cli.train", "`llamafactory-cli train` with odb activated explicitly"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 1 failed with a message, 2 not understood or refused."""
    parser = argparse.ArgumentParser(
        prog="odb-factory",
        description="Online dynamic batching for LLaMA-Factory.",
        epilog="`odb-factory COMMAND --help` says more about one.",
    )
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning, add_help=False)  # the command's own parser answers --help
    # Whatever follows the command's name is the command's to read.
    arguments, rest = parser.parse_known_args(argv)
    try:
        return importlib.import_module(COMMANDS[arguments.command][0]).main(rest) or 0
    except ODBError as error:
        print(f"odb-factory {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
