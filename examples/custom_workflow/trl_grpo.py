"""TRL's GRPO under a token budget: the generated batch is computed in micro-batches, with the same loss and gradient.

python examples/custom_workflow/trl_grpo.py

Of a batch of answers, most of them short, one long answer decides what a padded batch costs. So the batch is cut by
`plan_micro_batches`: one backward for each micro-batch, its loss weighted so that all of them add up to the batch's.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

import odb_factory.integrations.trl  # noqa: F401  with transformers 5, trl 0.24 cannot be imported without it
from odb_factory import plan_micro_batches
from odb_factory.cli.demo import build_tiny_qwen2

MEAN_OF_SAMPLES = ("grpo", "dr_grpo")
"""TRL's `loss_type`s that take the mean over the answers of a batch; the others take it over their tokens."""
OF_SAMPLES = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages",
              "old_per_token_logps", "ref_per_token_logps")  # fmt: skip


class BudgetedGRPOTrainer(trl.GRPOTrainer):
    """A `GRPOTrainer` whose batch is computed in micro-batches of at most `token_budget` padded tokens."""

    token_budget = 1024

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        batch = self._prepare_inputs(inputs)  # TRL generates the answers and scores them
        total = torch.zeros((), device=self.accelerator.device)
        for part, weight in self.micro_batches(batch):
            with self.compute_loss_context_manager():
                loss = self._compute_loss(model, part) * weight
            self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def micro_batches(self, batch: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        """The micro-batches of this rank's batch with the weight of each; the same number on all ranks."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        prompts, answers = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
        here = torch.full_like(answers, rank)
        # Answers stay on the rank that generated them, so ranks exchange their lengths only.
        lengths, answer_lengths, owners = self.accelerator.gather(torch.stack([prompts + answers, answers, here], 1)).T
        micro_batches = plan_micro_batches(
            lengths.cpu(),
            token_budget=self.token_budget,
            ranks=ranks,
            owners=owners.cpu(),
            layout="padded",
            overlong="singleton",
        )
        first = rank * len(answers)  # of this rank in what was gathered
        shares = torch.ones_like(answer_lengths) if self.loss_type in MEAN_OF_SAMPLES else answer_lengths
        parts = []
        for indices in micro_batches[rank]:
            # Times the ranks: DDP takes the mean over them. A rank that idles computes a sample with weight 0.
            # `dapo` alone divides by the tokens of the whole batch itself.
            weight = float(shares[indices].sum() / shares.sum()) * ranks
            weight = float(bool(indices)) if self.loss_type == "dapo" else weight
            parts.append((cut_out(batch, [i - first for i in indices] or [0]), weight))
        return parts


def cut_out(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """These rows of a batch, without columns that are padding in all of them (left of prompts, right of answers)."""
    part = {key: value[rows] if key in OF_SAMPLES and value is not None else value for key, value in batch.items()}
    longest_prompt = max(int(part["prompt_mask"].sum(1).max()), 1)
    longest_answer = max(int(part["completion_mask"].sum(1).max()), 1)
    for key, value in part.items():
        if key in OF_SAMPLES and torch.is_tensor(value) and value.dim() == 2:
            part[key] = value[:, -longest_prompt:] if key.startswith("prompt") else value[:, :longest_answer]
    return part


def variety(completions: list[str], **_: Any) -> list[float]:
    """A reward that needs no model: the share of different characters."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a chat model (none: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("saves/trl_grpo"), help="(%(default)s)")
    parser.add_argument("--token_budget", type=int, default=1024, help="padded tokens of a micro-batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (%(default)s)")
    parser.add_argument("--unsplit", action="store_true", help="compute each batch at once, as TRL does")
    args = parser.parse_args()
    trainer = make(args.model, args.output, args.unsplit, max_steps=args.steps)
    trainer.token_budget = args.token_budget
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']:.6f} grad_norm {entry['grad_norm']:.6f}")


def make(model: str | Path | None, output: Path, unsplit: bool = False, **settings: Any) -> Any:
    """A trainer of made-up prompts of 2 to 200 words, with 4 answers for each."""
    path = model or build_tiny_qwen2(output / "tiny_qwen2")
    words = random.Random(0)
    prompts = [
        {"prompt": "say " + " ".join(words.choices(["red", "green", "blue"], k=2 + k**2 % 199))} for k in range(16)
    ]
    config = trl.GRPOConfig(
        output_dir=str(output),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=16,  # of the batch that is generated and then cut
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        seed=7,
        **settings,
    )
    kind = trl.GRPOTrainer if unsplit else BudgetedGRPOTrainer
    policy: Any = AutoModelForCausalLM.from_pretrained(path)
    policy.warnings_issued = {}  # TRL 0.24 expects it, transformers 5 has none
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return kind(policy, variety, config, datasets.Dataset.from_list(prompts), processing_class=tokenizer)


if __name__ == "__main__":
    main()
