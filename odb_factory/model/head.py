"""The door at the output embedding: a weighted token loss without a matrix of logits, in an unchanged model.

During a weighted forward the linear layer that makes logits computes another function: it multiplies the supervised
tokens with the vocabulary, a chunk at a time, and returns the weighted sum of their losses instead of logits. No tensor
[supervised tokens, vocabulary] exists, and tokens without a label are never multiplied with the vocabulary. The model
is called without labels, so its own loss code does not run. The door sets `loss`, and adds the router losses of a
mixture of experts as the model does. The hooks of engines (DDP, DeepSpeed, FSDP) run as usual: the layer is called, its
weights are gathered for the call, and the loss is computed from its output.

Names of shapes: rows, length: of the labels; N = rows x length; S: supervised tokens; H: hidden size; V: vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.model.chunked import AfterHead, log_probs_of, weighted_loss_of
from odb_factory.model.flat_row import forward_replaced

logger = get_logger(__name__)

LOG_PROBS = "log_probs"
"""Key of the log-probabilities of the labels [rows, length - 1] in the output of a model: `FusedCausalLMOutput` of trl
1, whose `SFTTrainer` takes their mean."""


class WithoutLogits:
    """Computes the loss of weighted forwards of `model` without logits. All other forwards are the model's own.

    model: a transformers model with labels, also wrapped by PEFT, DDP, FSDP or DeepSpeed. The attribute `model` is the
        transformers model inside.
    why_not: a reason of the caller not to use the door.
    reason: why the door is not used; None if it is. The first weighted forward may still find a reason; then the model
        runs a second time, with logits. A reason is logged once.
    acted: whether the last weighted forward used the door.

    Example::

        door = WithoutLogits(model)
        with door.weighing(1 / num_supervised):
            loss = model(**batch).loss
        loss.backward()
    """

    def __init__(self, model: nn.Module, why_not: str | None = None):
        self.model: Any = model_with_labels(model)
        self.reason, self.acted, self._is_logged = why_not, False, False
        self._name = type(model if self.model is None else self.model).__name__
        self._after = AfterHead()
        if self.model is None:
            self.reason = "no part of it is a transformers model that takes labels"
        elif why_not is None:
            after = _why_not_in_place(model, self.model) or own_loss(self.model)
            self.reason, self._after = (after, AfterHead()) if isinstance(after, str) else (None, after)

    @contextlib.contextmanager
    def weighing(self, weights: float | Tensor, num_supervised: int | None = None) -> Iterator[None]:
        """Within it a forward with labels [rows, length] returns as `loss` the weighted sum of its token losses.

        weights: of the loss at each position, which predicts the label of the next token: [rows, length], [rows, 1], or
            one number. num_supervised: number of positions with a loss, if the host knows it; otherwise the host waits
            for the device.
        If the door is not used (`reason`), a forward is the model's own.
        """
        self.acted = False
        forward = functools.partial(self._forward, weights, num_supervised)
        self._log()
        with contextlib.nullcontext() if self.reason is not None else forward_replaced(self.model, forward):
            yield

    @contextlib.contextmanager
    def router_losses_times(self, factor: float) -> Iterator[None]:
        """Within it the coefficient of the model's router losses is multiplied by `factor`, also if the door is not
        used."""
        coefficients = [] if self.model is None or factor == 1 else _router_coefficients(self.model)
        for place, name, value in coefficients:
            setattr(place, name, value * factor)
        try:
            yield
        finally:
            for place, name, value in coefficients:
                setattr(place, name, value)

    def _forward(
        self, weights: float | Tensor, num_supervised: int | None, own: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The model's forward. Only a training forward is changed: with labels, without a cache, with all logits."""
        labels = kwargs.get("labels")
        values = [kwargs.get(name) for name in ("past_key_values", "use_cache", "logits_to_keep", "shift_labels")]
        is_other = any(value is not None and not (isinstance(value, int) and not value) for value in values)
        if self.reason is not None or labels is None or is_other:
            return own(*args, **kwargs)

        def weighted_loss(linear: nn.Linear, hidden: Tensor) -> Tensor:
            self.reason = self._why_other_shape(hidden, labels)
            if self.reason is not None:
                return hidden.new_zeros(())
            return weighted_loss_of(linear, hidden, labels, weights, num_supervised, self._after)

        # The model runs without labels; its output embedding computes the losses.
        inputs = {name: value for name, value in kwargs.items() if name != "labels"}
        output, losses = self.at_head(functools.partial(own, *args, **inputs), weighted_loss)
        if self.reason is not None:
            self._log()
            return own(*args, **kwargs)
        loss = losses.sum()  # no view: the Trainer multiplies it in place, and FSDP2 has hooks on outputs
        # The router's loss, added as the model adds it.
        aux_loss = output.get("aux_loss")
        if aux_loss is not None:
            (_, _, coefficient), *_ = _router_coefficients(self.model)
            loss = loss + coefficient * aux_loss.to(loss.device)
        self.acted = True
        rest = {name: value for name, value in output.items() if name not in ("loss", "logits")}
        return type(output)(loss=loss, **rest)

    def log_probs(
        self, run: Callable[[], Any], labels: Tensor, num_supervised: int | None = None
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """The output of a forward without labels and logits, and the three results of `log_probs_of`.

        run: the forward, of the model as it is wrapped. labels: [rows, length]; position t predicts label t + 1.
        Raises `ConfigError` if the door is not used (`reason`).
        """
        if self.reason is not None:
            raise ConfigError(
                f"odb.layout: 'flat' is not right for preferences with {self._name}: {self.reason}; set it to padded."
            )
        places_and_means: list[Tensor] = []

        def log_probs(linear: nn.Linear, hidden: Tensor) -> Tensor:
            if (why := self._why_other_shape(hidden, labels)) is not None:
                raise DataError(why)
            places, of_labels, means = log_probs_of(linear, hidden, labels, num_supervised, self._after)
            places_and_means.extend((places, means))
            return of_labels

        output, of_labels = self.at_head(run, log_probs)
        places, means = places_and_means
        return output, places, of_labels.reshape(-1), means

    @property
    def gives_states(self) -> bool:
        """Whether the head's output are the model's logits: the door is used, and the model does not change them."""
        return self.reason is None and self._after == AfterHead()

    def at_head(self, run: Callable[[], Any], function: Callable[[nn.Linear, Tensor], Tensor]) -> tuple[Any, Tensor]:
        """The output of a forward without labels and logits, and the result of `function` [1, n, 1], after all hooks of
        engines.

        run: the forward, of the model as it is wrapped. function: called with the head's linear layer, whose forward is
        replaced (`nn.Linear.forward(linear, hidden)` are the logits), and the hidden states [rows, length, H]; it
        returns a scalar or [n].
        """
        head, outputs = self.model.get_output_embeddings(), list[Tensor]()

        def computed(linear: nn.Linear, _: Any, hidden: Tensor) -> Tensor:
            return function(linear, hidden).reshape(1, -1, 1)  # dimensions of logits

        with contextlib.ExitStack() as stack:
            stack.callback(head.register_forward_hook(lambda _, __, output: outputs.append(output)).remove)
            for linear in _linears(head):
                stack.enter_context(forward_replaced(linear, functools.partial(computed, linear)))
            output = run()
        if len(outputs) != 1:
            raise DataError(f"{self._name} called its output embedding {len(outputs)} times in a forward, not once.")
        return output, outputs[0]

    def _why_other_shape(self, hidden: Tensor, labels: Tensor) -> str | None:
        if hidden.shape[:-1] == labels.shape:
            return None
        return (
            f"{self._name} computes logits of {list(hidden.shape[:-1])} positions from labels of {list(labels.shape)}; "
            "the loss without logits needs one position for each label"
        )

    def _log(self) -> None:
        if self.reason is not None and not self._is_logged:
            self._is_logged = True
            logger.info(
                "loss: with logits, for %s: %s (costs 2 to 3 float32 numbers for each token and entry of the "
                "vocabulary)",
                self._name,
                self.reason,
            )


def _why_not_in_place(outermost: nn.Module, model: Any) -> str | None:
    if getattr(model, "_compiled_call_impl", None) is not None or any(
        type(module).__name__ == "OptimizedModule" for module in outermost.modules()
    ):
        return "torch.compile has compiled it as a whole"
    from transformers.loss.loss_utils import ForCausalLMLoss  # heavy

    if model.loss_function is not ForCausalLMLoss:
        return "its loss_function is not transformers' ForCausalLMLoss"
    head = model.get_output_embeddings()
    if head is None:
        return "it has no output embedding"
    linears = _linears(head)
    if not linears:
        kind = type(head)
        return f"its output embedding is a {kind.__module__}.{kind.__qualname__}, not a plain torch.nn.Linear"
    for linear in linears:
        if "forward" in vars(linear):
            return "the forward of its output embedding has been replaced"
        if not linear.weight.is_floating_point():
            return f"its output embedding has weights of {linear.weight.dtype}"
    if has_routers(model) and not _router_coefficients(model):
        return "it adds a loss for its routers, whose coefficient is unknown"
    return None


def has_routers(model: Any) -> bool:
    """Whether the model adds router losses."""
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def _linears(head: nn.Module) -> list[nn.Linear]:
    """The linear layers that may compute logits: the head itself, or the original and the copies that PEFT trains.

    Exactly `torch.nn.Linear`, plain or sharded by FSDP: LoRA and quantized layers have the same class name, and compute
    something else.
    """
    head = getattr(head, "_fsdp_wrapped_module", head)
    parts: list[Any] = [head]
    if type(head).__name__ == "ModulesToSaveWrapper":
        copies: Any = head.modules_to_save
        parts = [head.original_module, *copies.values()]
    kinds = map(type, parts)  # FSDP2 gives each module that it shards a class of its own
    is_plain = all(k is nn.Linear or (k.__name__ == "FSDPLinear" and nn.Linear in k.__bases__) for k in kinds)
    return parts if is_plain else []


def _router_coefficients(model: Any) -> list[tuple[Any, str, float]]:
    """The coefficients of router losses (object, attribute, value): of the model, then of its config. The model reads
    the first."""
    places = itertools.product((model, model.config.get_text_config()), ("router_aux_loss_coef", "aux_loss_coef"))
    values = [(place, name, getattr(place, name, None)) for place, name in places]
    return [(place, name, float(value)) for place, name, value in values if value is not None]


# A trial of the code after the head: how a model changes its logits, and which loss it computes from them. The output
# embedding returns known logits, and no layer computes (`without_layers`), so the trial takes milliseconds.

LABELS = ((-100, 5, 6, 7, 8), (-100, -100, 4, 3, -100))
"""Labels of the trial: [rows, length]. The last token of the second row is padding."""


def model_with_labels(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that takes labels, inside adapters and wrappers of engines."""
    for module in model.modules():
        kind = type(module)  # the class has the signature, even if the module's own forward is wrapped
        if hasattr(kind, "get_output_embeddings") and "labels" in signature(kind.forward).parameters:
            return module
    return None


def own_loss(model: Any) -> AfterHead | str:
    """How `model` changes its logits before it computes the mean cross entropy of the supervised tokens, each predicted
    by the token before it. A text if its loss is another, or the change is unknown: why.

    model: a transformers model that takes labels and has an output embedding. Its loss code is run.
    """
    parameters = signature(model.forward).parameters
    # router losses, and Liger's kernel that computes the loss without logits
    switched_off = {name: False for name in ("output_router_logits", "skip_logits") if name in parameters}
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
        size = model.config.get_text_config().vocab_size
        random = 3 * torch.randn(*labels.shape, size, generator=torch.Generator().manual_seed(0))
        output = run(random.to(device), labels)
        mean = float(cross_entropy(output["logits"][:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten()))
        if not math.isclose(float(output["loss"]), mean, rel_tol=1e-5):
            return "its loss is not the mean cross entropy of its tokens"
        # of both signs, from small values, which show a factor, to large ones, which show a cap
        known = torch.logspace(-3, 4, size) * (1 - 2 * (torch.arange(size) % 2))
        changed = run(known.to(device).expand(random.shape), None)["logits"]
    except Exception as error:  # the model's code may raise anything
        return f"its loss code cannot be tried ({one_line(error)})"
    if len(calls) != 1:
        return f"it calls its output embedding {len(calls)} times in a forward"
    if changed.shape == random.shape:
        x, y = known.double(), changed[0, 0].double().cpu()
        scale, cap = float(y[0] / x[0]), float(y.abs().max())
        if math.isfinite(scale) and scale > 0:
            scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-5) else scale
            if torch.allclose(x * scale, y, rtol=1e-5, atol=1e-7):
                return AfterHead(scale)
            if torch.allclose(cap * torch.tanh(scale * x / cap), y, rtol=1e-5, atol=1e-7):
                return AfterHead(scale, cap)
    return "it changes its logits in another way than by a factor or a cap"


@contextlib.contextmanager
def without_layers(model: Any, logits: Tensor) -> Iterator[None]:
    """Within it the output embedding of `model` returns `logits` [rows, length, V], and its other parts random numbers.

    The parts are replaced: their hooks do not run and their weights are not read, so they may be sharded, or on another
    device.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # Modules that hold the head keep their forward; what they call gives random numbers.
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
    """Replaces a part of a model: it has this forward, and all other attributes of the part."""

    def __init__(self, part: Any, forward: Callable[..., Any]):
        super().__init__()
        own = vars(part)
        # The weights, too: a loss may read them.
        vars(self).update(_part=part, forward=forward, _parameters=own["_parameters"], _modules=own["_modules"])

    def _get_name(self) -> str:
        return type(self._part).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_part"], name)


class _HiddenStates:
    """The output of a body: hidden states only."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, _: Any) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None
