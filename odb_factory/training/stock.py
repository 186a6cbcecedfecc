"""Measure, before training, how stock weighs the samples of an optimizer step.

1. The `get_batch_samples` and `training_step` of the trainer that will train run on a few rows. The layers of the model
   do not compute, and its output embedding returns logits that are leaves, so the gradient of the loss that reaches
   `accelerator.backward` ends there. If the returned logits have a gradient, the trainer computes the loss.
2. The loss of each sample alone, on its own logits, has a gradient, too. Stock's gradient must be this gradient times a
   weight, and the weights of all samples must be those that the planner gives by one rule (`candidates`).

So a release, a custom loss or a trainer that weighs differently needs no branch here. A loss that fits no rule is
refused.

Names of shapes: rows, length: of a padded micro-batch; V: vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast

from odb_factory.data.observe import IGNORE_INDEX, ItemError
from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, OptimizerStepRule, StockMean, StockSteps
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped
from odb_factory.model.flat_row import forward_replaced
from odb_factory.model.head import LOG_PROBS, StandIn, has_routers, model_with_labels, without_layers
from odb_factory.planner import ROW
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced

logger = get_logger(__name__)

ROWS, ROWS_OF_MICRO_BATCH = 6, 2
ROWS_READ, FEW_TOKENS = 16, 12
"""Rows of a rank to choose from; rows of fewer tokens than this come last."""
MOST_TOKENS, MOST_PADDING = 16, 3
"""Columns of a row, and columns of its padding: the logits of whole rows may not fit into memory."""
SUPERVISED, NONE_IN_THE_LAST = (2, 5, 3, 7, 4, 9), (2, 5, 3, 7, 4, 0)
"""Supervised tokens of each row, if it is long enough: only rows that differ show the rule."""
TOLERANCE = 1e-3
"""Allowed relative difference of gradients and weights. Two rules differ by several percent."""

FROM_PADDING = (
    "a label is predicted from padding: the first token of a row that is padded on the left has a label; set it to "
    "-100, or pad on the right"
)


@dataclass(frozen=True, slots=True)
class StockLoss:
    """How stock makes the loss of an optimizer step.

    mean: the rule of the weights. is_measured: the rule is not assumed.
    is_trainers: the trainer computes the loss from logits (`compute_loss_func`, its own `compute_loss`, the label
    smoother), and is called once a sample; else the forward of the model computes it.
    has_log_probs: the trainer takes the mean of log-probabilities that the model returns (`LOG_PROBS`).
    counts_unsupervised: a mean over samples counts samples without a supervised token.
    number: an example of the number of items that stock's `get_batch_samples` returns.
    """

    mean: StockMean = MEAN_OF_STEP
    is_measured: bool = False
    is_trainers: bool = False
    has_log_probs: bool = False
    counts_unsupervised: bool = False
    number: Any = field(default=None, compare=False)


def assumed(trainer: Any, *, has_labels: bool) -> StockLoss:
    """The rule for a loss that cannot be measured, such as the loss of pairs: whether stock's step divides a loss by
    the number of micro-batches. has_labels: stock counts the labels of an optimizer step."""
    probe, handed = _probe_of(trainer), []
    probe.current_gradient_accumulation_steps = 2
    loss, batch = torch.ones((), device=trainer.args.device), {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}
    hooks = replaced(probe.accelerator, backward=lambda loss, **_: handed.append(float(loss)))
    with hooks, replaced(probe, compute_loss=lambda *_, **__: loss):
        probe.training_step(probe.model, batch, loss if has_labels else None)
    return StockLoss(MEAN_OF_STEP if handed == [1.0] else MEAN_OF_MICRO_BATCH)


class UnknownWeights(ConfigError):
    """Stock's weights fit no rule or cannot be measured, but each sample may have a loss of its own.

    So odb can give the samples other weights (`loss_scaling`)."""


def measurable_model(trainer: Any) -> Any:
    """The transformers model that takes labels and has an output embedding, inside `trainer.model`.

    Raises `ConfigError` if there is none.
    """
    model: Any = model_with_labels(trainer.model)
    if model is None or model.get_output_embeddings() is None:
        raise ConfigError(
            f"model: {type(unwrapped(trainer.model)).__name__} has no output embedding (get_output_embeddings), so how "
            f"{type(trainer).__name__} weighs the samples of an optimizer step cannot be measured; use ODBDataLoader "
            "in a custom loop, or train without odb."
        )
    return model


Rows = Sequence[tuple[Any, int]]
"""Processed rows of this rank to measure with: features, tokens."""


def short_rows(dataset: Any, observer: Callable[[Any], Any], rank: int) -> Rows:
    """A few short rows of the dataset, each perhaps several times. observer: dataset item -> features, cost.

    Raises `ItemError` if no row can be read and the observer cannot read the kind of the first one.
    """
    rows: list[tuple[int, int, Any]] = []
    errors: list[Exception] = []
    with kept_random_numbers():
        for number in range(min(ROWS_READ, len(dataset))):
            try:
                features, cost = observer(dataset[(rank * ROWS_READ + number) % len(dataset)])
            except Exception as error:  # reported when the row is trained on
                errors.append(error)
                continue
            rows.append((cost.tokens + cost.patches, cost.tokens, features))
    if not rows and errors and isinstance(errors[0], ItemError):
        raise errors[0]
    rows.sort(key=lambda row: (row[0] < FEW_TOKENS, row[0]))
    chosen = itertools.cycle([(features, tokens) for size, tokens, features in rows if size > 1])
    return list(itertools.islice(chosen, ROWS))


# The rules, and the weight of a sample by each of them.


def candidates(world_size: int) -> list[StockMean]:
    """All rules, the usual ones first.

    The engine takes the mean over the ranks. Some trainers multiply the loss by the number of ranks and some do not, so
    each rule comes with factors.
    """
    of_tokens, of_all = ("tokens", "labels"), ("tokens", "labels", "samples", "all labels")
    kinds: list[tuple[Any, float | None, tuple[Any, ...]]] = [
        ("step", None, of_tokens),
        ("rank", None, of_tokens),
        ("micro_batch", None, of_all),
        ("micro_batch", world_size, of_all),
    ]
    return [
        StockMean(over, divisor, counts, factor)
        for factor in dict.fromkeys((1.0, float(world_size), 1 / world_size))
        for over, divisor, all_counts in kinds
        for counts in all_counts
        if over != "rank" or world_size > 1
    ]


def _table(answers: Sequence[Any]) -> np.ndarray:
    """The `samples` (units, whether the first token has a label) of all ranks as `ROW`, in stock's micro-batches."""
    samples = [sample for answer in answers for sample in answer["samples"]]
    rows = np.zeros(len(samples), ROW)
    rows["units"], rows["leading_label"] = zip(*samples)
    rank, number = np.divmod(np.arange(len(rows)), len(rows) // len(answers))
    micro_batch, row = np.divmod(number, ROWS_OF_MICRO_BATCH)
    rows["position"] = (micro_batch * len(answers) + rank) * ROWS_OF_MICRO_BATCH + row
    return rows


def _planned_weights(mean: StockMean, rows: np.ndarray, world_size: int) -> np.ndarray:
    """[n]: the weight that the planner gives the mean loss of each sample (`ROW` [n]) by this rule."""
    steps = StockSteps(
        rule=OptimizerStepRule(batch_size=ROWS_OF_MICRO_BATCH, accumulation=1, stock_mean=mean),
        global_batch_size=len(rows),
        world_size=world_size,
        num_samples=None,
        remainder=0,
        is_split=False,
    )
    of_stock, num_means = steps.means_of(rows)
    divisors, counted, _ = of_stock.T
    amounts = counted if mean.counts == "all labels" else np.maximum(rows["units"], 1)
    weights: np.ndarray = world_size * mean.factor / (mean.divisor or num_means) * amounts / np.maximum(divisors, 1)
    return weights


def _is_near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE)


