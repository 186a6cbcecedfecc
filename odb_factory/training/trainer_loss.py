"""The loss of a training: what stock makes it of, how a loss that the trainer computes weighs samples."""

from __future__ import annotations

import contextlib
import dis
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from odb_factory.accounting.losses import by_position, in_float32, to_device
from odb_factory.data.observe import IGNORE_INDEX
from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, StockMean
from odb_factory.data.progress import OptimizerStepRule
from odb_factory.data.samples import OptimizerStep
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.model.check import shifts_labels, unwrapped
from odb_factory.model.head import WithoutLogits
from odb_factory.model.own_loss import counts_items
from odb_factory.training.arguments import replaced

logger = get_logger(__name__)

LOOK_AT_THE_LOSS_ONLY = ("odb_factory.", "transformers.", "llamafactory.")
"""Packages whose trainers, in training, read only the loss of a model's output."""


def stock_mean(trainer: Any, loss: TrainerLoss | None) -> StockMean:
    """How the Trainer of transformers divides the loss of an optimizer step. loss: in place of the model's own.

    Models with a processor take no number of tokens under LLaMA-Factory, which sets `model_accepts_loss_kwargs`.
    """
    args, counts_tokens = trainer.args, trainer.model_accepts_loss_kwargs
    sums_up_to = 1 if args.average_tokens_across_devices else args.world_size
    if loss is not None and loss.is_smoother:
        # The mean of a micro-batch. `training_step` divides it by the accumulation where no tokens are counted;
        # `compute_loss` multiplies it by the number of processes where they are counted on all of them.
        return StockMean("micro_batch", sums_up_to if counts_tokens else None, counts_first=not loss.shifts)
    if loss is not None and not loss.takes_num_items:
        # LLaMA-Factory's asft: its own `compute_loss` returns the mean of a micro-batch, and `training_step` does not
        # divide what a loss function returns.
        return StockMean("micro_batch", args.world_size, counts_first=False)
    if loss is None and not counts_tokens:
        return MEAN_OF_MICRO_BATCH
    if loss is None and not trainer.odb.equal_weights:
        # `training_step` does not divide the mean of a micro-batch by the accumulation: it takes it for a share of the
        # optimizer step. So stock adds these means up.
        if _ignores_num_items(trainer):
            return StockMean("micro_batch", args.world_size, counts_first=False)
        if not counts_items(trainer.model):
            return StockMean("micro_batch", sums_up_to, counts_first=False)
    several_means = args.world_size > 1 and not args.average_tokens_across_devices
    return StockMean("rank") if several_means else MEAN_OF_STEP


def routers_weigh(rule: OptimizerStepRule, step: OptimizerStep, world_size: int) -> float:
    """How often stock adds the loss of a model's routers in an optimizer step.

    Where the loss of tokens is divided by the tokens of all micro-batches, nothing divides that of routers: it is added
    once a micro-batch and, where tokens are counted on all ranks, multiplied by these as the rest is.
    """
    if rule.stock_mean.over not in ("step", "rank"):
        return 1.0
    micro_batches = math.ceil(step.samples / rule.batch_size)
    return micro_batches / (world_size if rule.stock_mean.over == "rank" else 1)


