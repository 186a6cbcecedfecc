"""The door at the output embedding: a weighted token loss without a matrix of logits, in an unchanged model.

For the length of one weighted forward the linear layer that makes logits computes another function: it takes some
hundred supervised tokens at a time, computes their logits, losses and gradients, and returns the weighted sum of the
losses in the place of logits. So nothing of [supervised tokens, vocabulary] ever exists, and tokens without a label
never meet the vocabulary. The model is called without labels, so that loss code of its own does not run; the door sets
`loss`, and adds the losses of a mixture of experts for its routers as the model does. The hooks of engines (DDP,
DeepSpeed, FSDP) run as ever: the layer is called, its weights are gathered for the call, and its output is what the
loss is computed from.

Names of shapes: rows, length: of the labels; N = rows x length; S: supervised tokens; H: hidden size; V: vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)

IGNORE_INDEX = -100
CHUNK_ELEMENTS = {"cpu": 2**24}
OTHER_CHUNK_ELEMENTS = 2**27
"""Logits that exist at a time, by device type. An accelerator needs more tokens at a time to be busy."""
WEIGHT_SLICE = 2**24
"""Elements of the head's gradient that one product of lower precision adds to the float32 sum."""
PROBE_RANGE = (-3, 4)
"""Powers of ten between which a probe's logits lie: small ones show a factor, large ones a cap."""


