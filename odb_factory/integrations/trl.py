"""Online micro-batches for the pairs of TRL's `DPOTrainer`. TRL's `SFTTrainer` needs only `enable_odb`.

A pair is a prompt and two answers, each a row with the prompt, chosen answers first. A padded pair costs two rows of
the longer answer; a flat pair costs both answers: the collate worker joins the rows in one flat row, which every model
computes instead of the padded rows (`model/unpad.py`). The loss is a mean over pairs. Needs `pip install trl`.

Since trl 1 the collator makes the rows, and models return log-probabilities from a fused head. In trl 0.24 the trainer
makes the rows and reads logits.

Import this module before the trainers of trl 0.24: with transformers 5 it treats missing packages as installed, and
`from trl import DPOTrainer` fails because mergekit is missing. Importing this module corrects its package flags.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from torch.nn.utils.rnn import pad_sequence

from odb_factory.accounting import Computing
from odb_factory.config import ODBConfig, ODBKeys
from odb_factory.data.observe import IGNORE_INDEX, ItemError
from odb_factory.data.samples import Measured
from odb_factory.errors import ConfigError
from odb_factory.planner import Collation, Cost, Media
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import PAIRS, why_no_door
from odb_factory.training.pair_metrics import PairMetrics
from odb_factory.training.trainer import enable_odb

OF_TRAINERS = (
    ("_compute_loss", "_metrics", "_total_train_tokens", "loss_types"),
    ("get_batch_loss_metrics", "concatenated_forward", "_stored_metrics", "loss_type", "padding_free", "use_weighting"),
)
"""Attributes of the trainer that this module uses: of trl 1, and of trl 0.24."""
OF_TOKENS = "which is a mean over the tokens of a micro-batch and so depends on how an optimizer step is cut"
SORTED = "sorts the pairs of a micro-batch and so depends on how an optimizer step is cut"
REFUSED_LOSSES = {
    "sft": f"adds a loss of the chosen answers, {OF_TOKENS}",
    **dict.fromkeys(("aot", "aot_pair", "aot_unpaired"), SORTED),
}
RUNNING = "goes by a mean that every micro-batch moves, idle ones too"
SIDES = ("chosen", "rejected")
WITH_IMAGES = (
    "it has images, which odb has not tried with TRL's DPOTrainer; use `stage: dpo` of LLaMA-Factory, or train without "
    "odb"
)


def _correct_packages() -> None:
    """Replace trl's package flags that are tuples: transformers 5 returns (available, version), and trl 0.24 treats any
    tuple as true."""
    try:
        packages = importlib.import_module("trl.import_utils")
    except ImportError:  # no trl: `enable_odb_dpo` rejects the trainer
        return
    for name, value in list(vars(packages).items()):
        if name.endswith("_available") and isinstance(value, tuple):
            setattr(packages, name, value[0])


_correct_packages()


def enable_odb_dpo(trainer: Any, config: ODBConfig | None = None, **block: Unpack[ODBKeys]) -> Any:
    """Make `train()` of a `trl.DPOTrainer` form its micro-batches online. Changes and returns this trainer object.

    config, or its keys as keyword arguments, as in `enable_odb`. `token_budget` counts both answers of each pair, each
    with its prompt; with `layout: padded`, two rows of the longer answer. Losses, gradients and figures of pairs equal
    those of training without odb; figures of tokens are means over the optimizer step, not over stock's micro-batches.
    Raises `ConfigError` for another type of trainer, and for losses that are not a mean over pairs.

    Example::

        trainer = DPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, processing_class=tokenizer)
        enable_odb_dpo(trainer, token_budget=8192)
        trainer.train()
    """
    _check(trainer)
    args = trainer.args
    collate: Callable = PairRows(args.max_length, args.truncation_mode)
    figures, multiple, not_flat = FiguresOfAllRanks, 1, why_not_flat(trainer)
    if has_rows(trainer):
        collate, figures, multiple = _with_labels, FiguresOfRows, args.pad_to_multiple_of or 1
    enable_odb(
        trainer,
        config,
        cost_fn=functools.partial(pair_cost, args.max_length),
        measure=functools.partial(measure_pairs, args.max_length),
        collation=Collation(rows=len(SIDES), batches=("",), pad_to_multiple_of=multiple),
        equal_weights=True,
        not_flat=not_flat,
        **block,
    )
    if not_flat is None:
        trainer.odb.collate_fn = functools.partial(collate, trainer.data_collator)
    trainer.odb.parts = (figures(trainer),)
    return trainer


def has_rows(trainer: Any) -> bool:
    """Whether the collator of this trainer makes the rows (trl 1)."""
    return hasattr(trainer, "_compute_loss")


def _check(trainer: Any) -> None:
    missing = [[name for name in names if not hasattr(trainer, name)] for names in OF_TRAINERS]
    if all(missing):
        raise ConfigError(
            f"enable_odb_dpo: a {type(trainer).__name__} has no {' and no '.join(map(', '.join, missing))}, which the "
            f"DPOTrainer of trl 1 and of trl 0.24 have; {PAIRS}, or train without odb."
        )
    args = trainer.args
    running = {"bco_pair": RUNNING} if hasattr(trainer, "running") else {}
    for loss in trainer.loss_types if has_rows(trainer) else trainer.loss_type:
        if (why := (REFUSED_LOSSES | running).get(loss)) is not None:
            raise ConfigError(f"loss_type: {loss!r} {why}; leave it out, or train without odb.")
    if getattr(args, "rpo_alpha", None) is not None:
        raise ConfigError(f"rpo_alpha: {args.rpo_alpha} {REFUSED_LOSSES['sft']}; set it to None.")
    if getattr(args, "use_liger_loss", False):
        raise ConfigError("use_liger_loss: True has not been tried with odb; set it to False.")
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError("router_aux_loss_coef: the loss of routers is added once a micro-batch; set it to 0.")
    if getattr(trainer, "_is_vision_dataset", False):
        raise ConfigError(f"train_dataset: {WITH_IMAGES}.")


def why_not_flat(trainer: Any) -> str | None:
    """Why the micro-batches cannot be flat; None if they can."""
    if has_rows(trainer):
        has_head = hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")
        return None if has_head else "this release of trl reads all logits; trl 1.16 does not"
    if trainer.padding_free:
        return "padding_free: True lays the rows of a micro-batch flat in the trainer"
    if trainer.use_weighting:
        return "use_weighting: True reads the whole distribution of each token"
    if trainer.args.ld_alpha is not None and trainer.truncation_mode == "keep_end":
        return "ld_alpha with truncation_mode: keep_end reads a token if an answer has lost its prompt"
    return why_no_door(trainer)


def _with_labels(collate: Callable[..., Any], pairs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The batch of a collator of trl 1, with `labels`: the answer tokens."""
    batch = collate(pairs)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORE_INDEX)}