class TrainerLoss:
    """The loss that a trainer computes from outputs and labels, in place of the model's own.

    That is its `compute_loss_func` or, if there is none, its label smoother. Each returns the mean over the tokens it
    is given, or their sum divided by `num_items_in_batch`. So that samples of a micro-batch weigh differently, it is
    called once for the samples of each weight, with their part of the outputs and labels.

    name: for messages. is_smoother: it is the label smoother. shifts: it compares each token with the next label.
    takes_num_items: it takes the number of tokens to divide by. is_dynamic: it is that of dynamic fine-tuning
    (`_is_dynamic`), which is computed here without logits where the model allows it.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.is_smoother = trainer.compute_loss_func is None
        self._place = "label_smoother" if self.is_smoother else "compute_loss_func"
        function = getattr(trainer, self._place)
        self.shifts = not self.is_smoother or shifts_labels(unwrapped(trainer.model))
        parameters = inspect.signature(function).parameters.values()
        self.takes_num_items = any(
            one.name == "num_items_in_batch" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters
        )
        self.is_dynamic = self.takes_num_items and _is_dynamic(function)
        self._without_logits: WithoutLogits | None = None
        function = getattr(function, "func", function)  # of a functools.partial
        self.name = f"compute_loss_func ({getattr(function, '__qualname__', type(function).__name__)})"
        if self.is_smoother:
            self.name = f"label_smoothing_factor: {trainer.args.label_smoothing_factor}"

    @classmethod
    def of(cls, trainer: Any) -> TrainerLoss | None:
        """None where the loss is the model's own, or one mean of the trainer's (`equal_weights` of `enable_odb`)."""
        is_own = trainer.compute_loss_func is None and trainer.label_smoother is None
        return None if is_own or trainer.odb.equal_weights else cls(trainer)

    @contextlib.contextmanager
    def weighing(
        self,
        model: nn.Module,
        labels: Any,
        row_weights: Sequence[float] | None,
        segments: Sequence[int],
        num_units: int,
        num_supervised: int | None = None,
    ) -> Iterator[None]:
        """While `compute_loss` runs. model: as trained. labels: [rows, length]. row_weights, segments: of
        `MicroBatchLoss` and `Measured`; num_units: of the micro-batch; num_supervised: tokens with a loss, if known.

        Raises `ConfigError` at the end where `compute_loss` has not used this loss.
        """
        function: Callable[..., Tensor] = getattr(self._trainer, self._place)
        places: list[Tensor] = []  # where outputs have log-probabilities of labels in the place of logits
        calls = 0

        def weighed(outputs: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if places:
                values = in_float32(outputs["logits"])
                weights = values.new_full((), 1 / num_units)
                if row_weights is not None:
                    weights = to_device(by_position(row_weights, segments), values).expand(labels.shape)
                    weights = weights.reshape(-1)[places[0]]
                return -(values * values.detach().exp() * weights).sum()
            given = [(1 / num_units, (outputs, labels, *args))]
            if row_weights is not None:
                self._check_logits(outputs, labels)
                given = _by_weight((outputs, labels, *args), labels, row_weights, segments)
            losses = []
            for weight, part in given:
                predicted = part[1][:, 1:] if self.shifts else part[1]
                num_items = (predicted != IGNORE_INDEX).sum()
                more = {"num_items_in_batch": num_items} if "num_items_in_batch" in kwargs else {}
                losses.append(function(*part, **kwargs | more) * (num_items * weight))
            return sum(losses[1:], losses[0])

        with contextlib.ExitStack() as stack:
            if self.is_dynamic and isinstance(labels, Tensor):
                self._without_logits = self._without_logits or WithoutLogits(model, why_logits(self._trainer))
                places = stack.enter_context(self._without_logits.in_place_of_logits(labels, num_supervised))
            stack.enter_context(replaced(self._trainer, **{self._place: weighed}))
            yield
        if not calls:
            raise ConfigError(
                f"{self.name}: compute_loss of {type(self._trainer).__name__} does not use it, and odb divides the "
                "loss as the Trainer divides that one; leave it out."
            )

    def _check_logits(self, outputs: Any, labels: Tensor) -> None:
        logits = outputs.get("logits") if isinstance(outputs, dict) else outputs[0]
        if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
            raise ConfigError(
                f"{self.name}: the samples of a micro-batch have different weights here, and "
                f"{type(unwrapped(self._trainer.model)).__name__} returns no logits of its rows (a fused kernel such "
                "as Liger's computes the loss itself); turn the kernel off, or set `loss_scaling: exact`."
            )


def _is_dynamic(function: Callable[..., Any]) -> bool:
    """Whether a loss of LLaMA-Factory is that of dynamic fine-tuning (arXiv 2508.05629), found out by calling it: each
    token's loss is multiplied by its probability, which has no gradient."""
    if not str(getattr(function, "__module__", "")).startswith("llamafactory."):
        return False
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 31, generator=generator, requires_grad=True)  # eaft takes the 20 largest
    labels = torch.tensor([[IGNORE_INDEX, 5, 6, 7], [1, IGNORE_INDEX, 3, IGNORE_INDEX]])
    of_labels = logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:, None].clamp_min(0))[..., 0]
    wanted = -(of_labels * of_labels.detach().exp() * (labels[:, 1:] != IGNORE_INDEX)).sum() / 3
    found = function({"logits": logits}, labels, num_items_in_batch=torch.tensor(3))
    slope, wanted_slope = (torch.autograd.grad(one, logits)[0] for one in (found, wanted))
    return torch.allclose(found, wanted) and torch.allclose(slope, wanted_slope, atol=1e-7)


