"""How stock weighs the samples of an optimizer step: measured before training, with the trainer that will train.

1. The trainer's own `get_batch_samples` and `training_step` run on a few rows. The layers of the model do not compute,
   and its output embedding returns logits that are leaves: the gradient of what reaches `accelerator.backward` ends at
   the logits. A gradient of what the model returns shows that the trainer's code computes the loss.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast

from odb_factory.data.observe import IGNORE_INDEX
from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, StockMean
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.model.check import unwrapped
from odb_factory.model.flat_row import forward_replaced
from odb_factory.model.head import StandIn, has_routers, model_with_labels, without_layers
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.training.arguments import replaced

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


@dataclass(frozen=True, slots=True)
class StockLoss:
    """How stock makes the loss of an optimizer step.

    mean: the rule of the weights. is_trainers: code of the trainer computes it from logits (`compute_loss_func`, a
    `compute_loss` of its own, the label smoother), and is called once a sample; else the model's own forward.
    counts_unsupervised: a mean over samples counts those without a supervised token, which otherwise are left out.
    number: an example of what stock's `get_batch_samples` returns as the number of items.
    """

    mean: StockMean = MEAN_OF_STEP
    is_trainers: bool = False
    counts_unsupervised: bool = False
    number: Any = field(default=None, compare=False)


def assumed(trainer: Any) -> StockLoss:
    """The rule of a loss that cannot be measured here, such as that of pairs."""
    return StockLoss(MEAN_OF_STEP if trainer.model_accepts_loss_kwargs else MEAN_OF_MICRO_BATCH)


class UnknownWeights(ConfigError):
    """What stock weighs the samples fits no rule, or cannot be seen; nothing shows that their losses are not their own.

    So other weights can be given to them (`loss_scaling`)."""


Rows = Sequence[tuple[Any, int]]
"""A few short processed rows of this rank, to measure with: features, and units."""


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
    chosen = itertools.cycle([(features, units) for size, units, features in rows if size > 1])
    return list(itertools.islice(chosen, ROWS))


# The rules, and what a sample weighs by each of them.


def candidates(world_size: int) -> list[StockMean]:
    """The rules that exist, the usual ones first.

    Some trainers multiply by the number of ranks, over which the engine takes the mean, and some do not, so each rule
    comes with factors.
    """
    of_tokens, of_samples = ("tokens", "labels"), ("samples", "all labels")
    kinds: list[tuple[Any, float | None, tuple[Any, ...]]] = [
        ("step", None, of_tokens),
        *[("rank", None, of_tokens)] * (world_size > 1),
        ("micro_batch", None, of_tokens + of_samples),
        ("micro_batch", world_size, of_tokens + of_samples),
    ]
    return [
        StockMean(over, divisor, counts, factor)
        for factor in dict.fromkeys((1.0, float(world_size), 1 / world_size))
        for over, divisor, all_counts in kinds
        for counts in all_counts
    ]


Table = Sequence[Sequence[tuple[int, int, bool]]]
"""Of each rank the samples of the measurement: micro-batch, tokens with a loss, whether the first token has a label."""


def weights_by(mean: StockMean, table: Table) -> list[list[float]]:
    """What the mean loss of each sample weighs on its own rank."""
    totals: dict[Any, int] = {}
    samples: list[list[tuple[Any, int]]] = []  # of each rank: the mean that a sample is in, and what it counts there
    for rank, rows in enumerate(table):
        samples.append([])
        for micro_batch, units, has_first in rows:
            key = {"step": (), "rank": (rank,), "micro_batch": (rank, micro_batch)}[mean.over]
            amount = 1 if mean.counts == "samples" else units + (mean.counts == "all labels" and has_first)
            totals[key] = totals.get(key, 0) + amount + (mean.counts == "labels" and has_first)
            samples[-1].append((key, amount))
    times = mean.factor * len(table) / (mean.divisor or len(totals))
    return [[times * amount / max(totals[key], 1) for key, amount in rows] for rows in samples]


def _losses_by(mean: StockMean, answers: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """The loss of each micro-batch of all ranks, and what this rule makes of the losses of its samples.

    answers: of each rank `rows` (`Table`), the loss of each row `alone`, and `stock`'s of each micro-batch.
    """
    for answer, weights in zip(answers, weights_by(mean, [answer["rows"] for answer in answers])):
        sums = [0.0] * len(answer["stock"])
        for (micro_batch, *_), weight, loss in zip(answer["rows"], weights, answer["alone"]):
            sums[micro_batch] += weight * loss
        yield from zip(answer["stock"], sums)


def _is_near(value: float, expected: float, tolerance: float = TOLERANCE) -> bool:
    return abs(value - expected) <= tolerance * max(abs(value), abs(expected))


class Unmeasured(Exception):
    """Why something cannot be measured before training.

    help: what may help: other "labels" of the rows, because stock cannot train on a row without a supervised token;
    other "rows"; other "weights" for the samples, as nothing shows that their losses are not their own.
    """

    def __init__(self, why: str, help: str = ""):
        super().__init__(why)
        self.help = help


def together(gather: Callable, failure: Unmeasured, compute: Callable[[], Any]) -> Any:
    """What `compute` returns here, unless it fails on a rank: then all raise. Collective.

    failure: of an error that code of a trainer or a collator raises, whose message follows.
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


