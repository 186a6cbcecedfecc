"""Samples of real data in simulation: their lengths and patches, as `odb-factory plan` observes them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import yaml
from simulation import LONGEST
from train_workloads import build_vl

from odb_factory.demo.demo import sft_config
from odb_factory.errors import ConfigError
from odb_factory.llamafactory import activation
from odb_factory.planning import make_metadata

SAMPLES = 1024
"""So many are observed, of which the simulation draws."""


def built_in(folder: Path) -> Path:
    """A LLaMA-Factory YAML of the built-in MM-Mix, which is written into `folder`."""
    model, data = build_vl(folder, SAMPLES)
    config = sft_config(
        model, data, folder / "output", dataset="mm_mix", template="qwen3_vl_nothink", cutoff_len=LONGEST
    )
    path = folder / "built_in.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def observed(config: Path) -> np.ndarray:
    """The samples of a LLaMA-Factory YAML that can be trained on, as `ROW`; spread over it where there are many."""
    activation.activate()
    with contextlib.redirect_stdout(sys.stderr):  # what is logged on the way
        from odb_factory.plan.arguments import parsed
        from odb_factory.plan.observe import observe
        from odb_factory.plan.rows import open_rows

        with parsed(config, ranks=1) as asked:
            seen = observe(open_rows(asked, SAMPLES), asked.batch_size * asked.accumulation, SAMPLES).seen
    costs = [one.cost for one in seen if one.cost is not None]
    rows = make_metadata(costs, [0] * len(costs), exhausted=True, sizes=[0] * len(costs)).rows
    if not len(rows) or rows["tokens"].max() > LONGEST:
        raise ConfigError(
            f"{config}: the simulation takes samples of at most {LONGEST:,} tokens, at least one of them; set "
            "cutoff_len to that."
        )
    return rows
