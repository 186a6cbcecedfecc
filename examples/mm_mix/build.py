"""Build an MM-Mix data set: from files every installation has, or from your own (`--source`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from odb_factory.demo.mm_mix import Source, build_builtin_mix, build_mix
from odb_factory.demo.tiny_model import build_tiny_qwen3_vl
from odb_factory.errors import ODBError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("mm_mix_data"), help="where to write (%(default)s)")
    parser.add_argument("--source", action="append", metavar="PATH[:weight]", help="JSON, JSONL or folder; repeatable")
    parser.add_argument("--samples", type=int, help="training rows (600; with --source: all the weights allow)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny-model", type=Path, metavar="FOLDER", help="also make a tiny random Qwen3-VL there")
    args = parser.parse_args()

    given = {} if args.samples is None else {"samples": args.samples}
    try:
        if args.source:
            sources = [Source.parse(text) for text in args.source]
            summary = build_mix(args.folder, sources=sources, seed=args.seed, **given)
        else:
            summary = build_builtin_mix(args.folder, seed=args.seed, **given)
    except ODBError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{summary.folder}: {summary.train} training rows, {summary.val} validation rows")
    for name, rows in summary.parts.items():
        print(f"{rows:6d}  {name}")
    if args.tiny_model:
        print(f"{build_tiny_qwen3_vl(args.tiny_model)}: tiny random Qwen3-VL")


if __name__ == "__main__":
    main()