@dataclass(frozen=True)
class AfterHead:
    """What a model does to its logits: `cap * tanh(scale * logits / cap)`; cap None: `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None


class WithoutLogits:
    """Computes the loss of weighted forwards of `model` without logits. All other forwards are the model's own.

    model: a transformers model with labels, also wrapped by PEFT, DDP, FSDP or DeepSpeed.
    why_not: a reason of the caller not to use the door.
    reason: why the door is not used; None where it is. The first weighted forward may still find one: it runs the
        model once more without gradients, to see what the model does to its logits. A reason is logged once.

    Example::

        door = WithoutLogits(model)
        with door.weighing(1 / num_supervised):
            loss = model(**batch).loss
        loss.backward()
    """

    def __init__(self, model: nn.Module, why_not: str | None = None):
        self._model = _model_with_labels(model)
        self._name = type(model if self._model is None else self._model).__name__
        self._after: AfterHead | None = None
        self._is_told = False
        self.reason = why_not
        self.acted = False
        if self._model is None:
            self.reason = "no part of it is a transformers model that takes labels"
        elif why_not is None:
            self.reason = _why_not_in_place(model, self._model)

    @contextlib.contextmanager
    def weighing(self, weights: float | Tensor, num_supervised: int | None = None) -> Iterator[None]:
        """Within it a forward with labels [rows, length] returns as `loss` the weighted sum of its token losses.

        weights: of the loss at each position, which is that of the next token's label: [rows, length], [rows, 1], or
            one number. num_supervised: positions with a loss, if the host knows them: the device is not waited for.
        Where the door is not used (`reason`), a forward is the model's own. `acted` tells, at the end.
        """
        self.acted = False
        if self.reason is not None:
            self._tell()
            yield
            return
        model: Any = self._model
        own, is_replaced = model.forward, "forward" in vars(model)
        model.forward = functools.partial(self._forward, own, weights, num_supervised)
        try:
            yield
        finally:
            if is_replaced:
                model.forward = own
            else:
                del model.forward

    def _forward(
        self, own: Callable[..., Any], weights: float | Tensor, num_supervised: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        """The model's forward. It is a forward of training if it has labels, no cache, and wants all logits."""
        labels = kwargs.get("labels")
        if labels is None or any(_is_given(kwargs.get(name)) for name in _OTHER_FORWARDS):
            return own(*args, **kwargs)
        without_labels = {name: value for name, value in kwargs.items() if name != "labels"}
        if self._after is None and self.reason is None:
            self._probe(functools.partial(own, *args, **without_labels), labels)
        if self.reason is not None:
            self._tell()
            return own(*args, **kwargs)
        after = self._after
        assert after is not None

        def weighted_loss(linear: nn.Linear, hidden: Tensor) -> Tensor:
            if hidden.shape[:-1] != labels.shape:
                raise DataError(_other_shape(self._name, hidden, labels))
            return weighted_loss_of(linear, hidden, labels, weights, num_supervised, after).reshape(1, 1, 1)

        with self._head_computes(weighted_loss) as outputs:
            output = own(*args, **without_labels)
        if len(outputs) != 1:
            raise DataError(f"{self._name} called its output embedding {len(outputs)} times in a forward with labels.")
        loss = outputs[0].reshape(())
        aux_loss = output.get("aux_loss")
        if aux_loss is not None:
            loss = loss + self._router_coefficient() * aux_loss.to(loss.device)
        self.acted = True
        rest = {name: value for name, value in output.items() if name not in ("loss", "logits")}
        return type(output)(loss=loss, **rest)

    def token_losses(self, run: Callable[[], Any], targets: Tensor) -> Tensor | None:
        """The loss at each position of a forward without labels and gradients, in float32: [rows, length].

        run: the forward, of the model as it is wrapped; the first call runs it twice. targets: [rows, length], the
        token that each position predicts, -100 where none counts (the loss there is 0). None where the door is not
        used (`reason`).
        """
        if self._after is None and self.reason is None:
            self._probe(run, targets)
        if self.reason is not None:
            return None
        after = self._after
        assert after is not None
        found: list[Tensor] = []

        def losses(linear: nn.Linear, hidden: Tensor) -> Tensor:
            if hidden.shape[:-1] != targets.shape:
                raise DataError(_other_shape(self._name, hidden, targets))
            found.append(token_losses_of(linear, hidden, targets, after))
            return hidden.new_zeros(1, 1, 1)

        with self._head_computes(losses), torch.no_grad():
            run()
        return found[0]

    @contextlib.contextmanager
    def _head_computes(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Meanwhile the head's linear layer computes `function`. Yields what the head returns to the model, behind all
        hooks of engines."""
        model: Any = self._model
        head = model.get_output_embeddings()
        outputs: list[Tensor] = []
        linears = _linears(head)
        hook = head.register_forward_hook(lambda _, __, output: outputs.append(output))
        for linear in linears:
            linear.forward = functools.partial(function, linear)  # type: ignore[method-assign]
        try:
            yield outputs
        finally:
            hook.remove()
            for linear in linears:
                del linear.forward

    def _probe(self, run: Callable[[], Any], labels: Tensor) -> None:
        """Find out what the model does to logits, by logits that are known; run: its forward without labels."""
        seen: list[tuple[Tensor, Tensor]] = []

        def known(linear: nn.Linear, hidden: Tensor) -> Tensor:
            seen.append((hidden, _known_logits(linear.out_features, hidden.device)))
            return seen[-1][1]

        try:
            with self._head_computes(known), _evaluating(self._model):
                output = run()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if not seen or isinstance(error, torch.OutOfMemoryError):
                raise  # it would in stock training, too
            self.reason = f"it does not take other logits than of [rows, length, vocabulary]: {one_line(error)}"
            return
        if len(seen) != 1:
            self.reason = f"it calls its output embedding {len(seen)} times in a forward"
        elif seen[0][0].shape[:-1] != labels.shape:
            self.reason = _other_shape(self._name, seen[0][0], labels)
        elif not isinstance(output, Mapping) or not isinstance(output.get("logits"), Tensor):
            self.reason = "it returns no named logits"
        elif output.get("aux_loss") is not None and self._router_coefficient() is None:
            self.reason = "it adds a loss for its routers by a coefficient that is not known"
        else:
            self._after = _after_head(seen[0][1], output["logits"])
            if self._after is None:
                self.reason = "it changes its logits in another way than by a factor or a cap"

    def _router_coefficient(self) -> float | None:
        """What the model multiplies the losses of its routers by."""
        model: Any = self._model
        for place in (model, model.config.get_text_config()):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                found = getattr(place, name, None)
                if found is not None:
                    return float(found)
        return None

    def _tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        logger.info(
            "loss: with logits, for %s: %s (costs 2 to 3 float32 numbers for each token and entry of the vocabulary)",
            self._name,
            self.reason,
        )


_OTHER_FORWARDS = ("past_key_values", "use_cache", "logits_to_keep", "shift_labels")
"""Arguments of forwards that are not a training's."""


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, int) and not value)


# Whether the door fits


