"""What a model does to its logits, and the loss that it computes from them, found out by running that code alone.

In the trial the output embedding returns known logits and no other part of the model computes (`without_layers`), so it
takes milliseconds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
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


def model_with_labels(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that takes labels, inside adapters and wrappers of engines."""
    for module in model.modules():
        kind = type(module)  # whose forward tells what it takes, however the module's own has been wrapped
        if hasattr(kind, "get_output_embeddings") and "labels" in signature(kind.forward).parameters:
            return module
    return None


def own_loss(model: Any) -> AfterHead | str:
    """What `model` does to its logits, before it computes the mean cross entropy of the supervised tokens, each
    predicted by the token before it; a text: why its loss is another one, or what it does is unknown.

    model: a transformers model that takes labels and has an output embedding, whose loss code is tried.
    """
    parameters = signature(model.forward).parameters
    switched_off = {name: False for name in SWITCHED_OFF if name in parameters}
    calls: list[Any] = []

    def run(logits: Tensor, labels: Tensor | None) -> Any:
        calls.clear()
        with without_layers(model, logits), torch.no_grad():
            model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(None))
            return model.forward(input_ids=ids, attention_mask=mask, labels=labels, **switched_off, return_dict=True)

    try:
        devices = (weight.device for weight in model.parameters() if weight.device.type != "meta")
        device = next(devices, torch.device("cpu"))
        labels = torch.tensor(LABELS, device=device)
        ids, mask = labels.clamp_min(3), torch.ones_like(labels)
        mask[-1, -1] = 0
        known = _known_logits(model.config.get_text_config().vocab_size)
        drawn = 3 * torch.randn(*labels.shape, len(known), generator=torch.Generator().manual_seed(0))
        output = run(drawn.to(device), labels)
        mean = float(cross_entropy(output["logits"][:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten()))
        if not math.isclose(float(output["loss"]), mean, rel_tol=1e-5):
            return "its loss is not the mean cross entropy of its tokens"
        changed = run(known.to(device).expand(drawn.shape), None)["logits"]
    except Exception as error:  # any code may stand there
        return f"its loss code cannot be tried ({one_line(error)})"
    if len(calls) != 1:
        return f"it calls its output embedding {len(calls)} times in a forward"
    after = _after_head(known, changed[0, 0]) if changed.shape == drawn.shape else None
    return after or "it changes its logits in another way than by a factor or a cap"


def _known_logits(size: int) -> Tensor:
    """[V]: numbers of both signs, from small to large."""
    return torch.logspace(*PROBE_RANGE, size) * (1 - 2 * (torch.arange(size) % 2))


def _after_head(logits: Tensor, changed: Tensor) -> AfterHead | None:
    """What has made `changed` of `logits` ([V]); None: nothing that is known."""
    x, y = logits.double(), changed.double().cpu()
    scale = float(y[0] / x[0])
    if not math.isfinite(scale) or scale <= 0:
        return None
    scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale
    cap = float(y.abs().max())
    for after, expected in (
        (AfterHead(scale), x * scale),
        (AfterHead(scale, cap), cap * torch.tanh(scale * x / cap)),
    ):
        if torch.allclose(expected, y, rtol=1e-5, atol=1e-7):
            return after
    return None


# ----------------------------------------------------------------------------------------------------------------------
# A model whose layers do not compute.


@contextlib.contextmanager
def without_layers(model: Any, logits: Tensor) -> Iterator[None]:
    """Meanwhile the output embedding of `model` returns `logits` [rows, length, V], and its other parts random numbers.

    The parts are replaced, so no hook of theirs is called and no weight read: it may be sharded, or on another device.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    size = (*logits.shape[:2], model.config.get_text_config().hidden_size)
    hidden = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(logits)
    hold_head = {part for part in model.modules() if part is not head and head in part.modules()}

    def body(*args: Any, **_: Any) -> Any:
        is_layer = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return args[0] if is_layer else _HiddenStates(hidden)  # a layer between body and head, or a body

    def forward_of(part: nn.Module) -> Callable[..., Any]:
        if part in hold_head:
            return part.forward
        if part is head:
            return lambda *_, **__: logits.clone()
        return body if part is not embedding else lambda *_, **__: hidden

    places = [
        (parent, name, part)
        for parent in model.modules()
        for name, part in parent.named_children()
        if parent in hold_head or part is embedding
    ]
    try:
        for parent, name, part in places:
            setattr(parent, name, StandIn(part, forward_of(part)))
        yield
    finally:
        for parent, name, part in places:
            setattr(parent, name, part)


class StandIn(nn.Module):
    """In the place of a part of a model, with this forward. Everything else is asked of the part."""

    def __init__(self, part: Any, forward: Callable[..., Any]):
        super().__init__()
        vars(self).update(_part=part, forward=forward)

    def _get_name(self) -> str:
        return type(self._part).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_part"], name)


class _HiddenStates:
    """The output of a body: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, _: Any) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None
