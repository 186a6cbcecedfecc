"""Runs of the real `llamafactory-cli train` with several ranks, from one or more launchers ("nodes").

Every process of a run has a mark in its environment, also its ranks and their workers: torchrun puts each rank into
another session, so a process group does not contain them.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml
from support import BIN, MARK, end_marked_processes, free_port, marked_processes, proc_words

TIMEOUT_S = 200
POLL_S = 0.05


@dataclass(frozen=True)
class Node:
    """The launcher of a node: a command in front of the launcher, and its environment."""

    prefix: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a run ended. `ranks[r]`: the output of rank r; `launchers[n]`: the output of the launcher of node n."""

    returncodes: list[int]
    ranks: list[str]
    launchers: list[str]

    def __str__(self) -> str:
        parts = [f"return codes {self.returncodes}"]
        parts += [f"--- rank {rank} ---\n{text[-3000:]}" for rank, text in enumerate(self.ranks)]
        parts += [f"--- launcher {node} ---\n{text[-2000:]}" for node, text in enumerate(self.launchers)]
        return "\n".join(parts)


class Marked:
    """Commands, and all processes that they start; a context manager that leaves no process behind."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.launchers: list[subprocess.Popen] = []

    def launch(self, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """env: in addition to the environment of this process."""
        with log.open("w") as file:
            self.launchers.append(
                subprocess.Popen(
                    words,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, MARK: self.mark, **env},
                    start_new_session=True,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def so_far(self) -> object:
        """The output to show if the run fails a test."""
        raise NotImplementedError

    def processes(self) -> dict[int, list[str]]:
        """Every living process of the run: its command line by its id."""
        return marked_processes(self.mark)

    def rank_pid(self, rank: int) -> int:
        """The main process of a rank, which must exist."""
        ranks = {pid for pid in self.processes() if f"RANK={rank}" in proc_words(pid, "environ")}
        return next(pid for pid in ranks if parent(pid) not in ranks)

    def wait_until(self, condition: Callable[[], Any], otherwise: str, timeout_s: float = TIMEOUT_S) -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > until or all(launcher.poll() is not None for launcher in self.launchers):
                pytest.fail(f"{otherwise}\n{self.so_far()}")
            time.sleep(POLL_S)

    def left_behind(self, patience_s: float = 5.0) -> dict[int, list[str]]:
        """Processes of the run still alive `patience_s` seconds after its end (torch's own helpers need a moment)."""
        until = time.monotonic() + patience_s
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return alive

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of all launchers; kills the run and fails the test after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        for launcher in self.launchers:
            try:
                launcher.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                hung = "\n".join(f"{pid}: {' '.join(words[:6])}" for pid, words in self.processes().items())
                self.kill()
                pytest.fail(f"no end within {timeout_s} s; alive until killed:\n{hung}\n{self.so_far()}")

    def kill(self) -> None:
        """End every process of the run by its id, also stopped processes."""
        end_marked_processes(self.mark)
        for launcher in self.launchers:
            launcher.wait(10)


class Run(Marked):
    """A training of `num_ranks` ranks, started at once."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        num_ranks: int = 2,
        nodes: Sequence[Node] = (Node(),),
        env: Mapping[str, str] = {},
        master: str = "127.0.0.1",
    ):
        super().__init__()
        self.num_ranks, self.output_dir = num_ranks, Path(config["output_dir"])
        self.folder = self.output_dir.with_name(f"{self.output_dir.name}_logs")
        self.folder.mkdir(parents=True)
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        common = {
            "FORCE_TORCHRUN": "1",
            "NPROC_PER_NODE": str(num_ranks // len(nodes)),
            "NNODES": str(len(nodes)),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(free_port()),
            # torchrun writes the output of each rank to separate files.
            "PET_REDIRECTS": "3",
        }
        try:
            for number, node in enumerate(nodes):
                node_env = {"NODE_RANK": str(number), "PET_LOG_DIR": str(self.folder / f"node{number}")}
                words = [*node.prefix, str(BIN / "llamafactory-cli"), "train", str(path)]
                self.launch(words, self.folder / f"launcher{number}.log", common | node_env | node.env | dict(env))
        except BaseException:
            self.kill()
            raise

    def end(self, timeout_s: float = TIMEOUT_S) -> Ended:
        self.wait(timeout_s)
        return self.so_far()

    def so_far(self) -> Ended:
        launchers = [(self.folder / f"launcher{n}.log").read_text() for n in range(len(self.launchers))]
        codes = [launcher.poll() for launcher in self.launchers]
        ranks = [self.output(rank) for rank in range(self.num_ranks)]
        return Ended(codes, ranks, launchers)

    def output(self, rank: int) -> str:
        """The output of a rank so far, stdout and then stderr."""
        per_node = self.num_ranks // len(self.launchers)
        node, local = divmod(rank, per_node)
        files = sorted((self.folder / f"node{node}").glob(f"*/attempt_0/{local}/std*.log"), reverse=True)
        return "\n".join(path.read_text(errors="replace") for path in files)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
