"""Compare stock LLaMA-Factory's ways of batching with odb on one GPU, with random weights of real model sizes.

    python benchmarks/gpu.py --quick           # five minutes: the parts, and Qwen3-VL-2B with stock and odb
    python benchmarks/gpu.py --limit 3600      # all models and contestants; repeat until "all is done"
    python benchmarks/gpu.py --model qwen3_1_7b --only mix/odb "mix/neat_packing, 2 rows" profile/odb
    python benchmarks/gpu.py --tiny --quick    # one minute, tiny layers on a CPU: checks that the script works

Each job (a training, or the parts) runs in a new process, which does its imports while the previous job runs. The
figures of a job are a JSON file in `--output-dir`; a job that has its file is not repeated. The data sets: `mix`, with
text lengths of MM-Mix, and pictures (JPEGs of noise) for vision-language models; `alike`, with samples of equal length,
so that fixed batches and odb have the same rows; `profile`, `mix` with one optimizer step under torch.profiler. The
first optimizer steps are not timed.

Real tokens: tokens of the samples, without padding. Waiting: time between an optimizer step's end on the device and the
next step's begin. MFU: operations of the weights for the real tokens and patches (6 per weight and token, LoRA 4, a
frozen tower 2), without attention, as a share of the data sheet's peak; "computed" adds recomputation in the backward.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

Result = dict[str, Any]
Job = dict[str, Any]
PICTURE_SHARE, SIDES, MOST_PIXELS = 0.7, (256, 384, 512, 768, 1024), 1024 * 1024
FIRST_S = 90
"""Expected seconds of a job before any job has run."""
DATA_SETS = ("mix", "alike", "profile")
QUICK = ("mix/odb", "mix/odb, recompute: always", "mix/stock, 4 rows")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings that differ on a GPU and with `--tiny`. alike_tokens: cut-off of `alike` samples, which are longer."""

    samples: int
    samples_a_step: int
    warm_up: int
    cutoff_len: int
    alike_tokens: int
    alike_rows: int
    workers: int


REAL = Scale(samples=256, samples_a_step=32, warm_up=2, cutoff_len=8192, alike_tokens=1024, alike_rows=16, workers=8)
TINY = Scale(samples=32, samples_a_step=8, warm_up=1, cutoff_len=512, alike_tokens=128, alike_rows=4, workers=1)

_QWEN3 = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN2_5_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TINY_TEXT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 4096}  # fmt: skip
TINY_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}


@dataclass(frozen=True)
class Model:
    """text, vision: parts of the published config that affect time and memory. last: the key of `vision` that lists
    layers. packs: `neat_packing` supports the model."""

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any] | None
    template: str
    finetuning: str = "full"
    patch: int = 16
    last: str = ""
    packs: bool = False


