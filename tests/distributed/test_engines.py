"""Full fine-tuning by several ranks: each engine trains as one stock process; a rank may have no rows.

With optimizer or parameters on the CPU the training is stock's (I9) for any K, or it is refused. That grid:
`pytest -s -m nightly tests/distributed/test_engines.py -k offload`.

"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from distributed.rows import INVALID, check_audits, check_books, losses, read_audits, row
from packaging.version import Version
from same_training import Config, check_same_training, launch, read, report
from same_training import train as train_here
from support import need, noise, once, shimmed, training_config, write_dataset

from odb_factory.refusals import SUMS_OFFLOADED_GRADIENTS

ACCUMULATION, BATCH = 2, 2
TOKEN_BUDGET, MAX_PATCHES = 256, 140
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
"""Relative tolerances. DeepSpeed adds up the squares of all gradients in one float32 tensor."""
WITH_VIDEO = {k for k in range(30) if k % 5 >= 3 and k % 3}
"""Rows with a video; half of them have pictures, too."""
LAYERS = ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]


@dataclass(frozen=True)
class Engine:
    """changes, env: select the engine. evidence: a file of its checkpoint that shows a sharded model or optimizer."""

    changes: dict[str, Any]
    evidence: str = "checkpoint-*/optimizer.pt"
    env: dict[str, str] = field(default_factory=dict)
    deepspeed_stage: int = 0
    balance: bool = True


KNOWN = {"ACCELERATE_TORCH_DEVICE": "cpu"}
"""The host knows the integers of a micro-batch, as on an accelerator. FSDP would treat cpu:0 as another device."""


def zero(stage: int, balance: bool = True) -> Engine:
    states = "zero_pp_rank_1_mp_rank_00_model_states.pt" if stage == 3 else "*zero_pp_rank_1_mp_rank_00_optim_states.pt"
    # No `use_cpu`, with which transformers leaves DeepSpeed out of the process group: the CPU is the only device.
    evidence = f"checkpoint-*/global_step*/{states}"
    return Engine({"use_cpu": False}, evidence, KNOWN, stage, balance)


def fsdp(version: int) -> Engine:
    config = {"version": version, "sync_module_states": False, "transformer_layer_cls_to_wrap": LAYERS}
    # FSDP1 crashes when it gathers the whole model on CPU. transformers 5.24 reads the key, others the environment.
    config["state_dict_type"] = sharded = "SHARDED_STATE_DICT"
    env = {**shimmed("fsdp_on_cpu"), **KNOWN, "FSDP_STATE_DICT_TYPE": sharded}
    evidence = "checkpoint-*/pytorch_model_fsdp_0/__1_0.distcp"
    return Engine({"fsdp": "full_shard auto_wrap", "fsdp_config": config}, evidence, env)


ENGINES = {
    "ddp": Engine({}, env=KNOWN),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "fsdp": fsdp(1),
    "fsdp2": fsdp(2),
    "zero3, not balanced": zero(3, balance=False),
}
RUN_ANYWAY = [("ddp", 2), ("zero3", 2), ("fsdp2", 2)]
NIGHTLY = [(name, num_ranks) for num_ranks in (2, 4) for name in ENGINES if (name, num_ranks) not in RUN_ANYWAY]


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 rows: 3 to 70 words, with none, one or two small pictures, a video, or both."""
    folder = tmp_path_factory.mktemp("mix")
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        noise(size).convert("RGB").save(folder / f"{name}.png")
    for k in range(4):
        noise((64, 64), seed=k).convert("RGB").save(folder / f"frame_{k}.png")
    pictures = [[], ["wide.png"], ["tall.png"], [], ["wide.png", "tall.png"]]
    video = [f"frame_{k}.png" for k in range(4)]
    rows = [row(3 + (k * 13) % 67, pictures[k % 5], [video] if k in WITH_VIDEO else []) for k in range(30)]
    write_dataset(folder, {"mix": rows})
    return folder