def measure(trainer: Any, rows: Rows, collate: Callable[[list[Any]], Any], gather: Callable) -> StockLoss:
    """The rule by which `trainer` weighs the samples of an optimizer step.

    rows: of this rank; none: rows are made up. collate: the trainer's collator. gather: (JSON) -> the JSON of all
    ranks. Collective.
    Leaves the trainer, its model and all random numbers as they are. Raises `ConfigError` on all ranks if no rule fits,
    `UnknownWeights` if other weights would be right.
    """
    model: Any = model_with_labels(trainer.model)
    own = [model is not None and model.get_output_embeddings() is not None, bool(rows)]
    has_logits, has_rows = map(all, zip(*gather(own)))
    try:
        if not has_logits:
            return _by_values(_Measurement(trainer, model), rows, collate, gather)
        return _by_gradients(trainer, model, [rows] * has_rows + [()], collate, gather)
    except Unmeasured as why:
        kind = UnknownWeights if why.help in ("rows", "weights") else ConfigError
        raise kind(
            f"how {type(trainer).__name__} weighs the samples of an optimizer step fits no rule that odb has ({why}), "
            "so odb would train another loss; train without odb."
        ) from None


def _by_gradients(trainer: Any, model: Any, to_read: list[Rows], collate: Callable, gather: Callable) -> StockLoss:
    """The rule that the gradients of logits fit. to_read: rows to try, one after the other. Collective."""
    why = Unmeasured("")
    for rows, supervised in itertools.product(to_read, (NONE_IN_THE_LAST, SUPERVISED)):
        measurement = _Measurement(trainer, model)
        try:
            make = functools.partial(measurement.micro_batches, rows, collate, supervised)
            micro_batches = together(gather, Unmeasured("its rows cannot be collated: ", "rows"), make)
            weigh = functools.partial(measurement.weigh, micro_batches)
            stock = _rule_of(gather(together(gather, Unmeasured("its step raises ", "labels"), weigh)))
            logger.debug("stock takes %s (measured)", stock.mean)
            return replace(stock, number=measurement.number)
        except Unmeasured as error:
            why = error
        if why.help != "rows" and not (why.help == "labels" and supervised is NONE_IN_THE_LAST):
            break
    raise why


