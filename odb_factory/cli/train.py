"""`odb-factory train`: the explicit way in, for where torch does not call our entry point."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_factory.llamafactory import activation

CHILD = Path(__file__).with_name("train_child.py")


def main(argv: Sequence[str]) -> int:
    """Activate odb_factory, then be `llamafactory-cli train` with the same arguments.

    Returns 2 without training if `ODB_FACTORY_DISABLE` is set. Errors of LLaMA-Factory pass through.
    """
    parser = argparse.ArgumentParser(
        prog="odb-factory train",
        description="Run `llamafactory-cli train` with odb_factory activated explicitly: for "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, a torch older than 2.5, or an installation without metadata.",
        usage="odb-factory train CONFIG.yaml [key=value ...]",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a LLaMA-Factory training YAML")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="changes to it, such as odb.token_budget=4096"
    )
    given = parser.parse_args(argv)

    activation.activate()
    if not activation.is_active():
        print(
            f"odb-factory train: {activation.DISABLE}={os.environ.get(activation.DISABLE)} switches odb_factory off; "
            "unset it, or use `llamafactory-cli train` to train without odb.",
            file=sys.stderr,
        )
        return 2

    from llamafactory import cli, launcher

    from odb_factory.llamafactory.probes import check_launcher

    # The file that the launcher gives to torchrun, where it starts several processes.
    check_launcher(launcher)
    launcher.__file__ = str(CHILD)
    sys.argv = ["llamafactory-cli", "train", given.config, *given.overrides]
    cli.main()
    return 0
