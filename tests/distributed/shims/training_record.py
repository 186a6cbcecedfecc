"""A callback that writes down what a training has computed, micro-batch by micro-batch, whoever formed the batches.

One JSON line for each optimizer step of a rank: `micro_batches` (of each the checksums of its rows) and
`learning_rates` (of each parameter group). Rank r writes to PATH.r. Needs nothing of odb_factory, nor of the tests.
"""

import json
import zlib

from transformers import TrainerCallback


class TrainingRecord(TrainerCallback):
    def __init__(self, path):
        self.path, self.micro_batches = path, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handle = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs):
        if module.training:  # not an evaluation
            self.micro_batches.append(row_checksums(kwargs))

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        rates = [group["lr"] for group in optimizer.param_groups]
        with open(f"{self.path}.{args.process_index}", "a", encoding="utf-8") as file:
            file.write(json.dumps({"micro_batches": self.micro_batches, "learning_rates": rates}) + "\n")
        self.micro_batches = []

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()


def row_checksums(inputs):
    """Of the real tokens of each row and their labels; padding and fake media, which are masked, are left out."""
    real = inputs["attention_mask"].bool()
    return [
        zlib.crc32(ids[mask].cpu().numpy().tobytes() + labels[mask].cpu().numpy().tobytes())
        for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], real)
    ]
