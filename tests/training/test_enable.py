"""`enable_odb` on a Hugging Face Trainer whose dataset yields processed samples: `trainer.train()` just works, with the
losses of stock, and leaves nothing behind."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, WeightedRandomSampler
from toy import NUM_ROWS, Rows, Stream, item, pad
from training.flat_models import COMMON, HEAD, MOE
from training.toy_training import BLOCK, FILL, Rates, Sequential, audit, ids, losses, make, train
from training.trainings import divides
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, set_seed

from odb_factory import ConfigError, Cost, ODBTrainer, ODBTrainerMixin, enable_odb
from odb_factory.model.chunked import Sizes

EVERY_ROW = Counter(range(NUM_ROWS))


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_a_trainer_as_it_is(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """Two epochs with accumulation: every row once an epoch, right figures, evaluations of stock."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    trainer = make(tiny_text, tmp_path, eval_dataset=Rows(num_rows=12), eval_strategy="epoch", **options)
    assert enable_odb(trainer, **block) is trainer
    metrics = trainer.train().metrics
    assert ids(tmp_path) == Counter(dict.fromkeys(range(NUM_ROWS), 2))
    of_steps = Counter(line["optimizer_step"] for line in audit(tmp_path))
    assert trainer.state.global_step == trainer.state.max_steps == max(of_steps)
    assert all(line["micro_batches"] == of_steps[line["optimizer_step"]] for line in audit(tmp_path))
    if block is BLOCK:
        assert max(of_steps) == 2 * math.ceil(NUM_ROWS / 16)
    else:
        assert max(of_steps.values()) == 2  # the last of an epoch may have fewer
    assert trainer.state.epoch == 2.0
    assert [entry["epoch"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1.0, 2.0]
    samples = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert samples == pytest.approx(2 * NUM_ROWS, rel=0.01)
    assert [len(batch["input_ids"]) for batch in trainer.get_eval_dataloader()] == [8, 4]


@pytest.mark.parametrize("arguments", [(2048,), ({"token_budget": 2048},)])
def test_wrong_arguments_are_refused(tiny_text, tmp_path, arguments: Any) -> None:
    trainer = make(tiny_text, tmp_path)
    with pytest.raises(ConfigError, match="^config: "):
        enable_odb(trainer, *arguments)
    with pytest.raises(ConfigError, match="^enable_odb: "):
        enable_odb(trainer.model, token_budget=2048)
    with pytest.raises(ConfigError, match="^process_group: expected the torch.distributed.ProcessGroup"):
        enable_odb(trainer, process_group="dp", **BLOCK)


def test_a_trainer_that_is_not_enabled_is_stocks(tiny_text, tmp_path) -> None:
    """Also with the mixin, and with an enabled trainer in the process."""
    make(tiny_text, tmp_path / "other", block=BLOCK)
    kinds = type("Mixed", (ODBTrainerMixin, Trainer), {}), Trainer
    mixed, stock = (losses(train(tiny_text, tmp_path / "out", max_steps=3, trainer_class=kind)) for kind in kinds)
    assert mixed == stock and not (tmp_path / "out" / "odb_summary.json").exists()


def test_custom_trainers(tiny_text, tmp_path) -> None:
    trainer = train(tiny_text, tmp_path, odb=BLOCK, trainer_class=type("Mine", (ODBTrainer,), {}))
    assert ids(tmp_path) == EVERY_ROW
    with pytest.raises(ConfigError, match="already"):
        enable_odb(trainer, **BLOCK)


def own_dataloader(self: Any) -> DataLoader:
    return DataLoader(self.train_dataset, batch_size=4, sampler=list(range(10, 20)), collate_fn=pad)


def test_a_custom_train_dataloader(tiny_text, tmp_path) -> None:
    """It is used, but refused if it overrides odb's."""
    of_trainer, of_odb = (
        type("Mine", (kind,), {"get_train_dataloader": own_dataloader}) for kind in (Trainer, ODBTrainer)
    )
    train(tiny_text, tmp_path, trainer_class=of_trainer, block=BLOCK)
    assert ids(tmp_path) == Counter(range(10, 20))
    with pytest.raises(ConfigError, match=r"^get_train_dataloader of Mine overrides odb's without calling super"):
        train(tiny_text, tmp_path, trainer_class=of_odb, odb=BLOCK)


class Weighted(Trainer):
    """Has a sampler whose order depends on former orders, and takes a number of each row from the batch."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        return WeightedRandomSampler([1.0] * NUM_ROWS, NUM_ROWS, generator=generator)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(inputs.pop("of_row")) == len(inputs["input_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


def pad_with_numbers(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with a number of each row, which cannot be laid flat."""
    return pad(items) | {"of_row": torch.tensor([len(item["input_ids"]) for item in items])}


class Own(torch.nn.Module):
    """Wraps a model and has no config."""

    def __init__(self, path: Any):
        super().__init__()
        self.language_model = AutoModelForCausalLM.from_pretrained(path)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.language_model(input_ids=input_ids, labels=labels)


class Searched(Trainer):
    """The trial of a search sets the accumulation."""

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.args.gradient_accumulation_steps = 1


SAME: dict[str, dict[str, Any]] = {
    "as it is": {},
    "half an epoch": {"num_train_epochs": 0.5},
    "drop_last": {"dataloader_drop_last": True},
    "a trial of a search": {"trainer_class": Searched, "gradient_accumulation_steps": 8},
    # Stock's mean counts the first label of a row, though no token predicts it.
    "a cost that names the units": {
        "block": {"cost_fn": lambda row: Cost(len(row["input_ids"]), units=len(row["labels"]) - 1)}
    },
    "an order that is drawn once": {"trainer_class": Weighted, "collate": pad_with_numbers, "num_train_epochs": 2},
    "a module without a config": {"model": Own, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SAME)
def test_losses_are_those_of_stock(tiny_text, tmp_path, name: str) -> None:
    """Also with a seed that a script sets after it has made the trainer, because accelerate's sampler uses it."""
    options = dict(SAME[name])
    more, model = options.pop("block", {}), options.pop("model", lambda path: path)
    stock_and_odb = []
    for block in (None, BLOCK | more):
        trainer = make(model(tiny_text), tmp_path, block=block, **options)
        set_seed(7)
        trainer.train()
        stock_and_odb.append(losses(trainer))
    assert stock_and_odb[1] == pytest.approx(stock_and_odb[0], rel=1e-5)


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_a_stream_ends_with_max_steps(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """In its second epoch; the first has every item once."""
    trainer = train(tiny_text, tmp_path, Stream(), max_steps=12, gradient_accumulation_steps=1, block=block)
    assert trainer.state.global_step == 12
    first = [row for line in audit(tmp_path) if line["epoch"] == 0 for row in line["ids"]]
    assert Counter(first) == EVERY_ROW
    assert any(line["epoch"] == 1 for line in audit(tmp_path))


def labelled(k: int) -> dict[str, Any]:
    """Row k of the toy data; two rows have no supervised token."""
    row = item(k)
    return row | {"labels": [-100] * len(row["labels"])} if k in (2, 5) else row


def pad_both(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with labels if the items have labels."""
    batch = pad(items)
    for row, labels in zip(items, batch["labels"]):
        labels[: len(row["input_ids"])] = torch.tensor(row.get("labels", row["input_ids"]))
    return batch if "labels" in items[0] else {"input_ids": batch["input_ids"]}


@pytest.mark.parametrize("has_labels", [True, False])
def test_predictions_by_budget_are_of_every_row(tiny_text, tmp_path, has_labels: bool) -> None:
    """Also of rows without a loss. Without any labels the prediction is stock's."""
    rows = Rows(labelled if has_labels else lambda k: {"input_ids": item(k)["input_ids"]}, 12)
    block = BLOCK | {"eval_token_budget": 128}
    ours, stock = (
        make(tiny_text, tmp_path, collate=pad_both, per_device_eval_batch_size=4, block=odb).predict(rows)
        for odb in (block, None)
    )
    assert len(ours.predictions) == len(stock.predictions) == 12
    for k in range(12):
        tokens = len(item(k)["input_ids"])
        assert ours.predictions[k][:tokens] == pytest.approx(stock.predictions[k][:tokens], abs=1e-4)
    assert ("test_loss" in ours.metrics, "test_loss" in stock.metrics) == (has_labels, has_labels)
    if has_labels:
        assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


# The learning rate with `fill`


@pytest.mark.parametrize(("scale", "power", "kind"), [("linear", 1.0, Sequential), ("sqrt", 0.5, Trainer)])
def test_learning_rate_scaled_to_the_batch(tiny_text, tmp_path, scale: str, power: float, kind: type) -> None:
    """By the samples of an optimizer step, once. An order that is not random is possible if the window has all rows."""
    rates = Rates()
    changes = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "callbacks": [rates]}
    block = FILL | {"buffer_size": 1024, "lr_scale": scale}
    train(tiny_text, tmp_path, block=block, trainer_class=kind, **changes)
    samples = NUM_ROWS / max(line["optimizer_step"] for line in audit(tmp_path))
    assert rates.rates == [pytest.approx(1e-3 * (samples / 16) ** power)] * len(rates.rates)


SHORT_THEN_LONG = [3] * 200 + [60] * 60


def rates_of(model: Path, folder: Path, kind: type = Sequential, lr_scale: str = "none", **changes: Any) -> list[float]:
    """The short rows come first, so the first window differs from the rest."""
    rows, rates = (
        Rows(lambda k: dict.fromkeys(("input_ids", "labels"), [k % 60 + 1] * SHORT_THEN_LONG[k]), 260),
        Rates(),
    )
    block = FILL | {"buffer_size": 64, "lr_scale": lr_scale}
    train(model, folder, rows, block=block, trainer_class=kind, callbacks=[rates], **changes)
    return rates.rates


def test_a_warmup_beyond_the_estimate_ramps_over_its_steps_and_decays_over_the_rest(tiny_text, tmp_path) -> None:
    """The rate follows the samples done: it rises to real step 8 and falls over all other steps."""
    rates = rates_of(tiny_text, tmp_path, warmup_steps=8, lr_scheduler_type="linear")
    assert len(rates) > 16
    assert rates[:9] == pytest.approx([1e-3 * k / 8 for k in range(9)])
    assert rates[8:] == sorted(set(rates[8:]), reverse=True) and rates[-1] > 0


@pytest.mark.parametrize("kind", [Sequential, Trainer], ids=["in order", "small window"])
def test_lr_scale_is_refused_if_the_first_window_may_differ_from_the_rest(tiny_text, tmp_path, kind: type) -> None:
    with pytest.raises(ConfigError, match=r"^odb.lr_scale: 'linear' .* buffer_size") as refused:
        rates_of(tiny_text, tmp_path, kind, lr_scale="linear")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "odb_audit_rank0.jsonl").exists(), "no step is taken"


# Trainers in sequence, two at once, one twice, outside of `train()`


def held() -> tuple[int, int, int, int]:
    """Child processes, threads, open files and process groups of this process."""
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    return len(multiprocessing.active_children()), threading.active_count(), len(os.listdir("/proc/self/fd")), groups


def make_odb(model: Path, folder: Path, **changes: Any) -> Trainer:
    return make(model, folder, block=BLOCK, dataloader_num_workers=1, **changes)


@pytest.fixture
def nothing_is_left(tiny_text, tmp_path_factory) -> Any:
    """The first training starts what a process has once (a resource tracker, a pool of autograd)."""
    make_odb(tiny_text, tmp_path_factory.mktemp("first"), max_steps=1).train()
    before = held()
    yield
    until = time.monotonic() + 10  # threads take a moment to end
    while any(now > then for now, then in zip(held(), before)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(now <= then for now, then in zip(held(), before)), (held(), before)


@pytest.mark.integration
def test_twice_with_an_evaluation_in_between(tiny_text, tmp_path, nothing_is_left) -> None:
    """The trainer keeps its dataset, collator and arguments."""
    trainer = make(tiny_text, tmp_path, eval_dataset=Rows(num_rows=12), dataloader_num_workers=1)
    before = trainer.train_dataset, trainer.data_collator, trainer.args.to_dict()
    first = enable_odb(trainer, **BLOCK).train()
    assert (trainer.train_dataset, trainer.data_collator, trainer.args.to_dict()) == before
    assert ids(tmp_path) == EVERY_ROW
    assert trainer.evaluate()["eval_loss"] > 0
    again = trainer.train()
    assert ids(tmp_path) == EVERY_ROW
    assert again.global_step == first.global_step
    assert again.training_loss < first.training_loss


@pytest.mark.integration
def test_one_inside_the_other(tiny_text, tmp_path, nothing_is_left) -> None:
    """Each has its own rows, weights and figures, while both are in the middle of an epoch."""

    class TrainAnother(TrainerCallback):
        trained = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.trained:
                self.trained = True
                make_odb(tiny_text, tmp_path / "inner").train()

    trainer = make_odb(tiny_text, tmp_path / "outer", callbacks=[TrainAnother()])
    alone = make_odb(tiny_text, tmp_path / "alone")
    trainer.train()
    alone.train()
    for folder in ("outer", "inner", "alone"):
        assert ids(tmp_path / folder) == EVERY_ROW
    assert losses(trainer) == pytest.approx(losses(alone))


@pytest.mark.integration
def test_a_micro_batch_is_freed_before_the_next_is_taken(tiny_text, tmp_path) -> None:
    seen: list[weakref.ref[Any]] = []

    class Notes(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(weakref.ref(inputs["input_ids"]))
            return super().training_step(model, inputs, *args, **kwargs)

    class Looks(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            assert all(reference() is None for reference in seen)

        on_step_end = on_substep_end

    trainer = train(tiny_text, tmp_path, block=BLOCK | {"token_budget": 80}, callbacks=[Looks()], trainer_class=Notes)
    assert len(seen) > 2 * trainer.state.global_step


@pytest.mark.integration
def test_a_callback_sees_and_may_iterate_an_ordinary_train_dataloader(tiny_text, tmp_path, nothing_is_left) -> None:
    """Stock's, also outside of `train()` and in the middle of an epoch, without effect on the training."""
    seen: list[int] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
            assert isinstance(train_dataloader, DataLoader)
            assert (train_dataloader.num_workers, train_dataloader.dataset) == (0, trainer.train_dataset)
            assert train_dataloader.sampler is not None
            seen.append(len(next(iter(train_dataloader))["input_ids"]))

    trainer, stock = make(tiny_text, tmp_path, callbacks=[Looks()], block=BLOCK), make(tiny_text, tmp_path)
    loaders = [each.get_train_dataloader() for each in (trainer, stock)]
    assert len({(type(loader), len(loader)) for loader in loaders}) == 1 and trainer.odb.training is None
    trainer.train()
    assert seen == [trainer.args.per_device_train_batch_size] * trainer.state.global_step
    assert ids(tmp_path) == EVERY_ROW


# Several ranks

ACCUMULATION = 2


def train_all(rank: int, model: str, output_dir: str) -> tuple[list[float], list[tuple[int, ...]]]:
    """Returns the losses of a training in groups of one rank, and what the process holds after each of three trainings
    of both ranks."""
    os.environ["LOCAL_RANK"] = str(rank)
    # Two ranks, each the only one of its group: the engine averages two equal gradients.
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    trainer = make(Path(model), Path(output_dir, str(rank)), gradient_accumulation_steps=ACCUMULATION)
    assert trainer.accelerator.num_processes == 2
    enable_odb(trainer, process_group=groups[rank], loss_scaling="exact", **BLOCK)
    trainer.train()
    counts = []
    for k in range(3):
        make_odb(Path(model), Path(output_dir, f"world{k}")).train()
        gc.collect()
        counts.append(held())
    return losses(trainer), counts


def test_ranks_of_different_groups_do_not_share_samples(tiny_text, tmp_path) -> None:
    options = {"model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_enable:train_all", tmp_path, limit_s=120, **options)
    for rank in range(2):
        folder = tmp_path / str(rank)
        assert ids(folder) == EVERY_ROW
        weights: Counter[int] = Counter()
        for line in audit(folder):
            weights[line["optimizer_step"]] += line["weight"]
        assert list(weights.values()) == pytest.approx([1.0] * len(weights))
    # The same training by one process
    exact = BLOCK | {"loss_scaling": "exact"}
    alone = train(tiny_text, tmp_path / "alone", block=exact, gradient_accumulation_steps=ACCUMULATION)
    for outcome in outcomes:
        of_group, counts = outcome.value
        assert of_group == pytest.approx(losses(alone), rel=1e-4)
        # Processes, threads, files and groups. The first training starts what a process has once.
        assert all(later <= before for before, later in zip(counts[1], counts[2], strict=True)), counts
    for k in range(3):
        assert ids(tmp_path / f"world{k}") + ids(tmp_path / f"world{k}", rank=1) == EVERY_ROW


# Losses and logits

STEPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 3, "learning_rate": 5e-5}


def logged(model: Path, folder: Path, loss_of: Any, dtype: torch.dtype, odb: bool, **changes: Any) -> list[float]:
    """loss_of: the `compute_loss_func` of the Trainer."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    changes = STEPS | {"per_device_train_batch_size": 2, "compute_loss_func": loss_of} | changes
    return losses(train(network, folder, block={"token_budget": 64} if odb else None, **changes))


@pytest.mark.integration
def test_losses_in_bfloat16_add_up_in_float32(tiny_text: Path, tmp_path: Path) -> None:
    """Like stock's; a sum in bfloat16 would have 8 bits."""
    stock, ours = (logged(tiny_text, tmp_path, divides, torch.bfloat16, odb) for odb in (False, True))
    assert ours == pytest.approx(stock, rel=4e-3)
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in ours)


@pytest.mark.integration
@pytest.mark.parametrize("counts_tokens", [True, False], ids=["text", "as with a processor"])
def test_losses_of_routers_weigh_as_in_stock(counts_tokens: bool, tmp_path: Path) -> None:
    """Within 5 %, because they depend on which samples share a micro-batch. Stock divides them by the accumulation
    only if it divides the loss by the accumulation."""

    def first_loss(odb: bool, coefficient: float) -> float:
        torch.manual_seed(0)
        routers = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **COMMON | HEAD | MOE | routers))
        trainer = make(model, tmp_path, **STEPS)
        trainer.model_accepts_loss_kwargs = counts_tokens
        if odb:
            enable_odb(trainer, token_budget=64)
        trainer.train()
        return losses(trainer)[0]

    stock, ours = ([first_loss(odb, coefficient) for coefficient in (0.0, 0.5)] for odb in (False, True))
    assert ours[0] == pytest.approx(stock[0], rel=1e-6)
    assert ours[1] - ours[0] == pytest.approx(stock[1] - stock[0], rel=0.05)


@pytest.mark.integration
def test_a_loss_of_nan_is_left_out_of_the_log(tiny_text: Path, tmp_path: Path) -> None:
    """As in stock, unless `logging_nan_inf_filter` is false."""

    def nan_with_row_0(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = divides(outputs, labels, num_items_in_batch)
        return loss + math.nan if (labels == item(0)["input_ids"][0]).any() else loss

    def of_one_step(loss_of: Any, **changes: Any) -> float:
        one_step = {"max_steps": 1, "dataset": Rows(num_rows=8)}
        (loss,) = logged(tiny_text, tmp_path, loss_of, torch.float32, odb=True, **one_step | changes)
        return loss

    assert 0.2 < of_one_step(nan_with_row_0) / of_one_step(divides) < 0.98
    assert math.isnan(of_one_step(nan_with_row_0, logging_nan_inf_filter=False))


class LargestLogits(TorchDispatchMode):
    """largest: elements of the largest tensor made within whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.largest = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[-1:] == (self.vocabulary,):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.integration
@pytest.mark.parametrize("is_own", [True, False])
def test_logits_of_all_tokens_are_never_made(tiny_text: Path, tmp_path: Path, monkeypatch: Any, is_own: bool) -> None:
    """With the model's own loss and with a loss of LLaMA-Factory. A trainer that reads logits: `test_trl.py`."""
    from llamafactory.train.trainer_utils import dft_loss_func

    loss = None if is_own else dft_loss_func
    config = AutoConfig.from_pretrained(tiny_text)
    vocabulary = config.vocab_size
    monkeypatch.setattr("odb_factory.model.chunked.ON_CPU", Sizes(chunk=0, tile=16 * vocabulary, rows=16))
    stock, ours = (make(tiny_text, tmp_path, block=odb, compute_loss_func=loss, **STEPS) for odb in (None, BLOCK))
    with LargestLogits(vocabulary) as of_stock:
        stock.train()
    with LargestLogits(vocabulary) as of_odb:
        ours.train()
    assert of_stock.largest > 100 * vocabulary
    assert of_odb.largest <= config.hidden_size * vocabulary, "the head's own weight"
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    for weight, expected_weight in zip(ours.model.parameters(), stock.model.parameters()):
        torch.testing.assert_close(weight, expected_weight, rtol=1e-3, atol=2e-6)
    assert ours.evaluate(Rows(num_rows=4))["eval_loss"] > 0
