"""A model in training on a device under a cap of memory, for gpu.py."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu_models import PATCH_VALUES, Batch, Collator, Sample, build_model, num_patches, padded_tokens

LEARNING_RATE = 1e-4
PROBE_SHARE = 0.94
"""Of the cap: what the hardest micro-batch may take alone, so that an epoch of many shapes finds room as well."""


@dataclass(frozen=True)
class Task:
    """flops: of one epoch of the samples. peak_flops: of the device, a second, if known. workers: of a loader."""

    samples: Sequence[Sample]
    validation: Sequence[Sample]
    collate: Collator
    flops: float
    peak_flops: float | None
    workers: int

    @property
    def real_tokens(self) -> int:
        return sum(len(sample["input_ids"]) for sample in self.samples)


class Bench:
    """A model in training on a device, and what is known to fit there.

    cap: bytes of the device that may be reserved; on a CPU, where no allocator can be asked, the padded tokens of a
    micro-batch.
    """

    def __init__(self, model_name: str, device: torch.device, cap: int, is_short: bool):
        self.device, self.cap, self.is_cuda = device, cap, device.type == "cuda"
        self.limit_memory(1.0)  # of a model before this one nothing is left
        self.model = build_model(model_name, device, is_short)
        self.initial = {name: value.to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()  # its states are there from now on, whatever runs out of memory later
        self.optimizer.zero_grad(set_to_none=True)
        self.pixels = torch.randn(0, PATCH_VALUES, dtype=torch.bfloat16, device=device)
        self.fitting: list[tuple[int, int]] = []
        self.failing: list[tuple[int, int]] = []

    def restart(self) -> None:
        """First weights, and an optimizer that has seen nothing."""
        self.model.load_state_dict(self.initial)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def loss(self, batch: Batch) -> torch.Tensor:
        inputs = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        if patches := num_patches(batch):
            if patches > len(self.pixels):
                self.pixels = torch.randn(patches, PATCH_VALUES, dtype=torch.bfloat16, device=self.device)
            inputs["pixel_values"] = self.pixels[:patches]
        return self.model(**inputs).loss

    def step(self, batch: Batch, loss_scale: float = 1.0) -> torch.Tensor:
        loss = self.loss(batch)
        (loss * loss_scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self, task: Task) -> float:
        """Mean over all tokens."""
        counts = [int((sample["labels"] != -100).sum()) for sample in task.validation]
        losses = [float(self.loss(task.collate([sample]))) for sample in task.validation]
        return sum(loss * count for loss, count in zip(losses, counts)) / sum(counts)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def limit_memory(self, share: float) -> None:
        """What goes beyond this share of the cap is out of memory from now on."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(share * self.cap / torch.cuda.mem_get_info()[1])
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int | None:
        """Bytes reserved on the device; of a CPU it cannot be said for one training of several in a process."""
        return torch.cuda.max_memory_reserved() if self.is_cuda else None

    def fits(self, batch: Batch) -> bool:
        """Two optimizer steps on this micro-batch; what follows from earlier answers is not tried again."""
        shape = padded_tokens(batch), num_patches(batch)
        if any(shape[0] <= known[0] and shape[1] <= known[1] for known in self.fitting):
            return True
        if any(shape[0] >= known[0] and shape[1] >= known[1] for known in self.failing):
            return False
        answer = self._try(batch) if self.is_cuda else shape[0] <= self.cap
        (self.fitting if answer else self.failing).append(shape)
        return answer

    def _try(self, batch: Batch) -> bool:
        self.limit_memory(PROBE_SHARE)
        try:
            for _ in range(2):
                self.step(batch)
            self.synchronize()
            return True
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad(set_to_none=True)
            return False
