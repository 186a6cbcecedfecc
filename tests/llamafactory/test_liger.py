"""A training with Liger's kernels equals stock's (I9). odb replaces only the fused loss.

Without a GPU Triton interprets the kernels, which takes minutes; liger-kernel must be installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from same_training import check_same_training, report, train
from support import noise, shimmed, training_config, write_dataset
from tiny_models import TinyModels

pytestmark = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger_kernel is not installed")
ENV = {} if torch.cuda.is_available() else shimmed("triton_on_cpu") | {"TRITON_INTERPRET": "1"}
STEPS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2}
OF_LLAMAFACTORY, OF_THE_TRAINER = {"enable_liger_kernel": True}, {"use_liger_kernel": True}
"""The first replaces classes of a model family before loading, the second methods of a loaded model."""


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts` and `pictures` with few tokens: the interpreter takes 0.1 s for each."""
    folder = tmp_path_factory.mktemp("rows")
    noise((56, 56)).convert("RGB").save(folder / "noise.png")

    def row(number: int, images: list[str]) -> dict[str, Any]:
        question, answer = "<image>" * len(images) + "say", "so " * (1, 4, 2, 3)[number]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "images": images}

    rows = {name: [row(k, images) for k in range(4)] for name, images in (("texts", []), ("pictures", ["noise.png"]))}
    return write_dataset(folder, rows)


@pytest.mark.parametrize(
    ("kind", "layout", "liger"),
    [
        ("qwen2", "flat", OF_LLAMAFACTORY),
        ("qwen2_5_vl", "padded", OF_LLAMAFACTORY),
        ("qwen3_vl", "padded", OF_THE_TRAINER),
        pytest.param("qwen2_5_vl", "flat", OF_LLAMAFACTORY, marks=pytest.mark.nightly),
    ],
)
def test_the_training_is_stocks(
    kind: str, layout: str, liger: dict[str, Any], tiny_text: Path, tiny_vl: Path, rows_dir: Path, tmp_path: Path
) -> None:
    """The samples with images have different weights within a micro-batch, as in stock's mean of means."""
    model = TinyModels(tiny_text, tiny_vl, tmp_path)({"qwen2": "tied", "qwen3_vl": "tied_vl"}.get(kind, kind))
    odb = {"token_budget": 1024, "audit": True, "layout": layout}
    trainings, kernels = [], []
    for name, more in (("odb", {"odb": odb}), ("stock", {})):
        config = training_config(
            model,
            rows_dir,
            tmp_path / name,
            template={"qwen2": "qwen", "qwen2_5_vl": "qwen2_vl"}.get(kind, kind),
            dataset="texts" if kind == "qwen2" else "pictures",
            default_system="s",
            image_max_pixels=64 * 64,
            dataloader_num_workers=0,
            **STEPS,
            **liger,
            **more,
        )
        ran = tmp_path / f"{name}_kernels"
        trainings.append(train(config, env=ENV | {"ODB_TEST_KERNELS": str(ran)}))
        kernels.append(set(ran.read_text().split()) if ENV else set())
    report(f"{kind} {layout}", check_same_training(*trainings))
    if ENV:
        assert kernels[1] - kernels[0] >= {"liger_cross_entropy_kernel"}, "the kernel of the fused loss"
        assert kernels[0] & kernels[1] >= {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}
