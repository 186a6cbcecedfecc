"""Trainings of LLaMA-Factory's stages with an `odb:` block and without: their model, rows and configurations."""

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
from distributed.ranks import run_ranks
from distributed.shims.training_record import TrainingRecord
from PIL import Image
from same_training import Training, check_same_training, read, report
from support import read_jsonl, training_config
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from odb_factory.llamafactory import attach

NUM_TRAINED, NUM_EVAL, NUM_PICTURES = 22, 4, 14
"""With 2 x 3 pairs an optimizer step the last one of an epoch has stock micro-batches of 3 and of 1."""
STEPS = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
ODB = {"token_budget": 640, "audit": True}
"""Holds all pairs of the last optimizer step at once, were they of one weight."""
WHOLE: dict[str, dict[str, Any]] = {"pt": {"packing": False}}
"""Stock's own argument for documents that stay whole; with odb it goes without saying."""
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
ROWS = {"pt": "documents", "sft": "talks", "kto": "judged"}
HEAD_BIAS = "v_head.summary.bias"
LIMIT_S = 240

Config = Callable[..., dict[str, Any]]


def configurations(tiny_text: Path, folder: Path) -> Config:
    """`config_of(stage, output_dir, ...)`: a training on the rows that this writes to `folder`."""
    model, rows_dir = untied(tiny_text, folder / "model"), write_rows(folder / "rows")

    def config_of(name: str, output_dir: Path, **changes: Any) -> dict[str, Any]:
        return (
            training_config(
                model,
                rows_dir,
                output_dir,
                stage=name,
                dataset=ROWS.get(name, "pairs"),
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


def untied(tiny: Path, folder: Path, auto: Any = AutoModelForCausalLM) -> Path:
    """A head of its own, which stock can save beside a value head; no dropout, which would differ by the cut."""
    shutil.copytree(tiny, folder)
    config = AutoConfig.from_pretrained(folder)
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        part.tie_word_embeddings, part.summary_dropout_prob = False, 0.0
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    return folder


def write_rows(folder: Path) -> Path:
    """In the formats of LLaMA-Factory's demo sets: documents, conversations, and those with a better and a worse
    answer, or with one that is judged."""
    folder.mkdir()
    rng = random.Random(5)
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
    talks = [{"conversations": pair["conversations"] + [pair["chosen"]]} for pair in pairs]
    judged = [talk | {"good": k % 3 > 0} for k, talk in enumerate(talks)]
    albums = [{"conversations": one["conversations"] + [one["chosen"]], "images": one["images"]} for one in pictures]
    rows = {"documents": documents, "pairs": pairs, "pictures": pictures}
    rows |= {"talks": talks, "judged": judged, "albums": albums}
    for name in rows:
        (folder / f"{name}.json").write_text(json.dumps(rows[name]), encoding="utf-8")
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    in_messages = {"messages": "conversations"}
    of_pairs = {"formatting": "sharegpt", "ranking": True, "columns": columns}
    info = {
        "documents": {"file_name": "documents.json", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "pairs.json", **of_pairs},
        "pictures": {"file_name": "pictures.json", **of_pairs, "columns": columns | {"images": "images"}},
        "talks": {"file_name": "talks.json", "formatting": "sharegpt"},
        "albums": {"file_name": "albums.json", "formatting": "sharegpt", "columns": in_messages | {"images": "images"}},
        "judged": {"file_name": "judged.json", "formatting": "sharegpt", "columns": in_messages | {"kto_tag": "good"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


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
        configs.append(config_of(stage, folder / f"{name}_stock", **(common | WHOLE.get(stage, {}))))
    folder.mkdir(exist_ok=True)
    outcomes = run_ranks("stage_ranks:train_stages", folder, world_size=num_ranks, limit_s=limit_s, configs=configs)
    assert all(outcome.returncode == 0 for outcome in outcomes), "\n".join(o.said[-3000:] for o in outcomes)

    def trained(name: str) -> Training:
        return read(folder / name, folder / f"{name}_record", num_ranks)

    return {name: (trained(f"{name}_odb"), trained(f"{name}_stock")) for name in stages}


class OneBatch(TrainerCallback):
    """Compares the gradient of every optimizer step with that of the mean loss of one batch of the same samples."""

    def __init__(self, trainer: Any):
        self.trainer, self.audit = trainer, Path(trainer.args.output_dir, "odb_audit_rank0.jsonl")
        self.deviations: list[float] = []
        self.num_cut, self.of_a_tensor = 0, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        lines = [line for line in read_jsonl(self.audit) if line["optimizer_step"] == state.global_step + 1]
        ids = [id for line in lines for id in line["ids"]]
        keeps_means = self.trainer.odb.run.config.loss_scaling == "stock"
        if keeps_means and len(ids) % args.per_device_train_batch_size:
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


def compare_with_one_batch(monkeypatch: pytest.MonkeyPatch) -> list[OneBatch]:
    """The comparisons of the trainings with odb that are run in this process."""
    made: list[OneBatch] = []
    attached = attach.attach

    def also_compare(trainer: Any, config: Any) -> None:
        attached(trainer, config)
        made.append(OneBatch(trainer))
        trainer.add_callback(made[-1])

    monkeypatch.setattr(attach, "attach", also_compare)
    return made
