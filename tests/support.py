"""Test helpers: datasets, configurations, runs of real LLaMA-Factory and their logs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from packaging.version import Version
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from odb_factory.model.known import Known

BIN = Path(sys.executable).parent
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment

SHIMS = Path(__file__).parent / "distributed" / "shims"
"""The folder's `sitecustomize` runs first in every process that a test starts."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))

os.environ["ODB_TEST_SHIM_DEEPSPEED_ON_GLOO"] = "1"  # see `shimmed`

CHECKPOINTS = Version(version("transformers")) < Version("5.18")
"""Whether LLaMA-Factory 0.9.5's gradient checkpointing works: stock fails with newer releases of transformers."""

RUN_TIMEOUT_S = 240
MARK = "ODB_TEST_RUN"
"""An environment variable that marks all processes of a run: torchrun starts each rank in its own session."""


def write_dataset(folder: Path, datasets: dict[str, list[dict[str, Any]]]) -> Path:
    """Write rows and LLaMA-Factory's `dataset_info.json`; returns `folder`."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    tags["system_tag"] = "system"
    info = {}
    for name, rows in datasets.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        media = [key for key in ("images", "videos") if any(row.get(key) for row in rows)]
        columns = {key: key for key in ("messages", *media)}
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A grey noise image, width x height; identical in each run, unlike Pillow's `effect_noise`."""
    values = np.random.default_rng(seed).normal(128, 60, size[::-1])
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def training_config(model: Path, data_dir: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """An ordinary SFT configuration for one CPU process. changes: keys of LLaMA-Factory, and `odb`."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "qwen3_vl" if (model / "preprocessor_config.json").exists() or "vl" in model.name else "qwen",
        "dataset_dir": str(data_dir),
        "media_dir": str(data_dir),
        "dataset": "texts",
        "cutoff_len": 2048,
        "output_dir": str(output_dir),
        "overwrite_output_dir": True,
        "overwrite_cache": True,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 1,
        "use_cpu": True,
        "seed": 3,
        "disable_gradient_checkpointing": not CHECKPOINTS,
    } | changes


def run_llamafactory(config: dict[str, Any], *overrides: str, env: dict[str, str] | None = None) -> Any:
    """Run the real `llamafactory-cli train` on `config`."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    yaml_path = folder.parent / f"{folder.name}.yaml"
    yaml_path.write_text(yaml.safe_dump(config), encoding="utf-8")
    words = [str(BIN / "llamafactory-cli"), "train", str(yaml_path), *overrides]
    return end_of(words, RUN_TIMEOUT_S, environment=os.environ | (env or {}))


def need(package: str) -> None:
    """Skip a test if a package is not installed."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package.replace('_', '-')}")


class Convolutions(TorchDispatchMode):
    """Counts convolutions, forward and backward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "convolution" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")
WAITS += ("repeat_interleave",)
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
ON_THE_HOST = ("fast_pos_embed_interpolate", "get_window_index", "get_vision_window_index")
"""Functions of transformers that read host tensors, also on a machine with a GPU."""


class ReadBacks(TorchDispatchMode):
    """Counts per source line, while `is_on`, the operations that wait for a GPU: reads of values, and results whose
    size depends on values on the device."""

    def __init__(self, is_on: bool = True):
        super().__init__()
        self.is_on, self.lines = is_on, Counter[str]()

    def __enter__(self) -> Any:
        self._tolist = tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:
            self._count("tolist")
            return tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = [index for index in args[1] if index is not None] if name in INDEXED else []
        by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        if (name in WAITS or by_mask) and not any(isinstance(tensor, Known) for tensor in (*args, *indices)):
            self._count(name)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and "transformers" not in frame.f_code.co_filename:
            frame = frame.f_back
        is_host = frame is not None and frame.f_code.co_name in ON_THE_HOST and "unique" not in name
        is_host |= frame is not None and frame.f_back.f_code.co_name == "hand_in_windows"  # odb calls on the host
        if self.is_on and not is_host:
            line = "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.lines[line] += 1


def free_port() -> int:
    """A free port below 32,768, where the ephemeral ports of the kernel begin."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Cache results and errors of `make`, so that a slow failure is not repeated for each cell."""
    cache: dict[tuple[Any, ...], tuple[Any, BaseException | None]] = {}

    @functools.wraps(make)
    def cached(*args: Any) -> Any:
        if args not in cache:
            try:
                cache[args] = make(*args), None
            except BaseException as error:
                cache[args] = None, error
        value, error = cache[args]
        if error is not None:
            raise error
        return value

    return cached


def shimmed(name: str) -> dict[str, str]:
    """Environment variables with which every process first imports this module of SHIMS."""
    return {f"ODB_TEST_SHIM_{name.upper()}": "1"}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_audit(output_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The audit of a rank without times: equal for equal runs."""
    return [without_clock(line) for line in read_jsonl(output_dir / f"odb_audit_rank{rank}.jsonl")]


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    """A line of an audit without times."""
    return {name: value for name, value in line.items() if name not in ("time", "data_wait_s")}


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    """The Trainer's log history."""
    return json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def marked_processes(mark: str) -> dict[int, list[str]]:
    """The command line of every living process with this `MARK`, by process id."""
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        words = proc_words(pid, "cmdline")
        if words and f"{MARK}={mark}" in proc_words(pid, "environ"):  # a zombie has no words
            command_lines[pid] = words
    return command_lines


def end_of(
    words: Sequence[str],
    limit_s: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output; none of its processes outlives the call."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        words,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={"MASTER_PORT": str(free_port()), **(environment or os.environ), MARK: mark},
    )
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end_marked_processes(mark)
        printed, _ = process.communicate()
        pytest.fail(f"{words}: no end within {limit_s} s:\n{printed[-4000:]}")
    finally:
        end_marked_processes(mark)
    return subprocess.CompletedProcess(words, process.returncode, printed, errors)


def run_command(
    words: Sequence[str], limit_s: float, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """The output of a command that must succeed. It sees no CUDA device."""
    ended = end_of(words, limit_s, cwd, {**(environment or os.environ), "CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, f"{words}:\n{ended.stdout[-4000:]}"
    return ended.stdout


def end_marked_processes(mark: str) -> None:
    """End every process with this `MARK` by its id, also stopped processes."""
    for _ in range(100):
        alive = marked_processes(mark)
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def proc_words(pid: int, file: str) -> list[str]:
    """The words of a /proc file with NUL-terminated words; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
