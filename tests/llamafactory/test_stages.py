"""I8 and I9 for the stages pt, rm and dpo: the same YAML with an `odb:` block is the same training as without.

Supervised fine-tuning is `test_same_training.py`'s. The wide grid: `pytest -s -m full_grid`; -s shows how far the
runs differ.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.conftest import deepspeed_op  # noqa: F401  (a fixture)
from distributed.ranks import run_ranks
from distributed.shims.training_record import TrainingRecord
from distributed.test_engines import deepspeed_config
from llamafactory.hparams import get_train_args
from llamafactory.train.tuner import run_exp
from PIL import Image
from safetensors.torch import load_file
from same_training import Training, check_same_training, read, report, train
from support import read_jsonl, training_config
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import attach
from odb_factory.llamafactory.media import MediaObserver
from odb_factory.llamafactory.stages import STAGES

NUM_TRAINED, NUM_EVAL, NUM_PICTURES = 22, 4, 14
"""With 2 x 3 pairs an optimizer step the last one of an epoch has stock micro-batches of 3 and of 1."""
STEPS = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
ODB = {"token_budget": 640, "audit": True}
"""Holds all pairs of the last optimizer step at once, were they of one weight."""
WHOLE = {"pt": {"packing": False}, "rm": {}, "dpo": {}}
"""Stock's own argument for documents that stay whole; with odb it goes without saying."""
GRADIENT, OF_A_TENSOR = 2e-6, 1e-5
"""Largest relative differences: of the norm of the whole gradient, and of that of a tensor, whose parts may cancel."""
VARIANTS = {
    "orpo": {"pref_loss": "orpo"},
    "simpo": {"pref_loss": "simpo"},
    "ipo": {"pref_loss": "ipo"},
    "hinge": {"pref_loss": "hinge"},
    "ftx": {"pref_ftx": 0.5, "pref_beta": 0.02},
    "ld": {"ld_alpha": 0.5, "pref_beta": 0.02},
}
"""Stock sums some hundred log-probabilities in float32, along padded rows, to 3e-5; with its beta of 0.1 gradients of
pairs that are learnt differ by 3e-6 for that, in float64 models too."""
ONE_EPOCH = {"num_train_epochs": 1, "eval_strategy": "no", "max_grad_norm": 1e9}
HEAD_BIAS = "v_head.summary.bias"
LIMIT_S = 240

