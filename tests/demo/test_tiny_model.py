"""The tiny models load offline the way LLaMA-Factory loads any, and their parts agree with one another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from odb_factory.demo import tiny_model  # noqa: E402
from odb_factory.demo.tiny_model import build_tiny_qwen2, build_tiny_qwen3_vl  # noqa: E402

TEXTS = [
    "def f(x):\n\treturn x['key'] + 1234  # it's done\r\n\n",
    "Grüße, 你好, 🤗 and a tab\t.",
    "<think>\nhm\n</think>\n\nyes",
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "qwen3_vl")


@pytest.fixture(scope="module")
def processor(model_folder: Path):
    return transformers.AutoProcessor.from_pretrained(model_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips_text(model_folder: Path, text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_is_trained_with_the_rule_that_qwen2_loads_it_with() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert tiny_model.SPLIT_RULE == PRETOKENIZE_REGEX


def test_special_ids_of_config_and_tokenizer_match(model_folder: Path, processor) -> None:
    config = transformers.AutoConfig.from_pretrained(model_folder)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert getattr(config, name) == getattr(processor, name)
        token = "<|" + name.removesuffix("_token_id").replace("image", "image_pad").replace("video", "video_pad") + "|>"
        assert processor.tokenizer(token)["input_ids"] == [getattr(config, name)]
    assert config.text_config.vocab_size == len(processor.tokenizer)
    assert config.text_config.pad_token_id == processor.tokenizer.pad_token_id
    assert processor.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("size", [(64, 64), (640, 480), (3000, 200), (40, 700)])
def test_processor_expands_an_image_to_a_quarter_of_its_patches(processor, size: tuple[int, int]) -> None:
    from PIL import Image

    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    out = processor(images=[Image.new("RGB", size)], text=[prompt], return_tensors="pt")
    num_patches = int(out["image_grid_thw"].prod())
    assert out["pixel_values"].shape == (num_patches, 3 * 2 * 16 * 16)
    assert num_patches <= 400
    assert int((out["input_ids"] == processor.image_token_id).sum()) == num_patches // 4


def test_vision_language_model_learns_from_an_image(model_folder: Path, processor) -> None:
    """Forward and backward reach the vision tower, through the deepstack branch too."""
    from PIL import Image

    model = transformers.AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    text = "<|vision_start|><|image_pad|><|vision_end|>A lion."
    batch = processor(images=[Image.linear_gradient("L").convert("RGB")], text=[text], return_tensors="pt")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert any(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "deepstack" in name)


def test_text_twin_shares_the_tokenizer_and_has_no_processor(model_folder: Path, tmp_path: Path) -> None:
    folder = build_tiny_qwen2(tmp_path / "qwen2")
    assert (folder / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()
    assert not (folder / "preprocessor_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(8)[None]
    assert model(input_ids=ids, labels=ids).loss.isfinite()


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    text = "a small text, a small text"
    weights = [
        (build_tiny_qwen2(tmp_path / name, text=text, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in {"one": 1, "same": 1, "other": 2}.items()
    ]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_finished_folder_is_kept_a_stale_one_replaced_a_foreign_one_refused(tmp_path: Path) -> None:
    folder, text = tmp_path / "model", "a small text, a small text"
    build_tiny_qwen2(folder, text=text)
    written = (folder / "config.json").stat().st_mtime_ns
    build_tiny_qwen2(folder, text=text)
    assert (folder / "config.json").stat().st_mtime_ns == written
    build_tiny_qwen2(folder, text=text, seed=1)
    assert json.loads((folder / "tiny_model.json").read_text())["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no draft is left behind

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="mine"):
        build_tiny_qwen2(tmp_path / "mine", text=text)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
