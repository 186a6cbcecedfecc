"""examples/slurm.sh as a job of two nodes, with stand-ins for the two commands of Slurm's that it calls."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from support import read_log, run_command, training_config

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
SCONTROL = "#!/bin/bash\necho localhost\necho other\n"
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait $task || exit 1; done
"""


def test_the_script_trains_on_two_nodes(tiny_text, data_dir, tmp_path, monkeypatch) -> None:
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    odb = {"token_budget": 1024, "global_batch_size": 12}
    config = training_config(tiny_text, data_dir, tmp_path / "out", ddp_backend="gloo", odb=odb)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "NPROC_PER_NODE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    run_command([str(SCRIPT), str(tmp_path / "my.yaml"), "odb.global_batch_size=16"], 200)
    assert [entry["step"] for entry in read_log(tmp_path / "out") if "loss" in entry] == [1, 2, 3]