Config = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own, which stock can save beside a value head; no dropout, which would differ by the cut."""
    folder = tmp_path_factory.mktemp("models") / "untied"
    shutil.copytree(tiny_text, folder)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings, config.summary_dropout_prob = False, 0.0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the formats of LLaMA-Factory's demo sets: documents, and conversations with a better and a worse answer."""
    folder, rng = tmp_path_factory.mktemp("rows"), random.Random(5)
    vocabulary = ["the", "model", "reads", "a", "long", "line", "of", "words", "and", "says", "which", "is", "better"]

    def words(count: int) -> str:
        return " ".join(rng.choices(vocabulary, k=count))

    def said(who: str, count: int) -> dict[str, str]:
        return {"from": who, "value": words(count)}

    numbers = range(NUM_TRAINED + NUM_EVAL)
    documents = [{"text": words(3 + k * 13 % 67)} for k in numbers]
    pairs = [
        {
            "conversations": [said("human", 3 + k % 9)],
            "chosen": said("gpt", 2 + k * 13 % 61),
            "rejected": said("gpt", 2 + k * 29 % 53),
        }
        for k in numbers
    ]
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        Image.effect_noise(size, 60).convert("RGB").save(folder / f"{name}.png")
    pictures = []
    for k, pair in enumerate(pairs[:NUM_PICTURES]):
        images = ([], ["wide.png"], ["tall.png", "wide.png"])[k % 3]
        asked = {"from": "human", "value": "<image>" * len(images) + pair["conversations"][0]["value"]}
        pictures.append(pair | {"conversations": [asked], "images": images})
    for name, rows in {"documents": documents, "pairs": pairs, "pictures": pictures}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    of_pairs = {"formatting": "sharegpt", "ranking": True, "columns": columns}
    info = {
        "documents": {"file_name": "documents.json", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "pairs.json", **of_pairs},
        "pictures": {"file_name": "pictures.json", **of_pairs, "columns": columns | {"images": "images"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def config_of(model: Path, rows_dir: Path) -> Config:
    def config_of(name: str, output_dir: Path, **changes: Any) -> dict[str, Any]:
        return (
            training_config(
                model,
                rows_dir,
                output_dir,
                stage=name,
                dataset="documents" if name == "pt" else "pairs",
                num_train_epochs=2,
                learning_rate=3e-4,
                lr_scheduler_type="cosine",
                warmup_steps=2,
                val_size=NUM_EVAL,
                per_device_eval_batch_size=2,
                eval_strategy="steps",
                eval_steps=3,
                include_num_input_tokens_seen=True,
                disable_gradient_checkpointing=True,
            )
            | STEPS
            | changes
        )

    return config_of


class OneBatch(TrainerCallback):
    """Compares the gradient of every optimizer step with that of the mean loss of one batch of the same samples."""

    def __init__(self, trainer: Any):
        self.trainer, self.audit = trainer, Path(trainer.args.output_dir, "odb_audit_rank0.jsonl")
        self.deviations: list[float] = []
        self.num_cut, self.of_a_tensor = 0, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        lines = [line for line in read_jsonl(self.audit) if line["optimizer_step"] == state.global_step + 1]
        ids = [id for line in lines for id in line["ids"]]
        if len(ids) % args.per_device_train_batch_size:
            return  # a mean of means of unlike micro-batches, which one batch does not have
        self.num_cut += len(lines) > 1
        recorded = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, TrainingRecord)]
        before = [list(one.micro_batches) for one in recorded]
        ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        batch = self.trainer.data_collator([dict(self.trainer.train_dataset[i]) for i in ids])
        counted = {}
        if self.trainer.model_accepts_loss_kwargs:  # as the Trainer counts, before the causal shift
            counted["num_items_in_batch"] = (batch["labels"] != -100).sum()
        self.trainer.compute_loss(model, self.trainer._prepare_inputs(batch), **counted).backward()
        differences, norms = [], []
        for name, p in model.named_parameters():
            if p.grad is not None:
                differences.append(float((ours[name] - p.grad).norm()))
                norms.append(float(p.grad.norm()))
            p.grad = ours.get(name)
        self.deviations.append(math.hypot(*differences) / math.hypot(*norms))
        of_tensors = [one / norm for one, norm in zip(differences, norms) if norm > 1e-6 * max(norms)]
        self.of_a_tensor = max(self.of_a_tensor, *of_tensors)
        for one, micro_batches in zip(recorded, before):
            one.micro_batches = micro_batches


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> list[OneBatch]:
    """The comparisons of the trainings with odb that this test runs in this process."""
    made: list[OneBatch] = []
    attached = attach.attach

    def also_compare(trainer: Any, config: Any) -> None:
        attached(trainer, config)
        made.append(OneBatch(trainer))
        trainer.add_callback(made[-1])

    monkeypatch.setattr(attach, "attach", also_compare)
    return made


def check_gradient(name: str, one: OneBatch) -> None:
    print(f"{name}: gradient of an optimizer step {max(one.deviations):.1e}, worst tensor {one.of_a_tensor:.1e}")
    assert one.num_cut and max(one.deviations) < GRADIENT and one.of_a_tensor < OF_A_TENSOR


@pytest.mark.parametrize("stage", WHOLE)
def test_a_stage_is_the_same_training_on_one_rank(
    stage: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    budget = ODB if stage != "pt" else ODB | {"token_budget": 128}
    ours = train(config_of(stage, tmp_path / "odb", odb=budget, max_grad_norm=1e9))
    stock = train(config_of(stage, tmp_path / "stock", max_grad_norm=1e9, **WHOLE[stage]))
    times = 1 if stage == "pt" else 2
    assert [len(step) // times for step in stock.rows] == [6, 6, 6, 4] * 2
    same(stage, ours, stock)
    check_gradient(stage, one_batch[0])
    audit = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert {bool(line["segments"]) for line in audit} == {stage == "pt"}, "pt is flat, pairs are padded"
    assert all(line["units"] == len(line["ids"]) for line in audit if stage != "pt")


def test_pairs_with_images_are_the_same_training(
    config_of: Config, tiny_vl: Path, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    """Both answers bring the images of their row; where no pair of a micro-batch has one, the fake image comes once."""
    changes = {"model_name_or_path": str(tiny_vl), "template": "qwen3_vl", "dataset": "pictures"}
    changes |= ONE_EPOCH | {"per_device_train_batch_size": 2, "freeze_vision_tower": False}
    budget = {"token_budget": 500, "max_patches": 300, "audit": True}
    ours = train(config_of("dpo", tmp_path / "odb", odb=budget, **changes))
    same("dpo with images", ours, train(config_of("dpo", tmp_path / "stock", **changes)))
    check_gradient("dpo with images", one_batch[0])
    trainer = one_batch[0].trainer
    settings = trainer.odb_settings
    for line in read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl"):
        costs = [settings.observer(trainer.train_dataset, id)[1] for id in line["ids"]]
        rows, length, patches = settings.collation.shape(costs)
        assert line["patches"] == patches <= 300
        assert line["rows"] == 2 * rows and 2 * line["length"] <= length, "a pair is two rows of half its tokens"


@pytest.mark.parametrize("variant", ["orpo", "simpo", "ipo"])
def test_losses_over_pairs_have_the_gradient_of_one_batch(
    variant: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path
) -> None:
    run_exp(config_of("dpo", tmp_path / "out", odb=ODB, **(VARIANTS[variant] | ONE_EPOCH)))
    check_gradient(variant, one_batch[0])


def same(name: str, ours: Training, stock: Training, **options: Any) -> None:
    """A reward model's loss is one of differences of scores: the gradient of the bias of its head is 0 but for
    rounding, of which Adam makes whole steps."""
    ours, stock = (
        dataclasses.replace(one, weights={key: value for key, value in one.weights.items() if key != HEAD_BIAS})
        for one in (ours, stock)
    )
    report(name, check_same_training(ours, stock, **options))


def on_ranks(
    config_of: Config,
    folder: Path,
    stages: dict[str, tuple[str, dict[str, Any]]],
    num_ranks: int = 2,
    limit_s: float = LIMIT_S,
) -> dict[str, tuple[Training, Training]]:
    """Of each named stage with its changes the training with odb and stock's; all in the processes of one launch."""
    configs = []
    for name, (stage, changes) in stages.items():
        common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "val_size": 6}
        common |= {"ddp_find_unused_parameters": stage == "rm"} | changes
        block = common.pop("odb", ODB)
        configs.append(config_of(stage, folder / f"{name}_odb", odb=block, **common))
        configs.append(config_of(stage, folder / f"{name}_stock", **(common | WHOLE[stage])))
    folder.mkdir(exist_ok=True)
    outcomes = run_ranks("stage_ranks:train_stages", folder, world_size=num_ranks, limit_s=limit_s, configs=configs)
    assert all(outcome.returncode == 0 for outcome in outcomes), "\n".join(o.said[-3000:] for o in outcomes)

    def trained(name: str) -> Training:
        return read(folder / name, folder / f"{name}_record", num_ranks)

    return {name: (trained(f"{name}_odb"), trained(f"{name}_stock")) for name in stages}


def test_stages_are_the_same_training_on_two_ranks(config_of: Config, tmp_path: Path) -> None:
    stages = {stage: (stage, {"num_train_epochs": 1}) for stage in WHOLE}
    stages["pt_padded"] = ("pt", {"num_train_epochs": 1, "odb": ODB | {"layout": "padded"}})
    for stage, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages).items():
        times = 1 if stage.startswith("pt") else 2
        assert [len(step) // times for step in stock.rows] == [8, 8, 4], stage
        same(f"{stage}, 2 ranks", ours, stock)


# What is refused, and what is said.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "pt", "packing": True}, ("packing", "True", "layout: flat")),
        ({"stage": "rm", "odb": ODB | {"layout": "flat"}}, ("stage", "rm", "flat", "padded")),
        ({"stage": "dpo", "odb": ODB | {"layout": "flat"}}, ("stage", "dpo", "flat", "padded")),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(
    changes: dict[str, Any], words: tuple[str, ...], config_of: Config, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        get_train_args(config_of("sft", tmp_path, **{"odb": ODB} | changes))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_documents_stay_whole_and_that_is_said(
    config_of: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = config_of("pt", tmp_path, odb=ODB)
    assert get_train_args(given)[1].packing is False and "packing" not in given
    assert len([message for message in caplog.messages if "documents stay whole" in message]) == 1
    assert get_train_args(config_of("pt", tmp_path))[1].packing is True, "without the block it is stock's"


# Pairs and tokens as they are counted.


class Pad:
    pad_token_id = 2


def test_a_pad_token_inside_a_document_carries_no_loss() -> None:
    """Where a tokenizer pads with its end-of-text token the collator masks every one of them."""
    cost = STAGES["pt"].of_training(None, Pad()).cost({"input_ids": [2, 5, 2, 7, 2]}, None)  # type: ignore[arg-type]
    assert (cost.tokens, cost.units, cost.leading_label) == (5, 2, False)


@pytest.mark.parametrize(
    ("pref_loss", "pref_ftx", "units"),
    [("sigmoid", 0.0, (1, 1)), ("sigmoid", 0.5, (0, 1)), ("ipo", 0.0, (0, 0)), ("simpo", 0.0, (0, 0))],
)
def test_an_empty_answer_is_left_out_where_the_loss_divides_by_its_length(
    pref_loss: str, pref_ftx: float, units: tuple[int, int]
) -> None:
    class Arguments:
        pass

    arguments = Arguments()
    arguments.pref_loss, arguments.pref_ftx = pref_loss, pref_ftx  # type: ignore[attr-defined]
    stage = STAGES["dpo"].of_training(arguments, None)
    empty, answer = ([1, 1], [-100, -100]), ([1, 1, 4], [-100, -100, 4])

    def units_of(chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]) -> int:
        features = {"chosen_input_ids": chosen[0], "chosen_labels": chosen[1]}
        features |= {"rejected_input_ids": rejected[0], "rejected_labels": rejected[1]}
        cost = stage.cost(features, NO_MEDIA)
        assert cost.tokens == 6
        return cost.units

    assert (units_of(empty, answer), units_of(answer, empty)) == units


class NoMedia(MediaObserver):
    def __init__(self) -> None:
        pass

    def count_patches(self, *args: Any) -> int:
        return 0

    def has_media(self, *args: Any) -> bool:
        return True


NO_MEDIA = NoMedia()


# The wide grid.


@pytest.mark.full_grid
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_dpo(variant: str, config_of: Config, one_batch: list[OneBatch], tmp_path: Path) -> None:
    changes = VARIANTS[variant] | {"max_grad_norm": 1e9}
    ours = train(config_of("dpo", tmp_path / "odb", odb=ODB, **changes))
    stock = train(config_of("dpo", tmp_path / "stock", **changes))
    same(variant, ours, stock)
    check_gradient(variant, one_batch[0])


@pytest.mark.full_grid
@pytest.mark.parametrize("tuning", ["lora", "freeze"])
@pytest.mark.parametrize("stage", WHOLE)
def test_tuning(stage: str, tuning: str, config_of: Config, tmp_path: Path) -> None:
    changes = {"finetuning_type": tuning, "freeze_trainable_layers": 1}
    ours = train(config_of(stage, tmp_path / "odb", odb=ODB, **changes))
    stock = train(config_of(stage, tmp_path / "stock", **(changes | WHOLE[stage])))
    same(f"{stage}, {tuning}", ours, stock)


@pytest.mark.full_grid
@pytest.mark.timeout(960)
def test_variants_and_adapters_on_two_ranks(config_of: Config, tmp_path: Path) -> None:
    stages = {f"dpo_{name}": ("dpo", changes) for name, changes in VARIANTS.items()}
    stages |= {f"{stage}_lora": (stage, {"finetuning_type": "lora"}) for stage in WHOLE}
    for name, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages, limit_s=900).items():
        same(f"{name}, 2 ranks", ours, stock)


@pytest.mark.full_grid
@pytest.mark.parametrize("stage", WHOLE)
@pytest.mark.parametrize("zero", [2, 3])
def test_zero(
    zero: int,
    stage: str,
    config_of: Config,
    tmp_path: Path,
    deepspeed_op: None,  # noqa: F811
) -> None:
    changes = {"deepspeed": deepspeed_config(zero, tmp_path), "use_cpu": False, "val_size": 6}
    changes |= {"per_device_train_batch_size": 2, "eval_strategy": "no"}
    ours = train(config_of(stage, tmp_path / "odb", odb=ODB, **changes), 2)
    stock = train(config_of(stage, tmp_path / "stock", **(changes | WHOLE[stage])), 2)
    same(f"{stage}, 2 ranks, ZeRO-{zero}", ours, stock, shards_parameters=zero == 3)


@pytest.mark.full_grid
@pytest.mark.parametrize("stage", ["pt", "dpo"])
def test_a_resumed_training_is_the_same(stage: str, config_of: Config, tmp_path: Path) -> None:
    """LLaMA-Factory resumes no full training of a reward model."""
    saves = {"save_strategy": "steps", "save_steps": 3, "save_only_model": False}
    whole = train(config_of(stage, tmp_path / "out", odb=ODB, **saves))
    again = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3"), "overwrite_output_dir": False}
    for name in ("model.safetensors", "odb_audit_rank0.jsonl"):
        (tmp_path / "out" / name).unlink()
    run_exp(config_of(stage, tmp_path / "out", odb=ODB, **(saves | again)))
    assert read_jsonl(tmp_path / "out" / "odb_audit_rank0.jsonl")[0]["optimizer_step"] == 4
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == whole.weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.weights.items())
