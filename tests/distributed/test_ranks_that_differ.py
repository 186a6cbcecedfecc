"""I11: two ranks whose arguments or releases differ end for the same reason, in one line, before a model is loaded."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from support import training_config

from odb_factory.data import ranks as agreement
from odb_factory.errors import ODBError

LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": 16}
COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.1}}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora_alpha (16 on rank 0; 128 on rank 1)": (LORA, {"lora_alpha": 128}),
    "finetuning_type": ({}, LORA),
    "use_dft_loss": ({}, {"use_dft_loss": True}),
    "rope_scaling": ({}, {"rope_scaling": "linear"}),
    "image_max_pixels": ({"image_max_pixels": 65536}, {"image_max_pixels": 16384}),
    "cutoff_len": ({}, {"cutoff_len": 100}),
    "learning_rate": ({}, {"learning_rate": 0.5}),
    "odb.token_budget (1024 on rank 0; 99 on rank 1)": ({}, {"odb": {"token_budget": 99}}),
    "lr_scheduler_kwargs.min_lr": (COSINE, {"lr_scheduler_kwargs": {"min_lr": 0.2}}),
    "do_train": ({}, {"do_train": False}),
    # Rank 1 alone is refused: the message names the difference, not the refusal.
    "auto_find_batch_size": ({}, {"auto_find_batch_size": True}),
}
"""Words of the message of both ranks; options of both ranks, and of rank 1."""
RELEASES = {"torch": "2.1.0", "deepspeed": "0.1.2", "peft": None, "Python": "3.99.0"}


@contextmanager
def another_release(package: str, version: str | None) -> Iterator[None]:
    """A context in which this process reads another release of a package."""
    real = metadata.version

    def release_of(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    target, stand_in = (platform, "python_version") if package == "Python" else (metadata, "version")
    with mock.patch.object(target, stand_in, (lambda: version) if package == "Python" else release_of):
        agreement.releases.cache_clear()
        yield
    agreement.releases.cache_clear()


def end_of_arguments(config: dict[str, Any]) -> str:
    from llamafactory.hparams import get_train_args

    try:
        get_train_args(config)
    except ODBError as error:
        return str(error)
    return "went on"


def each_argument(rank: int, *, config: dict[str, Any]) -> dict[str, str]:
    """Read all arguments in one process: after a failed agreement the ranks can start again."""
    from odb_factory import memory
    from odb_factory.llamafactory import activation

    activation.activate()
    os.environ["LOCAL_RANK"] = str(rank)
    ends = {}
    for words, (both, differs) in ARGUMENTS.items():
        ends[words] = end_of_arguments(config | both | (differs if rank else {}))
    for name, version in RELEASES.items():
        with another_release(name if rank else "none", version):
            ends[f"release of {name} ("] = end_of_arguments(config)
    with another_release("torch", "2.1.0+cpu" if rank else "2.1.0+cu126"):
        ends["build"] = end_of_arguments(config)
    paths = {"model_name_or_path": config["model_name_or_path"] + "/."} if rank else {}
    ends["paths"] = end_of_arguments(config | paths)
    with mock.patch.object(memory, "find_meter", return_value=None if rank else CPUMeter(1)):
        ends["one refused"] = end_of_arguments(config | {"odb": {"token_budget": "auto"}})
    both_refused = {"accelerator_config": {"dispatch_batches": True}}
    ends["both refused"] = end_of_arguments(config | both_refused)
    return ends


TRAINERS = {
    "lora_alpha": "peft_config.default.lora_alpha (16 on rank 0; 128 on rank 1)",
    "config": "model.config.rms_norm_eps (1e-06 on rank 0; 0.1 on rank 1)",
    "weight_decay": "weight_decay (0.0 on rank 0; 0.5 on rank 1)",
    "trainer": "trainer ('Trainer' on rank 0; 'OtherTrainer' on rank 1)",
}


def each_trainer(rank: int, *, path: str, out: str) -> dict[str, Any]:
    """Trainers of transformers, without LLaMA-Factory."""
    from peft import LoraConfig, get_peft_model
    from toy import Rows, pad
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from odb_factory import enable_odb

    class OtherTrainer(Trainer):
        pass

    os.environ["LOCAL_RANK"] = str(rank)
    ends = {}
    for name in (*TRAINERS, "workers"):
        differs = bool(rank) and name
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        model.config.rms_norm_eps = 0.1 if differs == "config" else 1e-6
        if name == "lora_alpha":
            lora = LoraConfig(task_type="CAUSAL_LM", lora_alpha=128 if differs else 16, target_modules=["q_proj"])
            model = get_peft_model(model, lora)
        kind = OtherTrainer if differs == "trainer" else Trainer
        arguments = TrainingArguments(
            f"{out}/{name}",
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=1,
            save_strategy="no",
            report_to="none",
            weight_decay=0.5 if differs == "weight_decay" else 0.0,
            dataloader_num_workers=1 if differs == "workers" else 0,
        )
        trainer = enable_odb(kind(model, arguments, train_dataset=Rows(), data_collator=pad), token_budget=512)
        try:
            trainer.train()
            ends[name] = "trained"
        except ODBError as error:
            ends[name] = f"{error} (after {trainer.state.global_step} optimizer steps)"
    return ends


def test_trainers_without_llamafactory_compare_their_settings(tiny_text: Path, tmp_path: Path) -> None:
    ranks = run_ranks(
        "distributed.test_ranks_that_differ:each_trainer", tmp_path, limit_s=200, path=str(tiny_text), out=str(tmp_path)
    )
    first, second = (outcome.value for outcome in ranks)
    assert first == second, "both end for the same reason"
    for name, words in TRAINERS.items():
        assert first[name].startswith("the ranks differ in ") and words in first[name], first[name]
        assert first[name].endswith("(after 0 optimizer steps)")
    assert first["workers"] == "trained"


def test_settings_of_the_model_are_compared_before_it_is_loaded(tiny_text, data_dir, tmp_path) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 1024}, ddp_backend="gloo")
    ranks = run_ranks("distributed.test_ranks_that_differ:each_argument", tmp_path, limit_s=200, config=config)
    first, second = (outcome.value for outcome in ranks)
    assert first == second, "both end for the same reason"
    for words in (*ARGUMENTS, *(f"release of {name} (" for name in RELEASES)):
        assert first[words].startswith("the ranks differ in ") and words in first[words] and "\n" not in first[words], (
            first[words]
        )
    assert first["build"] == first["paths"] == "went on"
    assert first["one refused"].startswith("rank 1 stopped: odb.token_budget: 'auto' tries micro-batches on an acc")
    assert first["both refused"].startswith("accelerator_config.dispatch_batches: True")
    assert not any("the ranks differ in" in outcome.output for outcome in ranks), "paths and builds may differ"
