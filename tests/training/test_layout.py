"""I10: a model that cannot compute flat rows is refused: by name, or by the check of a tiny copy or the real model.
Rows that cannot be laid flat: `layout: auto` pads them and trains as stock (I9), `flat` is refused.

The check before training reads 16 rows. A later row that cannot be laid flat pads only its own micro-batch.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import pytest
import torch
from distributed.ranks import run_ranks
from toy import Rows, Stream, pad
from training import toy_training
from training.flat_models import LENGTHS, MIXERS, WRONG, flat_batch, make_model, samples
from training.toy_training import Sequential, audit, collate, ids, losses, make
from training.vision_rows import picture_row, vision_model
from transformers import LlamaForCausalLM, Trainer

from odb_factory import ConfigError, DataError
from odb_factory.data.collate import ROWS_TRIED
from odb_factory.model import attention
from odb_factory.model import check as check_module
from odb_factory.model.check import Layout, Runs, check_rows, models_of, of_flat_batch

BUDGET = 256


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the check of the real model."""
    monkeypatch.setattr(check_module, "why_refused", lambda model, args: None)
    monkeypatch.setattr(check_module, "check", lambda *_, installs: None)


def resolve_layout(trainer: Trainer, layout: str = "auto", refused: str | None = None) -> Layout:
    return check_module.resolve_layout(models_of(trainer), layout, trainer.args, refused=refused)


# By name, or by a tiny copy


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "computes something else on a flat row") for kind in WRONG),
        ("of torch", ""),
        ("attends to images", ""),  # the tiny copy gets only text
        ("refused by its caller", "the caller"),
        ("trained with noise", "neftune_noise_alpha"),
    ],
)
def test_refused_before_a_loader_is_made(kind: str, reason: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2) if kind == "of torch" else make_model(kind if kind in WRONG else "llama")
    if kind == "attends to images":
        model.config.model_type = "mllama"
    refused, noise = reason if kind == "refused by its caller" else None, 5.0 if kind == "trained with noise" else None
    trainer = make(model, tmp_path, neftune_noise_alpha=noise)
    layout = resolve_layout(trainer, refused=refused)
    assert layout.name == "padded" and reason in layout.reason
    with pytest.raises(ConfigError, match="odb.layout: 'flat' is not right here.*; set `layout: padded`"):
        resolve_layout(trainer, "flat", refused)


def test_a_second_model_that_refuses_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    """For example a reference model whose class does not let its attention function be replaced."""
    first, second = make_model("llama"), make_model("llama")
    second.set_attn_implementation = lambda _: None
    args = make(first, tmp_path).args
    first.config.use_cache = True
    before = [dict(vars(part)) for part in first.modules()]
    assert check_module.resolve_layout([first, second], "auto", args).name == "padded"
    with pytest.raises(ConfigError, match=r"odb\.layout"):
        check_module.resolve_layout([first, second], "flat", args)
    assert [dict(vars(part)) for part in first.modules()] == before
    assert first.config._attn_implementation == "sdpa" and first.config.use_cache is True


# By the kernel


@pytest.mark.parametrize(
    ("kernel", "device", "layout", "name", "words"),
    [
        ("sdpa", "cpu", "auto", "flat", "odb_varlen: sdpa on runs of samples of equal length, because"),
        ("sdpa", "cpu", "padded", "padded", "as configured"),
        ("eager", "cpu", "auto", "flat", "odb_varlen: the model's eager function on runs of samples of equal length"),
        ("flex_attention", "cuda", "auto", "flat", "flex_attention"),
        ("flash_attention_2", "cuda", "auto", "flat", "flash_attention_2"),
        ("unknown", "cuda", "auto", "padded", "unknown"),
        ("unknown", "cuda", "flat", "flat", "unknown"),
    ],
)
def test_kernels(kernel: str, device: str, layout: str, name: str, words: str, tmp_path: Path) -> None:
    model = make_model("llama", torch.bfloat16)
    model.config._attn_implementation_internal = kernel
    trainer = make(model, tmp_path)
    model.config.use_cache = True
    trainer.args.__dict__["_setup_devices"] = torch.device(device)  # caches `args.device`
    resolved = resolve_layout(trainer, layout)
    assert (resolved.name, words in resolved.reason) == (name, True), resolved.reason
    assert resolved.with_boundaries == ("flash" in kernel)
    names = {"sdpa": attention.NAME, "eager": attention.EAGER_NAME} if name == "flat" else {}
    assert model.config._attn_implementation == names.get(kernel, kernel)
    assert model.config.use_cache == (name == "padded"), "with a cache transformers looks for no samples in a row"
    resolved.undo()
    assert model.config._attn_implementation == kernel and model.config.use_cache


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_model_that_odb_varlen_does_not_fit_keeps_its_kernel(kernel: str, tmp_path: Path) -> None:
    model = make_model("llama", kernel=kernel)
    model.config.model_type = "gemma3"
    trainer = make(model, tmp_path)
    reason = resolve_layout(trainer).reason
    assert "square of a whole row" in reason and "tokens of an image see each other" in reason
    assert model.config._attn_implementation == kernel
    trainer.args.__dict__["_setup_devices"] = torch.device("cuda")
    assert resolve_layout(trainer).name == "padded"
    assert resolve_layout(trainer, "flat").name == "flat"


