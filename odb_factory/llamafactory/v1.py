"""LLaMA-Factory's next trainer (`USE_V1=1`): its optimizer steps, cut into our micro-batches.

v1's trainer takes from its batch generator the micro-batches of an optimizer step, any number of them, and multiplies
the loss of each by its share of the step's labels. So `BatchGenerator` takes the place of v1's own, and `Losses` stands
around `compute_loss`, where the model computes each micro-batch as one flat row (`model/unpad.py`). The samples of an
optimizer step, and what each weighs, are those of v1's strategy `normal`:

1. The order is v1's. What does not fill an optimizer step at the end of an epoch is dropped, as v1 does.
2. sft: the loss is a mean over the labels of the step, however these are cut.
3. dpo, rm: v1 takes the mean over the pairs of a micro-batch and multiplies it by that micro-batch's share of labels. A
   pair weighs the labels of its micro-batch in v1, divided by `micro_batch_size`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from accelerate.utils import send_to_device
from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
from llamafactory.v1.core.utils import batching
from llamafactory.v1.utils.callbacks import TrainerCallback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from odb_factory.config import ODBConfig
from odb_factory.data.flat import UNPADDED
from odb_factory.data.observe import IGNORE_INDEX, ItemError, RowDropped, count_media, count_supervised
from odb_factory.data.order import StockMean
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.loop.dataloader import ODBDataLoader, ODBStepInfo, pop_step_info
from odb_factory.model.check import (
    NUM_SAMPLES,
    Layout,
    Runs,
    Trial,
    check_rows,
    fall_back,
    models_of,
    positions_of_media,
    resolve_layout,
)
from odb_factory.model.flat_row import begin_row
from odb_factory.model.unpad import FlatRows, UnpadDoor
from odb_factory.planner import Collation, Cost
from odb_factory.training.arguments import replaced

logger = get_logger(__name__)

TRAINERS = {"SFTTrainer": "sft", "DPOTrainer": "dpo", "RMTrainer": "rm"}
"""v1's classes and their commands."""
CHOSEN, REJECTED = 1, 2
"""In `token_type_ids` of a pair, which v1 lays into one row: prompt and chosen answer, then prompt and rejected one."""
NOT_COLLATED = ("extra_info", "_dataset_name")
NOT_FOR_MODELS = ("labels", "loss_weights", "token_type_ids")
"""Of a batch; v1 gives models the labels and weights of sft, which they do not need."""
PART = "odb_part"
"""The key of a batch under which `Losses` finds what it is."""


# Rows: rendered by v1 when they are observed; their media once more when they are collated, so that no pixels wait.


class RenderedRows(Dataset[dict[str, Any]]):
    """`self[i]`: model inputs of row i as v1's renderer makes them (lists), or the row itself if it has media, and
    under `cost` its tokens, its labels that carry loss and its media."""

    def __init__(self, dataset: Any, renderer: Any, cutoff_len: int, *, needs_both: bool, has_ranks: bool):
        """needs_both: a pair of which `cutoff_len` leaves one answer has no loss, as v1's reward models have it.
        has_ranks: there are several."""
        self.dataset, self.renderer, self.cutoff_len = dataset, renderer, cutoff_len
        self.needs_both, self.has_ranks = needs_both, has_ranks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.dataset[index]
        item = self.render(row)
        cost = self._cost(item)
        return {"row": row, "cost": cost} if cost.has_media else {**item, "cost": cost}

    def render(self, row: Any) -> dict[str, Any]:
        (item,) = self.renderer.process_samples([row])
        return {key: value for key, value in item.items() if key not in NOT_COLLATED}

    def _cost(self, item: Mapping[str, Any]) -> Cost:
        ids, labels, weights = (item[name][: self.cutoff_len] for name in ("input_ids", "labels", "loss_weights"))
        if any(weight != 1 for label, weight in zip(labels, weights) if label != IGNORE_INDEX):
            raise ItemError(
                "its loss_weight is not 0 or 1, and v1 divides a micro-batch by its weights, so which samples share "
                "one would matter; leave loss_weight out"
            )
        units = count_supervised(labels)
        if not units or (self.needs_both and REJECTED not in item["token_type_ids"][: self.cutoff_len]):
            raise RowDropped("unsupervised", "nothing is left that carries loss; cutoff_len may have cut it off")
        media = count_media(item)
        if any(media) and self.has_ranks:
            raise ItemError(
                "it has media, of which odb trains v1 on one rank: each rank would have to run its encoders equally "
                "often; leave the odb: block out"
            )
        return Cost(len(ids), media.patches, units, has_media=any(media), media=media)


