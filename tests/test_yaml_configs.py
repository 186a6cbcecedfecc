"""LLaMA-Factory's real parser accepts every file of yaml_configs/, with the promised values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.utils.deepspeed import HfDeepSpeedConfig

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("yaml_configs/**/*.yaml"))}
FULL = ("ultrachat", "llava_150k", "sharegpt4o", "mm_mix")
PAPER = {f"{data}_{size}_{how}" for data in FULL[:3] for size in ("2b", "8b") for how in ("full", "lora")}
PAPER |= {"mm_mix_2b_full"}
PROMISED = {"model": "Qwen/Qwen3-VL-2B-Instruct", "method": "full", "cutoff_len": 16384}
PROMISED |= {"learning_rate": 1e-5, "scheduler": "cosine", "warmup": 0.03}
NAMES = {"tiny_cpu", *FULL, "mm_mix_lora", "qwen2_5_vl_qlora", "two_nodes", *PAPER}

# `odb-factory plan` reads a YAML through LLaMA-Factory's parser. 16 ranks: two nodes of eight GPUs.
READ = """
import json, sys
from pathlib import Path
from llamafactory.data.parser import get_dataset_list
from llamafactory.data.template import TEMPLATES
from odb_factory.cli.plan import read
from odb_factory.llamafactory import activation

activation.activate()
for path in map(Path, sys.argv[1:]):
    overrides = []
    if "model_name_or_path: ./" in path.read_text():  # a model that has to be made first
        overrides.append("model_name_or_path=.")
    planned = read(path, overrides, ranks=16)
    model, data, training, finetuning = planned.arguments
    assert data.template in TEMPLATES, data.template
    print("READ" + json.dumps({
        "name": path.stem, "keeps": planned.config.keeps, "loss_scaling": planned.config.loss_scaling,
        "step_size": planned.step_size, "budgets": [planned.token_budget, planned.config.max_patches],
        "cutoff_len": data.cutoff_len, "learning_rate": training.learning_rate, "method": finetuning.finetuning_type,
        "scheduler": training.lr_scheduler_type, "warmup": training.warmup_steps, "model": model.model_name_or_path,
        "datasets": [item.load_from for item in get_dataset_list(data.dataset, data.dataset_dir)]
        if data.dataset_dir == "yaml_configs" else None,
    }))
"""


def keys_of(name: str) -> dict[str, Any]:
    return yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """The parsed values of each file by its stem, read from the root of the repository."""
    command = [sys.executable, "-P", "-c", READ, *(str(path.relative_to(ROOT)) for path in CONFIGS.values())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = [line.removeprefix("READ") for line in ended.stdout.splitlines() if line.startswith("READ")]
    return {config["name"]: config for config in map(json.loads, lines)}


def test_what_the_files_mean(configs: dict[str, dict[str, Any]]) -> None:
    assert configs.keys() == NAMES
    assert all(config["keeps"] and config["loss_scaling"] == "stock" for config in configs.values())
    for name in FULL:
        assert PROMISED.items() <= configs[name].items() and configs[name]["budgets"][0] == 12288
    for name in PAPER:
        patches = None if name.startswith("ultrachat") else 32768
        assert (configs[name]["step_size"], configs[name]["budgets"]) == (128, [12288, patches]), name
    for name, config in configs.items():
        keys = keys_of(name)
        samples = keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"]
        assert samples >= 8 and config["step_size"] == 16 * samples, "usual batch sizes"
        assert keys.keys() >= {"freeze_vision_tower", "freeze_multi_modal_projector", "output_dir"}
        assert keys.get("bf16") or name not in FULL
    # Entries of yaml_configs/dataset_info.json as LLaMA-Factory reads them; MM-Mix writes its own.
    datasets = [configs[name]["datasets"] for name in FULL]
    assert datasets == [["hf_hub"], ["hf_hub"], ["file"], None]


@pytest.mark.parametrize(("name", "stage"), [("ds_z2", 2), ("ds_z3", 3)])
def test_deepspeed_file(name: str, stage: int) -> None:
    """accelerate's own reader reads the file; sizes are `auto`, because the Trainer knows them."""
    path = f"yaml_configs/deepspeed/{name}.json"
    config = HfDeepSpeedConfig(str(ROOT / path))
    assert (config.is_zero2(), config.is_zero3()) == (stage == 2, stage == 3)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert {config.get_value(key) for key in (*sizes, "gradient_clipping", "bf16.enabled")} == {"auto"}
    assert "scheduler" not in config.config  # it would count steps that are not known ahead
    assert path in {keys_of(name).get("deepspeed") for name in NAMES}
