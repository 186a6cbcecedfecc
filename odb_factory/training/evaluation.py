"""`eval_token_budget`: evaluations whose micro-batches are formed by a budget, and stock's `eval_loss`.

Stock's `eval_loss` is a weighted sum over the samples, and the weights are known before a forward. In each round every
rank evaluates one batch of `per_device_eval_batch_size` rows. The loss of a batch is a mean over tokens or pairs, as in
training with an accumulation of 1; `eval_loss` is the mean of these losses over the rows of their batches. Rounds that
are full on every rank are planned here, several at a time, like the micro-batches of optimizer steps. A last round that
is not full is left to stock, which repeats rows to fill its batches. A Trainer counts each row once
(`gather_for_metrics`); a Seq2SeqTrainer, such as LLaMA-Factory's for sft, also counts the repeated rows (`gather`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import skip_first_batches
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from odb_factory.accounting import Computing, loss_of
from odb_factory.config import AUTO, ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import IGNORE_INDEX, Observer
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule, StockMean, dismantle
from odb_factory.data.pool import why_not_observed
from odb_factory.data.samples import Measured, MicroBatch, name_rows
from odb_factory.errors import OutOfMemoryError, one_line
from odb_factory.log import get_logger
from odb_factory.memory import is_out_of_memory
from odb_factory.model.check import Layout
from odb_factory.model.tower import one_pass
from odb_factory.planner import Cost
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import overriding_compute_loss
from odb_factory.training.stock import measure_evaluation

logger = get_logger(__name__)

ROWS_PLANNED = 256
"""Rows of a rank whose micro-batches are planned together."""


class MicroBatchInputs(dict[str, torch.Tensor]):
    """A micro-batch in place of a batch: as a mapping it has one row for each sample, and no storage."""

    def __init__(self, collated: Collated):
        samples = len(collated[0].ids) or 1
        super().__init__(input_ids=torch.empty(samples, 1, dtype=torch.long, device="meta"))
        self.collated = collated


class Evaluation:
    """Replaces an evaluation dataloader: iterates over micro-batches, then over the batch of the last round.

    stock: the dataloader of the Trainer. Its length, which the progress bar shows, is counted in samples here.
    parts: the parts of `stock`, with the rows that `observer` reads. mean: stock's loss of a round is the sum of these
        means, divided by its `divisor`. loss_only: no predictions are kept.
    computing: the micro-batch in forward, if its loss is weighed.
    """

    def __init__(
        self,
        trainer: Any,
        stock: Any,
        parts: DataLoaderParts,
        config: ResolvedConfig,
        observer: Observer,
        mean: StockMean,
        *,
        loss_only: bool,
    ):
        odb, training = trainer.odb, trainer.odb.training
        self.dataset, self.loss_only = stock.dataset, loss_only
        self.computing: Computing | None = None
        self._trainer, self._stock, self._batch_size = trainer, stock, parts.batch_size
        # 1. The loader of full rounds, in the layout of the training
        layout = Layout("padded", "outside of training, or not checked yet")
        if training is not None and not training.is_unchecked:
            layout = training.layout
        if not loss_only and getattr(trainer.args, "predict_with_generate", False):
            observer, layout = PromptObserver(trainer, observer), Layout("padded", "tokens are generated")
        self.loader: ODBLoader = odb.make_loader(
            dataclasses.replace(parts, drop_last=True, persistent_workers=False),
            config,
            layout,
            observer=observer,
            is_evaluated=True,
            rule=OptimizerStepRule(
                batch_size=parts.batch_size,
                accumulation=-(-ROWS_PLANNED // parts.batch_size),
                drop_last=True,
                stock_mean=mean,
                equal_weights=odb.equal_weights,
            ),
        )
        # 2. The rows of full rounds and of the last round, and all rows that stock counts in its mean
        in_round = parts.batch_size * self.loader.world_size
        self._rounds, rest = divmod(len(parts.sampler), in_round)
        self._rest = 0 if parts.drop_last else rest
        self._rows, self._num_batches = self._rounds * in_round + self._rest, self._rounds + bool(self._rest)
        gather = getattr(trainer.gather_function, "func", trainer.gather_function)
        self._counts_repeated = gather.__name__ == "gather"
        self._counted = self._num_batches * in_round if self._counts_repeated else self._rows
        assert mean.divisor is not None, "`measure_evaluation` sets it"
        self._of_mean = in_round / mean.divisor
        # 3. The results of this rank
        self._loss: Tensor | None = None
        self._rows_without_loss = 0  # of stock's batches without a supervised token, which the mean leaves out
        self._figures: defaultdict[str, float] = defaultdict(float)
        self._predicted: list[tuple[int, Any, Any]] = []
        self._num_micro_batches = 0

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        for collated in self.loader if self._rounds else ():
            micro_batch, inputs = collated[0], MicroBatchInputs(collated)
            del collated
            yield inputs
            self._num_micro_batches += 1
            self._advance(micro_batch.totals.samples - 1)
            if micro_batch.ends_optimizer_step:
                self.loader.consume(micro_batch.step)
        if self._rest:
            yield from skip_first_batches(self._stock, self._rounds)
            self._advance(self._rest - 1)

    def _advance(self, samples: int) -> None:
        """Move progress bars by the samples of an item. The Trainer has counted the item as one sample."""
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "prediction_bar", None)
            if bar is not None:
                bar.update(samples)

    def run(self, loop: Callable[..., Any], description: str, ignore_keys: list[str] | None, prefix: str) -> Any:
        """`EvalLoopOutput` of the Trainer's own `evaluation_loop` over this object, with the loss and the predictions
        of all ranks. Collective."""
        trainer, odb = self._trainer, self._trainer.odb
        stored = {"store_metrics": self._store_metrics} if hasattr(trainer, "store_metrics") else {}
        # A training runs the towers in one pass already.
        is_alone = odb.training is None and self.loader.world_size > 1
        models = (trainer.model, getattr(trainer, "ref_model", None)) if is_alone else ()
        try:
            with replaced(trainer, **stored), replaced(odb, evaluation=self), one_pass(*models):
                output = loop(self, description, True, ignore_keys, prefix)
                metrics = dict(output.metrics or {})
                # The mean loss over the rows of all ranks.
                if self._loss is not None:
                    sums = torch.stack([self._loss.float(), self._loss.new_tensor(self._rows_without_loss).float()])
                    total, without_loss = trainer.accelerator.reduce(sums.to(trainer.args.device), "sum").tolist()
                    rest = self._counted - round(without_loss)
                    metrics[f"{prefix}_loss"] = total / rest if rest else math.nan
                # Predictions of all ranks in the order of the dataset.
                predictions, labels = None, None
                if not self.loss_only:
                    rows = sorted(gather_object(self._predicted), key=operator.itemgetter(0))
                    predictions, labels = (_stacked([row[number] for row in rows]) for number in (1, 2))
                    if trainer.compute_metrics is not None and predictions is not None and labels is not None:
                        predicted = EvalPrediction(predictions=predictions, label_ids=labels)
                        more = denumpify_detensorize(trainer.compute_metrics(predicted))
                        metrics |= {f"{prefix}_{name.removeprefix(f'{prefix}_')}": more[name] for name in more}
            if stored:
                trainer._stored_metrics["eval"].update({key: [value] for key, value in self._figures.items()})
        except BaseException as error:
            self.loader.abort(one_line(error))
            raise
        finally:
            self.loader.close()
        logger.info(
            "evaluated %d rows in %d micro-batches on each rank, where stock has %d batches",
            self._rows,
            self._num_micro_batches + bool(self._rest),
            self._num_batches,
        )
        return output._replace(predictions=predictions, label_ids=labels, metrics=metrics)

    def predict(self, step: Callable[..., Any], model: Any, inputs: Any, ignore_keys: Any) -> Any:
        """The loss of an item of `__iter__`; None if the model returns none. step: the Trainer's own `prediction_step`.

        Raises `OutOfMemoryError` if memory does not hold a micro-batch.
        """
        forward = functools.partial(step, model, prediction_loss_only=self.loss_only, ignore_keys=ignore_keys)
        if isinstance(inputs, MicroBatchInputs):
            return self._predict_micro_batch(forward, *vars(inputs).pop("collated"))
        first = self._rounds * self.loader.world_size * self._batch_size + self.loader.rank * self._batch_size
        num_rows = min(max(self._rows - first, 0), self._batch_size)
        rows = find_batch_size(inputs) if self._counts_repeated else num_rows
        self._share = 1.0
        loss, logits, labels = forward(inputs)
        counted = self._batch_size if self._counts_repeated else num_rows
        if loss is not None and not loss.isfinite():
            loss, self._rows_without_loss = torch.zeros_like(loss), self._rows_without_loss + counted
        self._count(loss, counted, range(first, first + (rows or 0)), logits, labels)
        return loss

    def _predict_micro_batch(
        self, forward: Callable[..., Any], micro_batch: MicroBatch, measured: Measured, batch: Any
    ) -> Any:
        self._share = len(micro_batch.ids) / self._batch_size
        has_loss = any(micro_batch.units)
        weights = [self._of_mean / max(sample.stock_units, 1) for sample in micro_batch.samples] if has_loss else []
        self.computing = Computing(micro_batch, measured, *loss_of(weights, micro_batch.units))
        try:
            with self._trainer.odb.in_forward(measured), self._trainer.odb.unpadded(batch) as batch:
                loss, logits, labels = forward(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            alone = "" if len(micro_batch.ids) > 1 else ", cutoff_len, max_new_tokens or image_max_pixels"
            raise OutOfMemoryError(
                f"out of memory in an evaluation, in a micro-batch of {measured.rows} x {measured.length} = {measured} "
                f"({name_rows(micro_batch.ids)}); lower `eval_token_budget`{alone}."
            ) from error
        if loss is not None and not has_loss:
            loss = torch.zeros_like(loss)  # the mean over no token is not a number
        # `get_batch_loss_metrics` of trainers for pairs returns the mean over the pairs, which is not weighed yet.
        weight = 1.0 if self.computing.is_weighed else self.computing.scale
        self.computing = None
        self._count(loss, weight, micro_batch.ids, logits, labels, measured.segments)
        self._rows_without_loss += sum(not sample.stock_units for sample in micro_batch.samples)
        return loss

    def _count(
        self, loss: Any, weight: float, ids: Sequence[int], logits: Any, labels: Any, segments: Sequence[int] = ()
    ) -> None:
        """Add the loss and the predictions of these rows to the results of this rank."""
        if logits is not None:
            preprocess = self._trainer.preprocess_logits_for_metrics
            logits = logits if preprocess is None else preprocess(logits, labels)
            self._predicted += zip(ids, *(_by_row(values, len(ids), segments) for values in (logits, labels)))
        if loss is not None:
            share = loss.double() * weight
            self._loss = share if self._loss is None else self._loss + share

    def _store_metrics(self, metrics: dict[str, float], train_eval: str = "train") -> None:
        """Add figures of a micro-batch. Stock takes their mean over the batches of a rank, and over the ranks."""
        for key, value in metrics.items():
            self._figures[key] += float(value) * self._share / self._num_batches


def _by_row(values: Any, num_rows: int, segments: Sequence[int]) -> list[Any]:
    """The output of a forward, split into its samples: numpy arrays, nested as in the output."""
    if values is None:
        return [None] * num_rows
    if not isinstance(values, Tensor) and not values:
        return [()] * num_rows  # to stock, labels of () and of None differ: it computes metrics with () alone
    if isinstance(values, Tensor):
        values = values.reshape(-1) if values.ndim == 0 else values  # a number: one pair
        array = values.detach().float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()
        if segments and array.shape[:2] == (1, sum(segments)):
            return np.split(array[0], np.cumsum(segments))[:num_rows]
        return list(array)[:num_rows]
    return list(zip(*(_by_row(part, num_rows, segments) for part in values), strict=True))


def _stacked(rows: list[Any]) -> Any:
    """The rows as the Trainer returns them: one array, padded on the right, or a tuple of such arrays."""
    if not rows or rows[0] is None:
        return None
    if isinstance(rows[0], tuple):
        return tuple(_stacked(list(column)) for column in zip(*rows))
    if not rows[0].ndim:
        return np.stack(rows)
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=IGNORE_INDEX).numpy()


class PromptObserver:
    """Counts the tokens of a row that a model generates from: its prompt and all that may follow, in all beams."""

    def __init__(self, trainer: Any, observer: Observer):
        gen_kwargs, configured = getattr(trainer, "_gen_kwargs", {}), trainer.model.generation_config
        new_tokens, max_length = gen_kwargs.get("max_new_tokens"), gen_kwargs.get("max_length")
        if new_tokens is None and max_length is None:
            new_tokens, max_length = configured.max_new_tokens, configured.max_length
        # At most `new_tokens` more tokens or, if that is 0, `max_length` tokens with the prompt
        self._new_tokens, self._max_length = new_tokens or 0, 0 if new_tokens else max_length or 0
        self._num_beams = gen_kwargs.get("num_beams") or configured.num_beams or 1
        self._multiple = 1 if trainer.odb.collation is None else trainer.odb.collation.pad_to_multiple_of
        self._observer = observer

    def __call__(self, item: Any) -> tuple[Any, Cost]:
        features, cost = self._observer(item)
        prompt = -(-cost.tokens // self._multiple) * self._multiple
        tokens = self._num_beams * max(prompt + self._new_tokens, self._max_length)
        return features, dataclasses.replace(cost, tokens=tokens, units=1)

    def describe(self, dataset: Any, index: int) -> str:
        return self._observer.describe(dataset, index)


def evaluation_by_budget(trainer: Any, stock: Any, loss_only: bool | None) -> Evaluation | None:
    """The evaluation that replaces the dataloader `stock`; None, and a log line with the reason, if stock evaluates.
    Collective.

    loss_only: of `Trainer.evaluation_loop`.
    """
    odb, args, token_budget = trainer.odb, trainer.args, trainer.odb.config.eval_token_budget
    if token_budget is None:
        return None
    why = _why_stock(trainer, stock)
    if why is None:
        # All samples take part, and nothing is written.
        config = dataclasses.replace(
            odb.resolved,
            token_budget=odb.resolved.token_budget if token_budget == AUTO else token_budget,
            global_batch_size="keep",
            loss_scaling="stock",
            lr_scale="none",
            join=True,
            overlong="singleton",
            oom="raise",
            on_error="raise",
            audit=False,
        )
        parts = dismantle(stock, 0)
        observer = odb.observer_of_items(parts, config)
        observer.keeps_unsupervised = True
        if odb.eval_rows is not None:
            rows, observer = odb.eval_rows(parts.dataset)
            parts = dataclasses.replace(parts, dataset=rows)
        elif problem := why_not_observed(parts, observer):
            why = f"row 0: {problem}"  # stock predicts rows without labels
    if why is None:
        # The mean that stock's loss of a round is, measured once for a trainer
        mean = odb.eval_mean
        if odb.equal_weights or odb.cost_fn is not None:
            mean = StockMean("micro_batch", args.world_size)
        elif mean is None:
            mean = odb.eval_mean = measure_evaluation(trainer, odb.gather)
        if mean is not None:
            loss_only = args.prediction_loss_only if loss_only is None else loss_only
            return Evaluation(trainer, stock, parts, config, observer, mean, loss_only=bool(loss_only))
        why = "how prediction_step makes its loss fits no rule"
    logger.info("eval_token_budget: %s has no effect on this evaluation: %s", token_budget, why)
    return None


def _why_stock(trainer: Any, stock: Any) -> str | None:
    odb, args = trainer.odb, trainer.args
    if isinstance(stock.dataset, IterableDataset):
        return "its rows can only be iterated"
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return "the trainer computes the loss in place of the model (compute_loss_func or label_smoothing_factor)"
    for kind in overriding_compute_loss(trainer):
        if not kind.__module__.startswith("trl."):
            return f"compute_loss of {kind.__name__} may change the loss of the model"
    if odb.observer is not None and odb.eval_rows is None:
        return f"figures of {type(trainer).__name__} depend on which rows share a batch"
    if odb.resolved is None:
        return "budgets of auto are not chosen yet"
    if not trainer.accelerator.even_batches or trainer.accelerator.split_batches:
        return "even_batches or split_batches of accelerate are not the defaults"
    by_batch = args.batch_eval_metrics or not args.eval_do_concat_batches
    if trainer.compute_metrics is not None and (by_batch or args.include_for_metrics):
        return "batch_eval_metrics or include_for_metrics is set, or eval_do_concat_batches is not"
    return None
