"""What LLaMA-Factory's trainer for KTO logs of its own, over what was trained.

It reduces the figures of the ranks as a vector without names, so every rank stores the same keys in the same order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from odb_factory.errors import ConfigError
from odb_factory.llamafactory.stages.kto_kl import StepKL
from odb_factory.training.pair_metrics import PreferenceMetrics, begins_step
from odb_factory.training.run import Computing

KINDS = ("chosen", "rejected")
KEYS_OF_A_KIND = ("rewards/{}_sum", "logps/{}_sum", "logits/{}_sum", "count/{}")


class ExampleMetrics(PreferenceMetrics):
    """Those of KTO: sums over the desirable and over the undesirable examples, which LLaMA-Factory adds up over ranks
    and divides by their numbers. Stock says those of rank 0 alone.

    `kl` is the sum of the estimates that were used (see `StepKL`), as stock's is the sum of its own.
    """

    counts = ("sums", "num_examples")

    def __init__(self, trainer: Any, step_kl: StepKL):
        super().__init__(trainer)
        self.step_kl = step_kl
        self.num_examples: Counter[str] = Counter()

    def forget(self) -> None:
        super().forget()
        self.num_examples.clear()

    def add(self, computing: Computing, metrics: dict[str, Any]) -> None:
        if begins_step(computing):
            self.num_examples.update(self.step_kl.num_examples)
            self.sums["kl"] += self.step_kl.kl if self.trainer.args.process_index == 0 else 0.0
        known = {key.format(kind) for key in KEYS_OF_A_KIND for kind in KINDS}
        if unknown := metrics.keys() - known - {"kl"}:
            raise ConfigError(
                f"odb: the trainer for KTO makes the figures {', '.join(sorted(unknown))}, which are not known here; "
                "install a supported release of LLaMA-Factory (`odb-factory doctor` names them)."
            )
        if not computing.micro_batch.idle:
            for key in metrics.keys() & known:
                self.sums[key] += metrics[key]

    def figures(self) -> dict[str, float]:
        # Of a kind that no rank has seen there must be no key: LLaMA-Factory divides by the number of its examples.
        kinds = [kind for kind in KINDS if self.num_examples[kind]]
        keys = [key.format(kind) for kind in kinds for key in KEYS_OF_A_KIND]
        return {key: self.sums[key] for key in (*keys, "kl")}
