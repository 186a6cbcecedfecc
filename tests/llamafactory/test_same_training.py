"""I8, I9 and I10: the same YAML with an `odb:` block is stock's training, in every stage, without padding.

`CELLS` names the trainings, `SETS` where they run: one rank in this process, several ranks in the processes of one
launch. The grid: `pytest -s -m nightly tests/llamafactory/test_same_training.py`; -s prints the differences from stock.
docs/engines.md has the table.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio
from distributed.rows import INVALID, row
from distributed.test_engines import ENGINES, NORM_TOLERANCE, deepspeed_config
from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from same_training import ODB, RELATIVE, Cell, Config, Training, check_cell, run_cells, train
from support import CHECKPOINTS, once, read_jsonl, shimmed, training_config, write_dataset

LIMIT_S, GRID_LIMIT_S = 540, 1500
PADDED, AUTO = {"layout": "padded"}, {"layout": "auto"}
IMAGES = {"template": "qwen3_vl", "val_size": 2, "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
ALBUMS, PICTURES = IMAGES | {"dataset": "albums"}, IMAGES | {"dataset": "pictures"}
OF_IMAGES = {"token_budget": 500, "max_patches": 300}
TIGHT = {"token_budget": 256}
LORA, FREEZE = {"finetuning_type": "lora"}, {"finetuning_type": "freeze", "freeze_trainable_layers": 1}
QLORA = LORA | {"quantization_bit": 4}
ONCE = {"num_train_epochs": 1}
UNEVEN = IMAGES | {"dataset": "uneven", "eval_dataset": "albums", "val_size": 0, "disable_shuffling": True} | ONCE
UNEVEN |= {"eval_steps": 2}
"""The first of two ranks has all images, unless samples move; evaluated before the last optimizer step."""
SHARED = {"token_budget": 500, "max_patches": 120, "balance": False, "balance_encoder": True}
FROZEN = {"freeze_vision_tower": True}
COMPILED = {"torch_compile": True}
NO_EVAL = {"eval_strategy": "no"}
SAVED = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True, "num_train_epochs": 3}
ASFT = {"use_asft_loss": True} | NO_EVAL
"""Stock cannot evaluate with this loss."""
SMOOTHED = {"label_smoothing_factor": 0.1}
ON_EACH = {"average_tokens_across_devices": False}
LOSSES: dict[str, dict[str, Any]] = {
    "dft": {"use_dft_loss": True},
    "eaft": {"use_eaft_loss": True},
    "asft": ASFT,
    "smoothed": SMOOTHED,
    "smoothed, all labels": SMOOTHED | {"train_on_prompt": True},
}
"""Losses of LLaMA-Factory or the Trainer; each has another divisor."""
VARIANTS = {
    "orpo": {"pref_loss": "orpo"},
    "simpo": {"pref_loss": "simpo"},
    "ipo": {"pref_loss": "ipo"},
    "hinge": {"pref_loss": "hinge"},
    "ftx": {"pref_ftx": 0.5, "pref_beta": 0.02},
    "ld": {"ld_alpha": 0.5, "pref_beta": 0.02},
}
"""Stock sums log-probabilities of padded rows in float32, with errors of 3e-5; a pref_beta of 0.1 makes them 3e-6 in
the gradients of learnt pairs, also in float64 models."""
WEIGHED = {"pref_ftx": 0.5, "kto_chosen_weight": 1.3, "kto_rejected_weight": 0.7, "learning_rate": 2e-4}
IS_NEW = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if IS_NEW else {"group_by_length": True}
AT_ONCE = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
"""Stock's micro-batch is the optimizer step."""