def overriding_compute_loss(trainer: Any) -> list[type]:
    """Classes with a `compute_loss` that may read the outputs of a model or change its loss, the first called first."""
    kinds = [kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind)]
    return [kind for kind in kinds if not kind.__module__.startswith(LOOK_AT_THE_LOSS_ONLY)]


def why_logits(trainer: Any) -> str | None:
    """Why the logits of a micro-batch are needed beside the model's own loss; None if only the loss is."""
    for kind in overriding_compute_loss(trainer):
        return f"compute_loss of {kind.__module__}.{kind.__qualname__} may read its outputs"
    return None


def _ignores_num_items(trainer: Any) -> bool:
    """Whether the loss is that of an own `compute_loss` whose code never reads the number of tokens it is given."""
    for kind in overriding_compute_loss(trainer):
        function = inspect.unwrap(vars(kind)["compute_loss"])
        if not inspect.isfunction(function):
            return False
        parameters = inspect.signature(function).parameters
        rest = [one.name for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
        name = "num_items_in_batch" if "num_items_in_batch" in parameters else (*rest, "")[0]
        loads = [one.argval for one in dis.get_instructions(function) if one.opname.startswith("LOAD_")]
        if not any(name in one if isinstance(one, tuple) else name == one for one in loads):  # Python 3.13 has tuples
            return True
        if "compute_loss" not in function.__code__.co_names:  # of the next class is not called
            return False
    return False


def _by_weight(
    given: tuple[Any, ...], labels: Tensor, row_weights: Sequence[float], segments: Sequence[int]
) -> list[tuple[float, tuple[Any, ...]]]:
    """For each weight but 0 the part of `given` for its samples: rows or, of a flat micro-batch, segments."""
    weights = sorted(set(row_weights) - {0.0})
    if segments:
        ends = np.cumsum(segments)
        places = [np.arange(end - length, end) for end, length in zip(ends, segments)]
    else:
        places = [np.array([row]) for row in range(len(row_weights))]
    of_weight = [
        np.concatenate([place for place, weight in zip(places, row_weights) if weight == one]) for one in weights
    ]
    order = torch.from_numpy(np.concatenate(of_weight))
    sizes, dim, shape = list(map(len, of_weight)), 1 if segments else 0, labels.shape

    def cut(value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            return value.index_select(dim, order.to(value.device, non_blocking=True)).split(sizes, dim)
        if isinstance(value, dict) and value:
            return [type(value)(**dict(zip(value, part))) for part in zip(*map(cut, value.values()))]
        if isinstance(value, tuple | list) and value:
            return [type(value)(part) for part in zip(*map(cut, value))]
        return [value] * len(sizes)

    return list(zip(weights, cut(given)))


# ----------------------------------------------------------------------------------------------------------------------
# Logged once at the start: what a user may not expect of the model and its loss.

DROPOUT_OF_ATTENTION = ("attention_dropout", "dropout")


def log_what_differs(trainer: Any) -> None:
    random = list(_dropouts(trainer.model))
    if random:
        name, rate = random[0]
        more = f" and {len(random) - 1} more" if len(random) > 1 else ""
        logger.info(
            "dropout is active in the model (%s: %g%s): its random masks are drawn for each micro-batch, so losses "
            "differ from stock's as with another seed",
            name,
            rate,
            more,
        )
    if trainer.args.neftune_noise_alpha is not None:
        logger.info(
            "neftune_noise_alpha: %g: the noise of a sample goes by its own length (padded micro-batches: by that of "
            "its row), in stock by that of its row, padded to the longest of its micro-batch; so shorter samples have "
            "more noise than in stock, but for per_device_train_batch_size: 1",
            trainer.args.neftune_noise_alpha,
        )
    loss = TrainerLoss.of(trainer)
    if loss is not None and not loss.shifts:
        logger.warning(
            "label_smoothing_factor: %g: transformers compares each token of a %s with its own label in place of the "
            "next one, in stock training too; set it to 0",
            trainer.args.label_smoothing_factor,
            type(unwrapped(trainer.model)).__name__,
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Name and rate of the modules that draw random masks in training; attention modules keep theirs as a number."""
    for name, module in model.named_modules():
        keys = ("p",) if isinstance(module, _DropoutNd) else DROPOUT_OF_ATTENTION
        rates = [vars(module).get(key) for key in keys]
        yield from [(name, rate) for rate in rates if isinstance(rate, float) and rate > 0][:1]