class Unmeasured(Exception):
    """Why something cannot be measured before training.

    help: what may help: other "labels" of the rows, if stock cannot train on a row without a supervised token; other
    "rows"; other "weights" of the samples, if each may have a loss of its own.
    """

    def __init__(self, why: str, help: str = ""):
        super().__init__(why)
        self.help = help


def together(gather: Callable, failure: Unmeasured, compute: Callable[[], Any]) -> Any:
    """The result of `compute`. If it fails on a rank, all ranks raise `Unmeasured`. Collective.

    failure: raised with the message of any other error appended.
    """
    result, problem = None, None
    try:
        result = compute()
    except Unmeasured as error:
        problem = str(error), error.help
    except Exception as error:
        problem = f"{failure}{one_line(error)}", failure.help
    if problem := next(filter(None, gather(problem)), None):
        raise Unmeasured(*problem)
    return result


def measure(trainer: Any, model: Any, rows: Rows, collate: Callable[[list[Any]], Any], gather: Callable) -> StockLoss:
    """The rule by which `trainer` weighs the samples of an optimizer step. Collective.

    model: of `measurable_model`. rows: of this rank; if a rank has none, rows are made up. collate: the trainer's
    collator. gather: (JSON) -> the JSON of all ranks.
    Leaves the trainer, its model and all random numbers as they are. Raises `ConfigError` on all ranks if no rule fits,
    `UnknownWeights` if other weights are possible.
    """
    has_rows, why = all(gather(bool(rows))), Unmeasured("")
    to_read: list[Rows] = [rows, ()] if has_rows else [()]
    for some_rows, supervised in itertools.product(to_read, (NONE_IN_THE_LAST, SUPERVISED)):
        try:
            return _measure_on(some_rows, supervised, trainer, model, collate, gather)
        except Unmeasured as error:
            why = error
        if why.help not in ("labels", "rows"):
            break
    kind = UnknownWeights if why.help in ("rows", "weights") else ConfigError
    raise kind(
        f"how {type(trainer).__name__} weighs the samples of an optimizer step fits no rule that odb has ({why}), so "
        "odb would train another loss; train without odb."
    )