@dataclass(frozen=True, slots=True)
class PairRows:
    """Adds the rows that a trainer of trl 0.24 would build to the batch of its own collator.

    Adds `input_ids`, `attention_mask` and `labels`, each [2 x pairs, length]; labels are the answer tokens.
    max_length, truncation_mode: the trainer's settings.
    """

    max_length: int | None
    truncation_mode: str

    def __call__(self, collate: Callable[..., Any], pairs: list[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [(pair["prompt_input_ids"], pair[f"{side}_input_ids"]) for side in SIDES for pair in pairs]
        cut = slice(self.max_length) if self.truncation_mode == "keep_start" else slice(-(self.max_length or 0), None)
        ids = [[*prompt, *answer][cut] for prompt, answer in rows]
        labels = [[*[IGNORE_INDEX] * len(prompt), *answer][cut] for prompt, answer in rows]

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            return pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=fill)

        return {
            **collate(pairs),
            "input_ids": padded(ids, 0),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": padded(labels, IGNORE_INDEX),
        }


def pair_cost(max_length: int | None, item: Mapping[str, Any]) -> Cost:
    """The cost of both answers, each with the prompt. item: a pair tokenized by `DPOTrainer`."""
    if item.get("pixel_values") is not None:
        raise ItemError(WITH_IMAGES)
    parts = [item.get(f"{part}_ids", item.get(f"{part}_input_ids")) for part in ("prompt", *SIDES)]
    if None in parts:
        raise ItemError(f"it has no `prompt_ids` and answers, but {', '.join(item)}")
    prompt, *answers = map(len, parts)
    lengths = [_cut(prompt + answer, max_length) for answer in answers]
    return Cost(tokens=sum(lengths), row_tokens=len(SIDES) * max(lengths), units=1)


def measure_pairs(
    max_length: int | None, batch: Mapping[str, Any], patch_size: int = 0, segments: tuple[int, ...] = ()
) -> Measured:
    """Measure a batch of `DataCollatorForPreference`, of two rows a pair; the trainer of trl 0.24 builds them.

    segments: sample lengths of the flat row in the batch; empty for a padded batch.
    """
    if segments:
        return Measured(1, sum(segments), Media(), units=len(segments) // len(SIDES), segments=segments)
    if "completion_mask" in batch:
        rows, length = batch["input_ids"].shape
        return Measured(rows, length, Media(), units=rows // len(SIDES))
    prompts, chosen, rejected = (batch[f"{part}_attention_mask"].sum(1) for part in ("prompt", *SIDES))
    longest = int((prompts + torch.maximum(chosen, rejected)).max())
    return Measured(len(SIDES) * len(prompts), _cut(longest, max_length), Media(), units=len(prompts))


def _cut(length: int, max_length: int | None) -> int:
    return length if max_length is None else min(length, max_length)


class FiguresOfAllRanks(PairMetrics):
    """Metrics averaged over ranks. The trainer gathers metrics per pair in every micro-batch, which requires equally
    many pairs on all ranks. With odb, ranks have different numbers of pairs: each rank counts its own, and `_log`
    divides the sums over all ranks."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with super().in_place(), replaced(self.trainer, log=functools.partial(self._log, self.trainer.log)):
            yield

    def _compute(self, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        gathers = {} if self.trainer.odb.num_items is None else {"gather_for_metrics": lambda figures: figures}
        with replaced(self.trainer.accelerator, **gathers):
            return super()._compute(stock, *args, **kwargs)

    def averaged(self) -> dict[str, float]:
        """The figures over all ranks. Collective."""
        counts = [self.counts[self.divisor(key)] for key in self.sums]
        local = torch.tensor([[*self.sums.values()], counts], dtype=torch.float64, device=self.trainer.args.device)
        sums, counts = self.trainer.accelerator.reduce(local, "sum").tolist()
        return {key: total / max(count, 1) for key, total, count in zip(self.sums, sums, counts)}

    def _log(self, stock: Callable, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """All ranks log the figures of training together, with the same keys."""
        stored = self.stored
        if self.trainer.odb.training is not None and "loss" in logs and stored:
            stored.update({key: [figure] for key, figure in self.averaged().items()})
        stock(logs, *args, **kwargs)


class FiguresOfRows(FiguresOfAllRanks):
    """The metrics of trl 1, of which some are means over the tokens of answers."""

    METHOD, STORED = "_compute_loss", "_metrics"
    OVER: ClassVar = {"entropy": "answers", "mean_token_accuracy": "chosen"}
    OVER |= {f"logits/{side}": side for side in SIDES}
    """The tokens that a figure is a mean over; other figures are means over pairs."""

    def divisor(self, key: str) -> str:
        # The number of tokens is a sum: nothing is counted under its name.
        return key if key == "num_tokens" else self.OVER.get(key, "pairs")

    def averaged(self) -> dict[str, float]:
        figures = super().averaged()
        self.trainer._total_train_tokens += int(figures["num_tokens"])
        return {**figures, "num_tokens": self.trainer._total_train_tokens}

    def _compute(self, stock: Callable, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        trainer, odb = self.trainer, self.trainer.odb
        inputs = {key: value for key, value in inputs.items() if key != "labels"}
        if odb.num_items is None:
            return stock(model, inputs, return_outputs)

        metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        gathers = dict.fromkeys(("gather", "gather_for_metrics"), lambda figures: figures)
        of_this = replaced(trainer, _metrics=metrics, _total_train_tokens=0)
        with of_this, replaced(trainer.accelerator, **gathers):
            result = stock(model, inputs, return_outputs)
        if odb.computing is not None and odb.evaluation is None:
            figures: dict[str, Any] = {key: values[-1] for key, values in metrics["train"].items()}
            tokens = inputs["completion_mask"][:, 1:].sum(1).view(len(SIDES), -1).sum(1).tolist()
            self.count(odb.computing, {**figures, **dict(zip(SIDES, tokens)), "answers": sum(tokens)})
        return result

    def add(self, computing: Computing, metrics: dict[str, Any]) -> None:
        tokens = {key: metrics.pop(key) for key in (*SIDES, "answers")}
        sums = {"num_tokens": metrics.pop("num_tokens")}
        sums |= {key: metrics.pop(key) * tokens[over] for key, over in self.OVER.items()}
        for key, value in sums.items():
            self.sums[key] += 0.0 if computing.micro_batch.idle else value
        self.counts.update({} if computing.micro_batch.idle else tokens)
        super().add(computing, metrics)
