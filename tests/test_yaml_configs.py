"""Every file of yaml_configs/ is accepted by LLaMA-Factory's real parser and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from odb_factory.config import ODBConfig

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(ROOT.glob("yaml_configs/**/*.yaml"))
FULL = ("ultrachat", "llava_150k", "sharegpt4o", "mm_mix")
PAPER = {f"{data}_{size}_{how}" for data in FULL[:3] for size in ("2b", "8b") for how in ("full", "lora")}
PAPER |= {"mm_mix_2b_full"}
PROMISED = {"model": "Qwen/Qwen3-VL-2B-Instruct", "method": "full", "cutoff_len": 16384, "bf16": True}
PROMISED |= {"learning_rate": 1e-5, "scheduler": "cosine", "warmup": 0.03}
NAMES = {"tiny_cpu", *FULL, "mm_mix_lora", "qwen2_5_vl_qlora", "two_nodes", *PAPER}

# Read as `llamafactory-cli train FILE key=value ...` reads it. Two keys depend on the machine and are
# overridden, nothing else: `use_cpu` (bf16 is checked against the device that trains) and `deepspeed`
# (which must be installed, and started by torchrun); its files have a test of their own below. A model that
# is to be made first is not here.
PARSE = """
import json, sys
from llamafactory.data.parser import get_dataset_list
from llamafactory.data.template import TEMPLATES
from llamafactory.hparams import get_train_args

parsed = {}
for path in sys.argv[1:]:
    sys.argv[1:] = [path, "use_cpu=true", "deepspeed=null"]
    if "model_name_or_path: ./" in open(path).read():
        sys.argv.append("model_name_or_path=.")
    model, data, training, finetuning, _ = get_train_args()
    assert data.template in TEMPLATES, data.template
    parsed[path] = {
        "cutoff_len": data.cutoff_len, "bf16": training.bf16, "learning_rate": training.learning_rate,
        "scheduler": training.lr_scheduler_type, "warmup": training.warmup_steps,
        "method": finetuning.finetuning_type, "model": model.model_name_or_path,
        "datasets": [item.load_from for item in get_dataset_list(data.dataset, data.dataset_dir)]
        if data.dataset_dir == "yaml_configs" else None,
    }
print("PARSED" + json.dumps(parsed))
"""

# As `odb-factory plan` reads it, before it looks at the model and the data.
PARSE_FOR_PLAN = """
import sys
from pathlib import Path
from odb_factory.llamafactory import activation
from odb_factory.cli.plan import read

activation.activate()
for path in sys.argv[1:]:
    training = read(Path(path), ranks=16)
    print("PLANNED", Path(path).stem, training.step_size, training.token_budget, training.config.max_patches)
"""


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, Any]]:
    """What the parser made of each file, by the file's stem; read from the root of the repository, as it says."""
    paths = [str(path.relative_to(ROOT)) for path in CONFIGS]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PARSE, *paths], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    answer = next(line for line in ended.stdout.splitlines() if line.startswith("PARSED"))
    return {Path(path).stem: values for path, values in json.loads(answer.removeprefix("PARSED")).items()}


def test_all_files_are_parsed(parsed: dict[str, dict[str, Any]]) -> None:
    assert set(parsed) == NAMES


@pytest.mark.parametrize("name", FULL)
def test_full_fine_tuning_says_what_it_promises(parsed: dict[str, dict[str, Any]], name: str) -> None:
    assert PROMISED.items() <= parsed[name].items()
    block = load(ROOT / "yaml_configs" / f"{name}.yaml")["odb"]
    assert (block["token_budget"], block["buffer_size"]) == (12288, 1024)


def test_data_sets_are_known_to_llamafactory(parsed: dict[str, dict[str, Any]]) -> None:
    """Entries of yaml_configs/dataset_info.json as LLaMA-Factory reads them; MM-Mix writes its own."""
    assert parsed["ultrachat"]["datasets"] == ["hf_hub"]
    assert parsed["llava_150k"]["datasets"] == ["hf_hub"]
    assert parsed["sharegpt4o"]["datasets"] == ["file"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_block_and_batch_size(path: Path) -> None:
    """Optimizer steps are kept, and hold what people train with."""
    config = load(path)
    kept = ODBConfig.from_block(config["odb"])
    assert kept.keeps and kept.loss_scaling == "stock"
    samples = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert samples >= 8
    assert kept.global_batch_size in ("keep", 16 * samples), "two nodes of eight GPUs"
    assert all(key in config for key in ("freeze_vision_tower", "freeze_multi_modal_projector", "output_dir"))


def test_the_papers_experiments_are_read_by_plan() -> None:
    """Of 16 ranks, two nodes: samples of an optimizer step and budgets."""
    paths = [str(path.relative_to(ROOT)) for path in CONFIGS if path.parent.name == "paper"]
    command = [sys.executable, "-P", "-c", PARSE_FOR_PLAN, *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr[-4000:]
    planned = {words[1]: words[2:] for words in map(str.split, ended.stdout.splitlines()) if words[:1] == ["PLANNED"]}
    assert planned.keys() == PAPER
    for name, found in planned.items():
        assert found == ["128", "12288", "None" if name.startswith("ultrachat") else "32768"], name


@pytest.mark.parametrize(("name", "stage"), [("ds_z2", 2), ("ds_z3", 3)])
def test_deepspeed_file(name: str, stage: int) -> None:
    """Read by accelerate's own reader; sizes are left to the Trainer, which knows them."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    path = ROOT / "yaml_configs" / "deepspeed" / f"{name}.json"
    config = HfDeepSpeedConfig(str(path))
    assert (config.is_zero2(), config.is_zero3()) == (stage == 2, stage == 3)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert {config.get_value(key) for key in (*sizes, "gradient_clipping", "bf16.enabled")} == {"auto"}
    assert "scheduler" not in config.config  # it would count steps that are not known ahead


def test_deepspeed_files_are_where_the_configs_say() -> None:
    named = {config["deepspeed"] for config in map(load, CONFIGS) if "deepspeed" in config}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("yaml_configs/deepspeed/*.json")} == named
