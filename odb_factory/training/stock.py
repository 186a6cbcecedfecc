"""How stock weighs the samples of an optimizer step: measured before training, with the trainer that will train.

1. The trainer's own `get_batch_samples` and `training_step` run on a few rows. A hook on the model's output embedding
   hands on logits that are leaves, so the gradient of what reaches `accelerator.backward` ends at the logits and no
   parameter sees it. A gradient of what the model returns shows that the trainer's code computes the loss.
2. The loss of each sample alone, on its own logits, has a gradient, too. Stock's gradient must be that one times a
   weight, and the weights of all samples must be those of one rule (`candidates`).

So a release, a custom loss or a trainer that weighs in another way needs no branch here. What fits no rule is refused.

Names of shapes: rows, length: of a padded micro-batch; V: vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from odb_factory.data.observe import IGNORE_INDEX
from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, Counts, StockMean
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped
from odb_factory.model.flat_row import forward_replaced
from odb_factory.model.head import StandIn, has_routers, model_with_labels, without_layers
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced
from odb_factory.training.oom import is_out_of_memory

logger = get_logger(__name__)

ROWS, ROWS_OF_MICRO_BATCH = 6, 2
ROWS_READ, FEW_TOKENS = 16, 12
"""Rows of a rank to choose from; those with fewer tokens than this show less."""
MOST_TOKENS, MOST_PADDING = 16, 3
"""Columns of a row, and those of its padding: the logits of whole rows may not fit into memory."""
SUPERVISED, NONE_IN_THE_LAST = (2, 5, 3, 7, 4, 9), (2, 5, 3, 7, 4, 0)
"""Tokens with a loss of each row, if it is long enough: a rule shows itself only if the rows differ."""
TOLERANCE, VALUE_TOLERANCE = 1e-3, 5e-3
"""Relative, of gradients and weights, and of losses of a whole model. Two rules differ by several percent."""
FROM_PADDING = (
    "a label is predicted from padding: the first token of a row that is padded on the left has a label; set it to "
    "-100, or pad on the right"
)
READS_PADDING = "its loss depends on the padding of a row"
NOT_FINITE, RAISES = "a micro-batch has a gradient that is not finite", "its step raises "
NO_LOGITS, OTHER_VALUES = "its logits cannot be read: ", "the values of its losses are those of no rule"


@dataclass(frozen=True, slots=True)
class StockLoss:
    """How stock makes the loss of an optimizer step.

    mean: the rule of the weights. is_trainers: code of the trainer computes it from logits (`compute_loss_func`, a
    `compute_loss` of its own, the label smoother), else the model's own forward. adds_up: called for the samples of a
    micro-batch, padded or flat, it returns the mean over their tokens of what it returns for each of them; otherwise it
    is called once a sample. counts_unsupervised: a mean over samples counts those without a supervised token, which
    otherwise are left out. number: an example of what stock's `get_batch_samples` returns as the number of items.
    """

    mean: StockMean = MEAN_OF_STEP
    is_trainers: bool = False
    adds_up: bool = True
    counts_unsupervised: bool = False
    number: Any = field(default=None, compare=False)

    @property
    def takes_stock_number(self) -> bool:
        """Whether stock's own number of items makes any cut of the optimizer step stock's."""
        return self.number is not None and self.mean.over == "step" and self.adds_up


def assumed(trainer: Any) -> StockLoss:
    """The rule of a loss that cannot be measured here, such as that of pairs."""
    return StockLoss(MEAN_OF_STEP if trainer.model_accepts_loss_kwargs else MEAN_OF_MICRO_BATCH)


class UnknownWeights(ConfigError):
    """What stock weighs the samples fits no rule, or cannot be seen; nothing shows that their losses are not their own.

    So other weights can be given to them (`loss_scaling`)."""


class Rows(NamedTuple):
    """A few short processed rows of this rank, to measure with, and the units of each."""

    features: list[Any]
    units: list[int]


def short_rows(dataset: Any, observer: Callable[[Any], Any], rank: int) -> Rows:
    """observer: dataset item -> features, cost."""
    rows: list[tuple[int, int, Any]] = []
    with kept_random_numbers():
        for number in range(min(ROWS_READ, len(dataset))):
            try:
                features, cost = observer(dataset[(rank * ROWS_READ + number) % len(dataset)])
            except Exception:  # reported when the row is trained on
                continue
            rows.append((cost.tokens + cost.patches, cost.units, features))
    rows.sort(key=lambda row: (row[0] < FEW_TOKENS, row[0]))
    chosen = list(itertools.islice(itertools.cycle([row for row in rows if row[0] > 1]), ROWS))
    return Rows([features for *_, features in chosen], [units for _, units, _ in chosen])


class Row(NamedTuple):
    """A sample of the measurement: its micro-batch, its tokens with a loss, whether its first token has a label."""

    micro_batch: int
    units: int
    has_first: bool


# ----------------------------------------------------------------------------------------------------------------------
# The rules, and what a sample weighs by each of them.


def candidates(world_size: int) -> Iterator[StockMean]:
    """The rules that exist, the usual ones first.

    Some trainers multiply by the number of ranks, over which the engine takes the mean, and some do not, so each rule
    comes with factors.
    """
    for factor in dict.fromkeys((1.0, float(world_size), 1 / world_size)):
        kinds: tuple[Counts, ...] = ("tokens", "labels", "samples", "all labels")
        for counts in kinds[:2]:
            yield StockMean("step", counts=counts, factor=factor)
            if world_size > 1:
                yield StockMean("rank", counts=counts, factor=factor)
        for counts, divisor in itertools.product(kinds, (None, world_size)):
            yield StockMean("micro_batch", divisor, counts, factor)


def weights_by(mean: StockMean, table: Sequence[Sequence[Row]]) -> list[list[float]]:
    """What the mean loss of each sample weighs on its own rank. table: the samples of each rank."""
    keys = [[("step",), (rank,), (rank, row.micro_batch)] for rank, rows in enumerate(table) for row in rows]
    place = {"step": 0, "rank": 1, "micro_batch": 2}[mean.over]
    every = [row for rows in table for row in rows]
    own = [
        1 if mean.counts == "samples" else row.units + (mean.counts == "all labels" and row.has_first) for row in every
    ]
    amounts = [n + (mean.counts == "labels" and row.has_first) for n, row in zip(own, every)]
    totals: dict[Any, int] = {}
    for key, amount in zip(keys, amounts):
        totals[key[place]] = totals.get(key[place], 0) + amount
    divisor = mean.divisor or len(totals)
    shares = iter(n / max(totals[key[place]], 1) / divisor * mean.factor * len(table) for key, n in zip(keys, own))
    return [[next(shares) for _ in rows] for rows in table]


# ----------------------------------------------------------------------------------------------------------------------
# The measurement.


def measure(trainer: Any, rows: Rows, collate: Callable[[list[Any]], Any], gather: Callable) -> StockLoss:
    """The rule by which `trainer` weighs the samples of an optimizer step.

    rows: of this rank; none: rows are made up. collate: the trainer's collator. gather: (JSON) -> the JSON of all
    ranks. Collective.
    Leaves the trainer, its model and all random numbers as they are. Raises `ConfigError` on all ranks if no rule fits,
    `UnknownWeights` if other weights would be right.
    """
    model: Any = model_with_labels(trainer.model)
    own = {"logits": model is not None and model.get_output_embeddings() is not None, "rows": bool(rows.features)}
    ranks = gather(own)
    has_logits, has_rows = (all(rank[key] for rank in ranks) for key in own)
    changes: Sequence[Sequence[int]] = (NONE_IN_THE_LAST, SUPERVISED, ())
    attempts = [*itertools.product([True] * has_rows, changes), *itertools.product([False], changes[:2])]
    why, kind = "", ConfigError
    for is_real, supervised in attempts if has_logits else ():
        measurement = _Measurement(trainer, model)
        try:
            if is_real:
                batches = measurement.collated(rows.features, collate, supervised)
            else:
                batches = measurement.made_up(supervised)
            problem = ""
        except Exception as error:
            batches, problem = [], f"its rows cannot be collated: {one_line(error)}"
        if any(problems := gather(problem)):
            why = next(filter(None, problems))
            continue
        answers = gather(measurement.run(batches))
        why = next((answer["problem"] for answer in answers if answer["problem"]), "")
        if why in (FROM_PADDING, READS_PADDING) and supervised:
            continue  # the labels that were changed may be what is predicted from padding
        if why.startswith((NOT_FINITE, RAISES)) and supervised is NONE_IN_THE_LAST:
            continue  # stock cannot train on a row without a supervised token
        if why:
            break
        stock, why = _rule_of(answers, trainer.args.world_size)
        if stock is not None:
            logger.debug("stock takes %s (measured)", stock.mean)
            return replace(stock, number=measurement.number)
        kind = UnknownWeights
        if not why.startswith("these rows"):
            break
    if not has_logits or "cannot be collated" in why:  # another model than a causal one
        stock, why = _by_values(trainer, rows, collate, gather)
        if stock is not None:
            return stock
    if why.startswith(NO_LOGITS) or why == OTHER_VALUES:
        kind = UnknownWeights
    raise kind(
        f"how {type(trainer).__name__} weighs the samples of an optimizer step fits no rule that odb has ({why}), so "
        "odb would train another loss; train without odb."
    )


def _by_values(trainer: Any, rows: Rows, collate: Callable, gather: Callable) -> tuple[StockLoss | None, str]:
    """As `measure`, from the values of losses alone: of stock's micro-batches, and of each sample. Collective."""
    measurement = _Measurement(trainer, None)
    answer: dict[str, Any] = {"problem": "", "rows": [], "alone": [], "stock": [], "together": 0.0}
    is_tried = bool(rows.features) and measurement.is_computed
    if not all(gather(is_tried)):
        stock = assumed(trainer)
        logger.warning("loss: taken for %s; this cannot be measured here (a stream, or a sharded model)", stock.mean)
        return stock, ""
    with kept_random_numbers(trainer.args.device):
        try:
            answer |= measurement.values(rows, collate)
        except Exception as error:
            answer["problem"] = one_line(error)
    answers = gather(answer)
    if problem := next((answer["problem"] for answer in answers if answer["problem"]), ""):
        return None, problem
    is_near = functools.partial(_is_near, tolerance=VALUE_TOLERANCE)
    for answer in answers:
        pair = [(Row(*row).units, loss) for row, loss in zip(answer["rows"], answer["alone"])][:ROWS_OF_MICRO_BATCH]
        if not is_near(answer["together"], sum(units * loss for units, loss in pair) / sum(units for units, _ in pair)):
            return None, "the loss of a micro-batch is not the mean of the losses of its samples"
    for mean in candidates(trainer.args.world_size):
        if all(map(is_near, *_losses_by(mean, answers))):
            return StockLoss(mean), ""
    return None, OTHER_VALUES


