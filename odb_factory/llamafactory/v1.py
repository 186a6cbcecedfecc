"""Online dynamic batching for `sft` in LLaMA-Factory's next trainer, v1 (`USE_V1=1`).

v1's trainer takes the micro-batches of an optimizer step from its batch generator, which may yield any number of them.
The trainer weights the loss of each by its share of the step's labels, so the loss is a mean over the labels of the
step, however the samples are cut. `BatchGenerator` replaces v1's batch generator. An optimizer step has the samples of
v1's strategy `normal`, in the same order; samples at the end of an epoch that do not fill a step are dropped, as in v1.
A flat micro-batch is computed without logits (`log_probs_of_row`); the loss code is v1's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
from llamafactory.v1.core.utils import batching
from llamafactory.v1.utils.callbacks import TrainerCallback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from odb_factory.config import ODBConfig
from odb_factory.data.observe import IGNORE_INDEX, ItemError, RowDropped, count_media, count_supervised
from odb_factory.errors import ConfigError
from odb_factory.loader import STEP_INFO_KEY, ODBDataLoader, pop_step_info
from odb_factory.log import get_logger
from odb_factory.model.check import (
    NUM_SAMPLES,
    Layout,
    Runs,
    check_rows,
    fall_back,
    positions_of_media,
    resolve_layout,
    unwrapped,
)
from odb_factory.model.flat_row import begin_row
from odb_factory.model.head import WithoutLogits
from odb_factory.planner import Cost

logger = get_logger(__name__)

NOT_COLLATED = ("extra_info", "_dataset_name")
NOT_FOR_MODELS = ("labels", "loss_weights")
"""Entries of a batch that v1 passes to the model although the model does not need them."""


class RenderedRows(Dataset[dict[str, Any]]):
    """Rows of v1's dataset, rendered when they are observed.

    `self[i]` holds the model inputs of row i from v1's renderer (lists), and its `cost`: tokens, labels that carry loss
    and media. For a row with media it holds the raw row instead of the inputs: the collator renders it again, so that
    no pixels are kept in memory. has_ranks: the training has several ranks.
    """

    def __init__(self, dataset: Any, renderer: Any, cutoff_len: int, *, has_ranks: bool):
        self.dataset, self.renderer, self.cutoff_len, self.has_ranks = dataset, renderer, cutoff_len, has_ranks

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
                "its loss_weight is not 0 or 1, and v1 divides the loss of a micro-batch by the sum of its weights, so "
                "the loss would depend on which samples share a micro-batch; leave loss_weight out"
            )
        units = count_supervised(labels)
        if not units:
            raise RowDropped("unsupervised", "nothing is left that carries loss; cutoff_len may have cut it off")
        media = count_media(item)
        if any(media) and self.has_ranks:
            raise ItemError(
                "it has media, and odb trains media under v1 on one rank only, because all ranks would have to run the "
                "encoders equally often; leave the odb: block out"
            )
        return Cost(len(ids), media.patches, units, has_media=any(media), media=media)


class Collator:
    """Collate with v1's functions.

    is_flat: the micro-batch becomes a flat row, with its own positions instead of v1's. positions: computes position
    ids for a model with three position axes (images); None: the model has one axis.
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
            batch["loss_weights"][:, 0] = 0  # v1 skips a row's first token; a flat row has one per sample
            batch.pop("position_ids", None)
            if self.positions is not None:
                batch["position_ids"] = self.positions(batch)
        return batch


