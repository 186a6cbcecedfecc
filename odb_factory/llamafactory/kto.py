"""KTO in LLaMA-Factory: KL estimates, figures, and a check of the trainer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_factory.accounting import Computing
from odb_factory.data.collate import Collated
from odb_factory.data.flat import UNPADDED
from odb_factory.data.samples import MicroBatch
from odb_factory.errors import ConfigError
from odb_factory.model.unpad import FlatRows
from odb_factory.training.arguments import replaced
from odb_factory.training.pair_metrics import PreferenceMetrics

# The loss of an example depends on an estimate of the KL divergence from the reference model: the mean over examples of
# the log-ratio of an answer to another prompt. Stock averages over the micro-batches of all ranks in a micro-step.
# odb's micro-batches hold other examples, so the forwards for the estimate run for all micro-batches of the optimizer
# step before the first is trained on: as many forwards as in stock, with one reduction over ranks for each optimizer
# step. `loss_scaling: stock` gives every example the estimate of its stock micro-step, and so stock's loss. Other
# scalings use one estimate for the optimizer step, and so give the gradient of one large batch.

REPLACED = ("forward", "concatenated_forward", "kto_loss")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Values for the loss of each example of a micro-batch; [examples], on the device.

    tags: whether the example is desirable. kl: the estimate (>= 0). sft_factor: the factor of the loss that `pref_ftx`
    adds: (examples / desirable examples) squared, in the example's stock batch.
    """

    tags: Tensor
    kl: Tensor
    sft_factor: Tensor


