"""Which layout the run would have: asked of the rules of a training, with the model's class and no weights."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from odb_factory.dry_run.arguments import Asked
from odb_factory.dry_run.rows import Rows
from odb_factory.errors import one_line
from odb_factory.llamafactory.layout import why_not_flat
from odb_factory.training.layout_choice import Layout, resolve_layout

ACCELERATOR = torch.device("cuda")
"""What a training is taken to run on, unless its YAML says `use_cpu`."""


def layout_of(asked: Asked, rows: Rows) -> Layout:
    """As resolved before training; what the check of a few real samples finds is not known.

    Raises `ConfigError` where `layout: flat` is refused.
    """
    if asked.config.layout == "padded":
        return resolve_layout(SimpleNamespace(train_dataset=rows.dataset, model=torch.nn.Module()), asked.config)
    try:
        with _quiet():
            model = _without_weights(asked, rows.tokenizer)
    except Exception as error:  # a model of its own code, or a release that builds it otherwise
        name: Literal["flat", "padded"] = "flat" if asked.config.layout == "flat" else "padded"
        return Layout(name, f"taken for granted, for the model cannot be built without its weights: {one_line(error)}")
    trainer = SimpleNamespace(
        model=model,
        train_dataset=rows.dataset,
        finetuning_args=asked.parsed.finetuning,
        args=SimpleNamespace(
            device=torch.device("cpu") if asked.uses_cpu else ACCELERATOR,
            neftune_noise_alpha=asked.parsed.training.neftune_noise_alpha,
            label_smoothing_factor=asked.parsed.training.label_smoothing_factor,
            bf16=asked.parsed.training.bf16,
            fp16=asked.parsed.training.fp16,
        ),
    )
    layout = resolve_layout(trainer, asked.config, why_not_flat(trainer))
    layout.undo()
    return layout


def _without_weights(asked: Asked, tokenizer: Any) -> Any:
    """The base model as LLaMA-Factory builds it from its config, on torch's meta device."""
    from llamafactory.model import load_model

    model_args, finetuning_args = copy.copy(asked.parsed.model), copy.copy(asked.parsed.finetuning)
    model_args.train_from_scratch = True  # from the config
    for key in ("adapter_name_or_path", "quantization_bit", "mixture_of_depths"):
        setattr(model_args, key, None)
    model_args.enable_liger_kernel = model_args.print_param_status = False
    finetuning_args.finetuning_type = "full"
    deepspeed = getattr(asked.parsed.training, "hf_deepspeed_config", None)
    unset_hf_deepspeed_config()  # with ZeRO-3 weights would be dealt out to ranks as they are made
    try:
        with torch.device("meta"):
            return load_model(tokenizer, model_args, finetuning_args, is_trainable=True)
    finally:
        if deepspeed is not None:
            set_hf_deepspeed_config(deepspeed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What is logged while the model is built concerns no training."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
