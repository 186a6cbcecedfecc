"""A custom loop over flat micro-batches: its batches (I2, I4), and the gradient of its optimizer steps (I8).

Real transformers models in float64 on real worker processes.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop import loops
from loop.loops import BUDGET
from toy import Rows
from training.flat_models import make_model
from training.toy_training import collate
from transformers import AutoModelForCausalLM, BloomConfig

from odb_factory import ConfigError, ODBDataLoader, pop_step_info, unpad, weighted_loss, without_logits
from odb_factory.model.flat_row import begin_row, row_in_progress


@pytest.fixture(autouse=True)
def no_flat_row_stays() -> Iterator[None]:
    yield
    begin_row(())


def labelled(k: int) -> dict[str, Any]:
    """Row k of the toy data; the second half has labels."""
    ids = [(7 * k + 3 * t) % 90 + 5 for t in range(2 + k * 7 % 39)]
    return {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]}


def make(dataset: Any = None, **changes: Any) -> ODBDataLoader:
    return loops.make(dataset, **{"layout": "flat"} | changes)


@pytest.mark.parametrize(
    ("layout", "by_logits", "pad_to_multiple_of"),
    [("padded", True, None), ("flat", True, None), ("flat", True, 32), ("flat", False, 32)],
)
def test_the_gradient_is_that_of_one_padded_batch(
    tiny_text: Path, layout: str, by_logits: bool, pad_to_multiple_of: Any
) -> None:
    """I8, I10: of every optimizer step, and its loss."""
    model = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64, use_cache=False).train()
    loss_of = without_logits(model)
    steps, ids, total, num_micro_batches = 0, [], 0.0, set()
    options = {"layout": layout, "collate_fn": collate, "pad_to_multiple_of": pad_to_multiple_of, "shuffle": True}
    options |= {"batch_size": 4, "gradient_accumulation_steps": 2, "num_workers": 1}
    with make(Rows(labelled, 24), **options) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            loss = None if by_logits else loss_of(batch, info)
            labels = batch.pop("labels")
            if loss is None:
                loss = weighted_loss(model(**batch).logits, labels, info)
            loss.backward()
            own = model(**batch, labels=labels).loss * info.loss_scale  # in float32
            assert own.item() == pytest.approx(loss.item(), rel=1e-5)
            ids, total = [*ids, *info.ids], total + loss.item()
            if not info.ends_optimizer_step:
                continue
            gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
            model.zero_grad()
            expected = big_padded_batch(model, ids)
            assert total == pytest.approx(expected, rel=1e-13)
            for name, value in model.named_parameters():
                deviation = (value.grad - gradients[name]).norm() / value.grad.norm()
                assert deviation < 1e-12, name
            model.zero_grad()
            num_micro_batches.add(info.micro_batches)
            steps, ids, total = steps + 1, [], 0.0
    assert steps == 3 and max(num_micro_batches) > 1


def losses(model: Any, loader: ODBDataLoader) -> dict[int, float]:
    """The loss of each optimizer step."""
    sums: Counter[int] = Counter()
    for batch in loader:
        info = pop_step_info(batch)
        sums[info.optimizer_step] += (model(**batch).loss * info.loss_scale).item()
    return dict(sums)


def test_a_cache_that_hides_samples_is_switched_off(tiny_text: Path, logged: pytest.LogCaptureFixture) -> None:
    """I10: models have their cache on by default, and then samples of a row attend to each other."""
    model = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64).train()
    settings: dict[str, Any] = {"dataset": Rows(labelled, 24), "collate_fn": collate}
    with make(layout="padded", **settings) as loader:
        expected = losses(model, loader)
    with make(**settings) as loader:
        unchecked = losses(model, loader)
    assert sum("call odb_factory.unpad(model, loader)" in message for message in logged.messages) == 1
    assert any(abs(unchecked[step] - expected[step]) > 1e-4 for step in expected), "the check is needed"
    logged.clear()
    with make(**settings) as loader:
        unpad(model, loader)
        assert losses(model, loader) == pytest.approx(expected, rel=1e-6)  # transformers' own loss is in float32
    assert not [record for record in logged.records if record.levelname == "WARNING"] and model.training


def test_the_replaced_forward_has_the_own_signature(tiny_text: Path) -> None:
    """`generate` masks padding only if the signature of the forward has a mask."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text)
    rows, signature = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]]), inspect.signature(model.forward)

    def generate(**more: Any) -> torch.Tensor:
        ask = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
        return torch.stack(model.generate(rows, output_logits=True, **ask, **more).logits)

    expected = generate()
    assert not torch.allclose(generate(attention_mask=torch.ones_like(rows)), expected)
    with make() as loader:
        unpad(model, loader)
        assert torch.allclose(generate(), expected) and inspect.signature(model.forward) == signature


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_a_loader_iterated_ahead_leaves_the_row_of_the_loop(accelerate_state: None, by_accelerate: bool) -> None:
    """I10: a thread at the end of the epoch does not change the row within a forward, nor does the end of another
    iteration, which the garbage collector may cause."""
    if by_accelerate:
        Accelerator()
    with make() as loader, make() as other:
        broken_off, batches, rest = iter(other), iter(loader), list[Any]()
        pop_step_info(next(broken_off))
        info = pop_step_info(next(batches))
        del broken_off
        thread = threading.Thread(target=rest.extend, args=(batches,))
        thread.start()
        thread.join()
        row = row_in_progress()
        assert rest and row is not None and row.segments == info.segments
        pop_step_info(rest[-1])


