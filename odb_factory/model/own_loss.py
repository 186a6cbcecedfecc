"""The loss that a model computes of its logits itself, found out by running that code alone.

In the trial the output embedding returns known logits and every other layer returns zeros. So the trial needs no
weights (they may be sharded), calls no hook, and takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_factory.errors import one_line

LABELS = ((-100, 5, 6, 7, 8), (-100, -100, 4, 3, -100))
"""Of the trial: [rows, length]. The last token of the second row is padding."""
NUM_ITEMS = 7
"""What the trial gives as `num_items_in_batch`; the rows have 6 supervised tokens."""
SWITCHED_OFF = ("output_router_logits", "skip_logits")
"""Arguments of forwards: the loss of routers, and Liger's kernel that computes the loss without logits."""


@dataclass(frozen=True)
class OwnLoss:
    """The loss of a model that is given labels.

    why_another: why it is not known to be the mean cross entropy of the supervised tokens, each predicted by the token
    before it; None where it is. counts_items: it is divided by `num_items_in_batch` where that is given.
    """

    why_another: str | None
    counts_items: bool


def model_with_labels(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that takes labels, inside adapters and wrappers of engines."""
    for module in model.modules():
        kind = type(module)  # whose forward tells what it takes, however the module's own has been wrapped
        if hasattr(kind, "get_output_embeddings") and "labels" in signature(kind.forward).parameters:
            return module
    return None


def counts_items(model: nn.Module) -> bool:
    """Whether the model's own loss is divided by `num_items_in_batch`. Several families take the number and return the
    mean of the micro-batch all the same. True where nothing else is known."""
    inner: Any = model_with_labels(model)
    if inner is None or inner.get_output_embeddings() is None:
        return True
    return own_loss(inner).counts_items


def own_loss(model: nn.Module) -> OwnLoss:
    """Try the loss code of `model`, a transformers model that takes labels and has an output embedding."""
    parameters = signature(model.forward).parameters
    try:
        with _without_layers(model) as batch, torch.no_grad():
            switched_off = {name: False for name in SWITCHED_OFF if name in parameters}
            run = functools.partial(model.forward, **batch, **switched_off, return_dict=True)
            output, labels = run(), batch["labels"][:, 1:].flatten()
            mean = float(cross_entropy(output["logits"][:, :-1].flatten(0, 1).double(), labels))
            is_mean = _is_close(output["loss"], mean)
            takes_items = "num_items_in_batch" in parameters or any(
                one.kind is Parameter.VAR_KEYWORD for one in parameters.values()
            )
            is_sum = False
            if takes_items:
                total = mean * int((labels != -100).sum())
                is_sum = _is_close(run(num_items_in_batch=labels.new_tensor(NUM_ITEMS))["loss"], total / NUM_ITEMS)
    except Exception as error:  # any code may stand there
        return OwnLoss(f"its loss code cannot be tried ({type(error).__name__}: {one_line(error)})", True)
    return OwnLoss(None if is_mean else "its loss is not the mean cross entropy of its tokens", is_sum)


def _is_close(loss: Tensor, wanted: float) -> bool:
    return math.isclose(float(loss), wanted, rel_tol=1e-5)


class _HiddenStates:
    """The output of a body: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, _: Any) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


@contextlib.contextmanager
def _without_layers(model: Any) -> Iterator[dict[str, Tensor]]:
    """Meanwhile the layers of `model` do not compute. Yields a batch for its forward."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    device = next((one.device for one in model.parameters() if one.device.type != "meta"), torch.device("cpu"))
    labels = torch.tensor(LABELS, device=device)
    numbers = torch.randn(
        *labels.shape, model.config.get_text_config().vocab_size, generator=torch.Generator().manual_seed(0)
    )
    logits, hidden = 3 * numbers.to(device), torch.zeros(*labels.shape, 1, device=device)

    def zeros(module: nn.Module, *args: Any, **_: Any) -> Any:
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.is_floating_point():
            return given
        return hidden if module is embedding else _HiddenStates(hidden)

    mask = torch.ones_like(labels)
    mask[-1, -1] = 0
    calls: dict[nn.Module, Any] = {head: lambda *_, **__: logits.clone()}
    for module in model.modules():
        if module not in (model, head):
            holds_head = any(part is head for part in module.modules())
            calls[module] = module.forward if holds_head else functools.partial(zeros, module)
    before = {module: vars(module).get("_compiled_call_impl") for module in calls}
    try:
        for module, call in calls.items():
            vars(module)["_compiled_call_impl"] = call  # which is called in the place of forward and all hooks
        yield {"input_ids": labels.clamp_min(3), "attention_mask": mask, "labels": labels}
    finally:
        for module, compiled in before.items():
            del vars(module)["_compiled_call_impl"]
            if compiled is not None:
                vars(module)["_compiled_call_impl"] = compiled
