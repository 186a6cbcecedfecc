"""What a model does to its logits, and the loss that it computes from them, found out by running that code alone.

In the trial the output embedding returns known logits and every other layer returns zeros. So the trial needs no
weights (they may be sharded), calls no hook, and takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_factory.errors import one_line
from odb_factory.model.chunked import AfterHead

LABELS = ((-100, 5, 6, 7, 8), (-100, -100, 4, 3, -100))
"""Of the trial: [rows, length]. The last token of the second row is padding."""
SWITCHED_OFF = ("output_router_logits", "skip_logits")
"""Arguments of forwards: the loss of routers, and Liger's kernel that computes the loss without logits."""


PROBE_RANGE = (-3, 4)
"""Powers of ten between which the trial's logits lie: small ones show a factor, large ones a cap."""


@dataclass(frozen=True)
class OwnLoss:
    """The loss of a model that is given labels.

    why_another: why the loss without logits cannot take its place; None where it is the mean cross entropy of the
    supervised tokens, each predicted by the token before it. after: what the model does to its logits, where it is not
    another loss.
    """

    why_another: str | None
    after: AfterHead | None = None


def model_with_labels(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that takes labels, inside adapters and wrappers of engines."""
    for module in model.modules():
        kind = type(module)  # whose forward tells what it takes, however the module's own has been wrapped
        if hasattr(kind, "get_output_embeddings") and "labels" in signature(kind.forward).parameters:
            return module
    return None


def own_loss(model: Any) -> OwnLoss:
    """Try the loss code of `model`, a transformers model that takes labels and has an output embedding."""
    parameters = signature(model.forward).parameters
    switched_off = {name: False for name in SWITCHED_OFF if name in parameters}
    try:
        with _without_layers(model) as trial, torch.no_grad():
            run = functools.partial(model.forward, **trial.batch, **switched_off, return_dict=True)
            labels = trial.batch["labels"]
            output, targets = run(labels=labels), labels[:, 1:].flatten()
            mean = float(cross_entropy(output["logits"][:, :-1].flatten(0, 1).double(), targets))
            if not _is_close(output["loss"], mean):
                return OwnLoss("its loss is not the mean cross entropy of its tokens")
            trial.logits, trial.calls = _known_logits(model.config.get_text_config().vocab_size, labels.device), 0
            output = run(labels=None)
    except Exception as error:  # any code may stand there
        return OwnLoss(f"its loss code cannot be tried ({one_line(error)})")
    if trial.calls != 1:
        return OwnLoss(f"it calls its output embedding {trial.calls} times in a forward")
    after = _after_head(trial.logits, output["logits"])
    if after is None:
        return OwnLoss("it changes its logits in another way than by a factor or a cap")
    return OwnLoss(None, after)


def _known_logits(size: int, device: torch.device) -> Tensor:
    """[1, 1, V]: numbers of both signs, from small to large."""
    low, high = PROBE_RANGE
    magnitudes = torch.logspace(low, high, size, device=device, dtype=torch.float32)
    signs = 1.0 - 2.0 * (torch.arange(size, device=device) % 2)
    return (magnitudes * signs).reshape(1, 1, size)


def _after_head(logits: Tensor, changed: Tensor) -> AfterHead | None:
    """What has made `changed` of `logits` ([1, 1, V]); None: nothing that is known."""
    if changed.shape != logits.shape:
        return None
    x, y = logits.double().cpu().flatten(), changed.double().cpu().flatten()
    scale = float(y[0] / x[0])
    if not math.isfinite(scale) or scale <= 0:
        return None
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale
    largest = float(y.abs().max())
    for after in (AfterHead(scale), AfterHead(scale, largest)):
        found = x * after.scale if after.cap is None else after.cap * torch.tanh(after.scale * x / after.cap)
        if torch.allclose(found, y, rtol=1e-5, atol=1e-7):
            return after
    return None


def _is_close(loss: Tensor, wanted: float) -> bool:
    return math.isclose(float(loss), wanted, rel_tol=1e-5)


class HiddenStates:
    """The output of a body: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, _: Any) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


@dataclass
class _Trial:
    """batch: for the forward. logits: what the output embedding returns. calls: of it, so far."""

    batch: dict[str, Tensor]
    logits: Tensor
    calls: int = 0

    def head(self, *_: Any, **__: Any) -> Tensor:
        self.calls += 1
        return self.logits.clone()


@contextlib.contextmanager
def _without_layers(model: Any) -> Iterator[_Trial]:
    """Meanwhile the layers of `model` do not compute."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    device = next((one.device for one in model.parameters() if one.device.type != "meta"), torch.device("cpu"))
    labels = torch.tensor(LABELS, device=device)
    numbers = torch.randn(
        *labels.shape, model.config.get_text_config().vocab_size, generator=torch.Generator().manual_seed(0)
    )
    hidden = torch.zeros(*labels.shape, 1, device=device)

    def zeros(module: nn.Module, *args: Any, **_: Any) -> Any:
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.is_floating_point():
            return given
        return hidden if module is embedding else HiddenStates(hidden)

    mask = torch.ones_like(labels)
    mask[-1, -1] = 0
    trial = _Trial({"input_ids": labels.clamp_min(3), "attention_mask": mask, "labels": labels}, 3 * numbers.to(device))
    calls: dict[nn.Module, Any] = {head: trial.head}
    for module in model.modules():
        if module not in (model, head):
            holds_head = any(part is head for part in module.modules())
            calls[module] = module.forward if holds_head else functools.partial(zeros, module)
    before = {module: vars(module).get("_compiled_call_impl") for module in calls}
    try:
        for module, call in calls.items():
            vars(module)["_compiled_call_impl"] = call  # which is called in the place of forward and all hooks
        yield trial
    finally:
        for module, compiled in before.items():
            del vars(module)["_compiled_call_impl"]
            if compiled is not None:
                vars(module)["_compiled_call_impl"] = compiled