# By the check


CHECKED = [
    *((kind, torch.float32, False) for kind in (*WRONG, "mamba2", "qwen3_5_text")),
    *((kind, torch.float32, True) for kind in ("llama", "gpt_oss", "mamba2", "qwen3_5_text")),
    *((kind, torch.bfloat16, True) for kind in ("llama", "gpt_oss", "qwen3_5_text")),
]


@pytest.mark.parametrize(("kind", "dtype", "is_right"), CHECKED, ids=str)
def test_the_check_of_real_rows(kind: str, dtype: torch.dtype, is_right: bool, tmp_path: Path) -> None:
    """It finds models that are refused by name and mixers that are not set up, and changes nothing. The tiny copies of
    all families: `tests/model/test_check.py`."""
    trainer = make(make_model(kind, dtype), tmp_path)
    if is_right:
        layout = resolve_layout(trainer)
        assert layout.name == "flat" and ("by padded groups of samples" in layout.reason) == (kind in MIXERS)
    trainer.model.lm_head.eval()
    state, modes = torch.get_rng_state(), [module.training for module in trainer.model.modules()]
    runs = Runs(trainer.model, trainer._prepare_inputs, lambda answer: [answer], trainer.compute_loss_context_manager)
    why = check_rows(runs, lambda: of_flat_batch(flat_batch(samples()), LENGTHS))
    assert (why is None) == is_right, why
    assert [module.training for module in trainer.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


# In a training


def train(model: Any, folder: Path, layout: str, dataset: Any = None, block: Any = None, **changes: Any) -> Trainer:
    """layout: "stock" trains without odb."""
    block = {"token_budget": BUDGET, "layout": layout, "audit": True} | (block or {})
    return toy_training.train(
        model, folder, dataset, block=None if layout == "stock" else block, **{"max_steps": 4} | changes
    )


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
def test_a_row_that_cannot_be_collated_does_not_decide_the_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """The check before training takes another row, or reads the row again if only the first read fails. The model has
    no tiny copy, because its class has another constructor."""
    rows, failed = Rows(num_rows=16), 0
    lengths = [len(rows[number]["input_ids"]) for number in range(16)]
    shortest = rows[lengths.index(min(lengths))]["input_ids"][0]  # a row that the check reads

    def collate_later(items: list[dict[str, Any]]) -> Any:
        nonlocal failed
        if failed < times and shortest in [item["input_ids"][0] for item in items]:
            failed += 1
            raise OSError("stale file handle")
        return pad(items)

    model = make_model("llama")
    model.__class__ = type("Wider", (LlamaForCausalLM,), {"__init__": lambda self, config, more: None})
    with caplog.at_level(logging.INFO, "odb_factory"):
        train(model, tmp_path, "auto", rows, block={"on_error": "skip"}, collate=collate_later, max_steps=2)
    assert failed and [message for message in caplog.messages if message.startswith("layout: flat (")]
    logged = [line for line in caplog.messages if f"the check of the layout passes over row {shortest - 1}," in line]
    assert len(logged) == (times > 1)


@pytest.mark.parametrize("block", [{}, {"global_batch_size": "fill", "lr_scale": "sqrt"}])
def test_a_model_that_fails_the_check_is_trained_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, block: dict[str, Any]
) -> None:
    """`auto` trains and saves as `padded` does; `flat` is refused."""
    without_rules(monkeypatch)
    saved = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine", "block": block}
    auto = train(make_model("bloom"), tmp_path / "auto", "auto", **saved)
    logged = [message for message in caplog.messages if message.startswith("layout: padded (")]
    assert len(logged) == 1 and "something else on a flat row" in logged[0]
    padded = train(make_model("bloom"), tmp_path / "padded", "padded", **saved)
    assert losses(auto) == losses(padded)
    assert audit(tmp_path / "auto") == audit(tmp_path / "padded")
    rmtree(tmp_path / "auto" / "checkpoint-4")
    again = train(make_model("bloom"), tmp_path / "auto", "auto", resume=True, **saved)
    assert losses(again) == losses(padded)
    with pytest.raises(ConfigError, match="odb.layout: 'flat'.*something else on a flat row.*`layout: padded`"):
        train(make_model("bloom"), tmp_path / "flat", "flat", block=block)
    assert not (tmp_path / "flat" / "odb_audit_rank0.jsonl").exists(), "no step is taken"


