"""Online micro-batches for the pairs of TRL's `DPOTrainer`. TRL's `SFTTrainer` needs only `enable_odb`.

A pair is a prompt and two answers: the trainer prepends the prompt to each answer, puts chosen answers first, and
shifts the rows to the left. A padded pair costs two rows of the longer answer; a flat pair costs both answers: the
collate worker builds the same rows and joins them in one flat row, which every model computes instead of the padded
rows (`model/unpad.py`). The loss is a mean over pairs. Needs `pip install trl`.

Import this module before the trainers of trl: with transformers 5, trl 0.24 treats missing packages as installed, and
`from trl import DPOTrainer` fails because mergekit is missing. Importing this module corrects trl's package flags.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.nn.utils.rnn import pad_sequence

from odb_factory.config import ODBConfig, ODBKeys
from odb_factory.data.observe import IGNORE_INDEX, ItemError
from odb_factory.data.samples import Measured
from odb_factory.errors import ConfigError
from odb_factory.planner import Collation, Cost, Media
from odb_factory.training.arguments import replaced
from odb_factory.training.checks import PAIRS, why_no_door
from odb_factory.training.pair_metrics import PairMetrics
from odb_factory.training.trainer import enable_odb

USED = (
    *("get_batch_loss_metrics", "concatenated_forward", "_stored_metrics", "max_length", "loss_type"),
    *("truncation_mode", "padding_free", "use_weighting"),
)
"""Attributes of the trainer that this module uses."""
OF_TOKENS = "which is a mean over the tokens of a micro-batch and so depends on how an optimizer step is cut"
REFUSED_LOSSES = {
    "sft": f"adds a loss of the chosen answers, {OF_TOKENS}",
    "bco_pair": "goes by a mean that every micro-batch moves, idle ones too",
}
SIDES = ("chosen", "rejected")


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
    with its prompt; with `layout: padded`, two rows of the longer answer. Losses, gradients and logged values equal
    those of training without odb.
    Raises `ConfigError` for another type of trainer, and for losses that are not a mean over pairs.

    Example::

        trainer = DPOTrainer(model, args=DPOConfig(...), train_dataset=pairs, processing_class=tokenizer)
        enable_odb_dpo(trainer, token_budget=8192)
        trainer.train()
    """
    _check(trainer)
    rows_of = PairRows(trainer.data_collator, trainer.max_length, trainer.truncation_mode)
    not_flat = why_not_flat(trainer)
    enable_odb(
        trainer,
        config,
        cost_fn=functools.partial(pair_cost, trainer.max_length),
        measure=functools.partial(measure_pairs, trainer.max_length),
        collation=Collation(rows=len(SIDES), batches=("",)),
        equal_weights=True,
        not_flat=not_flat,
        **block,
    )
    if not_flat is None:
        trainer.odb.collate_fn = rows_of
    trainer.odb.parts = (FiguresOfAllRanks(trainer),)
    return trainer


def _check(trainer: Any) -> None:
    missing = [name for name in USED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"enable_odb_dpo: a {type(trainer).__name__} has no {', '.join(missing)}, which the DPOTrainer of "
            f"trl 0.24 has; {PAIRS}, or train without odb."
        )
    for loss in trainer.loss_type:
        if loss in REFUSED_LOSSES:
            raise ConfigError(f"loss_type: {loss!r} {REFUSED_LOSSES[loss]}; leave it out, or train without odb.")
    if trainer.args.rpo_alpha is not None:
        raise ConfigError(f"rpo_alpha: {trainer.args.rpo_alpha} {REFUSED_LOSSES['sft']}; set it to None.")
    if trainer.args.use_liger_loss:
        raise ConfigError("use_liger_loss: True has not been tried with odb; set it to False.")


def why_not_flat(trainer: Any) -> str | None:
    """Why the micro-batches of this trainer cannot be flat; None if they can."""
    if trainer.padding_free:
        return "padding_free: True lays the rows of a micro-batch flat in the trainer"
    if trainer.use_weighting:
        return "use_weighting: True reads the whole distribution of each token"
    if trainer.args.ld_alpha is not None and trainer.truncation_mode == "keep_end":
        return "ld_alpha with truncation_mode: keep_end reads a token if an answer has lost its prompt"
    return why_no_door(trainer)