def _measure_on(
    rows: Rows, supervised: Sequence[int], trainer: Any, model: Any, collate: Callable, gather: Callable
) -> StockLoss:
    """`measure` on these rows, whose last tokens are supervised."""
    micro_batches = together(
        gather,
        Unmeasured("its rows cannot be collated: ", "rows"),
        lambda: _micro_batches(trainer, model, rows, collate, supervised),
    )
    failure = Unmeasured("its step raises ", "labels")
    number, answer = together(gather, failure, lambda: _weigh(trainer, model, micro_batches))
    answers = gather(answer)
    # Rules with the measured weights. A mean over samples may count samples without a supervised token.
    table = _table(answers)
    supervised_rows = table[table["units"] > 0]
    measured = np.concatenate([answer["weights"] for answer in answers])

    def difference(mean: StockMean, counted: np.ndarray) -> float:
        planned = _planned_weights(mean, counted, len(answers))[counted["units"] > 0]
        return float(np.max(np.abs(measured - planned) / planned))

    off = {mean: difference(mean, supervised_rows) for mean in candidates(len(answers))}
    rules = [mean for mean in off if min(off[mean], difference(mean, table)) < TOLERANCE]
    if not table["leading_label"].any():  # then no row shows whether first labels count
        rules = [mean for mean in rules if "labels" not in mean.counts]
    if not rules:
        nearest = min(off, key=off.__getitem__)
        raise Unmeasured(f"the nearest is {nearest}, {off[nearest]:.1%} off", "weights")
    if len(rules) > 1:
        raise Unmeasured(f"these rows cannot tell {' from '.join(map(str, rules))}", "rows")
    logger.debug("stock takes %s (measured)", rules[0])
    return StockLoss(
        rules[0],
        is_measured=True,
        is_trainers=any(answer["is_trainers"] for answer in answers),
        has_log_probs=any(answer["has_log_probs"] for answer in answers),
        counts_unsupervised=off[rules[0]] >= TOLERANCE,
        number=number,
    )