def test_a_stream_is_checked_only_with_layout_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its first micro-batch, so every row that is read is trained on."""
    with caplog.at_level(logging.INFO, "odb_factory"):
        auto = train(make_model("llama"), tmp_path / "auto", "auto", Stream())
    assert [message for message in caplog.messages if message.startswith("layout: padded (the rows of a stream")]
    flat = train(make_model("llama"), tmp_path / "flat", "flat", Stream())
    assert losses(flat) == pytest.approx(losses(auto), rel=1e-5)
    assert all(line["rows"] == 1 for line in audit(tmp_path / "flat"))
    without_rules(monkeypatch)
    with pytest.raises(ConfigError, match="something else on a flat row"):
        train(make_model("bloom"), tmp_path / "wrong", "flat", Stream())


def train_with_a_check_that_fails_on_rank_1(rank: int, output_dir: str) -> tuple[list[float], str]:
    """Returns the losses of a training with `auto`, and the error of `flat`."""
    os.environ["LOCAL_RANK"] = str(rank)
    if rank == 1:
        own = check_module._why_different
        check_module._why_different = lambda runs, trial: own(runs, trial) or "this rank sees a difference"
    auto = train(make_model("llama"), Path(output_dir, "auto"), "auto", per_device_train_batch_size=4)
    with pytest.raises(ConfigError) as stopped:
        train(make_model("llama"), Path(output_dir, "flat"), "flat", per_device_train_batch_size=4)
    return losses(auto), str(stopped.value)


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    function = "training.test_layout:train_with_a_check_that_fails_on_rank_1"
    outcomes = run_ranks(function, tmp_path, limit_s=120, output_dir=str(tmp_path))
    (ours, message), (_, other_message) = (outcome.value for outcome in outcomes)
    assert message == other_message and "odb.layout: 'flat'" in message and "(rank 1)" in message
    alone = losses(train(make_model("llama"), tmp_path / "alone", "padded"))
    assert ours == pytest.approx(alone, rel=1e-5), "the same optimizer steps on one rank"
    assert not any(line.get("segments") for line in audit(tmp_path / "auto"))


# Rows that cannot be laid flat

NUM_ROWS, LATE = 28, ROWS_TRIED + 5


def row(k: int) -> dict[str, Any]:
    """5 to 44 tokens, of which all but the first are supervised."""
    tokens = [1 + (k * 31 + j * 7) % 90 for j in range(5 + k * 7 % 40)]
    return {"k": k, "input_ids": tokens, "labels": [-100, *tokens[1:]], "attention_mask": [1] * len(tokens)}


def masked(row: dict[str, Any], *places: int) -> dict[str, Any]:
    mask = row["attention_mask"]
    for place in places:
        mask[place] = 0
    return row


def skips_positions(rows: list[dict[str, Any]], first: int) -> dict[str, torch.Tensor]:
    """The rows from `first` on skip positions."""
    batch = collate(rows)
    positions = torch.arange(batch["input_ids"].shape[1]).repeat(len(rows), 1)
    for place, row in enumerate(rows):
        positions[place, 3:] += 100 * (row["k"] >= first)
    return {**batch, "position_ids": positions}


def sorts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate(sorted(rows, key=lambda row: -len(row["input_ids"])))


def with_bools(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    return {**batch, "attention_mask": batch["attention_mask"].bool()}


class Case(NamedTuple):
    """is_late: the check before training does not read the rows that cannot be laid flat."""

    row: Callable[[int], dict[str, Any]] = row
    collate: Callable[..., dict[str, torch.Tensor]] = collate
    is_late: bool = False
    model: Callable[[], Any] = functools.partial(make_model, "llama")


CASES = {
    "positions": Case(collate=lambda rows: skips_positions(rows, 0)),
    "late positions": Case(collate=lambda rows: skips_positions(rows, LATE), is_late=True),
    "labels on masked tokens": Case(lambda k: masked(row(k), *[-1] * (k % 3 == 0))),
    "late labels on masked tokens": Case(lambda k: masked(row(k), *[-1] * (k == LATE)), is_late=True),
    "holes": Case(lambda k: masked(row(k), *[2] * (k == 9))),
    "late holes": Case(lambda k: masked(row(k), *[2] * (k >= LATE)), is_late=True),
    "late holes in a mask of bools": Case(lambda k: masked(row(k), *[2] * (k >= LATE)), with_bools, is_late=True),
    "a collator that sorts": Case(collate=sorts),
}


def run(case: Case, folder: Path, layout: str, on_error: str = "raise", **changes: Any) -> Trainer:
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
    cut |= {"max_steps": -1, "collate": case.collate, "trainer_class": Sequential}
    block = {"token_budget": 128, "on_error": on_error}
    return train(case.model(), folder, layout, Rows(case.row, NUM_ROWS), block, **cut | changes)


@pytest.mark.stock
@pytest.mark.integration
@pytest.mark.parametrize("name", CASES)
def test_auto_trains_as_stock(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    expected = pytest.approx(losses(run(case, tmp_path / "stock", "stock")), rel=1e-5)
    assert losses(run(case, tmp_path / "padded", "padded")) == expected
    for on_error in ("raise", "skip"):
        folder = tmp_path / on_error
        caplog.clear()
        assert losses(run(case, folder, "auto", on_error)) == expected
        assert ids(folder) == Counter(range(NUM_ROWS)), "no row is left out"
        lines = audit(folder)
        assert any(line["segments"] for line in lines) == case.is_late
        assert any(len(line["ids"]) > 1 for line in lines if not line["segments"])
        logged = [message for message in caplog.messages if message.startswith("layout: ")]
        assert len(logged) == 1 + case.is_late and all("Error" not in message for message in logged)


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in CASES if name != "a collator that sorts"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_flat_names_the_row(name: str, on_error: str, tmp_path: Path) -> None:
    case = CASES[name]
    with pytest.raises((ConfigError, DataError)) as refused:
        run(case, tmp_path, "flat", on_error)
    message = str(refused.value)
    assert "odb.layout" in message and "row " in message and "on_error" not in message and "\n" not in message
    if case.is_late:
        assert f"row {LATE}: " in message


def train_on_two_ranks(rank: int, output_dir: str, name: str, num_workers: int) -> dict[str, list[float]]:
    os.environ["LOCAL_RANK"] = str(rank)
    changes = {"per_device_train_batch_size": 1, "dataloader_num_workers": num_workers}
    kinds = ("stock", "auto")
    return {kind: losses(run(CASES[name], Path(output_dir, kind), kind, **changes)) for kind in kinds}


@pytest.mark.stock
@pytest.mark.integration
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_late_row_pads_one_micro_batch_of_its_rank(num_workers: int, tmp_path: Path) -> None:
    """Both ranks have the same number of micro-batches (I1), and no sample is lost (I2)."""
    options = {"output_dir": str(tmp_path), "name": "late labels on masked tokens", "num_workers": num_workers}
    outcomes = run_ranks("training.test_layout:train_on_two_ranks", tmp_path, limit_s=120, **options)
    for outcome in outcomes:
        assert outcome.value["auto"] == pytest.approx(outcome.value["stock"], rel=1e-5)
    lines = [audit(tmp_path / "auto", rank) for rank in range(2)]
    assert sum((ids(tmp_path / "auto", rank) for rank in range(2)), Counter()) == Counter(range(NUM_ROWS))
    assert len(lines[0]) == len(lines[1])
    padded = [LATE in line["ids"] for of_rank in lines for line in of_rank if not line["segments"]]
    assert padded == [True]


@pytest.mark.stock
@pytest.mark.integration
@pytest.mark.parametrize("num_workers", [0, 1])
def test_positions_of_images_are_those_of_the_model(num_workers: int, tmp_path: Path) -> None:
    """Without `mm_token_type_ids`, so newer releases of transformers take image tokens for text. With them:
    test_same_training.py."""
    case = Case(picture_row, model=vision_model)
    auto, stock = (
        losses(run(case, tmp_path / layout, layout, dataloader_num_workers=num_workers)) for layout in ("auto", "stock")
    )
    assert auto == pytest.approx(stock, rel=1e-5)
    assert all(line["segments"] for line in audit(tmp_path / "auto"))