def _losses_by(mean: StockMean, answers: Sequence[Any]) -> tuple[list[float], list[float]]:
    """The losses of the micro-batches of all ranks, and what they are made of those of the samples by this rule.

    answers: of each rank `rows`, the loss of each row `alone`, and `stock`'s of each micro-batch.
    """
    table, expected = [[Row(*row) for row in answer["rows"]] for answer in answers], []
    for answer, rows, weights in zip(answers, table, weights_by(mean, table)):
        sums = [0.0] * len(answer["stock"])
        for row, weight, loss in zip(rows, weights, answer["alone"]):
            sums[row.micro_batch] += weight * loss
        expected += sums
    return [loss for answer in answers for loss in answer["stock"]], expected


def _rule_of(answers: Sequence[Any], world_size: int) -> tuple[StockLoss | None, str]:
    """The rule that the answers of all ranks fit, or why there is none."""
    every = [[Row(*row) for row in answer["rows"]] for answer in answers]
    supervised = [[row for row in rows if row.units] for rows in every]
    measured = [weight for answer in answers for weight in answer["weights"] if weight is not None]

    def difference(mean: StockMean, table: Sequence[Sequence[Row]]) -> float:
        pairs = zip(itertools.chain(*table), itertools.chain(*weights_by(mean, table)))
        weights = [weight for row, weight in pairs if row.units]
        return max(abs(a - b) / b for a, b in zip(measured, weights))

    off = {mean: difference(mean, supervised) for mean in candidates(world_size)}
    off_with_all = {mean: difference(mean, every) for mean in off}
    rules = [mean for mean in off if min(off[mean], off_with_all[mean]) < TOLERANCE]
    if not any(row.has_first for rows in every for row in rows):  # then no row shows whether first labels count
        rules = [mean for mean in rules if "labels" not in mean.counts]
    if not rules:
        nearest = min(off, key=off.__getitem__)
        return None, f"the nearest is {nearest}, {off[nearest]:.1%} off"
    if len(rules) > 1:
        return None, f"these rows cannot tell {' from '.join(map(str, rules))}"
    is_trainers = any(answer["is_trainers"] for answer in answers)
    adds_up = all(answer["adds_up"] for answer in answers)
    return StockLoss(rules[0], is_trainers, adds_up, counts_unsupervised=off[rules[0]] >= TOLERANCE), ""