def _rule_of(answers: Sequence[Any]) -> StockLoss:
    """The rule that the answers of all ranks fit."""
    every: Table = [answer["rows"] for answer in answers]
    supervised: Table = [[row for row in rows if row[1]] for rows in every]
    measured = [weight for answer in answers for weight in answer["weights"]]

    def difference(mean: StockMean, table: Table) -> float:
        pairs = zip(itertools.chain(*table), itertools.chain(*weights_by(mean, table)))
        weights = [weight for (_, units, _), weight in pairs if units]
        return max(abs(a - b) / b for a, b in zip(measured, weights))

    off = {mean: difference(mean, supervised) for mean in candidates(len(answers))}
    off_with_all = {mean: difference(mean, every) for mean in off}
    rules = [mean for mean in off if min(off[mean], off_with_all[mean]) < TOLERANCE]
    if not any(has_first for rows in every for *_, has_first in rows):  # then no row shows whether first labels count
        rules = [mean for mean in rules if "labels" not in mean.counts]
    if not rules:
        nearest = min(off, key=off.__getitem__)
        raise Unmeasured(f"the nearest is {nearest}, {off[nearest]:.1%} off", "weights")
    if len(rules) > 1:
        raise Unmeasured(f"these rows cannot tell {' from '.join(map(str, rules))}", "rows")
    is_trainers = any(answer["is_trainers"] for answer in answers)
    return StockLoss(rules[0], is_trainers, counts_unsupervised=off[rules[0]] >= TOLERANCE)


def _by_values(measurement: _Measurement, rows: Rows, collate: Callable, gather: Callable) -> StockLoss:
    """The rule of a model whose logits are unknown, from the values of losses: of stock's micro-batches, and of each
    sample. Collective."""
    trainer = measurement.trainer
    device, will_be_sharded = trainer.args.device.type, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    is_whole = not will_be_sharded and all(weight.device.type == device for weight in trainer.model.parameters())
    if not all(gather(bool(rows) and is_whole)):
        stock = assumed(trainer)
        logger.warning("loss: taken for %s; this cannot be measured here (a stream, or a sharded model)", stock.mean)
        return stock
    answers = gather(together(gather, Unmeasured(""), lambda: measurement.values(rows, collate)))
    is_near = functools.partial(_is_near, tolerance=VALUE_TOLERANCE)
    for mean in candidates(len(answers)):
        if mean.counts == "tokens" and all(itertools.starmap(is_near, _losses_by(mean, answers))):
            return StockLoss(mean)
    raise Unmeasured("the losses of its micro-batches are no weighted means of those of their samples")


