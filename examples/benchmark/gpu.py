"""One GPU: real LLaMA-Factory on random weights of real model sizes, stock's ways of batching beside odb.

    python examples/benchmark/gpu.py --collect wheels    # elsewhere: what LLaMA-Factory needs beside torch and
                                                         # transformers, as wheels for a machine without a network
    python -m pip install --no-deps wheels/*.whl && python -m pip install --no-deps --no-build-isolation .
    python examples/benchmark/gpu.py --check             # versions, a measured matrix product, each attention kernel
    python examples/benchmark/gpu.py --model qwen3_vl_2b --limit 560   # again, until it says that all is done
    python examples/benchmark/gpu.py --table             # what is there so far
    python examples/benchmark/gpu.py --model qwen3_1_7b --tiny         # tiny layers on a CPU: shows that it works

All contestants train the same samples, and all but length-grouped and `neat_packing` the same in each optimizer step.
The losses are compared with those of stock with one row, whose steps odb is given; stock's own mean over a
vision-language model's optimizer step depends on the rows.
Each training is a process forked from one that has imported LLaMA-Factory, and leaves a JSON file; one that has it is
not run again, and none begins that would not end before `--limit`. Text lengths are those of MM-Mix
(simulation.py); pictures are JPEGs of noise. The first two optimizer steps are not timed. Real tokens: each sample's
own, once. Waiting: from the end of an optimizer step on the device to the begin of the next one. MFU: 6 operations a
weight and token (LoRA 4, a frozen tower 2); those of attention are not counted.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import page
from simulation import PROFILES
from workloads import forked, of_tokenizer, vocabulary, walker

ROOT = Path(__file__).resolve().parents[2]
WHEELS = (
    "llamafactory==0.9.5", "datasets==4.0.0", "dill<0.3.9", "multiprocess<0.70.17", "peft==0.18.1", "trl==0.24.0",
    "tyro<0.9", "docstring-parser", "shtab", "typeguard", "fire", "termcolor", "omegaconf==2.3.0", "torchdata==0.11.0",
    "antlr4-python3-runtime==4.9.3",
)  # fmt: skip
"""Beside an image with torch 2.11, transformers 5.17, accelerate, pyarrow, pandas and matplotlib: 3 MiB."""
PEAKS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}
"""Dense bf16 operations a second, by the data sheets of NVIDIA and a word of the device's name."""
SAMPLES_A_STEP, WARM_UP, CUTOFF_LEN = 32, 2, 8192
PICTURE_SHARE = 0.7
SIDES = (256, 384, 512, 768, 1024)
MOST_PIXELS = 1024 * 1024
SLOWEST_S = 150
"""A training that needs longer than the rest of `--limit` is not begun; this is what the first one may need."""

_QWEN3 = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN2_5_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
_QWEN3_5 = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "tie_word_embeddings": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


@dataclass(frozen=True)
class Model:
    """text, vision: of the config as the model's authors publish it (its config.json), in all that decides about time
    and memory. tiny: what `--tiny` puts in its place. rows: of the fixed batches that are tried."""

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any] | None
    template: str
    finetuning: str = "full"
    patch: int = 16
    rows: tuple[int, ...] = (1, 2, 4)
    packs: bool = False

    @property
    def token_budget(self) -> int:
        """The padded tokens of a fixed batch of two of the longest samples."""
        return 2 * CUTOFF_LEN


MODELS = {
    "qwen3_1_7b": Model("Qwen3", _QWEN3, None, "qwen3_nothink", packs=True),
    "qwen3_vl_2b": Model(
        "Qwen3VL",
        _QWEN3 | {"rope_scaling": _MROPE},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
        "qwen3_vl_nothink",
    ),
    "qwen2_5_vl_7b": Model(
        "Qwen2_5_VL",
        _QWEN2_5_7B,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        "qwen2_vl",
        finetuning="lora",
        patch=14,
    ),
    "qwen3_5_2b": Model("Qwen3_5", _QWEN3_5, None, "qwen3_nothink"),
}  # fmt: skip
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096}  # fmt: skip
TINY_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
Result = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------------------
# Model and data.