class _Measurement:
    """One run of stock on a few rows. model: the transformers model that takes labels, inside `trainer.model`."""

    def __init__(self, trainer: Any, model: Any):
        self._trainer, self._model, self._probe = trainer, model, _probe_of(trainer)
        device = trainer.args.device
        self.number: Any = None
        # An engine that will shard the model has not wrapped it yet.
        self.is_computed = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled) and all(
            weight.device.type == device.type and not _is_sharded(weight) for weight in trainer.model.parameters()
        )

    # 1. The micro-batches

    def collated(self, rows: list[Any], collate: Callable[[list[Any]], Any], supervised: Sequence[int]) -> list[Any]:
        """Micro-batches of two rows. supervised: tokens with a loss that each row gets, and every other row a first
        label, so that rows differ; (): labels are as collated."""
        batches = []
        for start in range(0, ROWS, ROWS_OF_MICRO_BATCH):
            own = copy.deepcopy(rows[start : start + ROWS_OF_MICRO_BATCH])
            batch = dict(collate(own))
            keys = batch.keys()
            batch, spans = _shortened(batch, _spans(batch, own))
            self.is_computed &= batch.keys() == keys
            if supervised and "shift_labels" not in batch:
                batch["labels"] = _revealing(batch, spans, self._of_rank(supervised, start))
            batches.append((batch, spans))
        return batches

    def made_up(self, supervised: Sequence[int]) -> list[Any]:
        """Micro-batches of random tokens, for data that cannot be read before training begins."""
        most = self._model.config.get_text_config().vocab_size - 1
        generator = torch.Generator().manual_seed(0)
        batches = []
        for start in range(0, ROWS, ROWS_OF_MICRO_BATCH):
            lengths = [12 + 3 * (start + row) for row in range(ROWS_OF_MICRO_BATCH)]
            spans = [(0, length) for length in lengths]
            mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
            ids = torch.randint(min(3, most), most + 1, mask.shape, generator=generator) * mask
            batch = {"input_ids": ids, "attention_mask": mask}
            batch["labels"] = _revealing(batch, spans, self._of_rank(supervised, start))
            batches.append((batch, spans))
        return batches

    def _of_rank(self, supervised: Sequence[int], start: int) -> list[int]:
        """Tokens with a loss of the rows of a micro-batch. Ranks have other numbers of them, too."""
        extra = self._trainer.args.process_index % 5
        return [supervised[start] + extra, *supervised[start + 1 : start + ROWS_OF_MICRO_BATCH]]

    # 2. Stock, and each sample alone

    def run(self, batches: Sequence[Any]) -> dict[str, Any]:
        """What this rank has measured: the weight of each sample (JSON types)."""
        answer: dict[str, Any] = {"problem": "", "rows": [], "weights": []}
        without = [parameter for parameter in self._trainer.model.parameters() if parameter.grad is None]
        with kept_random_numbers(self._trainer.args.device), torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                watched = self._stock(batches)
                answer |= self._compare(batches, watched)
            except _Unmeasured as error:
                answer["problem"] = str(error)
            except Exception as error:  # any code may stand there
                answer["problem"] = RAISES + one_line(error)
        for parameter in without:  # of a loss term that is made of weights
            parameter.grad = None
        return answer

    def evaluate(self, batch: Any, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The samples of a batch, their mean losses, and what `prediction_step` makes of them (JSON types)."""
        model, probe, targets = self._model, self._probe, _targets(batch)
        logits: list[Any] = []
        hook = model.register_forward_hook(lambda _, __, output: logits.append(output["logits"].float()))
        was_training, inputs = probe.model.training, {key: copy.copy(value) for key, value in batch.items()}
        try:
            with without_layers(model, _random_logits(model, targets, probe.args.device)):
                loss, *_ = probe.prediction_step(model.eval(), inputs, True)
        finally:
            hook.remove()
            probe.model.train(was_training)
        if loss is None:
            return {"has_loss": False}
        rows, means = [], []
        for row, (start, end) in enumerate(spans):
            labels = targets[row, start : end - 1].to(logits[0].device)
            rows.append(Row(0, int((labels != IGNORE_INDEX).sum()), bool(batch["labels"][row, start] != IGNORE_INDEX)))
            means.append(float(cross_entropy(logits[0][row, start : end - 1], labels, ignore_index=IGNORE_INDEX)))
        return {"rows": rows, "alone": means, "stock": [float(loss)]}

    def values(self, rows: Rows, collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """The losses of stock's micro-batches, of each sample alone, and of the first micro-batch as odb computes it
        (JSON types). The real model computes, without dropout."""
        probe, losses = self._probe, []
        probe.accelerator.backward = lambda loss, **_: losses.append(float(loss))
        starts = range(0, ROWS, ROWS_OF_MICRO_BATCH)

        def batch(start: int, count: int) -> Any:
            return collate(copy.deepcopy(rows.features[start : start + count]))

        def loss(inputs: Any, units: int) -> float:
            number = number_like(self.number, units, probe.args.device)
            # Not times the number of ranks, which is a part of the weight.
            alone = replaced(probe.args, average_tokens_across_devices=False)
            with torch.no_grad(), probe.compute_loss_context_manager(), alone:
                return float(probe.compute_loss(probe.model, probe._prepare_inputs(inputs), num_items_in_batch=number))

        was_training = probe.model.training
        vars(probe.model.eval())["train"] = lambda mode=True: probe.model  # `training_step` calls it
        try:
            probe.current_gradient_accumulation_steps = len(starts)
            batches = iter([batch(start, ROWS_OF_MICRO_BATCH) for start in starts])
            samples, self.number = probe.get_batch_samples(batches, len(starts), probe.args.device)
            with torch.no_grad():
                for inputs in samples:
                    probe.training_step(probe.model, inputs, self.number)
            alone = [loss(batch(number, 1), units) for number, units in enumerate(rows.units)]
            together = loss(batch(0, ROWS_OF_MICRO_BATCH), sum(rows.units[:ROWS_OF_MICRO_BATCH]))
        finally:
            del vars(probe.model)["train"]
            probe.model.train(was_training)
        own = [Row(number // ROWS_OF_MICRO_BATCH, units, False) for number, units in enumerate(rows.units)]
        return {"rows": own, "alone": alone, "stock": losses, "together": together}

    def _stock(self, batches: Sequence[Any]) -> list[_Watched]:
        probe, backward = self._probe, self._probe.accelerator.backward
        watched = [_Watched(_targets(batch), backward) for batch, _ in batches]
        probe.current_gradient_accumulation_steps = len(batches)
        copies = [{key: copy.copy(value) for key, value in batch.items()} for batch, _ in batches]
        samples, self.number = probe.get_batch_samples(iter(copies), len(copies), probe.args.device)
        for micro_batch, inputs in zip(watched, samples):
            step = functools.partial(self._step, micro_batch)
            try:
                step(dict(inputs))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.is_computed = False  # without its layers the model needs little memory
                step(dict(inputs))
            if micro_batch.leaf is None:
                raise _Unmeasured(f"{NO_LOGITS}{type(self._model).__name__} does not call its output embedding")
        return watched

    def _step(self, watched: _Watched, inputs: Any) -> None:
        probe = self._probe
        logits = None if self.is_computed else _random_logits(self._model, watched.targets, probe.args.device)
        with watched.watching(self._model, logits), replaced(probe.accelerator, backward=watched.backward):
            probe.training_step(probe.model, inputs, self.number)

    def _compare(self, batches: Sequence[Any], watched: Sequence[_Watched]) -> dict[str, Any]:
        is_trainers = any(micro_batch.is_trainers for micro_batch in watched)
        rows, alone = [], []
        weights: list[float | None] = []  # None: the sample has no supervised token
        for number, ((batch, spans), micro_batch) in enumerate(zip(batches, watched)):
            stock, value = micro_batch.gradient, 0.0
            assert micro_batch.leaf is not None
            if not (scale := stock.norm()).isfinite():
                raise _Unmeasured(NOT_FINITE)
            for row, (start, end) in enumerate(spans):
                targets = micro_batch.targets[row, start : end - 1]
                units = int((targets != IGNORE_INDEX).sum())
                outside = stock[row].clone()
                outside[start:end] = 0
                if outside.norm() > TOLERANCE * scale:
                    raise _Unmeasured(FROM_PADDING if start else READS_PADDING)
                stock_gradient = stock[row, start:end]
                rows.append(Row(number, units, bool(batch["labels"][row, start] != IGNORE_INDEX)))
                if not units:
                    if float(stock_gradient.norm()):
                        raise _Unmeasured("a sample without a supervised token has a gradient")
                    weights.append(None)
                    continue
                inputs, logits = cut(batch, row, start, end), micro_batch.logits[row : row + 1, start:end]
                if is_trainers:
                    loss = self._loss(logits, inputs, units)
                else:
                    loss = cross_entropy(logits[0, :-1], targets, ignore_index=IGNORE_INDEX)
                gradient = torch.autograd.grad(loss, micro_batch.leaf, retain_graph=True)[0][row, start:end]
                if not float(gradient.norm()) or not float(stock_gradient.norm()):
                    raise _Unmeasured("a sample has no gradient")
                weight = float((gradient * stock_gradient).sum() / gradient.square().sum())
                if float((stock_gradient - weight * gradient).norm()) > TOLERANCE * float(stock_gradient.norm()):
                    raise _Unmeasured("the loss of a sample depends on the other samples of its micro-batch")
                weights.append(weight)
                value += weight * float(loss.detach())
                alone.append((logits.detach(), inputs, units, float(loss.detach())))
            is_known = _is_near(micro_batch.value, value, TOLERANCE) or math.isnan(micro_batch.value)  # of 0 tokens
            if not (is_known or has_routers(self._model)):
                raise _Unmeasured("its loss has a term that is not made of the logits of its samples")
        adds_up = not is_trainers or self._adds_up(batches[0][0], watched[0], alone[:ROWS_OF_MICRO_BATCH])
        return {"rows": rows, "weights": weights, "is_trainers": is_trainers, "adds_up": adds_up}

    def _adds_up(self, batch: Any, watched: _Watched, alone: Sequence[Any]) -> bool:
        """Whether a flat row, and a padded micro-batch, have the mean over tokens of the losses of their samples.

        alone: of each its logits, inputs, units and loss.
        """
        total = sum(units for *_, units, _ in alone)
        mean = sum(units * loss for *_, units, loss in alone) / max(total, 1)
        flat = {key: torch.cat([inputs[key] for _, inputs, *_ in alone], 1) for key in ("input_ids", "labels")}
        for start in itertools.accumulate(inputs["labels"].shape[1] for _, inputs, *_ in alone[:-1]):
            flat["labels"][:, start] = IGNORE_INDEX
        parts = [(torch.cat([logits for logits, *_ in alone], 1), flat), (watched.logits.detach(), batch)]
        try:
            return all(_is_near(float(self._loss(logits, inputs, total)), mean, TOLERANCE) for logits, inputs in parts)
        except Exception:
            return False

    def _loss(self, logits: Tensor, inputs: Mapping[str, Any], units: int) -> Tensor:
        probe = self._probe
        inputs = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with probe.compute_loss_context_manager():
            number = number_like(self.number, units, logits.device)
            loss: Tensor = probe.compute_loss(
                SampleModel(probe.model, logits), probe._prepare_inputs(inputs), num_items_in_batch=number
            )
        return loss


class _Unmeasured(Exception):
    """Why stock's weights cannot be measured."""


class _Watched:
    """One micro-batch of stock, and the gradient of its logits.

    targets: labels of the next token [rows, length]. leaf: behind the output embedding. logits: what the model makes of
    it. value: of the loss that stock hands to backward.
    """

    leaf: Tensor | None = None
    logits: Tensor
    value = 0.0

    def __init__(self, targets: Tensor, backward: Callable[..., None]):
        self.targets, self._backward = targets, backward

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """In the place of accelerate's, which it calls."""
        self.value = float(loss.detach())
        self._backward(loss, **kwargs, retain_graph=True)

    @property
    def is_trainers(self) -> bool:
        return self._returned.grad is not None and bool(self._returned.grad.any())

    @property
    def gradient(self) -> Tensor:
        """Stock's, [rows, length, V]."""
        if self.leaf is None or self.leaf.grad is None:
            raise _Unmeasured("a micro-batch has no gradient")
        return self.leaf.grad

    @contextlib.contextmanager
    def watching(self, model: Any, logits: Tensor | None) -> Iterator[None]:
        """While stock computes this micro-batch. logits: in place of what the layers compute; None: they compute."""
        with contextlib.nullcontext() if logits is None else without_layers(model, logits):
            hook = model.get_output_embeddings().register_forward_hook(self._at_head)
            try:
                with forward_replaced(model, self._forward):  # PEFT calls no hook of the model
                    yield
            finally:
                hook.remove()

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_trained = torch.is_grad_enabled()  # else a reference of the trainer
        if "skip_logits" in signature(own).parameters:  # Liger's kernel makes no logits
            kwargs["skip_logits"] = False
        torch.set_grad_enabled(False)  # the layers need no graph
        try:
            output = own(*args, **kwargs)
        finally:
            torch.set_grad_enabled(self._is_trained)
        return self._at_end(output) if self._is_trained and self.leaf is not None else output

    def _at_head(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        if not self._is_trained:
            return None
        logits = output.detach().to(torch.promote_types(output.dtype, torch.float32))
        if logits.shape[:2] != self.targets.shape:
            raise _Unmeasured(f"its logits are {list(logits.shape[:2])} and its labels {list(self.targets.shape)}")
        # Token losses from small to large, so that a loss that bends or clamps them shows its gradient.
        self.targets = self.targets.to(logits.device)
        places = torch.arange(self.targets.numel(), device=logits.device).view(self.targets.shape)
        bonus = (places * 7 % 11).to(logits.dtype)
        logits.scatter_add_(2, self.targets.clamp_min(0)[..., None], bonus[..., None])
        torch.set_grad_enabled(True)
        self.leaf = logits.requires_grad_()
        return self.leaf

    def _at_end(self, output: Any) -> Any:
        assert self.leaf is not None
        leaf, is_tuple = self.leaf, isinstance(output, tuple)
        items: Any = enumerate(output) if is_tuple else [("logits", output.get("logits"))]
        shape = leaf.shape
        key, logits = next((item for item in items if getattr(item[1], "shape", None) == shape), (None, None))
        if logits is None:
            raise _Unmeasured(f"{NO_LOGITS}the model returns none")
        self.logits, self._returned = logits.to(leaf.dtype), logits.clone()
        self._returned.retain_grad()
        if is_tuple:
            return tuple(self._returned if number == key else value for number, value in enumerate(output))
        output[key] = self._returned
        return output


def _probe_of(trainer: Any) -> Any:
    """A shallow copy of the trainer without odb, whose backward goes through accelerate and ends at the logits."""
    probe = copy.copy(trainer)
    probe.odb = None
    for name, value in vars(trainer).items():
        if isinstance(value, dict | list) and not name.endswith("dataset"):  # figures that a trainer collects
            with contextlib.suppress(Exception):
                setattr(probe, name, copy.deepcopy(value))
    probe.state, accelerator = copy.copy(trainer.state), copy.copy(trainer.accelerator)
    probe.accelerator, accelerator.scaler = accelerator, None

    def backward(loss: Tensor, **kwargs: Any) -> None:
        if kwargs.get("scale_wrt_gas", True):
            raise _Unmeasured("DeepSpeed's engine would divide the loss by the accumulation once more")
        loss.backward(retain_graph=True)

    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_engine_wrapped = SimpleNamespace(backward=backward)
    return probe


def _is_near(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * max(abs(value), abs(expected))


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") or type(parameter.data).__name__ == "DTensor"


def _random_logits(model: Any, targets: Tensor, device: torch.device) -> Tensor:
    size = (*targets.shape, model.config.get_text_config().vocab_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """The label of the next token, [rows, length]."""
    if isinstance(batch.get("shift_labels"), Tensor):
        return batch["shift_labels"]
    return pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]


def _spans(batch: Mapping[str, Any], rows: Sequence[Any]) -> list[tuple[int, int]]:
    """The places of each row's sample: from its first to its last token that is attended to or has a label."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        mask = torch.ones_like(ids)
        for number, row in enumerate(rows):
            length = len(row["input_ids"]) if isinstance(row, Mapping) and "input_ids" in row else ids.shape[1]
            mask[number, length:] = 0
    is_own = (mask != 0) | (batch["labels"] != IGNORE_INDEX)
    ends = [row.nonzero()[:, 0].tolist() for row in is_own]
    return [(places[0], places[-1] + 1) for places in ends]


def _shortened(batch: dict[str, Any], spans: list[tuple[int, int]]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """`MOST_TOKENS` columns of each row: the first token of its sample and the last ones, and some of its padding.

    Media, which the tokens that are left do not fit, are left out, and what else is neither of a token nor of a row.
    """
    shape = batch["input_ids"].shape
    if shape[1] <= MOST_TOKENS:
        return batch, spans
    chosen, new_spans = [], []
    for start, end in spans:
        padding = [*range(start), *range(end, shape[1])]
        padding = padding[: max(MOST_PADDING, MOST_TOKENS - (end - start))]
        last = range(end + 1 + len(padding) - MOST_TOKENS, end)
        chosen.append(sorted([*padding, start, *last]))
        first = chosen[-1].index(start)
        new_spans.append((first, first + 1 + len(last)))
    rows, columns = torch.arange(shape[0])[:, None], torch.tensor(chosen)

    short = {}
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            short[key] = value
        elif value.shape[:2] == shape:
            short[key] = value[rows, columns]
    return short, new_spans


def _revealing(batch: Mapping[str, Any], spans: Sequence[tuple[int, int]], supervised: Sequence[int]) -> Tensor:
    """Labels by which rules differ. supervised: tokens of each row with a loss; every other row has a first label."""
    ids = batch["input_ids"]
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, ((start, end), most) in enumerate(zip(spans, supervised)):
        count = min(most, end - start - 1)
        labels[row, end - count : end] = ids[row, end - count : end]
        if row % 2 == 0:
            labels[row, start] = ids[row, start]
    return labels


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation: `prediction_step` on one micro-batch of each rank.


def measure_evaluation(
    trainer: Any, rows: Rows, collate: Callable[[list[Any]], Any], gather: Callable
) -> StockMean | None:
    """What stock's loss of a batch of an evaluation is the mean of: the batches of all ranks at the same time ("round")
    or its own ("micro_batch"). None: something else. Collective.

    rows, collate, gather: of `measure`.
    """
    model: Any = model_with_labels(trainer.model)
    answer: dict[str, Any] = {"rows": [], "alone": [], "stock": [], "has_loss": True}
    if model is not None and model.get_output_embeddings() is not None:
        measurement = _Measurement(trainer, model)
        with kept_random_numbers(trainer.args.device), contextlib.suppress(Exception):
            try:
                (batch, spans), *_ = measurement.collated(rows.features, collate, SUPERVISED)
            except Exception:  # reported when the rows are evaluated
                (batch, spans), *_ = measurement.made_up(SUPERVISED)
            answer |= measurement.evaluate(batch, spans)
    answers = gather(answer)
    if not any(answer["has_loss"] for answer in answers):  # tokens are generated
        return StockMean("micro_batch", len(answers))
    if not all(answer["stock"] for answer in answers):
        return None
    ranks, is_near = len(answers), functools.partial(_is_near, tolerance=TOLERANCE)
    for over, counts, factor in itertools.product(
        ("round", "micro_batch"), ("tokens", "labels"), dict.fromkeys((1.0, float(ranks), 1 / ranks))
    ):
        mean = StockMean("step" if over == "round" else over, counts=counts, factor=factor)
        if all(map(is_near, *_losses_by(mean, answers))):
            return StockMean(over, (1 if over == "round" else ranks) / factor, counts)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The loss of one sample, by code of the trainer: in the measurement, and in training if it does not add up.


class SampleModel(StandIn):
    """In the place of the model in a `compute_loss`: its output has the logits of one sample, [1, length, V]."""

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
    """A number of items of the kind that stock's `get_batch_samples` returns: a tensor, an int or None."""
    if isinstance(stock, Tensor):
        return torch.full((), number, dtype=stock.dtype, device=device)
    return None if stock is None else type(stock)(number)


def cut(inputs: Mapping[str, Any], row: int, start: int, end: int) -> dict[str, Any]:
    """The inputs of one sample: places `start` to `end` of a row of what is [rows, length, ...], its row of what is
    [rows, ...], all of everything else."""
    rows, length = inputs["labels"].shape

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:2] == (rows, length):
            return value[row : row + 1, start:end]
        return value[row : row + 1] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value

    return {key: part(value) for key, value in inputs.items()}