@dataclass(frozen=True, slots=True)
class PairRows:
    """A collator that adds the rows that the trainer would build to the batch of the trainer's own collator.

    Adds `input_ids`, `attention_mask` and `labels`, each [2 x pairs, length]; labels are the answer tokens.
    max_length, truncation_mode: the trainer's settings.
    """

    collate: Callable[[list[Mapping[str, Any]]], dict[str, Any]]
    max_length: int | None
    truncation_mode: str

    def __call__(self, pairs: list[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [(pair["prompt_input_ids"], pair[f"{side}_input_ids"]) for side in SIDES for pair in pairs]
        cut = slice(self.max_length) if self.truncation_mode == "keep_start" else slice(-(self.max_length or 0), None)
        ids = [[*prompt, *answer][cut] for prompt, answer in rows]
        labels = [[*[IGNORE_INDEX] * len(prompt), *answer][cut] for prompt, answer in rows]

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            return pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=fill)

        return {
            **self.collate(pairs),
            "input_ids": padded(ids, 0),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": padded(labels, IGNORE_INDEX),
        }


def pair_cost(max_length: int | None, item: Mapping[str, Any]) -> Cost:
    """The cost of both answers, each with the prompt. item: a pair tokenized by `DPOTrainer`."""
    if item.get("pixel_values") is not None:
        raise ItemError(
            "it has images, which TRL's DPOTrainer gives to models without patch grids alone and odb has not tried; "
            "use `stage: dpo` of LLaMA-Factory, or train without odb"
        )
    prompt = len(item["prompt_input_ids"])
    lengths = [_cut(prompt + len(item[f"{side}_input_ids"]), max_length) for side in SIDES]
    return Cost(tokens=sum(lengths), row_tokens=len(SIDES) * max(lengths), units=1)


def measure_pairs(
    max_length: int | None, batch: Mapping[str, Any], patch_size: int = 0, segments: tuple[int, ...] = ()
) -> Measured:
    """Measure a batch of `DataCollatorForPreference`, from which the trainer builds two rows per pair.

    segments: sample lengths of the flat row in the batch; empty for a padded batch.
    """
    if segments:
        return Measured(1, sum(segments), Media(), units=len(batch["prompt_input_ids"]), segments=segments)
    prompts, chosen, rejected = (batch[f"{part}_attention_mask"].sum(1) for part in ("prompt", *SIDES))
    longest = int((prompts + torch.maximum(chosen, rejected)).max())
    return Measured(rows=2 * len(prompts), length=_cut(longest, max_length), media=Media(), units=len(prompts))


def _cut(length: int, max_length: int | None) -> int:
    return length if max_length is None else min(length, max_length)


class FiguresOfAllRanks(PairMetrics):
    """Metrics averaged over ranks. The trainer gathers metrics per pair in every micro-batch, which requires equally
    many pairs on all ranks. With odb, ranks have different numbers of pairs: each rank keeps the means of its pairs,
    and `_log` averages these means over ranks."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with super().in_place(), replaced(self.trainer, log=functools.partial(self._log, self.trainer.log)):
            yield

    def _get_batch_loss_metrics(self, stock: Callable, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        gathers = {} if self.trainer.odb.num_items is None else {"gather_for_metrics": lambda figures: figures}
        with replaced(self.trainer.accelerator, **gathers):
            return super()._get_batch_loss_metrics(stock, *args, **kwargs)

    def _log(self, stock: Callable, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Average the metrics over ranks, then log. Collective for training logs: all ranks log together, same keys."""
        stored = self.trainer._stored_metrics["train"]
        if self.trainer.odb.training is not None and "loss" in logs and stored:
            metrics = torch.tensor([value for (value,) in stored.values()], device=self.trainer.args.device)
            of_all = self.trainer.accelerator.reduce(metrics, "mean").tolist()
            stored.update({key: [value] for key, value in zip(stored, of_all)})
        stock(logs, *args, **kwargs)