class Collator:
    """v1's own collation. positions: of images, by a model that counts them in three axes; None: no such model.

    is_flat: the model gets the positions of a flat row, and those that v1 counts are left out.
    """

    def __init__(self, rows: RenderedRows, positions: Callable[..., Any] | None, *, is_flat: bool):
        self.rows, self.positions, self.is_flat = rows, positions, is_flat

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rendered = [self.rows.render(item["row"]) if "row" in item else dict(item) for item in items]
        for item in rendered:
            item.pop("cost", None)
        if any("mm_token_type_ids" in item for item in rendered):  # rows without media have none
            for item in rendered:
                item.setdefault("mm_token_type_ids", [0] * len(item["input_ids"]))
        cutoff_len = self.rows.cutoff_len
        if with_media := getattr(batching, "_collate_micro_batch", None):  # not in 0.9.5
            batch: dict[str, Any] = with_media(rendered, cutoff_len)
        else:
            batch = batching.default_collate(batching.pad_and_truncate(rendered, cutoff_len))
        if self.is_flat:
            batch.pop("position_ids", None)
            if self.positions is not None:
                batch["position_ids"] = self.positions(batch)
        return batch


class Order(Sampler[int]):
    """Rows in the order in which our loader takes them for v1's: whole optimizer steps alone, and in each the rows of
    the first micro-batch of every rank, then those of the second ones. v1 deals rows out to ranks one by one."""

    def __init__(self, num_rows: int, shape: tuple[int, int, int], seed: int):
        """shape: micro-batches of a rank in an optimizer step, rows of a micro-batch, ranks."""
        self.num_rows, self.shape, self.seed, self.epoch = num_rows, shape, seed, 0
        self.num_steps = num_rows // math.prod(shape)

    def __len__(self) -> int:
        return self.num_steps * math.prod(self.shape)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_rows, generator=generator)[: len(self)]
        return iter(order.view(self.num_steps, *self.shape).transpose(2, 3).flatten().tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class BatchGenerator(TrainerCallback):
    """In the place of v1's: iterates over the optimizer steps of an epoch, each a list of micro-batches.

    It begins when it is iterated first, when the trainer has wrapped its model: rows are tried in both layouts then,
    and workers start. As a callback of the trainer it closes itself when the training ends. num_micro_batch: of v1's
    strategy `normal`; ours has another number in each optimizer step. Raises `ConfigError`.
    """

    def __init__(self, trainer: Any, config: ODBConfig):
        kind = next((TRAINERS[cls.__name__] for cls in type(trainer).__mro__ if cls.__name__ in TRAINERS), None)
        if kind is None:
            raise ConfigError(f"odb: v1's {type(trainer).__name__} is unknown; odb drives {', '.join(TRAINERS)}.")
        args, ranks = trainer.args, DistributedInterface().get_world_size(Dim.DP)
        size = args.global_batch_size or ranks * args.micro_batch_size
        if size % (ranks * args.micro_batch_size):
            raise ConfigError(
                f"global_batch_size: {size} is not a multiple of micro_batch_size ({args.micro_batch_size}) x {ranks} "
                "ranks, as v1 asks; choose a multiple."
            )
        self.num_micro_batch = size // (ranks * args.micro_batch_size)
        self._order = Order(len(trainer.train_dataset), (self.num_micro_batch, args.micro_batch_size, ranks), args.seed)
        if not len(self):
            raise ConfigError(
                f"global_batch_size: {size} is more than the {len(trainer.train_dataset)} rows of the training "
                "dataset, and v1 drops what does not fill an optimizer step; choose a smaller one."
            )
        self._trainer, self._config, self._kind = trainer, config, kind
        self._rows = RenderedRows(
            trainer.train_dataset, trainer.renderer, args.cutoff_len, needs_both=kind == "rm", has_ranks=ranks > 1
        )
        self._online: ODBDataLoader[Any] | None = None
        self._saved: dict[str, Any] | None = None
        self._epoch = 0

    def __len__(self) -> int:
        """Optimizer steps of an epoch."""
        return self._order.num_steps

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._online is not None:
            self._online.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """After the optimizer step handed out last (JSON types)."""
        assert self._online is not None, "v1 saves after an optimizer step"
        return self._online.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, Mapping) or "version" not in state:
            raise ConfigError(
                "resume_from_checkpoint: this checkpoint was written without odb, and v1 does not keep where its "
                "optimizer steps end; go on without the odb: block, or start from its model."
            )
        self._saved = dict(state)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._online is None:
            self._online = self._begin()
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._online.load_state_dict(saved)
            if saved["epoch"] > self._epoch:  # saved at the end of its epoch, which v1 begins once more
                return
        step = []
        for batch in self._online:
            info = pop_step_info(batch)
            step.append(self._micro_batch(batch, info))
            if info.ends_optimizer_step:
                begin_row(())
                yield step
                step = []

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        begin_row(())
        if self._online is not None:
            self._online.close()

    def _begin(self) -> ODBDataLoader[Any]:
        trainer, config = self._trainer, self._config
        args, models = trainer.args, models_of(trainer)
        is_bf16 = args.bf16 and args.dist_config is not None
        layout = resolve_layout(models, config.layout, SimpleNamespace(device=trainer.device, bf16=is_bf16, fp16=False))
        online = self._make(layout)
        if layout.name == "flat" and (why := self._why_not_flat(online)) is not None:
            layout = fall_back(layout, config.layout, why)
            online.close()
            online = self._make(layout)
        online.is_checked = True
        logger.info(
            "online dynamic batching is on for v1's %s; layout: %s (%s)", self._kind, layout.name, layout.reason
        )
        Losses(trainer, self._kind, is_flat=layout.name == "flat")
        trainer.callback_handler.add_callback(self)
        return online

    def _make(self, layout: Layout) -> ODBDataLoader[Any]:
        args, is_flat = self._trainer.args, layout.name == "flat"
        model = models_of(self._trainer)[0]
        positions = positions_of_media(model) if self._kind == "sft" else None  # v1 gives pairs positions of one axis
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_size=args.micro_batch_size,
            sampler=self._order,
            num_workers=args.batching_workers,
            collate_fn=Collator(self._rows, positions, is_flat=is_flat),
            pin_memory=True,
            generator=torch.Generator().manual_seed(args.seed),
        )
        online: ODBDataLoader[Any] = ODBDataLoader.from_dataloader(
            loader,
            gradient_accumulation_steps=self.num_micro_batch,
            cost_fn=operator.itemgetter("cost"),
            collation=Collation(batches=("",)),
            audit_dir=args.output_dir if self._config.audit else None,
            stock_mean=StockMean("micro_batch", counts="labels"),
            config=dataclasses.replace(self._config, layout=layout.name, audit=False),
        )
        online.set_epoch(self._epoch)
        return online

    def _why_not_flat(self, online: ODBDataLoader[Any]) -> str | None:
        """Try the model on a few rows in both layouts, on all ranks."""

        def prepare(batch: dict[str, Any]) -> dict[str, Any]:
            inputs = {key: value for key, value in batch.items() if key not in NOT_FOR_MODELS}
            return send_to_device(inputs, self._trainer.device)

        online.loader.begin()
        return check_rows(
            Runs(self._trainer.model, prepare, online.gather),
            lambda: Trial(*online.trial_batches(NUM_SAMPLES))._replace(has_logits=True),
        )

    def _micro_batch(self, batch: dict[str, Any], info: ODBStepInfo) -> dict[str, Any]:
        rows = batch.pop(UNPADDED, None)
        weights = [sample.stock_units / self._trainer.args.micro_batch_size for sample in info.planned.samples]
        if info.is_idle:  # v1 multiplies the loss by the number of labels
            batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
        if rows is not None:
            rows = _rows_of(rows, batch)
        return {**batch, PART: Part(rows, weights, info)}


