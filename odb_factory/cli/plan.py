"""`odb-factory plan`: a look before training, of what its budgets will do with a sample of the data."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from odb_factory.errors import ConfigError, ODBError, one_line
from odb_factory.llamafactory import activation
from odb_factory.llamafactory.uncaught import TRACEBACK, shows_tracebacks

SAMPLES = 2000
QUIET = {"LLAMAFACTORY_VERBOSITY": "ERROR", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
"""What is logged on the way concerns no training. The workers are forked, which tokenizers warn of."""


def main(argv: Sequence[str]) -> int:
    """Print what a training of this YAML would do. Returns 2 if `ODB_FACTORY_DISABLE` is set; raises `ODBError`."""
    given = _parser().parse_intermixed_args(argv)
    activation.activate()
    if not activation.is_active():
        print(
            f"odb-factory plan: {activation.DISABLE}={os.environ.get(activation.DISABLE)} switches odb_factory off; "
            "unset it.",
            file=sys.stderr,
        )
        return 2
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
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
        from odb_factory.plan.advice import advise
        from odb_factory.plan.look import look
        from odb_factory.plan.show import show, to_dict

        found = look(asked, given.samples)
    advice = advise(found)
    show(console, found, advice)
    if given.json is not None:
        content = to_dict(found, advice)
        given.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if given.png is not None:
        from odb_factory.plan.show import draw

        draw(found, given.png)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="odb-factory plan",
        description="Look before you train: observe a sample of the data, plan it as a training would, and say what "
        "its budgets, and others, do with it. Nothing is trained.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", type=Path, help="a LLaMA-Factory training YAML")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to it, such as odb.token_budget=4096"
    )
    parser.add_argument(
        "--ranks", type=_at_least_one, metavar="N", help="plan for N ranks (default: those of a training started here)"
    )
    parser.add_argument(
        "--samples", type=_at_least_one, metavar="N", default=SAMPLES, help=f"rows to observe (default: {SAMPLES})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw one page of plots there")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
