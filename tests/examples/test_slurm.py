"""examples/slurm.sh as a job of two nodes, with stand-ins for the two Slurm commands that it calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import read_log, run_command, training_config

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
SCONTROL = "#!/bin/bash\necho localhost\necho other\n"
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait $task || exit 1; done
"""
RECORDS_ITS_INPUT = '#!/bin/bash\n{ env; printf "%s\\n" "$@"; } > "${0%/*}/node$NODE_RANK"\n'
OVERRIDE = "odb.global_batch_size=16"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., None]:
    """Runs the script on a YAML, with the given commands first on PATH."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "NPROC_PER_NODE": "1"}

    def run(settings: Path, **commands: str) -> None:
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, **commands}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        run_command([str(SCRIPT), str(settings), OVERRIDE], 200, environment=os.environ | slurm | {"PATH": path})

    return run


def test_each_node_gets_its_rank_and_the_address(job: Callable[..., None], tmp_path: Path) -> None:
    """In variables that LLaMA-Factory's launcher reads, as in tests/distributed/test_two_nodes.py."""
    job(tmp_path / "my.yaml", **{"llamafactory-cli": RECORDS_ITS_INPUT})
    port = 20000 + os.getpid() % 20000
    shared = {"FORCE_TORCHRUN=1", "NNODES=2", "NPROC_PER_NODE=1", "MASTER_ADDR=localhost", f"MASTER_PORT={port}"}
    for node in range(2):
        lines = (tmp_path / f"node{node}").read_text().splitlines()
        assert shared | {f"NODE_RANK={node}"} <= set(lines)
        assert lines[-3:] == ["train", str(tmp_path / "my.yaml"), OVERRIDE]


@pytest.mark.nightly
def test_the_script_trains_on_two_nodes(job: Callable[..., None], tiny_text, data_dir, tmp_path) -> None:
    odb = {"token_budget": 1024, "global_batch_size": 12}
    config = training_config(tiny_text, data_dir, tmp_path / "out", ddp_backend="gloo", odb=odb)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    job(tmp_path / "my.yaml")
    assert [entry["step"] for entry in read_log(tmp_path / "out") if "loss" in entry] == [1, 2, 3]
