"""Build the built-in MM-Mix, from files that every installation has, and a tiny random Qwen3-VL to train on it."""

from __future__ import annotations

import argparse
from pathlib import Path

from odb_factory.cli.demo import build_tiny_qwen3_vl
from odb_factory.cli.mm_mix import build_builtin_mix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("mm_mix_data"), help="where to write (%(default)s)")
    parser.add_argument("--samples", type=int, default=600, help="training rows (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny-model", type=Path, metavar="FOLDER", help="also make a tiny random Qwen3-VL there")
    arguments = parser.parse_args()
    build_builtin_mix(arguments.folder, samples=arguments.samples, seed=arguments.seed)
    print(f"{arguments.folder}: {arguments.samples} training rows")
    if arguments.tiny_model:
        print(f"{build_tiny_qwen3_vl(arguments.tiny_model)}: tiny random Qwen3-VL")


if __name__ == "__main__":
    main()
