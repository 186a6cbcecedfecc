"""`include_effective_tokens_per_second`, without the pass over the training data that LLaMA-Factory makes for it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class TellTokensPerSecond(TrainerCallback):
    """Puts the figure among those of the training: tokens trained on, without padding, a second and rank.

    LLaMA-Factory would preprocess every row once more behind the training, to count them, and is told not to.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        trainer.finetuning_args.include_effective_tokens_per_second = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run, logs = self.trainer.odb_run, kwargs["logs"]
        if run is not None and "train_runtime" in logs:
            tokens = run.accounting.since_resume.tokens / run.loader.world_size
            logs["effective_tokens_per_sec"] = tokens / logs["train_runtime"]
