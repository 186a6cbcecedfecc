"""TRL's `SFTTrainer` with `enable_odb`: text with and without `padding_free`, packs, and a vision-language model, whose
rows the collator tokenizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
from packaging.version import Version
from PIL import Image
from support import read_jsonl
from training.toy_training import losses
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import odb_factory.integrations.trl  # noqa: F401  (lets the trainers of trl 0.24 be imported)
from odb_factory import ConfigError, enable_odb

trl = pytest.importorskip("trl")

HAS_LOG_PROBS = Version(trl.__version__).major >= 1
BLOCK = {"token_budget": 512, "audit": True}


def train(trained: Any, folder: Path, *, odb: dict[str, Any] | None, **arguments: Any) -> list[float]:
    """Returns the losses of four optimizer steps. trained: model, processing class and rows."""
    model, processing_class, rows = trained
    arguments |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "use_cpu": True}
    arguments |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "bf16": False}
    arguments.setdefault("max_length", None)  # with `padding_free` trl 1 asks for it
    args, dataset = trl.SFTConfig(output_dir=str(folder), **arguments), datasets.Dataset.from_list(rows)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=processing_class)
    if odb is not None:
        enable_odb(trainer, **odb)
    trainer.train()
    return losses(trainer)


def of_text(path: Path) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Questions and answers of 1 to 29 words."""
    rows = [{"prompt": f"What is {k}? ", "completion": " ".join(["cats", "sing"] * k)[: 5 * k]} for k in range(1, 30)]
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), rows


def of_images(path: Path) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Messages about one image each, of three sizes."""
    sizes, rows = ((64, 64), (128, 64), (96, 160)), []
    for k in range(1, 30):
        messages = [{"role": "user", "content": f"What is {k}?"}, {"role": "assistant", "content": "cats sing " * k}]
        rows.append({"messages": messages, "images": [Image.linear_gradient("L").resize(sizes[k % 3]).convert("RGB")]})
    return AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path), rows


def test_padding_free_is_the_flat_layout(tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer of trl 0.24 reads logits, for their entropy, so they are made."""
    caplog.set_level("INFO")
    stock = train(of_text(tiny_text), tmp_path / "stock", odb=None, padding_free=False)
    for padding_free in (True, False):
        folder = tmp_path / str(padding_free)
        ours = train(of_text(tiny_text), folder, odb=BLOCK, padding_free=padding_free)
        assert ours == pytest.approx(stock, rel=1e-5)
        lines = read_jsonl(folder / "odb_audit_rank0.jsonl")
        assert all(line["rows"] == 1 and len(line["segments"]) == len(line["ids"]) for line in lines)
        assert any(len(line["ids"]) > 2 for line in lines)
    logged = [message for message in caplog.messages if message.startswith("loss: with logits")]
    assert len(logged) == (0 if HAS_LOG_PROBS else 2)
    assert all("SFTTrainer may read its outputs" in message for message in logged)


@pytest.mark.skipif(not HAS_LOG_PROBS, reason="this trl computes its loss from logits")
@pytest.mark.parametrize(
    ("odb", "arguments", "named"),
    [
        ({}, {"loss_type": "dft"}, "not a mean of the log-probabilities"),
        ({}, {"label_smoothing_factor": 0.1}, "label_mask"),
        ({"loss_scaling": "approx"}, {}, None),
    ],
)
def test_weights_of_log_probabilities(odb: Any, arguments: Any, named: str | None, tiny_text: Path, tmp_path: Path):
    """Since trl 1 the model computes them. Different weights multiply them; another loss is refused."""
    stock = train(of_text(tiny_text), tmp_path / "stock", odb=None, **arguments)
    if named is not None:
        with pytest.raises(ConfigError, match=named):
            train(of_text(tiny_text), tmp_path / "odb", odb=BLOCK | odb, **arguments)
        return
    ours = train(of_text(tiny_text), tmp_path / "odb", odb=BLOCK | odb | {"token_budget": 128}, **arguments)
    assert ours == pytest.approx(stock, rel=1e-3) and ours != pytest.approx(stock, rel=1e-7)


def test_packs_stay_as_they_are(tiny_text: Path, tmp_path: Path) -> None:
    """A pack is a row whose positions restart, and stays a padded row."""
    packed: dict[str, Any] = {"packing": True, "max_length": 64}
    stock = train(of_text(tiny_text), tmp_path / "stock", odb=None, **packed)
    assert train(of_text(tiny_text), tmp_path / "odb", odb=BLOCK, **packed) == pytest.approx(stock, rel=1e-5)


def test_a_vision_language_model(tiny_vl: Path, tmp_path: Path) -> None:
    """Its rows are messages and images, each collated alone to be counted."""
    stock = train(of_images(tiny_vl), tmp_path / "stock", odb=None)
    ours = train(of_images(tiny_vl), tmp_path / "odb", odb=BLOCK | {"max_patches": 200})
    assert ours == pytest.approx(stock, rel=1e-5)
    lines = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert sum(len(line["ids"]) for line in lines) == 29 and all(line["patches"] for line in lines)
    assert all(line["rows"] * line["length"] <= 512 and line["patches"] <= 200 for line in lines)
    assert any(len(line["ids"]) > 2 for line in lines)
