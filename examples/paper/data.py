"""Synthetic data with the length shapes of the paper's data sets, a sixth as long, for tiny models on a CPU.

Text profiles are walks through a made-up language (examples/benchmark/workloads.py). Vision profiles have a picture in
each sample, which makes up to half of its tokens. MM-Mix is the built-in mix of `odb-factory demo`, at its own lengths.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))
from runs import sft_config
from simulation import PROFILES, Draw
from workloads import LONGEST, PROMPT_WORDS, SHORTEST, build_text, build_vl, of_tokenizer, vocabulary, walker

from odb_factory.cli.mm_mix import num_validation
from odb_factory.cli.tiny_model import build_tiny_qwen3_vl

SHORTER = 6
"""Tiny models see lengths divided by this number."""
TOKEN_SIDE = 32
"""Pixels of a side of the square that becomes one token (2 x 2 patches)."""
MOST_TOKENS_OF_A_SIDE = 8
FAKE_IMAGE = 8
"""Tokens that LLaMA-Factory's collator adds to a batch without pictures of a vision-language model."""


@dataclass(frozen=True)
class Profile:
    """kind: `text`, `images` or `mix`. rows: of a fixed batch on a rank. samples: of the training split; a multiple of
    rows x accumulation, so that fixed batches repeat none. published: name of its YAMLs in yaml_configs/paper/."""

    shape: str
    kind: str
    published: str
    cutoff_len: int = 1024
    rows: int = 4
    accumulation: int = 16
    samples: int = 1280

    def build(self, folder: Path, samples: int) -> tuple[Path, Path]:
        """The folders of the tiny model and of the data set."""
        if self.kind == "mix":
            return build_vl(folder, samples)
        drawn = PROFILES[self.shape]

        def shorter(rng: np.random.Generator, count: int) -> np.ndarray:
            return drawn(rng, count) / SHORTER

        if self.kind == "text":
            return build_text(folder, samples, draw=shorter)
        return build_images(folder, samples, shorter)

    def config(self, folder: Path, model: Path, data: Path) -> dict[str, Any]:
        """One epoch with an `odb:` block whose budget is the memory of a fixed batch of the longest samples."""
        template = "qwen3_nothink" if self.kind == "text" else "qwen3_vl_nothink"
        dataset = {"text": "text", "images": "images", "mix": "mm_mix"}[self.kind]
        config = sft_config(model, data, folder, dataset=dataset, template=template, cutoff_len=self.cutoff_len)
        budget = self.rows * (self.cutoff_len + FAKE_IMAGE * (self.kind != "text"))
        return config | {
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "per_device_eval_batch_size": 8,
            "learning_rate": 3e-3,
            "warmup_steps": 0.2,  # a step more or less of a short warm-up would decide about the losses
            "odb": {"token_budget": budget, "buffer_size": 1024},
        }


PROFILE_NAMES = {
    "ultrachat": Profile("UltraChat", "text", "ultrachat"),
    "llava": Profile("LLaVA", "images", "llava_150k"),
    "sharegpt4o": Profile("ShareGPT4o", "images", "sharegpt4o"),
    "mmmix": Profile("MM-Mix", "mix", "mm_mix", cutoff_len=2048, rows=2, samples=320),
}


def build_images(folder: Path, samples: int, draw: Draw) -> tuple[Path, Path]:
    """A tiny Qwen3-VL and a data set: a picture and a walk in each sample, together as long as `draw` says."""
    from PIL import Image

    words, rng = vocabulary(), np.random.default_rng(0)
    model = build_tiny_qwen3_vl(folder / "tiny_qwen3_vl", text=of_tokenizer(words))
    data = folder / "images"
    (data / "pictures").mkdir(parents=True, exist_ok=True)
    for side in range(2, MOST_TOKENS_OF_A_SIDE + 1):
        pixels = rng.integers(0, 256, (side * TOKEN_SIDE, side * TOKEN_SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data / "pictures" / f"{side}.png")
    walk = walker(words, rng)

    def row(length: int) -> dict[str, Any]:
        side = min(MOST_TOKENS_OF_A_SIDE, max(2, math.isqrt(length // 2)))
        text = walk(max(PROMPT_WORDS + 2, length - side**2))
        prompt, answer = " ".join(text[:PROMPT_WORDS]), " ".join(text[PROMPT_WORDS:])
        pictures = [f"pictures/{side}.png"]
        return {"instruction": f"<image>{prompt}", "input": "", "output": answer, "images": pictures}

    columns = {"prompt": "instruction", "query": "input", "response": "output", "images": "images"}
    info = {}
    for name, count in (("images", samples), ("images_val", num_validation(samples))):
        lengths = np.clip(draw(rng, count), SHORTEST, LONGEST).astype(int)
        lengths[count // 2] = LONGEST  # the longest there can be is there
        (data / f"{name}.json").write_text(json.dumps([row(length) for length in lengths]), encoding="utf-8")
        info[name] = {"file_name": f"{name}.json", "columns": columns}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return model, data
