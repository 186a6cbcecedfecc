"""A callback that records the micro-batches that a training computes, with or without odb.

One JSON line for each optimizer step of a rank: `micro_batches` (the row checksums of each), `learning_rates` (of each
parameter group) and `engine` (classes of model and optimizer, as wrapped). Rank r writes to PATH.r. Imports nothing
from odb_factory or the tests.
"""

import itertools
import json
import zlib

import torch
from transformers import TrainerCallback


class TrainingRecord(TrainerCallback):
    def __init__(self, path):
        self.path, self.micro_batches = path, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = model.register_forward_pre_hook(self.record, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self.micro_batches = []  # discard those of a rehearsal

    def record(self, module, args, kwargs):
        if module.training and torch.is_grad_enabled():  # neither an evaluation nor a reference model
            self.micro_batches.append(row_checksums(kwargs))

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        rates = [group["lr"] for group in optimizer.param_groups]
        engine = [kind.__name__ for part in (model, optimizer, optimizer.optimizer) for kind in type(part).__mro__]
        engine += ["ZeRO-3"] * any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        line = {"micro_batches": self.micro_batches, "learning_rates": rates, "engine": sorted(set(engine))}
        with open(f"{self.path}.{args.process_index}", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.micro_batches = []

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()


def row_checksums(inputs):
    """Checksums of the real tokens of each sample, without padding and fake media. Labels are not included: trainers
    that compute their losses themselves may pass no labels to the model, and the losses show differences."""
    inputs = {"labels": torch.zeros_like(inputs["input_ids"])} | inputs
    if "attention_mask" in inputs:
        return [checksum(ids[mask]) for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool())]
    positions = inputs["position_ids"][..., 0, :].reshape(-1, inputs["input_ids"].shape[1])[0]
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    ids, labels = inputs["input_ids"][0], inputs["labels"][0]
    samples = [(ids[start:end], labels[start:end]) for start, end in itertools.pairwise(starts)]
    return [checksum(ids) for ids, labels in samples if (labels != -100).any()]


def checksum(ids):
    return zlib.crc32(ids.cpu().numpy().tobytes())