def _weigh(trainer: Any, model: Any, micro_batches: Sequence[_MicroBatch]) -> tuple[Any, dict[str, Any]]:
    """Run an optimizer step of stock. Returns its number of items and, as JSON, the samples of this rank and the weight
    of each that has a supervised token."""
    probe, device = _probe_of(trainer), trainer.args.device
    backward = probe.accelerator.backward
    probe.current_gradient_accumulation_steps = len(micro_batches)
    with kept_random_numbers(device):
        batches = iter([copy.deepcopy(micro_batch.batch) for micro_batch in micro_batches])
        step, number = probe.get_batch_samples(batches, len(micro_batches), device)
        for micro_batch, inputs in zip(micro_batches, step):
            hook = functools.partial(micro_batch.backward, backward)
            with micro_batch.known_to(model), replaced(probe.accelerator, backward=hook):
                probe.training_step(probe.model, dict(inputs), number)
        weights = [weight for each in micro_batches for weight in _weights_in(each, probe, number)]
    answer = {
        "samples": [sample for micro_batch in micro_batches for sample in micro_batch.samples],
        "weights": weights,
        "is_trainers": any(micro_batch.is_trainers for micro_batch in micro_batches),
        "has_log_probs": any(micro_batch.has_log_probs for micro_batch in micro_batches),
    }
    return number, answer


def _weights_in(micro_batch: _MicroBatch, probe: Any, number: Any) -> Iterator[float]:
    """The weight of the mean loss of each sample that has a supervised token. number: of items, as stock counts."""
    stock, total = micro_batch.gradient, 0.0
    if stock is None:
        raise Unmeasured("a micro-batch has no gradient")
    scale = stock.norm()
    if not (scale.isfinite() and math.isfinite(micro_batch.value)):
        raise Unmeasured("a micro-batch has a loss or a gradient that is not finite", "labels")
    for row, ((start, end), (units, _)) in enumerate(zip(micro_batch.spans, micro_batch.samples)):
        if torch.cat([stock[row, :start], stock[row, end:]]).norm() > TOLERANCE * scale:
            raise Unmeasured(FROM_PADDING if start else "its loss depends on the padding of a row")
        # What stock trains on the logits of this sample,
        own = stock[row, start:end]
        if not units:
            if own.any():
                raise Unmeasured("a sample without a supervised token has a gradient")
            continue
        # and the loss of the sample alone: the trainer's, or the mean over its tokens.
        if micro_batch.is_trainers:
            alone = SampleModel(probe.model, micro_batch.logits[row : row + 1, start:end])
            with probe.compute_loss_context_manager():
                inputs = probe._prepare_inputs(copy.deepcopy(cut(micro_batch.batch, row, start, end)))
                items = number_like(number, units, probe.args.device)
                loss = probe.compute_loss(alone, inputs, num_items_in_batch=items)
        else:
            loss = micro_batch.mean_loss(row)
        gradient = torch.autograd.grad(loss, micro_batch.leaf, retain_graph=True)[0][row, start:end]
        if not (gradient.any() and own.any()):
            raise Unmeasured("a sample has no gradient")
        # The factor between both, by least squares.
        weight = float((gradient * own).sum() / gradient.square().sum())
        if (own - weight * gradient).norm() > TOLERANCE * own.norm():
            raise Unmeasured("the loss of a sample depends on the other samples of its micro-batch")
        total += weight * float(loss.detach())
        yield weight
    if not _is_near(micro_batch.value, total):
        raise Unmeasured("its loss has a term that is not made of the logits of its samples")