def test_models_that_cannot_be_flat_are_refused(tiny_text: Path) -> None:
    """I10: by name, or by what they compute."""

    def refused(model: Any, words: str, **options: Any) -> None:
        with make(**options) as loader, pytest.raises(ConfigError, match=words):
            unpad(model, loader)

    model = AutoModelForCausalLM.from_pretrained(tiny_text).train()
    norm = model.model.norm.forward
    model.model.norm.forward = lambda states: norm(states + states.cumsum(1) / 10)  # of all tokens before it
    refused(model, "odb.layout: 'flat' is not right here: the model computes")
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=128, hidden_size=16, n_layer=1, n_head=2))
    refused(bloom, "BloomForCausalLM computes something else on a flat row")
    refused(model, "made with layout='flat'", layout="padded")
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    refused(model, r"loss of rows .* is nan, each alone in a plain batch")


def test_auto_is_padded_in_a_loop() -> None:
    with make(layout="auto") as loader:
        batch = next(iter(loader))
        assert pop_step_info(batch).segments == () and "position_ids" not in batch
    with pytest.raises(ConfigError, match="odb.pad_to_multiple_of: 8 .*`layout: flat`"):
        make(layout="auto", pad_to_multiple_of=8)


def test_the_info_of_another_batch_is_an_error(tiny_text: Path) -> None:
    """Rows of the same total, whose samples differ; and a row without info."""
    model = AutoModelForCausalLM.from_pretrained(tiny_text).train()
    with make(pad_to_multiple_of=BUDGET) as loader:
        unpad(model, loader)
        first, second, *_ = loader
        assert pop_step_info(first).segments != pop_step_info(second).segments
        with pytest.raises(ConfigError, match="unpad"):
            model(**first)
        model(**second)
    with make() as loader:
        unpad(model, loader)
        batch = next(batches := iter(loader))
        with pytest.raises(ConfigError, match="unpad"):
            model(**{key: batch[key] for key in ("input_ids", "position_ids", "labels")})
        pop_step_info(batch)
        model(**batch)
        del batches


@pytest.mark.parametrize("is_prepared_first", [True, False])
def test_accelerate_unwraps_a_set_up_model(tiny_text: Path, is_prepared_first: bool, accelerate_state: None) -> None:
    """accelerate removes its wrapper of mixed precision, before or after `unpad`."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected, accelerator = model(ids).logits, Accelerator(cpu=True, mixed_precision="bf16")
    with make() as loader:
        if is_prepared_first:
            unpad(accelerator.prepare(model), loader)
        else:
            unpad(model, loader)
            accelerator.prepare(model)
        assert not torch.equal(model(ids).logits, expected), "in bfloat16"
        inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert torch.equal(inner(ids).logits, expected) and torch.equal(inner(input_ids=ids).logits, expected)


def gradient(model: Any, loader: Any, *, at_once: bool = False) -> torch.Tensor:
    """The gradient of the first optimizer step. at_once: one backward after all forwards."""
    model.train().zero_grad()
    losses = []
    for batch in loader:
        info = pop_step_info(batch)
        losses.append(model(**batch).loss * info.loss_scale)
        if not at_once:
            losses.pop().backward()
        if info.ends_optimizer_step:
            break
    if at_once:
        assert len(losses) > 1
        torch.stack(losses).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "reentrant"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "mamba2", "gpt_oss"])
def test_one_backward_of_several_rows(kind: str, reentrant: bool) -> None:
    """I10: a recomputation computes its own row, not the last one."""
    model = make_model(kind, torch.float64)
    with make() as loader:
        unpad(model, loader)
        expected = gradient(model, loader)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert (gradient(model, loader, at_once=True) - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_text"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_set_up_model_is_set_up_separately(kind: str, copied: Any) -> None:
    """Averaged weights of a training are such a copy, and the file of `torch.save(model)`."""
    model = make_model(kind, torch.float64)
    before = [dict(vars(part)) for part in model.modules()]
    with make() as loader:
        puts_back, puts_back_again = unpad(model, loader), unpad(model, loader)
        expected, copy_of_model = gradient(model, loader), copied(model)
        unpad(copy_of_model, loader)()
        assert model.forward is not type(model).forward and set(vars(copy_of_model)) == set(before[0])
        copy_that_stays = copied(model)
        puts_back()
        puts_back_again()
        assert [dict(vars(part)) for part in model.modules()] == before
        assert torch.equal(gradient(copy_that_stays, loader), expected)


def big_padded_batch(model: Any, ids: list[int]) -> float:
    """Backward of the mean token loss of all samples as one padded batch; returns the loss."""
    batch = collate([labelled(k) for k in ids])
    labels = batch.pop("labels")[:, 1:]
    logits = model(**batch).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = losses.sum() / (labels != -100).sum()
    loss.backward()
    return loss.item()
