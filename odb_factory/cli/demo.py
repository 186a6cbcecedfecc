"""`odb-factory demo`: compare stock LLaMA-Factory and odb on the same samples, with a tiny model on a CPU.

The demo makes a tiny random Qwen3-VL and the built-in MM-Mix (drawn shapes and generated text), runs `llamafactory-cli
train` once without and once with odb, for one epoch each, and shows both trainings like `odb-factory compare`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.cli import compare
from odb_factory.cli.mm_mix import build_builtin_mix
from odb_factory.errors import ConfigError, ODBError

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tiny random models that LLaMA-Factory trains on a CPU, offline: a Qwen3-VL and a text-only Qwen2. Their folders have
# the same files as the real models (config, weights, tokenizer, processor, chat template). The weights are random: the
# models serve to test data flow and speed, not the quality of answers.

VOCAB_SIZE = 4096  # tokens, special tokens included
MODEL_MAX_LENGTH = 32768  # tokens
PATCH_SIZE = 16  # pixels; MERGE_SIZE x MERGE_SIZE patches become one image token
MERGE_SIZE = 2
MAX_IMAGE_PIXELS = 320 * 320  # at most 400 patches, 100 tokens
MAX_VIDEO_PIXELS = 2 * 320 * 320  # over all sampled frames; two frames share a patch: about 400 patches

# Qwen's order of token ids, after the vocabulary. The tokens in _ADDED are not "special": `skip_special_tokens` keeps
# them.
_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def train_tokenizer(text: str) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer like Qwen's; it is lossless for NFC-normalised text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2TokenizerFast  # type: ignore[attr-defined]  # a lazy name

    # Transformers 5 applies these rules to every Qwen2 tokenizer it loads, so the tokenizer must be trained with them.
    rules = Qwen2TokenizerFast().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.decoder = rules.normalizer, rules.decoder
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - len(_ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL[1:],
        model_max_length=MODEL_MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
    )


def write_processor(folder: Path) -> None:
    """Write the image and video processor files of a Qwen3-VL, for smaller pictures."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor

    common: dict[str, Any] = {"patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": MERGE_SIZE}
    common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Despite their names, both values are numbers of pixels of the whole picture.
    images = {"shortest_edge": 64 * 64, "longest_edge": MAX_IMAGE_PIXELS}
    videos = {"shortest_edge": 4 * 64 * 64, "longest_edge": MAX_VIDEO_PIXELS}
    Qwen2VLImageProcessor(**common, size=images).save_pretrained(folder)
    Qwen3VLVideoProcessor(**common, size=videos).save_pretrained(folder)


_MARKER = "tiny_model.json"