class _MicroBatch:
    """A micro-batch of stock with known logits, and the loss and gradient that stock makes of them.

    batch: as collated. spans: start and end of the sample in each row. samples: supervised tokens of each, and whether
    its first token has a label. targets: labels of the next token [rows, length].
    leaf: returned by the output embedding [rows, length, V]; logits: what the model makes of it.
    value: of the loss that stock hands to backward; gradient: of the leaf, times the factor of accelerate's backward.
    is_trainers: the trainer computes the loss, from the logits that the model returns. has_log_probs: the model returns
    the log-probabilities of the labels instead, as TRL makes it do, and the trainer takes their mean.
    """

    logits: Tensor
    value = 0.0
    gradient: Tensor | None = None
    is_trainers = False
    has_log_probs = _has_routers = False

    def __init__(self, batch: dict[str, Any], spans: list[tuple[int, int]], vocabulary: int, device: torch.device):
        self.batch, self.spans = batch, spans
        targets = _targets(batch).cpu()
        self.samples = [
            (int((row[start : end - 1] != IGNORE_INDEX).sum()), bool(labels[start] != IGNORE_INDEX))
            for row, labels, (start, end) in zip(targets, batch["labels"], spans)
        ]
        logits = torch.randn((*targets.shape, vocabulary), generator=torch.Generator().manual_seed(0))
        # Token losses from small to large show the gradient of a loss that bends or clamps them.
        bonus = (torch.arange(targets.numel()) * 7 % 11).view(*targets.shape, 1).float()
        logits.scatter_add_(2, targets.clamp_min(0)[..., None], bonus)
        self.targets, self.leaf = targets.to(device), logits.to(device).requires_grad_()

    @contextlib.contextmanager
    def known_to(self, model: Any) -> Iterator[None]:
        """Within it the model computes this micro-batch, without its layers and the losses of its routers."""
        config, self._has_routers = model.config.get_text_config(), has_routers(model)
        routers = replaced(config, output_router_logits=False) if self._has_routers else contextlib.nullcontext()
        # PEFT calls no hook of the model.
        with without_layers(model, self.leaf), forward_replaced(model, self._forward), routers:
            yield

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "skip_logits" in signature(own).parameters:  # Liger's kernel makes no logits
            kwargs["skip_logits"] = False
        output, shape = own(*args, **kwargs), self.leaf.shape
        is_tuple = isinstance(output, tuple)
        items: Iterable[Any] = enumerate(output) if is_tuple else output.items()
        key, logits = next((item for item in items if getattr(item[1], "shape", None) == shape), (None, None))
        if logits is None:
            return self._with_log_probs(output)
        if not torch.is_grad_enabled():  # an evaluation, or a reference model of the trainer
            if not hasattr(self, "logits"):
                self.logits = logits.float()
            return output
        if not logits.requires_grad:
            raise Unmeasured("its logits cannot be read: the model does not call its output embedding", "weights")
        self.logits, self._returned = logits.to(self.leaf.dtype), logits.clone()
        if is_tuple:
            return tuple(self._returned if number == key else value for number, value in enumerate(output))
        output[key] = self._returned
        if self._has_routers:
            output["aux_loss"] = self.leaf.new_zeros(())  # which a trainer may log
        return output

    def _with_log_probs(self, output: Any) -> Any:
        """An output with `LOG_PROBS`, 0 without a label: then those of the known logits."""
        targets = self.targets[:, :-1]
        log_probs, has_label = getattr(output, LOG_PROBS, None), targets != IGNORE_INDEX
        if log_probs is None or log_probs.shape != targets.shape or bool(log_probs[~has_label].any()):
            shape = list(targets.shape)
            raise Unmeasured(f"its logits cannot be read: the model returns none of {shape} tokens", "weights")
        if self._has_routers:
            raise Unmeasured("it adds the loss of routers once a micro-batch; set router_aux_loss_coef to 0")
        known = self.leaf[:, :-1].log_softmax(-1).gather(2, targets.clamp_min(0)[..., None])[..., 0]
        output[LOG_PROBS] = known = known.where(has_label, 0.0)
        if torch.is_grad_enabled() or not hasattr(self, "logits"):
            self.logits, self._returned, self.has_log_probs = self.leaf, known, True
        return output

    def mean_loss(self, row: int) -> Tensor:
        """The mean over the supervised tokens of the sample of a row."""
        start, end = self.spans[row]
        logits, targets = self.logits[row, start : end - 1], self.targets[row, start : end - 1]
        return cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)

    def backward(self, own: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """Replaces accelerate's backward (`own`, which may multiply the loss). No parameter gets a gradient."""
        handed = loss.detach().clone().requires_grad_()
        own(handed, **kwargs)
        self.value, sources = float(loss.detach()), (self.leaf, self._returned)
        self.gradient, of_returned = torch.autograd.grad(
            loss, sources, handed.grad, retain_graph=True, allow_unused=True
        )
        if self.has_log_probs:
            of_labels = of_returned[self.targets[:, :-1] != IGNORE_INDEX]
            if not torch.allclose(of_labels, of_labels[:1]):
                raise Unmeasured("its loss is not a mean of the log-probabilities of the labels")
        else:
            self.is_trainers = of_returned is not None and bool(of_returned.any())


def apart(trainer: Any) -> Any:
    """A shallow copy of a trainer that logs nothing and collects its own figures."""
    copied = copy.copy(trainer)
    copied.log = lambda *args, **kwargs: None
    for name, value in vars(trainer).items():
        if isinstance(value, dict | list | set | deque | Tensor) and not name.endswith("dataset"):
            with contextlib.suppress(Exception):
                setattr(copied, name, copy.deepcopy(value))
    return copied


def _probe_of(trainer: Any) -> Any:
    """A copy of a trainer without odb. Its backward passes through accelerate and ends at the loss."""
    probe = apart(trainer)
    probe.odb = None
    probe.state, accelerator = copy.copy(trainer.state), copy.copy(trainer.accelerator)
    probe.accelerator, accelerator.scaler = accelerator, None

    def backward(loss: Tensor, **kwargs: Any) -> None:
        if kwargs.get("scale_wrt_gas", True):
            raise Unmeasured("DeepSpeed's engine would divide the loss by the accumulation once more")
        loss.backward()

    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_engine_wrapped = SimpleNamespace(backward=backward)
    return probe


# The rows of the measurement.


def _micro_batches(
    trainer: Any, model: Any, rows: Rows, collate: Callable[[list[Any]], Any], supervised: Sequence[int]
) -> list[_MicroBatch]:
    """Micro-batches of two rows. rows: none: random tokens. supervised: supervised tokens of each row; each rank adds
    another number to them."""
    args, vocabulary = trainer.args, model.config.get_text_config().vocab_size
    if not rows:
        generator, low = torch.Generator().manual_seed(0), min(3, vocabulary - 1)
        sizes = [12 + 3 * row for row in range(ROWS)]
        rows = [({"input_ids": torch.randint(low, vocabulary, (size,), generator=generator)}, size) for size in sizes]
        collate = _padded
    supervised = [count and count + args.process_index % 5 for count in supervised]
    micro_batches = []
    for start in range(0, ROWS, ROWS_OF_MICRO_BATCH):
        of_micro_batch = slice(start, start + ROWS_OF_MICRO_BATCH)
        features, tokens = zip(*rows[of_micro_batch])
        batch, spans = _short(dict(collate(copy.deepcopy(list(features)))), tokens)
        batch["labels"] = _revealing(batch, spans, supervised[of_micro_batch])
        if "shift_labels" in batch:
            batch["shift_labels"] = _targets(batch).contiguous()
        micro_batches.append(_MicroBatch(batch, spans, vocabulary, args.device))
    return micro_batches


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """The label of the next token, [rows, length]."""
    return pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    padded = pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": torch.full_like(padded, IGNORE_INDEX)}


def _short(batch: dict[str, Any], tokens: Sequence[int]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """`MOST_TOKENS` columns of each row: the first token of its sample, the last ones, and some padding; and start and
    end of the sample in these columns. A sample reaches from the first to the last token with attention or a label.

    Tensors that are not of tokens or rows are left out, such as media, which the remaining tokens do not fit.
    tokens: of each sample, for a batch without a mask of [rows, length].
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        mask = (torch.arange(ids.shape[1]) < torch.tensor(tokens)[:, None]).to(ids.device)
    columns, spans = [], []
    for is_own in (mask != 0) | (batch["labels"] != IGNORE_INDEX):
        places = is_own.nonzero()[:, 0].tolist()
        start, end = places[0], places[-1] + 1
        padding = [*range(start), *range(end, ids.shape[1])]
        first, rest = padding[:MOST_PADDING], padding[MOST_PADDING:]
        chosen = sorted([start, *first, *reversed(range(start + 1, end)), *rest][:MOST_TOKENS])
        columns.append(chosen)
        spans.append((chosen.index(start), chosen.index(start) + sum(start <= column < end for column in chosen)))
    places, short = (torch.arange(len(ids))[:, None], torch.tensor(columns)), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            short[key] = value
        elif value.shape[:2] == ids.shape:
            short[key] = value[places]
    return short, spans


def _revealing(batch: Mapping[str, Any], spans: Sequence[tuple[int, int]], supervised: Sequence[int]) -> Tensor:
    """Labels that tell rules apart: the last tokens of each row (their number: supervised), and the first token of one
    row. A first token after padding keeps its label, which would be predicted from padding."""
    ids = batch["input_ids"]
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, ((start, end), most) in enumerate(zip(spans, supervised)):
        count = min(most, end - start - 1)
        labels[row, end - count : end] = ids[row, end - count : end]
        if start:
            labels[row, start] = batch["labels"][row, start]
        elif not (labels[:row, 0] != IGNORE_INDEX).any():
            labels[row, 0] = ids[row, 0]
    return labels


# Evaluation: `prediction_step` on one micro-batch of each rank.


def measure_evaluation(trainer: Any, gather: Callable) -> StockMean | None:
    """The rule of stock's loss of an evaluation batch: a mean over the batches of all ranks at the same time ("round")
    or over its own ("micro_batch"); None if no rule fits. gather: as in `measure`. Collective."""
    answer: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # the trainer may run any code
        answer = _evaluate(trainer, measurable_model(trainer))
    answers = gather(answer)
    ranks = len(answers)
    if not any(answer.get("has_loss", True) for answer in answers):  # tokens are generated
        return StockMean("micro_batch", ranks)
    if not all(answer.get("has_loss") for answer in answers):
        return None
    table, losses = _table(answers), [answer["loss"] for answer in answers]
    alone = np.concatenate([answer["alone"] for answer in answers])
    rules: Any = itertools.product(
        ("round", "micro_batch"), ("tokens", "labels"), dict.fromkeys((1.0, float(ranks), 1 / ranks))
    )
    for over, counts, factor in rules:
        weights = _planned_weights(StockMean(over, counts=counts, factor=factor), table, ranks)
        expected = (weights * alone).reshape(ranks, -1).sum(1)
        if all(map(_is_near, losses, expected)):
            return StockMean(over, (1 if over == "round" else ranks) / factor, counts)
    return None


def _evaluate(trainer: Any, model: Any) -> dict[str, Any]:
    """The samples of a micro-batch, their mean losses, and the loss that `prediction_step` makes of them, as JSON."""
    probe, was_training = _probe_of(trainer), trainer.model.training
    micro_batch = _micro_batches(trainer, model, (), _padded, SUPERVISED)[0]
    try:
        with kept_random_numbers(trainer.args.device), micro_batch.known_to(model):
            loss, *_ = probe.prediction_step(model.eval(), copy.deepcopy(micro_batch.batch), True)
    finally:
        probe.model.train(was_training)
    if loss is None:
        return {"has_loss": False}
    alone = [float(micro_batch.mean_loss(row)) for row in range(ROWS_OF_MICRO_BATCH)]
    return {"has_loss": True, "samples": micro_batch.samples, "alone": alone, "loss": float(loss)}


# The loss of one sample, computed by the trainer: in the measurement and in training.


class SampleModel(StandIn):
    """Stands for the model in a `compute_loss`: its output has the logits of one sample, [1, length, V]."""

    def __init__(self, model: Any, logits: Tensor):
        super().__init__(unwrapped(model), self._forward)
        vars(self)["_logits"] = logits

    def _forward(self, labels: Any = None, num_items_in_batch: Any = None, **_: Any) -> CausalLMOutputWithPast:
        loss = None
        if labels is not None:
            targets = labels[0, 1:]
            count = (targets != IGNORE_INDEX).sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
            loss = cross_entropy(self._logits[0, :-1], targets, ignore_index=IGNORE_INDEX, reduction="sum") / count
        return CausalLMOutputWithPast(loss=loss, logits=self._logits)


def number_like(stock: Any, number: int, device: torch.device) -> Any:
    """A number of items of the type that stock's `get_batch_samples` returns: a tensor, an int or None."""
    if isinstance(stock, Tensor):
        return torch.full((), number, dtype=stock.dtype, device=device)
    return None if stock is None else type(stock)(number)


def cut(inputs: Mapping[str, Any], row: int, start: int, end: int) -> dict[str, Any]:
    """The inputs of the sample at places `start` to `end` of a row: its part of tensors [rows, length, ...], its row of
    tensors [rows, ...], all other values whole."""
    rows, length = inputs["labels"].shape

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            return value[row : row + 1, start:end]
        return value[row : row + 1] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value

    return {key: part(value) for key, value in inputs.items()}