def build(model: Model, folder: Path, samples: int, tiny: bool) -> tuple[Path, Path]:
    """The folders of a random model, made on the device in bf16, and of a data set; once."""
    words = vocabulary()
    place, data = folder / "model", folder / "data"
    if not (place / "config.json").exists():
        _save_model(model, place, of_tokenizer(words), tiny)
    if not (data / "dataset_info.json").exists():
        _save_data(data, walker(words, np.random.default_rng(0)), samples, model.vision is not None, tiny)
    return place, data


def _save_model(model: Model, place: Path, text: str, tiny: bool) -> None:
    import torch
    import transformers

    from odb_factory.cli.tiny_model import train_tokenizer, write_processor

    draft = place.with_name("draft")
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer = train_tokenizer(text)
    tokenizer.save_pretrained(draft)
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = {f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    text_config = model.text | (_tiny_text(model) if tiny else {})
    text_config |= {"max_position_embeddings": 32768, "eos_token_id": tokenizer.eos_token_id}
    text_config |= {"pad_token_id": tokenizer.pad_token_id}
    prefix = model.kind
    if model.vision is not None:
        vision = model.vision | (_tiny_vision(model) if tiny else {}) | {"patch_size": model.patch}
        config = getattr(transformers, f"{prefix}Config")(
            text_config=text_config, vision_config=vision,
            tie_word_embeddings=text_config.get("tie_word_embeddings", False), **ids,
        )  # fmt: skip
        write_processor(draft)
        _adapt_processor(draft, model)
        kind = getattr(transformers, f"{prefix}ForConditionalGeneration")
    else:
        name = f"{prefix}TextConfig" if hasattr(transformers, f"{prefix}TextConfig") else f"{prefix}Config"
        config = getattr(transformers, name)(**text_config)
        kind = getattr(transformers, f"{prefix}ForCausalLM")
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        kind._from_config(config, dtype=torch.bfloat16).save_pretrained(draft)
    draft.rename(place)


def _tiny_text(model: Model) -> dict[str, Any]:
    changes = dict(TINY)
    if "rope_scaling" in model.text:
        sections = [2, 3, 3] if model.kind == "Qwen2_5_VL" else [4, 2, 2]
        changes["rope_scaling"] = model.text["rope_scaling"] | {"mrope_section": sections}
    if "linear_num_key_heads" in model.text:
        changes |= {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
        changes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return changes


def _tiny_vision(model: Model) -> dict[str, Any]:
    last = "fullatt_block_indexes" if "fullatt_block_indexes" in (model.vision or {}) else "deepstack_visual_indexes"
    return TINY_VISION | {last: [1]}


def _adapt_processor(folder: Path, model: Model) -> None:
    """The processor of the tiny Qwen3-VL, for larger pictures and the patches of this model."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings |= {"patch_size": model.patch, "size": {"shortest_edge": 4096, "longest_edge": MOST_PIXELS}}
        if model.kind == "Qwen2_5_VL":
            settings["processor_class"] = "Qwen2_5_VLProcessor"
            if "video_processor_type" in settings:
                settings["video_processor_type"] = "Qwen2VLVideoProcessor"
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _save_data(data: Path, walk: Callable[[int], list[str]], samples: int, with_pictures: bool, tiny: bool) -> None:
    """`mix`: lengths of MM-Mix, of which pictures are a part; `alike`: all of 1,024 tokens."""
    from PIL import Image

    rng = np.random.default_rng(1)
    pictures = data / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    sides = SIDES[:2] if tiny else SIDES
    for side in sides if with_pictures else ():
        noise = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side)).save(pictures / f"{side}.jpg", quality=90)

    def row(length: int) -> dict[str, Any]:
        fitting = [side for side in sides if (side // 28) ** 2 < 0.8 * length]
        has_picture = with_pictures and fitting and rng.random() < PICTURE_SHARE
        side = int(rng.choice(fitting)) if has_picture else 0
        text = walk(max(24, length - (side // 32) ** 2))
        prompt = f"{'<image>' * bool(side)}{' '.join(text[:16])}"
        row: dict[str, Any] = {"instruction": prompt, "input": "", "output": " ".join(text[16:])}
        return row | ({"images": [f"pictures/{side}.jpg"] if side else []} if with_pictures else {})

    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    columns |= {"images": "images"} if with_pictures else {}
    lengths = np.clip(PROFILES["MM-Mix"](rng, samples), 24, CUTOFF_LEN - 64).astype(int)
    lengths[samples // 2] = CUTOFF_LEN - 64
    if tiny:
        lengths = np.maximum(24, lengths // 16)
    info = {}
    for name, of_rows in (("mix", lengths), ("alike", np.full(samples, 64 if tiny else 1024))):
        (data / f"{name}.json").write_text(json.dumps([row(int(one)) for one in of_rows]), encoding="utf-8")
        info[name] = {"file_name": f"{name}.json", "columns": columns}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# Contestants.


def contestants(model: Model, dataset: str, tiny: bool) -> dict[str, dict[str, Any]]:
    """Changes of the configuration by name, those with the most at stake first."""
    from runs import grouping_by_length
    from transformers import TrainingArguments

    def of_rows(rows: int) -> dict[str, Any]:
        return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": SAMPLES_A_STEP // rows}

    budget = model.token_budget // (16 if tiny else 1)
    cutoff = CUTOFF_LEN // (16 if tiny else 1)
    found = {f"stock, {rows} row{'s' * (rows > 1)}": of_rows(rows) for rows in model.rows[:1]}
    found["odb"] = of_rows(1) | {"odb": {"token_budget": budget}}
    if dataset == "alike":
        rows = budget // (64 if tiny else 1024)
        return {f"stock, {rows} rows": of_rows(rows), **{k: v for k, v in found.items() if k == "odb"}}
    found |= {f"stock, {rows} rows": of_rows(rows) for rows in model.rows[1:]}
    found["odb, padded"] = of_rows(1) | {"odb": {"token_budget": budget, "layout": "padded"}}
    found["length-grouped, 2 rows"] = of_rows(2) | grouping_by_length()
    if "batch_rebalance" in TrainingArguments.__dataclass_fields__:
        found["batch_rebalance, 2 rows"] = of_rows(2) | {"batch_rebalance": True}
    if model.packs:
        packed = {"per_device_train_batch_size": 2, "packing": True, "neat_packing": True, "cutoff_len": cutoff}
        found["neat_packing, 2 rows"] = packed | {"gradient_accumulation_steps": 1}
    return found


def configuration(model: Model, place: Path, data: Path, dataset: str, output: Path, tiny: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_name_or_path": str(place), "stage": "sft", "do_train": True, "finetuning_type": model.finetuning,
        "template": model.template, "dataset_dir": str(data), "media_dir": str(data), "dataset": dataset,
        "cutoff_len": CUTOFF_LEN // (16 if tiny else 1), "num_train_epochs": 1, "learning_rate": 1e-5,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": True,
        "dataloader_num_workers": 1 if tiny else 8, "preprocessing_num_workers": 1, "seed": 0, "use_cpu": tiny,
        "image_max_pixels": MOST_PIXELS, "output_dir": str(output), "optim": "adamw_torch",
        "overwrite_output_dir": True, "pure_bf16": not tiny and model.finetuning == "full",
    }  # fmt: skip
    if config["pure_bf16"]:
        del config["bf16"]
    return config


# ----------------------------------------------------------------------------------------------------------------------
# One training, in a forked process.


def train(name: str, config: dict[str, Any], saved: Path) -> None:
    """Run LLaMA-Factory and write the figures of this training; out of memory is a figure, too."""
    import torch
    from llamafactory.train.tuner import run_exp
    from transformers import Trainer, TrainerCallback

    on_cuda = not config["use_cpu"]
    settled: Callable[[], Any] = torch.cuda.synchronize if on_cuda else lambda: None
    steps: list[dict[str, float]] = []
    batches: list[Any] = []  # tensors of the device, read after the training
    training_step = Trainer.training_step

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.append({"begin": time.time()})

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            settled()
            steps[-1] |= {"end": time.time(), "micro_batches": len(batches)}

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()

    def counted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask, grid = inputs.get("attention_mask"), inputs.get("image_grid_thw")
        real = (mask > 0).sum() if mask is not None and mask.dim() == 2 else None
        patches = grid.prod(-1) if grid is not None else None
        batches.append((inputs["input_ids"].numel(), real, patches))
        return training_step(self, model, inputs, *args, **kwargs)

    Trainer.training_step = counted
    result: Result = {"name": name}
    try:
        run_exp(config, callbacks=[Clock()])
    except torch.OutOfMemoryError as error:
        result["failed"] = f"out of memory ({str(error).split('.')[0][:60]})"
    if "failed" not in result:
        history = json.loads((Path(config["output_dir"]) / "trainer_state.json").read_text(encoding="utf-8"))
        first = steps[WARM_UP - 1]
        timed = batches[int(first["micro_batches"]) :]
        result |= {
            "seconds": steps[-1]["end"] - first["end"],
            "waiting": sum(b["begin"] - a["end"] for a, b in zip(steps[WARM_UP - 1 :], steps[WARM_UP:])),
            "optimizer_steps": len(steps) - WARM_UP,
            "micro_batches": len(timed),
            "computed_tokens": sum(tokens for tokens, _, _ in timed),
            "real_tokens": sum(int(real) if real is not None else tokens for tokens, real, _ in timed),
            "patches": sum(int(grid.sum()) for _, _, grid in timed if grid is not None),
            "losses": [entry["loss"] for entry in history["log_history"] if "loss" in entry],
            "peak": torch.cuda.max_memory_allocated() if on_cuda else 0,
        }
    saved.write_text(json.dumps(result, indent=1), encoding="utf-8")


def run_all(name: str, folder: Path, samples: int, limit_s: float, tiny: bool) -> bool:
    """Whether all trainings of a model have their figures now."""
    import llamafactory.train.tuner  # noqa: F401  # once, before the forks

    began, longest = time.time(), 0.0
    model, place = MODELS[name], folder / name
    place.mkdir(parents=True, exist_ok=True)
    if failed := forked(lambda: build(model, place, samples, tiny), place / "build.log"):
        sys.exit(f"the model was not built: {failed} (all of it: {place / 'build.log'})")
    for dataset in ("mix", "alike"):
        for contestant, changes in contestants(model, dataset, tiny).items():
            run = place / f"{dataset}_{contestant}".replace(", ", "_").replace(" ", "_")
            saved = run / "result.json"
            if saved.exists():
                continue
            if time.time() - began + (longest or SLOWEST_S) > limit_s:
                return False
            run.mkdir(exist_ok=True)
            config = configuration(model, place / "model", place / "data", dataset, run, tiny) | changes
            started = time.time()
            failed = forked(functools.partial(train, contestant, config, saved), run / "train.log")
            if failed and not saved.exists():
                saved.write_text(json.dumps({"name": contestant, "failed": failed}), encoding="utf-8")
            for weights in run.glob("**/*.safetensors"):
                weights.unlink()
            longest = max(longest, time.time() - started)
            print(f"{name}, {dataset}, {contestant}: {time.time() - started:.0f} s", flush=True)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# What is shown.


def operations(model: Model, result: Result) -> float:
    """Floating-point operations of the weights on the real tokens and patches, however they were batched."""
    text, vision = model.text, model.vision or {}
    heads = text["num_attention_heads"] * text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    keys = heads * text["num_key_value_heads"] // text["num_attention_heads"]
    layer = text["hidden_size"] * (2 * heads + 2 * keys + 3 * text["intermediate_size"])
    weights = text["num_hidden_layers"] * layer + text["hidden_size"] * text["vocab_size"]
    per_weight = 6 if model.finetuning == "full" else 4
    found = per_weight * weights * result["real_tokens"]
    if vision:  # frozen, as LLaMA-Factory has it by default: forward alone
        block = 4 * vision["hidden_size"] ** 2 + 2 * vision["hidden_size"] * vision["intermediate_size"]
        found += 2 * vision["depth"] * block * result["patches"]
    return float(found)


def tables(folder: Path, machine: dict[str, Any]) -> list[str]:
    """A table for each model and data set."""
    found = []
    for name, model in MODELS.items():
        for dataset in ("mix", "alike"):
            paths = (folder / name).glob(f"{dataset}_*/result.json")
            results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)]
            if results:
                found.append(_table(f"{name}, {dataset}", model, results, machine))
    return found


def _table(title: str, model: Model, results: list[Result], machine: dict[str, Any]) -> str:
    head = [title, "real tokens/s", "of the best of stock", "MFU", "of a measured product", "peak GiB",
            "micro-batches a step", "padding", "waiting", "loss, furthest"]  # fmt: skip
    stock = [one for one in results if one["name"].startswith("stock") and "failed" not in one]
    first = stock[0] if stock else None  # one row, or the only one
    for one in results:
        if first and one["name"].startswith("odb") and "failed" not in one:
            one["real_tokens"] = first["real_tokens"]  # of the same samples; a flat row has no mask that tells them
        one["speed"] = one["real_tokens"] / one["seconds"] if "failed" not in one else 0.0
    best = max((one["speed"] for one in stock), default=None)
    rows: list[list[str]] = []
    for one in sorted(results, key=lambda one: -one["speed"]):
        if "failed" in one:
            rows.append([one["name"], one["failed"], *[""] * (len(head) - 2)])
            continue
        rate = operations(model, one) / one["seconds"]
        rows.append([
            one["name"],
            f"{one['speed']:,.0f}",
            f"{one['speed'] / best:.2f} x" if best else "",
            f"{rate / machine['peak']:.1%}" if machine.get("peak") else "",
            f"{rate / machine['product']:.1%}" if machine.get("product") else "",
            f"{one['peak'] / 2**30:.1f}",
            f"{one['micro_batches'] / one['optimizer_steps']:.1f}",
            f"{1 - one['real_tokens'] / one['computed_tokens']:.1%}",
            f"{one['waiting'] / one['seconds']:.1%}",
            _furthest(first, one),
        ])  # fmt: skip
    return page.table(head, rows)


def _furthest(compared: Result | None, one: Result) -> str:
    if compared is None or len(compared["losses"]) != len(one["losses"]):
        return "other steps"
    return f"{page.furthest(compared['losses'], one['losses']):.1e}"


# ----------------------------------------------------------------------------------------------------------------------
# The check, and the wheels.


def check(folder: Path) -> dict[str, Any]:
    """Versions, the device, a measured matrix product, and each attention kernel beside sdpa on padded rows."""
    import torch

    names = ("torch", "transformers", "accelerate", "llamafactory", "datasets", "peft", "trl", "odb_factory")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"{name} is not installed; `--collect` gathers what a machine without a network needs.")
    import llamafactory.train.tuner  # noqa: F401

    found: dict[str, Any] = {"versions": versions}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        found |= {"device": device, "product": _product(torch)}
        found["peak"] = next((peak for name, peak in PEAKS.items() if name in device.split()), None)
    found["kernels"] = kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))
    return found


def _product(torch: Any) -> float:
    """Operations a second of a product of 8,192 x 8,192 bf16 matrices: the best of ten."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * 8192**3 / best


def kernels(device: Any) -> dict[str, float]:
    """By case, how far a flat row's attention is from each sample alone in float64: output and gradients, the largest
    of the root mean squares, as a multiple of what sdpa on each sample alone in bf16 is off (1: as good)."""
    import torch

    from odb_factory.model.attention import attend
    from odb_factory.model.flat_row import flat_row

    lengths = [7, 130, 64, 64, 511, 1] if device.type == "cpu" else [7, 1300, 640, 640, 4095, 1]
    found: dict[str, float] = {}
    for heads, of_keys, size, window in ((8, 8, 128, None), (16, 2, 128, None), (8, 4, 96, None), (8, 2, 64, 48)):
        torch.manual_seed(0)
        module = torch.nn.Module()
        setattr(module, "num_key_value_groups", heads // of_keys)  # noqa: B010  # as transformers' layers have it
        states = [torch.randn(1, n, sum(lengths), size, dtype=torch.float64) for n in (heads, of_keys, of_keys)]
        weight = torch.randn(1, sum(lengths), heads, size, dtype=torch.float64)
        exact = _alone(states, weight, lengths, window, torch.float64, torch.device("cpu"))
        usual = _alone(states, weight, lengths, window, torch.bfloat16, device)
        flat = [one.to(device, torch.bfloat16).requires_grad_() for one in states]
        with flat_row(lengths, is_trial=True):
            out, _ = attend(module, *flat, None, sliding_window=window)
            grads = torch.autograd.grad(out, flat, weight.to(device, torch.bfloat16))
        ours = [out, *(grad.transpose(1, 2) for grad in grads)]
        off = [
            [float((a - b.detach().cpu().double()).pow(2).mean().sqrt()) for a, b in zip(exact, x)]
            for x in (ours, usual)
        ]
        found[f"{heads} heads, {of_keys} of keys, {size} values, window {window}"] = max(a / b for a, b in zip(*off))
    return found


def _alone(states: Sequence[Any], weight: Any, lengths: list[int], window: int | None, dtype: Any, on: Any) -> Any:
    """Output and gradients [1, tokens, heads, size] of sdpa, sample by sample, of query, key and value."""
    import torch
    from torch.nn import functional

    parts = []
    repeats = states[0].shape[1] // states[1].shape[1]
    for begin, end in itertools.pairwise(np.cumsum([0, *lengths])):
        own = [one[:, :, begin:end].to(on, dtype).requires_grad_() for one in states]
        q, k, v = own[0], *(one.repeat_interleave(repeats, dim=1) for one in own[1:])
        square = torch.ones(end - begin, end - begin, dtype=torch.bool, device=on).tril()
        square = square if window is None else square.triu(1 - window)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=square).transpose(1, 2)
        grads = torch.autograd.grad(out, own, weight[:, begin:end].to(on, dtype))
        parts.append([out.detach(), *(grad.transpose(1, 2) for grad in grads)])
    return [torch.cat(one, dim=1) for one in zip(*parts)]


def collect(folder: Path) -> None:
    """Download the wheels of `WHEELS` for Linux and Python 3.12 into a folder; build what is only a source."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    where = [arg for tag in ("2_28", "2_27", "2_17") for arg in ("--platform", f"manylinux_{tag}_x86_64")]
    where += ["--platform", "manylinux2014_x86_64", "--python-version", "3.12", "--only-binary=:all:"]
    for name in WHEELS:
        got = subprocess.run([*pip, "download", "-q", "--no-deps", *where, "-d", str(folder), name])
        if got.returncode:
            subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="gather wheels and end")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--samples", type=int, default=512, help="of an epoch (%(default)s)")
    parser.add_argument("--limit", type=float, default=560, help="seconds (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny layers on a CPU")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_gpu"), help="(%(default)s)")
    given = parser.parse_args()
    folder = given.output_dir.resolve()
    if given.collect:
        collect(given.collect)
    stubs = folder / "stubs"  # LLaMA-Factory imports PyAV, of which pictures need nothing
    if importlib.util.find_spec("av") is None:
        (stubs / "av").mkdir(parents=True, exist_ok=True)
        (stubs / "av" / "__init__.py").touch()
        sys.path.insert(0, str(stubs))
    # No CUDA context before the forks, and no look-ups.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
    os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if given.tiny else {}
    if given.check:
        check(folder)
    if given.model:
        all_done = run_all(given.model, folder, given.samples, given.limit, given.tiny)
        print("all is done" if all_done else "not all is done: run it again", flush=True)
    if given.table or given.model:
        known = folder / "machine.json"
        machine = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        print("\n\n".join(tables(folder, machine)))


if __name__ == "__main__":
    main()