CELLS: dict[str, Cell] = {
    "sft": Cell(block=TIGHT),
    "sft, saved": Cell(changes=SAVED, block=TIGHT),
    "sft, tied": Cell(model="tied", block=TIGHT),
    "sft, padded": Cell(block=PADDED),
    "sft, images": Cell("sft", ALBUMS, "tied_vl", OF_IMAGES, counts_memory=True),
    "sft, images, saved": Cell("sft", ALBUMS | SAVED, "tied_vl", OF_IMAGES),
    "sft, images, padded": Cell("sft", ALBUMS, "tied_vl", OF_IMAGES | PADDED),
    "sft, compiled": Cell("sft", COMPILED, block=TIGHT),
    "sft, images, compiled": Cell("sft", ALBUMS | COMPILED, "tied_vl", OF_IMAGES),
    "sft, images, qlora": Cell("sft", ALBUMS | QLORA, "tied_vl", OF_IMAGES, counts_memory=True),
    "sft, images and videos": Cell(
        "sft",
        ALBUMS | {"dataset": "scenes", "use_reentrant_gc": False},  # else DDP refuses a tower that stock calls twice
        "tied_vl",
        {"token_budget": 500, "max_patches": 160},
        counts_memory=True,
    ),
    "sft, images, exact": Cell("sft", ALBUMS, "tied_vl", OF_IMAGES | {"loss_scaling": "exact"}, AT_ONCE),
    "sft, Qwen3.5": Cell("sft", {}, "text_delta", TIGHT),
    "sft, Qwen3.5, images": Cell("sft", ALBUMS, "vl_delta", OF_IMAGES),
    "sft, Qwen2-Audio": Cell(
        "sft",
        {"template": "qwen2_audio", "dataset": "sounds", "dataloader_num_workers": 0},
        "qwen2_audio",
        {"token_budget": 512, "max_patches": 1000},
        counts_memory=True,
    ),
    "sft, Mamba": Cell("sft", {"disable_gradient_checkpointing": True}, "mamba", AUTO),
    "sft, Mamba, means of ranks": Cell("sft", ON_EACH | {"disable_gradient_checkpointing": True}, "mamba", AUTO),
    "sft, accuracy": Cell("sft", {"compute_accuracy": True, "eval_steps": 2}, block=TIGHT),
    "sft, accuracy, images": Cell("sft", ALBUMS | {"compute_accuracy": True}, "tied_vl", OF_IMAGES),
    "pt": Cell("pt", block={"token_budget": 128}),
    "pt, padded": Cell("pt", block=PADDED),
    "rm": Cell("rm"),
    "rm, images": Cell("rm", PICTURES | ONCE, "vl", OF_IMAGES),
    "dpo": Cell("dpo"),
    "dpo, images": Cell("dpo", PICTURES | ONCE | {"per_device_train_batch_size": 2}, "tied_vl", OF_IMAGES),
    "dpo, images, lora": Cell(
        "dpo",
        PICTURES | LORA | {"disable_gradient_checkpointing": not CHECKPOINTS},
        "tied_vl",
        OF_IMAGES,
        counts_memory=True,
    ),
    "kto": Cell("kto", WEIGHED, counts_memory=True),
    "kto, exact": Cell("kto", WEIGHED, block={"loss_scaling": "exact", "token_budget": 256}, stock=AT_ONCE),
    **{name: Cell("dpo", changes) for name, changes in VARIANTS.items()},
    **{name: Cell("sft", changes, block=TIGHT) for name, changes in LOSSES.items()},
    **{
        # With label smoothing this model counts the first label of a sample, which a flat row does not have.
        f"{name}, images": Cell("sft", ALBUMS | changes, "tied_vl", OF_IMAGES | (AUTO if "smoothed" in name else {}))
        for name, changes in LOSSES.items()
    },
    "dft, means of ranks": Cell("sft", LOSSES["dft"] | ON_EACH, block=TIGHT),
}
ENCODER: dict[str, dict[str, Any]] = {
    "": {},
    ", lora": LORA,
    ", videos": {"dataset": "films"},
    ", merger": FROZEN,
    ", merger and videos": FROZEN | {"dataset": "films"},
    ", frozen": FROZEN | {"freeze_multi_modal_projector": True},
    ", not checkpointed": {"disable_gradient_checkpointing": True},
    ", not reentrant": {"use_reentrant_gc": False},
}
CELLS |= {f"encoder{name}": Cell("sft", UNEVEN | more, "tied_vl", SHARED) for name, more in ENCODER.items()}
CELLS["encoder, dpo, lora"] = Cell(
    "dpo",
    PICTURES | ONCE | LORA | {"disable_gradient_checkpointing": not CHECKPOINTS},
    "tied_vl",
    SHARED | {"balance": True},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "qlora": QLORA,
    "dora": LORA | {"use_dora": True},
    "lora+": LORA | {"loraplus_lr_ratio": 16.0},
    "oft": {"finetuning_type": "oft"},
    "freeze": FREEZE,
    "train_on_prompt": {"train_on_prompt": True},  # stock counts labels that nothing predicts
    "drop_last": {"dataloader_drop_last": True, "per_device_train_batch_size": 4},
    "linear, max_steps": {"max_steps": 7, "lr_scheduler_type": "linear"},
    "epochs, in order": {"disable_shuffling": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "not checkpointed": {"disable_gradient_checkpointing": True},
    "checkpointed, not reentrant": {"use_reentrant_gc": False},
    "eager": {"flash_attn": "disabled"},
    "by length": BY_LENGTH | ONCE | NO_EVAL,
}
CELLS |= {f"sft, {name}": Cell("sft", changes, block=TIGHT) for name, changes in SETTINGS.items()}
EVALUATED = {"val_size": 18, "per_device_eval_batch_size": 4, "eval_steps": 1}
"""On two ranks: two batches, and a last batch of two rows, for which stock repeats rows."""
CELLS |= {
    f"evaluation, {name}": Cell(
        stage, ONCE | EVALUATED | dict(changes), model, TIGHT | {"eval_token_budget": 400} | block
    )
    for name, (stage, changes, model, block) in {
        "all labels": ("sft", {"train_on_prompt": True, "compute_accuracy": True}, "text", {}),
        "means of ranks": ("sft", ON_EACH, "text", PADDED),
        "images": (
            "sft",
            IMAGES | {"dataset": "albums", "val_size": 6, "per_device_eval_batch_size": 2},
            "vl",
            OF_IMAGES,
        ),
        "smoothed": ("sft", SMOOTHED, "text", {}),
    }.items()
}
CELLS |= {
    f"{name}, {tuning}": Cell(CELLS[name].stage, CELLS[name].changes | changes, CELLS[name].model, CELLS[name].block)
    for name in ("sft, images", "pt", "rm", "dpo", "dpo, images", "kto")
    for tuning, changes in (("lora", LORA), ("qlora", QLORA), ("freeze", FREEZE))
    if f"{name}, {tuning}" not in CELLS
}

ON_ONE = (
    "sft, saved", "sft, images, saved", "sft, images, exact", "sft, images and videos", "sft, images, qlora",
    "sft, Qwen3.5, images", "sft, by length",
    "sft, Qwen2-Audio", "sft, Mamba", "sft, accuracy", "asft, images", "dft", "eaft, images",
    "smoothed, images", "pt, padded", "dpo, images, lora", "orpo", "simpo", "kto", "kto, exact",
)  # fmt: skip
EVALUATIONS = tuple(name for name in CELLS if name.startswith("evaluation"))
ON_TWO = ("sft", "sft, images", "sft, qlora", "pt", "rm", "dpo", "kto", "encoder, lora", *EVALUATIONS)
TUNED = ("sft", "sft, images", "pt", "rm", "dpo", "dpo, images", "kto")
ON_ENGINES = {
    "full": (*TUNED, "sft, padded", "pt, padded", "sft, Qwen3.5", "orpo", "dft", "eaft", "asft, images"),
    "lora": tuple(f"{name}, lora" for name in TUNED),
    "qlora": ("sft, qlora", "sft, images, qlora"),
    "freeze": tuple(f"{name}, freeze" for name in TUNED),
}
OF_FSDP = {
    "text": ["Qwen2DecoderLayer"],
    "text_delta": ["Qwen3_5DecoderLayer"],
    "tied_vl": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
}
EVIDENCE = {
    "zero1": "DeepSpeedZeroOptimizer",
    "zero2": "DeepSpeedZeroOptimizer",
    "zero3": "ZeRO-3",
    "fsdp": "FullyShardedDataParallel",
    "fsdp2": "FSDPModule",
}
"""Class of the model or optimizer that shows the engine in use: accelerate falls back to DDP without a message."""


@dataclass(frozen=True)
class Set:
    """Cells that are trained in the processes of one launch. env: added to the environment of this process."""

    num_ranks: int
    cells: tuple[str, ...]
    engine: str = "ddp"
    env: Mapping[str, str] = field(default_factory=dict)


def of_engine(engine: str, names: tuple[str, ...]) -> Set:
    # Stock splits a reward model that was saved whole, but FSDP saves no whole model on CPU.
    names = tuple(name for name in names if not (engine.startswith("fsdp") and CELLS[name].stage == "rm"))
    # Rows of Qwen3.5 need different numbers of groups; with ZeRO-3 all rows have the same number.
    return Set(2, names, engine, shimmed("small_groups") if engine in ("zero3", "fsdp2") else {})


ON_TWO_COMPILED = ("sft, compiled", "sft, images, compiled")
IN_OTHER_SETS = (*ON_TWO_COMPILED, *(name for name in CELLS if name.startswith("encoder")))
MORE_ON_ONE = tuple(name for name in CELLS if name not in (*ON_ONE, *EVALUATIONS, *IN_OTHER_SETS))
MORE_ON_TWO = tuple(
    name for name in CELLS if name not in (*ON_TWO, *ON_TWO_COMPILED, "sft, Qwen2-Audio") and not CELLS[name].stock
)
SETS = {"1_rank": Set(1, ON_ONE), "2_ranks": Set(2, ON_TWO)}
GRID = (
    {"1_rank_more": Set(1, MORE_ON_ONE), "2_ranks_more": Set(2, MORE_ON_TWO)}
    | {"2_ranks_compiled": Set(2, ON_TWO_COMPILED)}
    | {"4_ranks": Set(4, ("sft", "sft, images", "dpo", "kto"))}
    | {
        f"{engine}_encoder": of_engine(engine, tuple(f"encoder, {name}" for name in ("lora", "videos", "merger")))
        for engine in EVIDENCE
    }
    | {f"{engine}_{tuning}": of_engine(engine, names) for engine in EVIDENCE for tuning, names in ON_ENGINES.items()}
)
FINETUNING = FinetuningArguments.__dataclass_fields__
VERSIONS = {("1_rank", "kto"), ("1_rank", "sft, images, saved"), ("2_ranks", "sft")}
"""Cells that also run with every supported release."""

BY_BUDGET = {"sft, accuracy": True, "dpo, images, lora": True, "kto": False, "smoothed, images": False}
"""Whether an evaluation uses the budget: not if a figure depends on the rows of a batch, or the trainer forbids it."""

Trained = Callable[[str, str], tuple[Training, Training]]


def load_wav(path: str) -> tuple[torch.Tensor, int]:
    """Replaces torchaudio's function, which needs torchcodec and FFmpeg."""
    with wave.open(path, "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return torch.from_numpy(samples.astype("f4") / 2**15)[None], file.getframerate()


@pytest.fixture(scope="module")
def trained(config_of: Config, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained("2_ranks", "dpo")`: the trainings with odb and with stock; a set of several ranks runs all its cells."""

    @once
    def of_set(name: str) -> dict[str, tuple[Training, Training]]:
        group, folder = (SETS | GRID)[name], tmp_path_factory.mktemp("set")
        engine = ENGINES[group.engine]
        common: dict[str, Any] = engine.changes | ONCE | (NO_EVAL if group.engine != "ddp" else {})
        if group.num_ranks == 4:  # whole micro-batches: stock would repeat rows
            common["per_device_train_batch_size"] = 1
        if engine.deepspeed_stage:
            common["deepspeed"] = deepspeed_config(engine.deepspeed_stage, folder)
        cells = {}
        for cell in filter(is_here, group.cells):
            changes = dict(CELLS[cell].changes) | common
            if "fsdp" in common:
                layers = OF_FSDP[CELLS[cell].model]
                changes["fsdp_config"] = common["fsdp_config"] | {"transformer_layer_cls_to_wrap": layers}
            cells[cell] = replace(CELLS[cell], changes=changes)
        limit_s = LIMIT_S if name in SETS else GRID_LIMIT_S
        env = engine.env | shimmed("qlora_on_cpu") | group.env
        return run_cells(cells, config_of, folder, group.num_ranks, limit_s=limit_s, env=env)

    def trained(name: str, cell: str) -> tuple[Training, Training]:
        if (SETS | GRID)[name].num_ranks > 1:
            return of_set(name)[cell]
        return run_cells({cell: CELLS[cell]}, config_of, tmp_path_factory.mktemp("cell"))[cell]

    return trained


def is_here(cell: str) -> bool:
    """Whether the loss and the packages of a cell are installed."""
    if CELLS[cell].changes.get("quantization_bit") and find_spec("bitsandbytes") is None:
        return False
    return all(key in FINETUNING for key in CELLS[cell].changes if key.startswith("use_") and key.endswith("_loss"))


def parameters() -> list[Any]:
    cells = []
    for name, group in (SETS | GRID).items():
        for cell in group.cells:
            marks = [pytest.mark.timeout(LIMIT_S + 60)]
            if name in GRID:
                marks = [pytest.mark.nightly, pytest.mark.timeout(GRID_LIMIT_S + 300)]
            marks += [pytest.mark.versions] * ((name, cell) in VERSIONS)
            cells.append(pytest.param(name, cell, id=f"{name}: {cell}", marks=marks))
    return cells


@pytest.mark.parametrize(("name", "cell"), parameters())
def test_the_same_training(trained, name: str, cell: str, monkeypatch, caplog) -> None:
    if not is_here(cell):
        pytest.skip("these releases have no such loss or model, or bitsandbytes is not installed")
    caplog.set_level("INFO")
    monkeypatch.setattr(torchaudio, "load", load_wav)
    if "qlora" in cell:
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # as the module `qlora_on_cpu`
    group = (SETS | GRID)[name]
    ours, stock = trained(name, cell)
    shards = group.engine in ("zero3", "fsdp", "fsdp2")
    differences = check_cell(f"{name}: {cell}", CELLS[cell], ours, stock, group.num_ranks, shards)
    assert EVIDENCE.get(group.engine, "AdamW") in ours.engine & stock.engine
    assert not group.engine.startswith("fsdp") or not stock.weights, "shards"
    assert differences.grad_norm < (NORM_TOLERANCE if group.engine.startswith("zero") else RELATIVE)
    if cell.startswith("encoder"):
        passes = 2 if "dpo" in cell else 1  # of the tower: policy and reference
        assert any(line["encoder_patches"] != passes * line["patches"] for line in ours.audit), "images move"
    logits = [line for line in caplog.messages if line.startswith("loss: with logits")]
    assert not logits or cell not in ("sft, Qwen2-Audio", "sft, Mamba")
    if group.num_ranks == 1 and cell in BY_BUDGET:
        assert any(line.startswith("evaluated ") for line in caplog.messages) == BY_BUDGET[cell]


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ["sft", "sft, images", "pt", "dpo", "kto", "sft, lora", "kto, lora"])
def test_a_resumed_training_is_the_same(cell: str, config_of: Config, tmp_path: Path) -> None:
    """In the middle of an epoch. LLaMA-Factory cannot resume a full training of a reward model."""
    training, out = CELLS[cell], tmp_path / "out"
    changes = dict(training.changes) | {"save_strategy": "steps", "save_steps": 3}
    changes["odb"] = ODB | dict(training.block) | {"layout": "flat"}
    whole = train(config_of(training.stage, out, model=training.model, **changes))
    (saved,) = out.glob("*model.safetensors")
    saved.unlink()
    (out / "odb_audit_rank0.jsonl").unlink()
    changes |= {"resume_from_checkpoint": str(out / "checkpoint-3"), "overwrite_output_dir": False}
    run_exp(config_of(training.stage, out, model=training.model, **changes))
    assert read_jsonl(out / "odb_audit_rank0.jsonl")[0]["optimizer_step"] == 4
    weights = load_file(saved)
    assert weights.keys() == whole.weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.weights.items())


def test_rows_that_llamafactory_drops_are_reported(tiny_text, tmp_path, caplog) -> None:
    """Stock shuffles the rows that its preprocessing pass keeps, which are unknown without the pass."""
    write_dataset(tmp_path, {"texts": [INVALID if k % 4 == 3 else row(3 + k) for k in range(16)]})
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "disable_shuffling": True}
    run_exp(training_config(tiny_text, tmp_path, tmp_path / "out", odb=TIGHT, **steps))
    (message,) = [message for message in caplog.messages if "LLaMA-Factory's preprocessing drops" in message]
    assert "(1 by optimizer step 1)" in message and "tokenized_path" in message
