"""Ray: LLaMA-Factory's own workers (`USE_RAY=1`) and workers of Ray Train train like ranks of torchrun."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.launch import Marked, Run
from same_training import RELATIVE, configurations, write_rows
from support import BIN, MARK, end_marked_processes, read_log

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install -e '.[ray]'")

ROOT = Path(__file__).parents[2]
START_S, END_S = 200, 30
pytestmark = pytest.mark.timeout(3 * START_S)
RAY = {"ray_num_workers": 2, "ray_init_kwargs": {"num_cpus": 20, "object_store_memory": 80_000_000}}
"""LLaMA-Factory reserves 10 CPUs for each worker; the machine may have fewer."""
CLI = (str(BIN / "llamafactory-cli"), "train")


class Command(Marked):
    """A command that uses Ray. It starts its own cluster, even if the address of another is set."""

    def __init__(self, words: Sequence[str], log: Path, **env: str):
        super().__init__()
        self._log = log
        self.launch(words, log, {"RAY_ADDRESS": "local"} | env)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def so_far(self) -> str:
        return self.log[-6000:]

    def own_lines(self) -> list[str]:
        """The lines of the log that Ray did not pass on from its workers."""
        return [line for line in self.log.splitlines() if not re.match(r"(\x1b\[\d+m)?\(", line)]

    def end(self, limit_s: float = START_S) -> int:
        """The exit code. The test fails if the command or a process that it started does not end."""
        self.wait(limit_s)
        left = self.left_behind(10)
        assert not left, f"{left}\n{self.so_far()}"
        return self.launchers[0].returncode


@pytest.fixture
def config_of(tiny_text, tiny_vl, tmp_path) -> Callable[..., dict[str, Any]]:
    make_config = configurations({"text": tiny_text, "vl": tiny_vl}.__getitem__, write_rows(tmp_path / "rows"))

    def config_of(stage: str = "sft", **changes: Any) -> dict[str, Any]:
        odb = {"token_budget": 640, "audit": True} | changes.pop("odb", {})
        return make_config(stage, tmp_path / "out", num_ranks=2, **changes) | {"odb": odb}

    return config_of


def write_config(config: dict[str, Any], folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def losses(folder: Path) -> list[float]:
    return [entry[name] for entry in read_log(folder) for name in ("loss", "eval_loss", "train_loss") if name in entry]


def under_torchrun(config: dict[str, Any], folder: Path) -> list[float]:
    with Run(config | {"output_dir": str(folder)}) as run:
        ended = run.end()
    assert ended.returncodes == [0], str(ended)
    return losses(folder)


VISION = {"model": "vl", "template": "qwen3_vl", "dataset": "albums", "num_train_epochs": 4}
VISION |= {"odb": {"token_budget": 500, "max_patches": 300}}


@pytest.mark.parametrize(("stage", "changes"), [("sft", VISION), pytest.param("dpo", {}, marks=pytest.mark.nightly)])
def test_workers_train_as_under_torchrun(config_of, tmp_path, stage: str, changes: dict[str, Any]) -> None:
    config = config_of(stage, **changes)
    with Command([*CLI, write_config(config | RAY, tmp_path)], tmp_path / "log", USE_RAY="1") as run:
        assert run.end() == 0, run.log[-6000:]
        assert "online dynamic batching is on" in run.log
    ours, expected = losses(Path(config["output_dir"])), under_torchrun(config, tmp_path / "torchrun")
    assert len(expected) > 5
    assert ours == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_killed_worker_ends_the_run(config_of, tmp_path, victim: int) -> None:
    config = config_of(num_train_epochs=500, eval_strategy="no")
    audit = Path(config["output_dir"], "odb_audit_rank1.jsonl")
    with Command([*CLI, write_config(config | RAY, tmp_path)], tmp_path / "log", USE_RAY="1") as run:
        run.wait_until(lambda: audit.exists() and audit.read_text().count("\n") > 8, "no step was taken")
        os.kill(run.rank_pid(victim), signal.SIGKILL)
        assert run.end(END_S) != 0
        lines = run.own_lines()
        (ours,) = [
            number for number, line in enumerate(lines) if line.startswith("[odb] ") and f"rank {victim}" in line
        ]
        has_ray_error = any("ray.exceptions." in line for line in lines[ours:])
        # The other worker may be the first to report the end.
        assert has_ray_error or "has ended without a word" in lines[ours], "\n".join(lines)


def test_ray_train_resumes_on_the_workers_that_are_left(config_of, tmp_path, monkeypatch) -> None:
    """examples/ray_train.py on two nodes; after a node dies, losses equal those of a run without a failure."""
    config = config_of(
        num_train_epochs=10, eval_strategy="no", save_strategy="steps", save_steps=5, odb={"global_batch_size": 8}
    )
    storage, mark = tmp_path / "storage", uuid.uuid4().hex
    words = [sys.executable, str(ROOT / "examples" / "ray_train.py"), write_config(config, tmp_path), str(storage)]
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")  # the second worker has no node any more
    cluster = ray_cluster.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000}
    )
    try:
        other = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        with Command(words, tmp_path / "log", RAY_ADDRESS=cluster.address) as run:
            run.wait_until(
                lambda: any(storage.glob("*/checkpoint_*/checkpoint/trainer_state.json")), "no checkpoint came"
            )
            cluster.remove_node(other, allow_graceful=False)
            assert run.end(2 * START_S) == 0, run.log[-6000:]
            assert re.search(r"Result\(.*'loss': ", run.log, re.DOTALL), run.log[-6000:]
            # Three times if another worker fails.
            assert run.log.count("Started training worker group of size") == 2, run.log[-6000:]
    finally:
        cluster.shutdown()
        end_marked_processes(mark)
    # Of one rank and of several; a folder has both if the workers saved it again.
    assert {"rng_state.pth", "rng_state_1.pth"} <= {path.name for path in storage.rglob("rng_state*.pth")}
    newest = max(storage.glob("*/checkpoint_*/checkpoint"), key=lambda folder: folder.parent.name)
    ours, expected = losses(newest), under_torchrun(config, tmp_path / "torchrun")
    assert len(ours) > 20
    assert ours == pytest.approx(expected[: len(ours)], rel=10 * RELATIVE)