class StepKL:
    """Estimates the KL divergence in the optimizer steps of a `CustomKTOTrainer`.

    kl: the sum of the estimates of the last optimizer step. num_examples: its examples on all ranks, by kind.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.kl = 0.0
        self.num_examples = {"chosen": 0, "rejected": 0}
        self._estimates: list[Estimate] = []
        self._is_estimating = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the losses of this trainer use these estimates."""
        methods = {name: functools.partial(getattr(self, f"_{name}"), getattr(self.trainer, name)) for name in REPLACED}
        with replaced(self.trainer, **methods), replaced(self.trainer.odb, before_step=self.estimate):
            yield

    def estimate(self, model: Any, micro_batches: Sequence[Collated]) -> None:
        """Estimate for all micro-batches of an optimizer step, also for idle ones: ranks run forwards together.

        The mean over the examples of each stock micro-batch, then over the ranks of a micro-step; or, if `loss_scaling`
        is not `stock`, over the examples of the optimizer step.
        """
        arguments, is_stock = self.trainer.args, self.trainer.odb.config.loss_scaling == "stock"
        ranks = arguments.world_size if is_stock else 1
        rows = arguments.per_device_train_batch_size * ranks
        num_batches = -(-self.trainer.odb.training.loader.global_batch_size // rows) * ranks if is_stock else 1

        def batches_of(micro_batch: MicroBatch) -> Tensor:  # the batch in which each example is averaged
            batches = [sample.stock_batch if is_stock else 0 for sample in micro_batch.samples]
            return torch.tensor(batches, dtype=torch.long)

        model.train()
        if callable(getattr(self.trainer.optimizer, "train", None)):  # an optimizer that averages weights
            self.trainer.optimizer.train()
        with replaced(self, _is_estimating=True):
            ratios = [self._log_ratios(model, batch) for _, _, batch in micro_batches]
        ratio = torch.cat(ratios).cpu().double().split([len(values) for values in ratios])
        sums = torch.zeros(3, num_batches, dtype=torch.float64)
        for (micro_batch, _, batch), log_ratios in zip(micro_batches, ratio):
            if not micro_batch.idle:
                tags = batch["kto_tags"].cpu()
                counted = torch.stack((torch.ones_like(log_ratios), tags.double(), log_ratios))
                sums.index_add_(1, batches_of(micro_batch), counted)
        device = self.trainer.accelerator.device
        sums = self.trainer.accelerator.reduce(sums.float().to(device), "sum")
        examples, chosen, total = sums
        # The mean of an empty batch is NaN, which nanmean leaves out.
        steps = (total / examples).view(-1, ranks).nanmean(1).nan_to_num().clamp(min=0)
        kl, sft_factor = steps.repeat_interleave(ranks), (examples / chosen.clamp(min=1)).square()
        self._estimates = []
        for micro_batch, _, batch in micro_batches:
            batches = batches_of(micro_batch).to(device) if not micro_batch.idle else 0
            tags = batch["kto_tags"].to(device)
            self._estimates.append(Estimate(tags, kl[batches].expand(len(tags)), sft_factor[batches].expand(len(tags))))
        self.kl = steps.sum().item()
        num_examples, num_chosen = round(examples.sum().item()), round(chosen.sum().item())
        self.num_examples = {"chosen": num_chosen, "rejected": num_examples - num_chosen}

    def _log_ratios(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Log-probability by the model minus that by the reference, of each answer to another prompt; [examples]."""
        needed = {key: value for key, value in batch.items() if f"kl_{key}" not in batch}
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            inputs = self.trainer._prepare_inputs(needed)
            rows = inputs.pop(f"kl_{UNPADDED}", None)
            with contextlib.nullcontext() if rows is None else self.trainer.odb.training.flat(FlatRows(**rows)):
                policy = self.trainer.concatenated_forward(model, inputs)[4]
                reference = self.trainer.compute_reference_log_probs(model, inputs)[2]
        return policy - reference

    # Replacements of methods of the trainer

    def _forward(self, stock: Callable, model: Any, batch: Mapping[str, Any], prefix: str = "") -> Any:
        """Stock runs two forwards of a micro-batch; run the one that is needed now, or both in an evaluation."""
        if not self._is_estimating and self.trainer.odb.computing is None:
            return stock(model, batch, prefix=prefix)
        if self._is_estimating == (prefix == "kl_"):
            return stock(model, batch, prefix=prefix)
        nothing = torch.zeros(len(batch["kto_tags"]), device=batch["kto_tags"].device)
        return nothing, nothing, nothing

    def _concatenated_forward(self, stock: Callable, model: Any, batch: Mapping[str, Any]) -> Any:
        """Weights the average log-probabilities of desirable answers, which only `pref_ftx` uses: stock multiplies
        their loss by (examples / desirable examples) squared of a batch."""
        *outputs, chosen_logps_avg = stock(model, batch)
        if (computing := self.trainer.odb.computing) is not None:
            estimate, num, num_chosen = self._estimate(computing), len(batch["kto_tags"]), len(chosen_logps_avg)
            chosen_logps_avg = chosen_logps_avg * estimate.sft_factor[estimate.tags] * (num_chosen / num) ** 2
        return *outputs, chosen_logps_avg

    def _kto_loss(self, stock: Callable, *logps: Tensor) -> Any:
        """Stock's loss of log-ratios from which the estimate is subtracted here, in place of stock.

        logps: chosen, rejected and KL by the model, then by the reference.
        """
        if (computing := self.trainer.odb.computing) is None:
            return stock(*logps)
        estimate = self._estimate(computing)
        chosen, rejected = logps[0] - logps[3], logps[1] - logps[4]
        log_ratios = chosen - estimate.kl[estimate.tags], rejected - estimate.kl[~estimate.tags]
        with replaced(self.trainer, calculate_KL=False):  # also skips stock's reduction over ranks
            losses, _, _, kl = stock(*log_ratios, *map(torch.zeros_like, logps[2:]))
        beta = self.trainer.beta
        return losses, beta * chosen.detach(), beta * rejected.detach(), kl

    def _estimate(self, computing: Computing) -> Estimate:
        estimate = self._estimates[computing.micro_batch.index]
        start = computing.micro_batch.start
        examples = slice(start, start + max(len(computing.micro_batch.ids), 1))
        return Estimate(estimate.tags[examples], estimate.kl[examples], estimate.sft_factor[examples])


# The figures that LLaMA-Factory's KTO trainer logs. It reduces the figures of the ranks as a vector without names, so
# every rank stores the same keys in the same order.

KINDS = ("chosen", "rejected")
KEYS_OF_A_KIND = ("rewards/{}_sum", "logps/{}_sum", "logits/{}_sum", "count/{}")


class ExampleMetrics(PreferenceMetrics):
    """Figures of KTO: sums over desirable and over undesirable examples, which LLaMA-Factory adds up over ranks and
    divides by the numbers of examples. Stock logs only the figures of rank 0.

    `kl` is the sum of the estimates (see `StepKL`), as in stock.
    """

    def __init__(self, trainer: Any, step_kl: StepKL):
        super().__init__(trainer)
        self.step_kl = step_kl

    def add(self, computing: Computing, metrics: dict[str, Any]) -> None:
        if computing.micro_batch.begins_optimizer_step:
            self.counts.update(self.step_kl.num_examples)
            self.sums["kl"] += self.step_kl.kl if self.trainer.args.process_index == 0 else 0.0
        if not computing.micro_batch.idle:
            for key in metrics.keys() - {"kl"}:
                self.sums[key] += metrics[key]

    def figures(self) -> dict[str, float]:
        # LLaMA-Factory divides by the number of examples of a kind, so there is no key if it is 0.
        kinds = [kind for kind in KINDS if self.counts[kind]]
        keys = [key.format(kind) for kind in kinds for key in KEYS_OF_A_KIND]
        return {key: self.sums[key] for key in (*keys, "kl")}


KL = 0.5


def check_trainer(trainer: Any) -> None:
    """Raise a one-line `ConfigError` if the loss is not a function of the log-ratio minus the estimate. Collective."""
    device = trainer.accelerator.device
    chosen, rejected = torch.tensor([2.0, -1.0], device=device), torch.tensor([1.0, 0.25, -3.0], device=device)

    def losses(subtracted: float, kl: float) -> Tensor:
        ratios, estimates = (chosen - subtracted, rejected - subtracted), torch.full((5,), kl, device=device)
        values: Tensor = trainer.kto_loss(*ratios, estimates, *map(torch.zeros_like, (*ratios, estimates)))[0]
        return values

    with torch.no_grad():
        stock = losses(0.0, KL)
        with replaced(trainer, calculate_KL=False):
            ours = losses(KL, KL)
    is_same = stock.shape == ours.shape and torch.allclose(stock, ours)
    if not (trainer.calculate_KL and is_same and 0 < stock.std() < 1):
        raise ConfigError(
            f"odb: {type(trainer).__name__}.kto_loss is not a function of the log-ratios minus the KL estimate, as "
            "odb_factory assumes; install a supported release (`odb-factory doctor` names them)."
        )