class Order(Sampler[int]):
    """The rows of v1's optimizer steps, reordered so that odb's loader gives each rank the same rows as v1: within a
    step, the first micro-batch of every rank, then the second of every rank. v1 deals single rows to the ranks."""

    def __init__(self, num_rows: int, shape: tuple[int, int, int], seed: int):
        """shape: micro-batches per rank and optimizer step, rows per micro-batch, ranks."""
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
    """Replace v1's batch generator: iterate over the optimizer steps of an epoch, each a list of micro-batches.

    The first iteration, after the trainer has wrapped its model, tries rows in both layouts and starts the workers. The
    generator is also a callback of the trainer, which closes it when the training ends. num_micro_batch: micro-batches
    per rank and optimizer step in v1's strategy `normal`. Raises `ConfigError`.
    """

    def __init__(self, trainer: Any, config: ODBConfig):
        if not any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__):
            raise ConfigError(
                f"odb: v1's {type(trainer).__name__} is not a trainer that odb drives, only SFTTrainer is; remove the "
                "odb: block."
            )
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
        self._trainer, self._config = trainer, config
        self._rows = RenderedRows(trainer.train_dataset, trainer.renderer, args.cutoff_len, has_ranks=ranks > 1)
        self._online: ODBDataLoader[Any] | None = None
        self._saved: dict[str, Any] | None = None
        self._epoch = 0

    def __len__(self) -> int:
        """Number of optimizer steps in an epoch."""
        return self._order.num_steps

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._online is not None:
            self._online.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last optimizer step that was yielded (JSON types)."""
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
            if saved["epoch"] > self._epoch:  # saved at the end of an epoch; v1 iterates that epoch again
                return
        step = []
        for batch in self._online:
            info = batch[STEP_INFO_KEY]
            if info.is_idle:  # v1 weights the loss by the number of labels: here 0
                batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
            step.append(batch)
            if info.ends_optimizer_step:
                yield step
                step = []

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        begin_row(())
        if self._online is not None:
            self._online.close()

    def _begin(self) -> ODBDataLoader[Any]:
        trainer, config = self._trainer, self._config
        args, model = trainer.args, unwrapped(trainer.model)
        is_bf16 = args.bf16 and args.dist_config is not None
        layout = resolve_layout(
            [model], config.layout, SimpleNamespace(device=trainer.device, bf16=is_bf16, fp16=False)
        )
        online = self._make(layout)
        if layout.name == "flat":
            door = WithoutLogits(trainer.model)
            if (why := door.reason or self._why_not_flat(online)) is not None:
                layout = fall_back(layout, config.layout, why)
                online.close()
                online = self._make(layout)
            else:
                trainer.compute_log_probs = functools.partial(log_probs_of_row, door, trainer.device)
        online.is_checked = True
        logger.info("online dynamic batching is on for v1's sft; layout: %s (%s)", layout.name, layout.reason)
        trainer.compute_loss = functools.partial(loss_of_micro_batch, trainer.compute_loss)
        trainer.callback_handler.add_callback(self)
        return online

    def _make(self, layout: Layout) -> ODBDataLoader[Any]:
        args, is_flat = self._trainer.args, layout.name == "flat"
        positions = positions_of_media(unwrapped(self._trainer.model))
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
            audit_dir=args.output_dir if self._config.audit else None,
            config=dataclasses.replace(self._config, layout=layout.name, audit=False),
        )
        online.set_epoch(self._epoch)
        return online

    def _why_not_flat(self, online: ODBDataLoader[Any]) -> str | None:
        """Try the model on a few rows in both layouts; return why flat cannot be used (None: it can). Collective."""

        def prepare(batch: dict[str, Any]) -> dict[str, Any]:
            return model_inputs(batch, self._trainer.device)

        online.loader.begin()
        return check_rows(Runs(self._trainer.model, prepare, online.gather), lambda: online.trial_batches(NUM_SAMPLES))


def loss_of_micro_batch(own: Callable[[dict[str, Any]], Tensor], batch: dict[str, Any]) -> Tensor:
    """Begin the flat row of a micro-batch, then call `own`, v1's `compute_loss`."""
    pop_step_info(batch)
    return own(batch)


def log_probs_of_row(door: WithoutLogits, device: torch.device, model: Any, batch: dict[str, Any]) -> Tensor:
    """Replace v1's `compute_log_probs` for a flat row, without computing logits. Returns the log-probability of each
    next token's label, 0 if that label carries no loss: [1, tokens - 1]."""
    labels: Tensor = batch["labels"]
    run = functools.partial(model, **model_inputs(batch, device))
    _, places, log_probs, _ = door.log_probs(run, labels, count_supervised(labels))  # labels are counted on the CPU
    return log_probs.new_zeros(labels.numel()).index_copy(0, places, log_probs)[None, :-1]


def model_inputs(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor) and key not in NOT_FOR_MODELS}
    return {key: tensor.to(device, non_blocking=True) for key, tensor in tensors.items()}
