"""What the tests stand on: tiny random models, a small data set of their own, real LLaMA-Factory runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import yaml
from PIL import Image, ImageDraw

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
# Tiny models gain nothing from threads, and worker processes share the cores with them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from odb_factory.cli.tiny_model import build_tiny_qwen2, build_tiny_qwen3_vl  # noqa: E402  (after the settings above)

RUN_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts` (48 rows, 3 to 400 words), `pictures` (24 rows with none, one or three images), `mixed` = both."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(7)
    words = " ".join(topics.values()).split()

    def turn(length: int) -> str:
        start = rng.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    def row(question: str, answer: str, images: list[str]) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "images": images,
        }

    texts = [row(turn(8), turn(int(3 * 1.11**k) if k < 47 else 400), []) for k in range(48)]
    pictures = []
    for k in range(24):
        names = []
        for number in range((1, 3, 1, 0)[k % 4]):
            size = (rng.randrange(30, 500), rng.randrange(30, 500))
            image = Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))
            ImageDraw.Draw(image).line([(0, 0), size], fill="white", width=5)
            names.append(f"picture_{k}_{number}.png")
            image.save(folder / names[-1])
        pictures.append(row("<image>" * len(names) + turn(6), turn(rng.randrange(3, 60)), names))
    write_dataset(folder, {"texts": texts, "pictures": pictures})
    return folder


def write_dataset(folder: Path, datasets: dict[str, list[dict[str, Any]]]) -> Path:
    """Write rows and LLaMA-Factory's `dataset_info.json`; returns `folder`."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {}
    for name, rows in datasets.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        columns = {"messages": "messages"} | ({"images": "images"} if any(row.get("images") for row in rows) else {})
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def training_config(model: Path, data_dir: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """An ordinary SFT configuration for one CPU process; `odb` is among the `changes` where wanted."""
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
    } | changes


def run_llamafactory(config: dict[str, Any], *overrides: str, env: dict[str, str] | None = None) -> Any:
    """Run the real `llamafactory-cli train` on `config`; kills the whole process group at the timeout."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(path), *overrides]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | (env or {}),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end within {RUN_TIMEOUT_S} s:\n{output[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    """The Trainer's log history."""
    return json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