MODELS = {
    "qwen3_vl_2b": Model(
        "Qwen3VL",
        _QWEN3 | {"rope_scaling": _MROPE},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [5, 11, 17]},
        "qwen3_vl_nothink",
        last="deepstack_visual_indexes",
    ),
    "qwen3_1_7b": Model("Qwen3", _QWEN3, None, "qwen3_nothink", packs=True),
    "qwen2_5_vl_7b": Model(
        "Qwen2_5_VL",
        _QWEN2_5_7B,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        "qwen2_vl",
        finetuning="lora",
        patch=14,
        last="fullatt_block_indexes",
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Model and data, built once.


def build(model: Model, place: Path, scale: Scale, tiny: bool) -> None:
    """Make the folders `model` and `data` in `place`, unless they exist."""
    found = Counter(re.findall(r"\b[a-z]{3,8}\b", " ".join(topics.values())))
    words = [word for word, _ in found.most_common(256)]
    if not (place / "model" / "config.json").exists():
        _save_model(model, place / "model", "\n".join(f" {word}" * 9 for word in words), tiny)
    if not (place / "data" / "dataset_info.json").exists():
        _save_data(place / "data", words, scale, model.vision is not None, tiny)


def _save_model(model: Model, place: Path, text: str, tiny: bool) -> None:
    import torch
    import transformers

    from odb_factory.cli.demo import train_tokenizer, write_processor

    draft = place.with_name("draft")
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer = train_tokenizer(text)
    tokenizer.save_pretrained(draft)
    text_config = model.text | (TINY_TEXT if tiny else {}) | {"max_position_embeddings": 32768}
    text_config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if tiny and "rope_scaling" in model.text:
        sections = [2, 3, 3] if model.kind == "Qwen2_5_VL" else [4, 2, 2]
        text_config["rope_scaling"] = model.text["rope_scaling"] | {"mrope_section": sections}
    if model.vision is None:
        config = getattr(transformers, f"{model.kind}Config")(**text_config)
        kind = getattr(transformers, f"{model.kind}ForCausalLM")
    else:
        vision = model.vision | (TINY_VISION | {model.last: [1]} if tiny else {}) | {"patch_size": model.patch}
        names = ("image_pad", "video_pad", "vision_start", "vision_end")
        number = tokenizer.convert_tokens_to_ids
        ids = {f"{name.removesuffix('_pad')}_token_id": number(f"<|{name}|>") for name in names}
        config = getattr(transformers, f"{model.kind}Config")(
            text_config=text_config, vision_config=vision,
            tie_word_embeddings=text_config.get("tie_word_embeddings", False), **ids,
        )  # fmt: skip
        write_processor(draft)
        _adapt_processor(draft, model)
        kind = getattr(transformers, f"{model.kind}ForConditionalGeneration")
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        kind._from_config(config, dtype=torch.bfloat16).save_pretrained(draft)
    draft.rename(place)


def _adapt_processor(folder: Path, model: Model) -> None:
    """Change the tiny Qwen3-VL's processor files to larger pictures and to the patch size of this model."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings |= {"patch_size": model.patch, "size": {"shortest_edge": 4096, "longest_edge": MOST_PIXELS}}
        if model.kind == "Qwen2_5_VL":
            settings["processor_class"] = "Qwen2_5_VLProcessor"
            if "video_processor_type" in settings:
                settings["video_processor_type"] = "Qwen2VLVideoProcessor"
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _save_data(data: Path, words: list[str], scale: Scale, with_pictures: bool, tiny: bool) -> None:
    from PIL import Image

    rng = np.random.default_rng(1)
    sides = SIDES[:2] if tiny else SIDES
    (data / "pictures").mkdir(parents=True, exist_ok=True)
    for side in sides if with_pictures else ():
        noise = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side)).save(data / "pictures" / f"{side}.jpg", quality=90)

    def row(length: int, side: int) -> dict[str, Any]:
        """A sample of about `length` tokens. side: pixels of its picture's edge; 0: no picture."""
        text = rng.choice(words, max(24, length - (side // 28) ** 2)).tolist()
        row: dict[str, Any] = {"instruction": f"{'<image>' * bool(side)}{' '.join(text[:16])}", "input": ""}
        row["output"] = " ".join(text[16:])
        return row | ({"images": [f"pictures/{side}.jpg"] if side else []} if with_pictures else {})

    def picture(length: int) -> int:
        fitting = [side for side in sides if with_pictures and (side // 28) ** 2 < 0.8 * length]
        return int(rng.choice(fitting)) if fitting and rng.random() < PICTURE_SHARE else 0

    # Lengths of MM-Mix: 80 % short answers, 20 % pages. One sample is as long as the cut-off.
    count, most = scale.samples, scale.cutoff_len - 64
    pages = rng.random(count) < 0.2
    lengths = np.where(pages, rng.lognormal(np.log(2500), 0.5, count), rng.lognormal(np.log(150), 0.35, count))
    lengths = np.clip(lengths / (8192 / scale.cutoff_len), 24, most).astype(int)
    lengths[count // 2] = most
    mix = [row(int(length), picture(int(length))) for length in lengths]
    alike = [row(2 * scale.alike_tokens, sides[0] if with_pictures and not tiny else 0) for _ in range(count)]
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    columns |= {"images": "images"} if with_pictures else {}
    for name, rows in (("mix", mix), ("alike", alike)):
        (data / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    info = {name: {"file_name": f"{name}.json", "columns": columns} for name in ("mix", "alike")}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# Contestants: changes of the configuration by name, the most important contestants first.


def contestants(model: Model, dataset: str, scale: Scale, tiny: bool, best_rows: int) -> dict[str, dict[str, Any]]:
    """best_rows: rows of the fastest fixed batches so far. A training with a key that transformers lacks fails."""

    def of_rows(rows: int) -> dict[str, Any]:
        return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": scale.samples_a_step // rows}

    if dataset == "alike":
        budget = scale.alike_rows * scale.alike_tokens + 64  # a text-only micro-batch gets a fake image of a few tokens
        ours = of_rows(1) | {"odb": {"token_budget": budget}}
        same = {f"stock, {scale.alike_rows} rows": of_rows(scale.alike_rows), "odb": ours}
        return {name: changes | {"cutoff_len": scale.alike_tokens} for name, changes in same.items()}
    budget = {"token_budget": 2 * scale.cutoff_len}  # as many tokens as a fixed batch of the two longest samples
    odb, always = of_rows(1) | {"odb": budget}, of_rows(1) | {"odb": budget | {"recompute": "always"}}
    if dataset == "profile":
        return {"odb": odb, "odb, recompute: always": always}
    fast = {"disable_gradient_checkpointing": True} | ({} if tiny else {"enable_liger_kernel": True})
    found = {"odb": odb, "odb, recompute: always": always}
    found |= {f"stock, {rows} row{'s' * (rows > 1)}": of_rows(rows) for rows in (4, 2, 1)}
    if model.packs:
        packed = {"per_device_train_batch_size": 2, "packing": True, "neat_packing": True}
        found["neat_packing, 2 rows"] = packed | {"gradient_accumulation_steps": 1}
    found["odb, Liger, no checkpointing"] = odb | fast
    found["stock, Liger, no checkpointing"] = of_rows(best_rows) | fast
    found["length-grouped, 2 rows"] = of_rows(2) | {"group_by_length": True}
    found["batch_rebalance, 2 rows"] = of_rows(2) | {"batch_rebalance": True}
    return found


def configuration(model: Model, place: Path, dataset: str, output: Path, scale: Scale, tiny: bool) -> dict[str, Any]:
    is_pure = not tiny and model.finetuning == "full"
    return {
        "model_name_or_path": str(place / "model"), "stage": "sft", "do_train": True, "template": model.template,
        "finetuning_type": model.finetuning, "dataset_dir": str(place / "data"), "media_dir": str(place / "data"),
        "dataset": "mix" if dataset == "profile" else dataset, "cutoff_len": scale.cutoff_len, "num_train_epochs": 1,
        "learning_rate": 1e-5, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "dataloader_num_workers": scale.workers, "preprocessing_num_workers": 1, "seed": 0,
        "use_cpu": tiny, "image_max_pixels": MOST_PIXELS, "output_dir": str(output), "optim": "adamw_torch",
        "overwrite_output_dir": True, **({"pure_bf16": True} if is_pure else {"bf16": True}),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# A training, in a separate process.


def train(config: dict[str, Any], warm_up: int, *, is_profiled: bool) -> Result:
    """Run LLaMA-Factory and return the figures; if it runs out of memory, `failed`."""
    import torch
    from llamafactory.train.tuner import run_exp
    from transformers import Trainer, TrainerCallback

    on_cuda = not config["use_cpu"]
    settled: Callable[[], Any] = torch.cuda.synchronize if on_cuda else lambda: None
    steps: list[dict[str, float]] = []
    batches: list[Any] = []  # (tokens, device tensors), read after the training
    forwards = [0]  # tokens computed by the first layer, including recomputation
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_cuda else [])]
    profiler = torch.profiler.profile(activities=kinds)
    training_step = Trainer.training_step

    def count_forward(module: Any, inputs: Any) -> None:
        forwards[0] += inputs[0].shape[:-1].numel()

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            layers = [one for name, one in model.named_modules() if re.search(r"(?<!vision)\.layers\.0\.mlp$", name)]
            layers[0].register_forward_pre_hook(count_forward)
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if is_profiled and len(steps) == warm_up:
                settled()
                profiler.start()
            steps.append({"begin": time.time()})

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            settled()
            steps[-1] |= {"end": time.time(), "micro_batches": len(batches), "forwards": forwards[0]}
            if is_profiled and len(steps) == warm_up + 1:
                profiler.stop()

    def counted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask, grid = inputs.get("attention_mask"), inputs.get("image_grid_thw")
        real = (mask > 0).sum() if mask is not None and mask.dim() == 2 else None
        batches.append((inputs["input_ids"].numel(), real, None if grid is None else grid.prod(-1)))
        return training_step(self, model, inputs, *args, **kwargs)

    Trainer.training_step = counted
    try:
        run_exp(config, callbacks=[Clock()])
    except torch.OutOfMemoryError as error:
        return {"failed": f"out of memory ({str(error).split('.')[0][:60]})"}
    history = json.loads((Path(config["output_dir"]) / "trainer_state.json").read_text(encoding="utf-8"))
    first, last = steps[warm_up - 1], steps[-1]
    timed = batches[int(first["micro_batches"]) :]
    result: Result = {
        "seconds": last["end"] - first["end"],
        "waiting": sum(b["begin"] - a["end"] for a, b in zip(steps[warm_up - 1 :], steps[warm_up:])),
        "optimizer_steps": len(steps) - warm_up,
        "micro_batches": len(timed),
        "computed_tokens": sum(tokens for tokens, _, _ in timed),
        "forward_tokens": last["forwards"] - first["forwards"],
        "real_tokens": sum(int(real) if real is not None else tokens for tokens, real, _ in timed),
        "patches": sum(int(grid.sum()) for _, _, grid in timed if grid is not None),
        "losses": [entry["loss"] for entry in history["log_history"] if "loss" in entry],
        "peak": torch.cuda.max_memory_allocated() if on_cuda else 0,
    }
    return result | (profile_of(profiler, steps[warm_up], on_cuda) if is_profiled else {})


def profile_of(profiler: Any, step: dict[str, float], on_cuda: bool) -> Result:
    """Profile of an optimizer step: share of time the device was busy, synchronisations, most expensive operations."""
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    dearest = sorted(averages, key=lambda one: -getattr(one, key))[:10]
    busy = sum(getattr(one, key) for one in averages) / 1e6
    waits = {one.key: one.count for one in averages if "Synchronize" in one.key or "Memcpy DtoH" in one.key}
    return {
        "profile": {
            "seconds": step["end"] - step["begin"],
            "busy": busy / (step["end"] - step["begin"]),
            "waits": waits,
            "dearest_ms": {one.key[:80]: [round(getattr(one, key) / 1e3, 2), one.count] for one in dearest},
        }
    }


# ----------------------------------------------------------------------------------------------------------------------
# A process for each job, which does its imports while the previous job runs.


PEAKS = {
    "B200": 2250.0, "H200 NVL": 835.5, "H200": 989.5, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.5,
    "A100": 312.0, "A40": 149.7, "A10": 125.0, "L40S": 362.0, "L4": 121.0,
}  # fmt: skip
"""Words of a GPU's name -> dense bf16 operations per second (1e12), from NVIDIA's data sheets."""


def peak_of(device: str) -> float | None:
    """Peak operations per second of the device with this name; None: unknown, or a MIG slice."""
    words = set(device.replace("-", " ").split())
    known = (peak for name, peak in PEAKS.items() if words.issuperset(name.split()))
    return None if "MIG" in words else next((peak * 1e12 for peak in known), None)


def work() -> None:
    """Worker process: import, read a job from stdin, run it, write its figures."""
    if importlib.util.find_spec("av") is None:  # LLaMA-Factory imports PyAV, which pictures do not need
        stub = Path(os.environ["HF_DATASETS_CACHE"]).with_name("stubs") / "av"
        stub.mkdir(parents=True, exist_ok=True)
        (stub / "__init__.py").touch()
        sys.path.insert(0, str(stub.parent))
    import llamafactory.train.tuner  # noqa: F401
    import torch
    import transformers

    if not (line := sys.stdin.readline()):
        return  # no job is left
    job: Job = json.loads(line)
    tiny, saved = job["tiny"], Path(job["saved"])
    device = "CPU" if tiny else torch.cuda.get_device_name()
    machine = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    result: Result = {"name": job["name"], "date": time.strftime("%Y-%m-%d"), "machine": machine}
    scale = TINY if tiny else REAL
    if job["name"] == "parts":
        from gpu_parts import parts

        result |= parts(tiny, job["quick"])
    else:
        model, place = MODELS[job["model"]], saved.parent
        if job["name"] == "build":
            build(model, place, scale, tiny)
        else:
            dataset, _, contestant = job["name"].partition("/")
            changes = contestants(model, dataset, scale, tiny, job["best_rows"])[contestant]
            if changes.pop("group_by_length", False):
                changes["train_sampling_strategy"] = "group_by_length"
            config = configuration(model, place, dataset, saved.with_suffix(""), scale, tiny) | changes
            result |= {"rows": changes.get("per_device_train_batch_size"), "peak_operations": peak_of(device)}
            result |= train(config, scale.warm_up, is_profiled=dataset == "profile")
            for weights in saved.with_suffix("").glob("**/*.safetensors"):
                weights.unlink()
    saved.write_text(json.dumps(result, indent=1), encoding="utf-8")


def start(folder: Path, number: int, tiny: bool) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_DATASETS_CACHE": str(folder / "cache")} | ({"CUDA_VISIBLE_DEVICES": ""} if tiny else {})
    with (folder / f"{number}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, __file__, "--worker"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment)


def run_all(jobs: Sequence[Job], folder: Path, limit_s: float, tiny: bool) -> list[str]:
    """Run the jobs; return the names of jobs not run because of the limit. The file of a failed job has the error."""
    began, longest = time.time(), 0.0
    todo = [job for job in jobs if not Path(job["saved"]).exists()]
    waiting = start(folder, 0, tiny) if todo else None
    for number, job in enumerate(todo):
        left_s = limit_s - (time.time() - began)
        if left_s < (longest or FIRST_S) or waiting is None:
            break
        job["best_rows"] = best_rows(folder, job["model"])
        worker, started = waiting, time.time()
        waiting = start(folder, number + 1, tiny) if number + 1 < len(todo) else None
        try:
            worker.communicate(json.dumps(job) + "\n", timeout=left_s)
            failed = "" if worker.returncode == 0 else _last_line(folder / f"{number}.log")
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            failed = f"not done within {left_s:.0f} s"
        if failed and not Path(job["saved"]).exists():
            Path(job["saved"]).write_text(json.dumps({"name": job["name"], "failed": failed}), encoding="utf-8")
        longest = max(longest, time.time() - started)
        print(f"{job['model']}, {job['name']}: {time.time() - started:.0f} s {failed}", flush=True)
    if waiting is not None:
        waiting.communicate("")
    return [f"{job['model']}, {job['name']}" for job in todo if not Path(job["saved"]).exists()]


def _last_line(log: Path) -> str:
    return (log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or ["(no output)"])[-1][:300]


def results_of(folder: Path, model: str) -> list[Result]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / model).glob("*.json"))]


def best_rows(folder: Path, model: str) -> int:
    """Rows of the fastest fixed batches of `mix` so far (4 if none has run)."""
    found = [one for one in results_of(folder, model) if one["name"].startswith("mix/stock") and "seconds" in one]
    return min(found, key=lambda one: one["seconds"])["rows"] if found else 4


# ----------------------------------------------------------------------------------------------------------------------
# The tables.


def operations(model: Model, result: Result) -> tuple[float, float]:
    """Floating-point operations of the weights: for real tokens and patches, and for recomputed tokens."""
    text, vision = model.text, model.vision
    heads = text["num_attention_heads"] * text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    keys = heads * text["num_key_value_heads"] // text["num_attention_heads"]
    layer = text["hidden_size"] * (2 * heads + 2 * keys + 3 * text["intermediate_size"])
    layers = text["num_hidden_layers"] * layer
    weights = layers + text["hidden_size"] * text["vocab_size"]
    needed = float((6 if model.finetuning == "full" else 4) * weights * result["real_tokens"])
    if vision is not None:  # frozen by default in LLaMA-Factory: forward only
        block = 4 * vision["hidden_size"] ** 2 + 2 * vision["hidden_size"] * vision["intermediate_size"]
        needed += 2 * vision["depth"] * block * result["patches"]
    return needed, 2.0 * layers * max(result["forward_tokens"] - result["computed_tokens"], 0)


def table(model: str, dataset: str, results: Sequence[Result]) -> str:
    head = ["real tokens/s", "of the best of stock", "MFU", "computed", "recomputed", "peak GiB",
            "micro-batches a step", "padding", "waiting", "loss, furthest"]  # fmt: skip
    found = {one["name"].partition("/")[2]: one for one in results if one["name"].startswith(f"{dataset}/")}
    stock = {name: one for name, one in found.items() if name.startswith("stock") and "seconds" in one}
    first = next(iter(stock.values()), None)
    for name, one in found.items():
        if first is not None and name.startswith("odb") and "seconds" in one:
            one["real_tokens"] = first["real_tokens"]  # same samples; a flat row has no mask to count
    best = max((one["real_tokens"] / one["seconds"] for one in stock.values()), default=None)
    lines = [f"| {model}, {dataset} | {' | '.join(head)} |", f"|---|{'--:|' * len(head)}"]
    for name, one in found.items():
        cells = [one.get("failed", ""), *[""] * (len(head) - 1)]
        if "seconds" in one:
            speed, peak = one["real_tokens"] / one["seconds"], one["peak_operations"]
            needed, again = operations(MODELS[model], one)
            cells = [
                f"{speed:,.0f}",
                f"{speed / best:.2f} x" if best else "",
                *(f"{share / one['seconds'] / peak:.1%}" if peak else "" for share in (needed, needed + again)),
                f"{one['forward_tokens'] / one['computed_tokens'] - 1:.0%}",
                f"{one['peak'] / 2**30:.1f}",
                f"{one['micro_batches'] / one['optimizer_steps']:.1f}",
                f"{1 - one['real_tokens'] / one['computed_tokens']:.1%}",
                f"{one['waiting'] / one['seconds']:.1%}",
                _furthest(first, one),
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _furthest(compared: Result | None, one: Result) -> str:
    if compared is None or len(compared["losses"]) != len(one["losses"]):
        return "other steps"
    return f"{max(abs(a - b) / abs(a) for a, b in zip(compared['losses'], one['losses'])):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", help="(all)")
    parser.add_argument("--only", nargs="+", metavar="DATA/CONTESTANT", help="parts, mix/odb, profile/odb, ... (all)")
    parser.add_argument("--quick", action="store_true", help="what fits into five minutes")
    parser.add_argument("--tiny", action="store_true", help="tiny layers on a CPU")
    parser.add_argument("--limit", type=float, default=600, help="seconds (%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_gpu"), help="(%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work()
        sys.stdout.flush()
        os._exit(0)  # the figures are written: do not wait for threads and data workers
    folder, scale = given.output_dir.resolve(), TINY if given.tiny else REAL
    models = given.model or (["qwen3_vl_2b"] if given.quick else list(MODELS))
    only = given.only or (("parts", *QUICK) if given.quick else None)
    # 1. Collect the jobs; `run_all` skips those that have a file
    jobs: list[Job] = []

    def add(name: str, model: str = "") -> None:
        saved = folder / model / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
        saved.parent.mkdir(parents=True, exist_ok=True)
        jobs.append({"name": name, "model": model, "saved": str(saved), "tiny": given.tiny, "quick": given.quick})

    if only is None or "parts" in only:
        add("parts")
    for model in models:
        add("build", model)
        for dataset in DATA_SETS:
            for contestant in contestants(MODELS[model], dataset, scale, given.tiny, 4):
                if only is None or f"{dataset}/{contestant}" in only:
                    add(f"{dataset}/{contestant}", model)
    left = run_all(jobs, folder, given.limit, given.tiny)
    # 2. Show the tables of all results so far
    shown = [table(model, dataset, results_of(folder, model)) for model in models for dataset in DATA_SETS]
    shown = [one for one in shown if len(one.splitlines()) > 2]
    if (known := folder / "parts.json").exists():
        shown.append("```json\n" + known.read_text(encoding="utf-8") + "\n```")
    (folder / "tables.md").write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    print("\n\n".join(shown))
    print(f"left, run it again: {', '.join(left)}" if left else "all is done")


if __name__ == "__main__":
    main()