class _Measurement:
    """One run of a trainer without odb on a few rows. model: the transformers model that takes labels, inside
    `trainer.model`. number: of items, as stock has counted them."""

    def __init__(self, trainer: Any, model: Any):
        self.trainer, self._model, self._probe = trainer, model, _probe_of(trainer)
        self._device = trainer.args.device
        self.number: Any = None

    # 1. The micro-batches

    def micro_batches(self, rows: Rows, collate: Callable[[list[Any]], Any], supervised: Sequence[int]) -> list[Any]:
        """Micro-batches of two rows. rows: none: of random tokens. supervised: tokens with a loss that each row gets;
        ranks have other numbers of them, too."""
        vocabulary = self._model.config.get_text_config().vocab_size
        features = [features for features, _ in rows]
        if not rows:
            generator, low = torch.Generator().manual_seed(0), min(3, vocabulary - 1)
            sizes = [(12 + 3 * row,) for row in range(ROWS)]
            features = [{"input_ids": torch.randint(low, vocabulary, size, generator=generator)} for size in sizes]
            collate = _padded
        supervised = [count and count + self.trainer.args.process_index % 5 for count in supervised]
        made = []
        for start in range(0, ROWS, ROWS_OF_MICRO_BATCH):
            own = copy.deepcopy(features[start : start + ROWS_OF_MICRO_BATCH])
            batch, spans = _short(dict(collate(own)), own)
            batch["labels"] = _revealing(batch, spans, supervised[start : start + ROWS_OF_MICRO_BATCH])
            if "shift_labels" in batch:
                batch["shift_labels"] = _targets(batch).contiguous()
            made.append(_MicroBatch(batch, spans, vocabulary, self._device))
        return made

    # 2. Stock, and each sample alone

    def _step(self, batches: Sequence[Any]) -> Iterator[Any]:
        """The batches of an optimizer step of stock, as it hands them to `training_step`."""
        probe = self._probe
        probe.current_gradient_accumulation_steps = len(batches)
        samples, self.number = probe.get_batch_samples(iter(copy.deepcopy(batches)), len(batches), self._device)
        yield from samples

    def _loss(self, model: Any, inputs: Mapping[str, Any], units: int) -> Tensor:
        """What code of the trainer makes of these inputs."""
        probe, number = self._probe, number_like(self.number, units, self._device)
        with probe.compute_loss_context_manager():
            inputs = probe._prepare_inputs(copy.deepcopy(inputs))
            loss: Tensor = probe.compute_loss(model, inputs, num_items_in_batch=number)
        return loss

    def weigh(self, micro_batches: Sequence[_MicroBatch]) -> dict[str, Any]:
        """What this rank has measured: the samples, and the weight of each that has a supervised token (JSON types)."""
        probe, own = self._probe, self._probe.accelerator.backward
        with kept_random_numbers(self._device):
            for micro_batch, inputs in zip(micro_batches, self._step([each.batch for each in micro_batches])):
                backward = functools.partial(micro_batch.backward, own)
                with micro_batch.known_to(self._model), replaced(probe.accelerator, backward=backward):
                    probe.training_step(probe.model, dict(inputs), self.number)
            weights = [weight for micro_batch in micro_batches for weight in self._weights_in(micro_batch)]
        rows = [row for number, micro_batch in enumerate(micro_batches) for row in micro_batch.samples(number)]
        is_trainers = any(micro_batch.is_trainers for micro_batch in micro_batches)
        return {"rows": rows, "weights": weights, "is_trainers": is_trainers}

    def _weights_in(self, micro_batch: _MicroBatch) -> Iterator[float]:
        """Of each sample that has a supervised token."""
        stock, total = micro_batch.gradient, 0.0
        if stock is None:
            raise Unmeasured("a micro-batch has no gradient")
        scale = stock.norm()
        if not (scale.isfinite() and math.isfinite(micro_batch.value)):
            raise Unmeasured("a micro-batch has a loss or a gradient that is not finite", "labels")
        for row, ((start, end), (_, units, _)) in enumerate(zip(micro_batch.spans, micro_batch.samples(0))):
            if torch.cat([stock[row, :start], stock[row, end:]]).norm() > TOLERANCE * scale:
                raise Unmeasured(FROM_PADDING if start else "its loss depends on the padding of a row")
            own = stock[row, start:end]
            if not units:
                if own.any():
                    raise Unmeasured("a sample without a supervised token has a gradient")
                continue
            if micro_batch.is_trainers:
                alone = SampleModel(self._probe.model, micro_batch.logits[row : row + 1, start:end])
                loss = self._loss(alone, cut(micro_batch.batch, row, start, end), units)
            else:
                loss = micro_batch.mean_loss(row)
            gradient = torch.autograd.grad(loss, micro_batch.leaf, retain_graph=True)[0][row, start:end]
            if not (gradient.any() and own.any()):
                raise Unmeasured("a sample has no gradient")
            weight = float((gradient * own).sum() / gradient.square().sum())
            if (own - weight * gradient).norm() > TOLERANCE * own.norm():
                raise Unmeasured("the loss of a sample depends on the other samples of its micro-batch")
            total += weight * float(loss.detach())
            yield weight
        if not _is_near(micro_batch.value, total):
            raise Unmeasured("its loss has a term that is not made of the logits of its samples")

    # 3. Values of losses alone

    def values(self, rows: Rows, collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """The losses of stock's micro-batches, and of each sample alone (JSON types). The real model computes, without
        dropout."""
        probe, losses = self._probe, []
        probe.accelerator.backward = lambda loss, **_: losses.append(float(loss))

        def batch(start: int, count: int) -> Any:
            return collate(copy.deepcopy([features for features, _ in rows[start : start + count]]))

        was_training = probe.model.training
        vars(probe.model.eval())["train"] = lambda mode=True: probe.model  # `training_step` calls it
        try:
            with kept_random_numbers(self._device), torch.no_grad():
                for inputs in self._step([batch(n, ROWS_OF_MICRO_BATCH) for n in range(0, ROWS, ROWS_OF_MICRO_BATCH)]):
                    probe.training_step(probe.model, inputs, self.number)
                # Not times the number of ranks, which is a part of the weight.
                with replaced(probe.args, average_tokens_across_devices=False):
                    alone = [float(self._loss(probe.model, batch(n, 1), units)) for n, (_, units) in enumerate(rows)]
        finally:
            del vars(probe.model)["train"]
            probe.model.train(was_training)
        own = [(number // ROWS_OF_MICRO_BATCH, units, False) for number, (_, units) in enumerate(rows)]
        return {"rows": own, "alone": alone, "stock": losses}

    def evaluate(self, micro_batch: _MicroBatch) -> dict[str, Any]:
        """The samples of a micro-batch, their mean losses, and what `prediction_step` makes of them (JSON types)."""
        probe, was_training, batch = self._probe, self._probe.model.training, copy.deepcopy(micro_batch.batch)
        try:
            with kept_random_numbers(self._device), micro_batch.known_to(self._model):
                loss, *_ = probe.prediction_step(self._model.eval(), batch, True)
        finally:
            probe.model.train(was_training)
        if loss is None:
            return {"has_loss": False}
        means = [float(micro_batch.mean_loss(row)) for row in range(ROWS_OF_MICRO_BATCH)]
        return {"rows": micro_batch.samples(0), "alone": means, "stock": [float(loss)]}


class _MicroBatch:
    """One micro-batch of stock, whose logits are known, and what stock makes of them.

    batch: as collated. spans: the places of each row's sample. targets: labels of the next token [rows, length].
    leaf: what the output embedding returns [rows, length, V]; logits: what the model makes of it. value: of the loss
    that stock hands to backward; gradient: of the leaf, by the gradient that accelerate's backward gives that loss.
    is_trainers: the loss is made of the logits that the model has returned.
    """

    logits: Tensor
    value = 0.0
    gradient: Tensor | None = None
    is_trainers = False

    def __init__(self, batch: dict[str, Any], spans: list[tuple[int, int]], vocabulary: int, device: torch.device):
        self.batch, self.spans = batch, spans
        targets = _targets(batch).cpu()
        logits = torch.randn((*targets.shape, vocabulary), generator=torch.Generator().manual_seed(0))
        # Token losses from small to large, so that a loss that bends or clamps them shows its gradient.
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
            raise Unmeasured(
                f"its logits cannot be read: the model returns none of {list(shape[:2])} tokens", "weights"
            )
        if not torch.is_grad_enabled():  # an evaluation, or a reference of the trainer
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

    def samples(self, number: int) -> list[tuple[int, int, bool]]:
        """In a `Table`."""
        found = []
        for row, (start, end) in enumerate(self.spans):
            units = int((self.targets[row, start : end - 1] != IGNORE_INDEX).sum())
            found.append((number, units, bool(self.batch["labels"][row, start] != IGNORE_INDEX)))
        return found

    def mean_loss(self, row: int) -> Tensor:
        """Of the tokens of a sample."""
        start, end = self.spans[row]
        logits, targets = self.logits[row, start : end - 1], self.targets[row, start : end - 1]
        return cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)

    def backward(self, own: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        """In the place of accelerate's own, which may multiply the loss. No parameter gets a gradient."""
        handed = loss.detach().clone().requires_grad_()
        own(handed, **kwargs)
        self.value, sources = float(loss.detach()), (self.leaf, self._returned)
        self.gradient, of_returned = torch.autograd.grad(
            loss, sources, handed.grad, retain_graph=True, allow_unused=True
        )
        self.is_trainers = of_returned is not None and bool(of_returned.any())


def apart(trainer: Any) -> Any:
    """A shallow copy of a trainer, which logs nothing: the figures that it collects are not the trainer's."""
    copied = copy.copy(trainer)
    copied.log = lambda *args, **kwargs: None
    for name, value in vars(trainer).items():
        if isinstance(value, dict | list | set | deque | Tensor) and not name.endswith("dataset"):
            with contextlib.suppress(Exception):
                setattr(copied, name, copy.deepcopy(value))
    return copied


def _probe_of(trainer: Any) -> Any:
    """Apart, without odb; its backward goes through accelerate and ends at the loss."""
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


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """The label of the next token, [rows, length]."""
    return pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    padded = pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": torch.full_like(padded, IGNORE_INDEX)}


def _short(batch: dict[str, Any], rows: Sequence[Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """`MOST_TOKENS` columns of each row: the first token of its sample and the last ones, and some of its padding; and
    the places of the sample there, from the first to the last token that is attended to or has a label.

    Media, which the tokens that are left do not fit, are left out, and what else is neither of a token nor of a row.
    rows: features that the batch has been collated from.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        has_ids = [isinstance(row, Mapping) and "input_ids" in row for row in rows]
        sizes = [len(row["input_ids"]) if has else ids.shape[1] for row, has in zip(rows, has_ids)]
        mask = (torch.arange(ids.shape[1]) < torch.tensor(sizes)[:, None]).to(ids.device)
    columns, spans = [], []
    for is_own in (mask != 0) | (batch["labels"] != IGNORE_INDEX):
        places = is_own.nonzero()[:, 0].tolist()
        start, end = places[0], places[-1] + 1
        padding = [*range(start), *range(end, ids.shape[1])]
        first, rest = padding[:MOST_PADDING], padding[MOST_PADDING:]
        chosen = sorted([start, *first, *reversed(range(start + 1, end)), *rest][:MOST_TOKENS])
        columns.append(chosen)
        spans.append((chosen.index(start), chosen.index(start) + sum(start <= column < end for column in chosen)))
    tokens, short = (torch.arange(len(ids))[:, None], torch.tensor(columns)), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            short[key] = value
        elif value.shape[:2] == ids.shape:
            short[key] = value[tokens]
    return short, spans


def _revealing(batch: Mapping[str, Any], spans: Sequence[tuple[int, int]], supervised: Sequence[int]) -> Tensor:
    """Labels by which rules differ: the last tokens of each row, so many as supervised says, and the first token of one
    row. A first token after padding keeps its label: what would predict it is padding."""
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
    """What stock's loss of a batch of an evaluation is the mean of: the batches of all ranks at the same time ("round")
    or its own ("micro_batch"). None: something else. gather: of `measure`. Collective.
    """
    model: Any = model_with_labels(trainer.model)
    answer: dict[str, Any] = {"rows": [], "alone": [], "stock": [], "has_loss": True}
    if model is not None and model.get_output_embeddings() is not None:
        with contextlib.suppress(Exception):  # any code may stand there
            measurement = _Measurement(trainer, model)
            answer |= measurement.evaluate(measurement.micro_batches((), _padded, SUPERVISED)[0])
    answers = gather(answer)
    if not any(answer["has_loss"] for answer in answers):  # tokens are generated
        return StockMean("micro_batch", len(answers))
    if not all(answer["stock"] for answer in answers):
        return None
    ranks = len(answers)
    for over, counts, factor in itertools.product(
        ("round", "micro_batch"), ("tokens", "labels"), dict.fromkeys((1.0, float(ranks), 1 / ranks))
    ):
        mean = StockMean("step" if over == "round" else over, counts=counts, factor=factor)
        if all(itertools.starmap(_is_near, _losses_by(mean, answers))):
            return StockMean(over, (1 if over == "round" else ranks) / factor, counts)
    return None


# The loss of one sample, by code of the trainer: in the measurement and in training.


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