def _model_with_labels(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model that takes labels, inside adapters and wrappers of engines."""
    for module in model.modules():
        kind = type(module)  # whose forward tells what it takes, however the module's own has been wrapped
        if hasattr(kind, "get_output_embeddings") and "labels" in signature(kind.forward).parameters:
            return module
    return None


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
    if _labels_reach_the_decoder(model):
        return "this release of transformers makes its attention mask from labels"
    return None


def _linears(head: nn.Module) -> list[nn.Linear]:
    """The linear layers that may compute logits: the head itself, or the original and the copies that PEFT trains.

    Exactly `torch.nn.Linear`, plain or sharded by FSDP: layers with LoRA or quantised weights are called so, too, and
    compute something else.
    """
    head = getattr(head, "_fsdp_wrapped_module", head)
    parts: list[Any] = [head]
    if type(head).__name__ == "ModulesToSaveWrapper":
        copies: Any = head.modules_to_save
        parts = [head.original_module, *copies.values()]
    return parts if all(map(_is_plain, parts)) else []


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)  # FSDP2 gives each module that it shards a class of its own
    return kind is nn.Linear or (kind.__name__ == "FSDPLinear" and nn.Linear in kind.__bases__)


def _labels_reach_the_decoder(model: Any) -> bool:
    """Whether labels are more than a loss's: transformers 4 makes masks from them in models with a prefix."""
    import transformers

    inner = getattr(model, "model", None)
    if int(transformers.__version__.split(".")[0]) >= 5 or inner is None:
        return False
    return "labels" in signature(type(inner).forward).parameters


def _other_shape(name: str, hidden: Tensor, labels: Tensor) -> str:
    return (
        f"{name} computes logits of {list(hidden.shape[:-1])} positions from labels of {list(labels.shape)}; the loss "
        "without logits needs one for each label."
    )


# The probe


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


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without gradients, dropout and checkpoints; each module is as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    for module, _ in before:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # drawing on the device would be dropout
            yield
    finally:
        for module, training in before:
            module.training = training


# The loss


def weighted_loss_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    weights: float | Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum of weight x token loss over the supervised positions, a scalar in float32 (float64 of float64 weights).

    hidden: [rows, length, H]; labels: [rows, length]; position t predicts label t + 1. weights, num_supervised: of
    `WithoutLogits.weighing`. chunk_tokens: whose logits exist at a time. Products are those of the linear layer, in the
    dtype of autocast where that is on; all else is in float32.
    Raises `DataError` where the weights are not those of these rows.
    """
    device, accurate = hidden.device, torch.float64 if linear.weight.dtype == torch.float64 else torch.float32
    labels = labels.to(device, non_blocking=True)
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
    supervised = targets != IGNORE_INDEX
    if num_supervised is None:
        places = supervised.nonzero()[:, 0]
    else:  # supervised ones first, in their order: nothing has to be read back
        places = supervised.to(torch.int8).argsort(descending=True, stable=True)[:num_supervised]
    weighed = supervised[places].to(accurate)
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or weights.shape[0] != labels.shape[0] or weights.shape[1] not in (1, labels.shape[1]):
            raise DataError(
                f"the weights of tokens are {list(weights.shape)} and the labels {list(labels.shape)}; give one weight "
                "for each row or for each position."
            )
        if device.type == "cuda" and weights.device.type == "cpu":
            weights = weights.pin_memory()
        everywhere = weights.to(device, accurate, non_blocking=True).expand(labels.shape).reshape(-1)
        weighed = weighed * everywhere[places]
    else:
        weighed = weighed * weights
    loss: Tensor = _ChunkedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        linear.weight,
        linear.bias,
        _Tokens(places, targets[places].clamp_min(0), weighed),
        _How(
            _product_dtype(linear, device),
            accurate,
            chunk_tokens or _chunk_tokens(linear, device),
            after,
            torch.is_grad_enabled(),
        ),
    )
    return loss


def token_losses_of(linear: nn.Linear, hidden: Tensor, targets: Tensor, after: AfterHead) -> Tensor:
    """The loss at each position, without gradients: [rows, length]; see `WithoutLogits.token_losses`."""
    device, dtype = hidden.device, _product_dtype(linear, hidden.device)
    accurate = torch.float64 if linear.weight.dtype == torch.float64 else torch.float32
    flat = targets.to(device).reshape(-1)
    losses = torch.zeros(flat.shape, device=device, dtype=accurate)
    w, b = linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)
    with _without_autocast(device.type):
        for places in (flat != IGNORE_INDEX).nonzero()[:, 0].split(_chunk_tokens(linear, device)):
            h = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places).to(dtype)
            logits = torch.nn.functional.linear(h, w, b).to(accurate)
            losses[places] = _losses(logits, flat[places], None, after)[0]
    return losses.view(targets.shape)


def _product_dtype(linear: nn.Linear, device: torch.device) -> torch.dtype:
    dtype = linear.weight.dtype
    if dtype != torch.float64 and torch.amp.is_autocast_available(device.type):
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    return dtype


def _chunk_tokens(linear: nn.Linear, device: torch.device) -> int:
    return max(CHUNK_ELEMENTS.get(device.type, OTHER_CHUNK_ELEMENTS) // linear.out_features, 1)


@dataclass(frozen=True)
class _Tokens:
    """The supervised tokens, [S] each: their places in [N], their targets, their weights."""

    places: Tensor
    targets: Tensor
    weights: Tensor

    def chunks(self, size: int) -> Iterator[Sequence[Tensor]]:
        return zip(self.places.split(size), self.targets.split(size), self.weights.split(size))


@dataclass(frozen=True)
class _How:
    """dtype: of the products with the head. accurate: of everything else."""

    dtype: torch.dtype
    accurate: torch.dtype
    chunk_tokens: int
    after: AfterHead
    with_gradient: bool


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed with the loss, for weights that are divided by the largest of them, so that they do not
    vanish in float16; backward multiplies them by it and by what comes from behind."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens, how: _How) -> Tensor:
        of_hidden, of_weight, of_bias = (how.with_gradient and needed for needed in ctx.needs_input_grad[:3])
        with_gradient = of_hidden or of_weight or of_bias
        with _without_autocast(hidden.device.type):
            total = hidden.new_zeros((), dtype=how.accurate)
            largest = torch.cat([tokens.weights.abs(), total.new_full((1,), torch.finfo(how.accurate).tiny)]).amax()
            w, b = weight.to(how.dtype), None if bias is None else bias.to(how.dtype)
            grad_hidden = torch.zeros_like(hidden) if of_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=how.accurate) if of_weight else None
            grad_bias = None if bias is None or not of_bias else torch.zeros_like(bias, dtype=how.accurate)
            for places, targets, weights in tokens.chunks(how.chunk_tokens):
                h = hidden.index_select(0, places).to(how.dtype)
                logits = torch.nn.functional.linear(h, w, b).to(how.accurate)
                losses, gradient = _losses(logits, targets, weights / largest if with_gradient else None, how.after)
                total += (losses * weights).sum()
                if gradient is None:
                    continue
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                gradient = gradient.to(how.dtype)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(0, places, (gradient @ w).to(hidden.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.T, h)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = tuple(None if one is None else one.dtype for one in (hidden, weight, bias))
        ctx.largest = largest
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the loss without logits keeps its gradients for one backward only")
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient * ctx.largest
        # A product of a tensor in bfloat16 with a scalar tensor would round the scalar first.
        return *(
            None if one is None else (one if one.dtype == factor.dtype else one.to(factor.dtype)).mul_(factor).to(dtype)
            for one, dtype in zip(gradients, ctx.dtypes)
        ), None, None  # fmt: skip


def _losses(logits: Tensor, targets: Tensor, weights: Tensor | None, after: AfterHead) -> tuple[Tensor, Tensor | None]:
    """Token losses [S] and, in the place of the logits [S, V], the gradients of their weighted sum by these logits."""
    slope: Tensor | None = None
    if after.cap is not None:
        logits.mul_(after.scale / after.cap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(after.cap)
    elif after.scale != 1.0:
        logits.mul_(after.scale)
    of_target = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    sums = logits.sub_(largest[:, None]).exp_().sum(1)
    losses = sums.log() + largest - of_target
    if weights is None:
        return losses, None
    weights = weights * after.scale
    gradient = logits.mul_((weights / sums)[:, None])
    gradient.scatter_add_(1, targets[:, None], -weights[:, None])
    return losses, gradient if slope is None else gradient.mul_(slope)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [V, S] @ right [S, H] to total [V, H], which may be of a higher precision than they are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    rows = max(WEIGHT_SLICE // right.shape[1], 1)
    for part, some in zip(total.split(rows), left.split(rows)):
        part += some @ right


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):  # the device "meta"
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
