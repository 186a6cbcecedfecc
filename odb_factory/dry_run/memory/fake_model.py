"""The model that a training would have, built by LLaMA-Factory from its config alone, and batches for it.

Its weights are torch's fake tensors: they have shapes and dtypes and no values, so a model of any size takes no memory
and no time. What does not come from a weight (ids, masks, grids) is real, so code that looks at it goes the way it goes
in training. What LLaMA-Factory makes of the arguments is asked of itself.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from odb_factory.data.measure import DEFAULT_PATCH_SIZE, Measured, measure_batch
from odb_factory.errors import ConfigError, one_line

if TYPE_CHECKING:
    from odb_factory.dry_run.memory.estimate import ParsedArguments

STAGES = ("pt", "sft")
IMAGE_SIDE = 448
"""Pixels of the blank images that stand for media: a few hundred to a thousand patches with most towers."""
UNKNOWN = {
    "model": ("quantization_bit", "use_unsloth", "use_kt", "mixture_of_depths"),
    "finetuning": ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro"),
}
"""Arguments of which the estimate has no idea what they take."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model of fake tensors in training mode. fake: the mode that they belong to. dtype: autocast's; None: without.

    parts: what makes batches for it: LLaMA-Factory's collator, template, tokenizer, processor (None: text alone), and
    the token that rows are filled with.
    """

    model: Any
    fake: Any
    dtype: torch.dtype | None
    parts: dict[str, Any]

    @property
    def takes_images(self) -> bool:
        return self.parts["template"].mm_plugin.image_token is not None and self.parts["processor"] is not None

    def batch(self, rows: int, row_length: int, images: int = 0) -> tuple[dict[str, Any], Measured]:
        """A collated micro-batch. Of several rows the first is as long as said, the others are one token shorter.

        The images are in the first row, which is as long as they need at least.
        """
        features = [self._feature(row_length - (row > 0), images if row == 0 else 0) for row in range(rows)]
        batch = dict(self.parts["collator"](features))
        if rows == 1:  # what stands in for missing images is masked; a flat row has no mask
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        patch_size = getattr(getattr(self.parts["processor"], "image_processor", None), "patch_size", None)
        patch_size = patch_size if isinstance(patch_size, int) else DEFAULT_PATCH_SIZE
        return batch, measure_batch(batch, patch_size)

    def _feature(self, length: int, num_images: int) -> dict[str, Any]:
        ids, images = self._image_ids(num_images) if num_images else ([], [])
        ids = ids + [self.parts["filler"]] * (length - len(ids))
        media = {"images": images or None, "videos": None, "audios": None}
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": list(ids), **media}

    def _image_ids(self, number: int) -> tuple[list[int], list[Any]]:
        from llamafactory.extras.constants import IMAGE_PLACEHOLDER
        from PIL import Image

        template, tokenizer, processor = (self.parts[name] for name in ("template", "tokenizer", "processor"))
        images = [Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), "white") for _ in range(number)]
        messages = [
            {"role": "user", "content": IMAGE_PLACEHOLDER * number},
            {"role": "assistant", "content": "a"},
        ]
        messages = template.mm_plugin.process_messages(messages, images, [], [], processor)
        ids, _ = template.mm_plugin.process_token_ids([], [], images, [], [], tokenizer, processor)
        for pair in template.encode_multiturn(tokenizer, messages, None, None):
            for part in pair:
                ids = ids + list(part)
        return ids, images


def build(arguments: ParsedArguments) -> FakeModel:
    """Raises `ConfigError` where the model cannot be built from its config, or trains as nothing is known of."""
    _check(arguments)
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
    from llamafactory.model import load_model, load_tokenizer

    model_args, finetuning_args = copy.copy(arguments.model), copy.copy(arguments.finetuning)
    model_args.train_from_scratch = True  # from the config
    model_args.enable_liger_kernel = False  # its kernels need an accelerator; the loss is accounted for by name
    model_args.adapter_name_or_path = None
    model_args.print_param_status = False
    finetuning_args.pissa_init = False
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode(allow_non_fake_inputs=True)
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"memory: torch {torch.__version__} has no fake tensors as they are known here ({one_line(error)}); "
            "install torch 2.5 to 2.12."
        ) from None
    with _quiet(), _without_deepspeed():
        tokenizer_module = load_tokenizer(model_args)
        tokenizer, processor = tokenizer_module["tokenizer"], tokenizer_module["processor"]
        template = get_template_and_fix_tokenizer(tokenizer, arguments.data)
        try:
            with torch.device("meta"):
                model = load_model(tokenizer, model_args, finetuning_args, is_trainable=True)
        except Exception as error:
            raise ConfigError(
                f"model_name_or_path: {model_args.model_name_or_path} cannot be built without its weights to estimate "
                f"its memory ({type(error).__name__}: {one_line(error)}); leave out --memory."
            ) from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("finetuning_type: no weight of the model is trained, so there is no memory to estimate.")
    autocast, weights = _precision(arguments.training)
    _make_fake(model, fake, weights)
    collator = SFTDataCollatorWith4DAttentionMask(
        template=template,
        model=model,
        attn_implementation=getattr(model.config, "_attn_implementation", None),
        compute_dtype=model_args.compute_dtype,
        tokenizer=tokenizer,
        processor=processor,
    )
    filler = tokenizer.encode("a", add_special_tokens=False)[0]
    parts = {"collator": collator, "template": template, "tokenizer": tokenizer, "processor": processor}
    return FakeModel(model, fake, autocast, {**parts, "filler": filler})


def _check(arguments: ParsedArguments) -> None:
    stage = arguments.finetuning.stage
    if stage not in STAGES:
        raise ConfigError(
            f"stage: memory is estimated for stage {' and '.join(STAGES)}, not for {stage}, whose loss and further "
            "models it knows nothing of; leave out --memory."
        )
    for group, names in UNKNOWN.items():
        for name in names:
            if getattr(getattr(arguments, group), name, None):
                raise ConfigError(f"{name}: nothing is known here of the memory that it takes; leave out --memory.")


def _precision(training: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Of autocast, and what weights are converted to (None: neither): the Trainer does one, DeepSpeed the other."""
    dtype = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    return (dtype, None) if training.deepspeed is None else (None, dtype)


def _make_fake(model: Any, fake: Any, dtype: torch.dtype | None) -> None:
    """Fake tensors of the CPU in the place of meta ones, so that what is chosen by device is chosen as for a real one.

    dtype: of all that is in floating point; None: as it is.
    """
    made: dict[int, Any] = {}  # a weight that is shared stays shared

    def of(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            one = torch.empty(tensor.shape, dtype=kind, device="cpu")
            is_weight = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = (torch.nn.Parameter(one, tensor.requires_grad) if is_weight else one), tensor
        return made[id(tensor)][0]

    with fake:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, of(parameter))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, of(buffer))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What is logged while the model is built concerns no training."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _without_deepspeed() -> Iterator[None]:
    """A YAML that asks for ZeRO-3 would have weights dealt out to ranks as they are made."""
    from transformers.integrations import deepspeed

    reference = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    config = None if reference is None else reference()
    if config is None:
        yield
        return
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)