def _rows_of(rows: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Of `FlatRows`. rows: of `with_flat_rows`. In a pair the rejected answer begins at position 0 again, as in v1."""
    inputs = {name: value for name, value in rows["inputs"].items() if name not in NOT_FOR_MODELS}
    kinds = batch.get("token_type_ids")
    if kinds is not None and inputs["position_ids"].dim() == 2:
        lengths = torch.stack([(kinds == kind).sum(1) for kind in (CHOSEN, REJECTED)], 1).flatten().tolist()
        counted = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = torch.cat([counted, inputs["position_ids"][0, len(counted) :]])[None]
    return {**rows, "inputs": inputs}


# The loss of a micro-batch.


@dataclass(frozen=True, slots=True)
class Part:
    """What `Losses` knows of a micro-batch. rows: what its `FlatRows` are made of, None if it is padded. weights: of
    each pair, in labels, as its units are."""

    rows: Mapping[str, Any] | None
    weights: Sequence[float]
    info: ODBStepInfo


class Losses:
    """Stands around the `compute_loss` of one trainer of v1, whose loss code stays as it is."""

    def __init__(self, trainer: Any, kind: str, *, is_flat: bool):
        self._trainer, self._kind, self._own = trainer, kind, trainer.compute_loss
        reads: Literal["scores", "labels"] = "scores" if kind == "rm" else "labels"
        self._doors = [UnpadDoor(model, reads=reads) for model in models_of(trainer)] if is_flat else []
        trainer.compute_loss = self

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        part: Part = batch[PART]
        begin_row(part.info.segments)
        with contextlib.ExitStack() as flat:
            if part.rows is not None:
                rows = FlatRows(**send_to_device(part.rows, self._trainer.device, non_blocking=True))
                for door in self._doors:
                    flat.enter_context(door.flat(rows))
            if self._kind == "sft":
                loss: Tensor = self._own(batch)
                return loss
            return self._of_pairs(batch, part)

    def _of_pairs(self, batch: dict[str, Any], part: Part) -> Tensor:
        """v1's loss of the whole micro-batch runs the models and fills v1's log; then the loss of each pair is v1's for
        a micro-batch of it alone, from the same outputs."""
        trainer, rows = self._trainer, {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        models = {name: model for name in ("model", "ref_model") if (model := getattr(trainer, name, None)) is not None}
        answers = {name: Answers(model) for name, model in models.items()}
        with replaced(trainer, **answers):
            loss = self._own(rows)
            metrics = getattr(trainer, "_step_metrics", {})
            if part.info.units and len(set(part.weights)) > 1:
                pairs = []
                for row in range(len(part.weights)):
                    for answer in answers.values():
                        answer.row = row
                    pairs.append(self._own({key: value[row : row + 1] for key, value in rows.items()}))
                weights = torch.tensor(part.weights, dtype=loss.dtype, device=loss.device)
                loss = (torch.stack(pairs) * weights).sum() / part.info.units
            elif part.info.units:
                loss = loss * (sum(part.weights) / part.info.units)
        # Without logits their means over prompts are not known.
        trainer._step_metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        return loss


class Answers:
    """Stands in for a model while the losses of a micro-batch are computed: it runs once, on all rows.

    row: the one asked for; None: all. A reference that is the model without its adapters is asked without gradients.
    """

    def __init__(self, model: Any):
        self._model, self._outputs = model, dict[bool, Any]()
        self.row: int | None = None

    def __call__(self, **inputs: Any) -> Any:
        grad = torch.is_grad_enabled()
        if grad not in self._outputs:
            self._outputs[grad] = (self._model if grad else getattr(self._model, "module", self._model))(**inputs)
        logits = self._outputs[grad].logits
        return SimpleNamespace(logits=logits if self.row is None else logits[self.row : self.row + 1])

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        return getattr(getattr(self._model, "module", self._model), name)