def build_tiny_qwen3_vl(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random Qwen3-VL of under a million parameters, its processor and tokenizer; return `folder`.

    text: training text of the tokenizer (None: CPython's help topics, about 460,000 characters). seed: for the weights.
    An image has at most 400 patches (100 tokens), a video about as many. A folder that already holds this model is
    kept. Raises `FileExistsError` if the folder holds anything else.

        build_tiny_qwen3_vl(Path("tiny_qwen3_vl"))
    """
    return _build(folder, text, seed, _qwen3_vl)


def build_tiny_qwen2(folder: Path, *, text: str | None = None, seed: int = 0) -> Path:
    """Write a random text-only Qwen2 with the same tokenizer and no processor; see `build_tiny_qwen3_vl`."""
    return _build(folder, text, seed, _qwen2)


def _build(
    folder: Path, text: str | None, seed: int, make: Callable[[PreTrainedTokenizerBase], PreTrainedModel]
) -> Path:
    if text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    identity = {"kind": make.__name__, "seed": seed, "text": hashlib.sha256(text.encode()).hexdigest()}
    identity["transformers"] = version("transformers")  # 4 cannot read the config that 5 writes
    folder, marker = Path(folder), Path(folder, _MARKER)
    if marker.is_file() and json.loads(marker.read_text()) == identity:
        return folder
    if folder.exists() and not marker.is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not a tiny model; choose another folder or remove it.")

    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if make is _qwen3_vl:
        write_processor(folder)
    marker.write_text(json.dumps(identity, indent=2) + "\n")
    return folder


# The language model of both models.
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MODEL_MAX_LENGTH,
    "tie_word_embeddings": True,
}


def _token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _qwen3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text_config: dict[str, Any] = _TEXT | _token_ids(tokenizer)
    # mrope_section splits half of head_dim into time, height and width.
    text_config |= {
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": _TEXT["hidden_size"],
        "num_position_embeddings": 20 * 20,  # the grid of the largest square picture
        "deepstack_visual_indexes": [0],
    }
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()
    }
    config = Qwen3VLConfig(text_config=text_config, vision_config=vision_config, tie_word_embeddings=True, **ids)
    return Qwen3VLForConditionalGeneration(config)


def _qwen2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_TEXT, **_token_ids(tokenizer)))


# The demo.

POLL_S = 0.5
CUTOFF_LEN, ROWS, STEP_SIZE = 2048, 2, 32
TOKEN_BUDGET = ROWS * CUTOFF_LEN
"""Tokens of the largest micro-batch of stock LLaMA-Factory: two rows of CUTOFF_LEN tokens."""
SAMPLES, SHORT_SAMPLES = 384, 96  # multiples of STEP_SIZE
CONTESTANTS: dict[str, dict[str, Any]] = {"stock": {}, "odb": {"odb": {"token_budget": TOKEN_BUDGET}}}
LAUNCHER = ("FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "USE_MCA", "USE_RAY", "USE_V1")
"""Environment variables that would change what LLaMA-Factory's launcher starts."""


def run(arguments: argparse.Namespace) -> int:
    """Train without and with odb, and show the comparison. Raises `ODBError` if a training fails."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    folder, ranks = arguments.output.resolve(), arguments.ranks
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file; name a folder.")
    console = Console(stderr=True)
    samples = SHORT_SAMPLES if arguments.short else SAMPLES
    console.print(f"{samples} samples, {STEP_SIZE} an optimizer step; stock: {ROWS} rows; odb: {TOKEN_BUDGET} tokens")
    with contextlib.redirect_stdout(sys.stderr):  # transformers imports DeepSpeed, which logs to stdout
        model = build_tiny_qwen3_vl(folder / "model")
    build_builtin_mix(folder / "data", samples=samples)
    config = config_of(model, folder / "data") | {"gradient_accumulation_steps": STEP_SIZE // (ROWS * ranks)}
    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for name, changes in CONTESTANTS.items():
        with Progress(*columns, console=console) as progress:
            train(config | changes | {"output_dir": str(folder / name)}, ranks, progress, samples // STEP_SIZE)
    namespace = argparse.Namespace(a=folder / "odb", b=folder / "stock", html=folder / "demo.html", json=arguments.json)
    return compare.run(namespace)


def config_of(model: Path, data: Path) -> dict[str, Any]:
    """LLaMA-Factory's configuration for one epoch of full fine-tuning on the built-in MM-Mix."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "qwen3_vl_nothink",
        "dataset_dir": str(data),
        "media_dir": str(data),
        "dataset": "mm_mix",
        "cutoff_len": CUTOFF_LEN,
        "per_device_train_batch_size": ROWS,
        "num_train_epochs": 1,
        "learning_rate": 6e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 1,
        "overwrite_cache": True,
        "use_cpu": True,
        "seed": 0,
        # LLaMA-Factory 0.9.5's checkpointing fails with transformers 5.18 and newer.
        "disable_gradient_checkpointing": True,
    }


def train(config: dict[str, Any], ranks: int, progress: Progress, steps: int) -> None:
    """Run `llamafactory-cli train` on a CPU in a new `output_dir`. Raises `ODBError` with the last line of its log."""
    import yaml

    output = Path(config["output_dir"])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    log, steps_log = output / "train.log", output / "trainer_log.jsonl"
    (output / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # folder of torchrun
        "CUDA_VISIBLE_DEVICES": "",  # with several devices LLaMA-Factory would start torchrun
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // ranks - 1)),
        **({"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}),
    }
    command = [sys.executable, "-m", "odb_factory.cli.main", "train", str(output / "train.yaml")]
    bar = progress.add_task(output.name, total=steps)
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                with contextlib.suppress(OSError, ValueError, IndexError, KeyError):  # last line partial or missing
                    progress.update(bar, completed=json.loads(steps_log.read_text().splitlines()[-1])["current_steps"])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # ends the launcher and torchrun; torchrun ends its ranks
                process.wait()
    if process.returncode != 0:
        last_line = log.read_text(errors="replace").rstrip().splitlines()[-1:]
        raise ODBError(f"{output.name}: exit code {process.returncode}: {' '.join(last_line)} (all of it: {log})")