@pytest.fixture(scope="module")
def train(tiny_vl: Path, mix: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`train("zero3", 2)` returns the output of that training; each training runs once."""

    @once
    def train(name: str, num_ranks: int) -> Path:
        engine, folder = ENGINES[name], tmp_path_factory.mktemp(name.split(",")[0])
        odb = {"token_budget": TOKEN_BUDGET, "max_patches": MAX_PATCHES, "audit": True, "balance": engine.balance}
        config = configuration(tiny_vl, mix, folder / "out", num_ranks, odb=odb) | engine.changes
        if engine.deepspeed_stage:
            config["deepspeed"] = deepspeed_config(engine.deepspeed_stage, folder)
        launch([config], folder, num_ranks, env=engine.env)
        return folder / "out"

    return train


@pytest.fixture(scope="module")
def stock(tiny_vl: Path, mix: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each optimizer step of stock LLaMA-Factory in one process, with the same batches."""
    out = tmp_path_factory.mktemp("stock") / "out"
    train_here(configuration(tiny_vl, mix, out, num_ranks=1))
    return losses(out)


def configuration(model: Path, data: Path, out: Path, num_ranks: int, **changes: Any) -> dict[str, Any]:
    """8 rows per optimizer step on up to 4 ranks, in micro-batches of 2: 30 rows are 4 steps, the last of 6."""
    return training_config(
        model,
        data,
        out,
        dataset="mix",
        ddp_backend="gloo" if num_ranks > 1 else None,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=4 // num_ranks,
        freeze_vision_tower=False,
        num_train_epochs=2,
        save_strategy="epoch",
        save_total_limit=1,
        **changes,
    )


def deepspeed_config(stage: int, folder: Path) -> str:
    """The configuration of a ZeRO stage in LLaMA-Factory's `examples/deepspeed`."""
    need("deepspeed")
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
        | ({"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}),
    }
    path = folder / f"ds_z{stage}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [*RUN_ANYWAY, *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in NIGHTLY)]
)
def test_engine_trains_as_one_stock_process(train, stock, name: str, num_ranks: int) -> None:
    """I1, I2, I4, I9: the same batches, and stock's loss and gradient, in each optimizer step."""
    out = train(name, num_ranks)
    audits = read_audits(out, num_ranks)
    check_audits(
        audits,
        ids=range(30),
        accumulation=4 // num_ranks,
        batch=BATCH,
        token_budget=TOKEN_BUDGET,
        max_patches=MAX_PATCHES,
        epochs=2,
    )
    check_books(out, audits, left_out={})
    assert list(out.glob(ENGINES[name].evidence)), f"{name} was not in use: {[str(p) for p in out.rglob('*')]}"
    for (loss, norm), (expected_loss, expected_norm) in zip(losses(out), stock, strict=True):
        assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)
    groups = [{*line["ids"]} for audit in audits for line in audit]
    assert num_ranks > 2 or any(group & WITH_VIDEO and group - WITH_VIDEO for group in groups), "the tower runs once"
    assert (json.loads((out / "odb_summary.json").read_text())["moved"] > 0) == ENGINES[name].balance
    if ENGINES[name].balance:
        assert audits == read_audits(train("ddp", num_ranks), num_ranks), "I6"


def test_a_rank_whose_rows_are_all_dropped_idles_to_the_end(tiny_vl, tmp_path) -> None:
    """I1, I2 and I7 with an empty share under ZeRO-3, which gathers parameters in every forward, with or without
    pictures. With `disable_shuffling` row i goes to rank i % 2."""
    noise((96, 64)).convert("RGB").save(tmp_path / "picture.png")
    rows = [row(3 + (k * 11) % 38, ["picture.png"] * (k % 2)) for k in range(12)]
    write_dataset(tmp_path, {"rows": [item for usable in rows for item in (usable, INVALID)]})
    odb = {"token_budget": 256, "buffer_size": 16, "audit": True, "global_batch_size": "fill", "balance": False}
    changes = {"dataset": "rows", "disable_shuffling": True, "gradient_accumulation_steps": ACCUMULATION}
    changes |= {"deepspeed": deepspeed_config(3, tmp_path), "use_cpu": False, "ddp_backend": "gloo"}
    launch([training_config(tiny_vl, tmp_path, tmp_path / "out", odb=odb, **changes)], tmp_path)
    audits = read_audits(tmp_path / "out", 2)
    assert all(line["idle"] for line in audits[1])
    check_audits(audits, ids=range(0, 24, 2), accumulation=ACCUMULATION, token_budget=256, fill=True)
    check_books(tmp_path / "out", audits, left_out={"invalid": 12})


OFFLOADED = {"nothing": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}
BUDGETS = {"one": 4096, "several": 200}
"""token_budget by the number of micro-batches of an optimizer step."""
GRID = [(1, "nothing"), (1, "optimizer"), (2, "nothing"), (3, "nothing"), (3, "optimizer"), (3, "parameters")]
LIMIT_S = 280


def offloading(stage: int, offloaded: str, folder: Path) -> str:
    """A configuration with torch's AdamW: DeepSpeed's AdamW for a CPU takes minutes to compile."""
    path = Path(deepspeed_config(stage, folder))
    config = json.loads(path.read_text(encoding="utf-8")) | {"zero_force_ds_cpu_optimizer": False}
    for part in OFFLOADED[offloaded]:
        config["zero_optimization"][f"offload_{part}"] = {"device": "cpu"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    [
        pytest.param(2, "optimizer", marks=pytest.mark.versions),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in GRID),
    ],
)
def test_offload(stage: int, offloaded: str, config_of: Config, tmp_path: Path) -> None:
    """On two ranks: odb with both budgets, and stock."""
    common: dict[str, Any] = {
        "deepspeed": offloading(stage, offloaded, tmp_path),
        "use_cpu": False,
        "max_samples": 24,
        "val_size": 0,
        "eval_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    blocks = {name: {"odb": {"token_budget": tokens, "audit": True}} for name, tokens in BUDGETS.items()}
    configs = [config_of("sft", tmp_path / name, **common | block) for name, block in (blocks | {"stock": {}}).items()]
    release = Version(metadata.version("deepspeed"))
    if (stage, offloaded) == (2, "optimizer") and release < Version(SUMS_OFFLOADED_GRADIENTS):
        for outcome in launch(configs, tmp_path, limit_s=LIMIT_S, may_fail=True):
            assert outcome.returncode != 0
            assert "deepspeed.zero_optimization.offload_optimizer: " in outcome.output
        assert not (tmp_path / "one").exists(), "refused before a file is written"
        return
    launch(configs, tmp_path, limit_s=LIMIT_S)
    with_one, with_several, stock = (read(tmp_path / name, 2) for name in (*BUDGETS, "stock"))
    assert max(with_one.num_micro_batches) == 1 < min(with_several.num_micro_batches)
    for name, ours in (("one", with_one), ("several", with_several)):
        deviation = check_same_training(ours, stock, shards_parameters=stage == 3)
        report(f"ZeRO-{stage}, {offloaded} offloaded, {name} micro-batches", deviation)
