"""A custom training loop with accelerate, in one process or in several (DDP), with batches formed online.

python examples/custom_workflow/accelerate_loop.py
torchrun --nproc_per_node 2 examples/custom_workflow/accelerate_loop.py

With --resume it continues after its last checkpoint, also with another number of ranks if batch_size x
gradient_accumulation_steps x ranks stays the same.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from odb_factory import ODBDataLoader, pop_step_info
from odb_factory.cli.demo import build_tiny_qwen2


class Chats(Dataset):
    """Tokenizes a row when it is asked for: there is no pass over the data before training."""

    def __init__(self, rows: list[dict[str, str]], tokenizer):
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        asked = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = self.tokenizer(row["answer"] + self.tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return {"input_ids": asked + answer, "labels": [-100] * len(asked) + answer}  # loss on the answer alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a chat model (none: a tiny random one)")
    parser.add_argument("--data", type=Path, help='JSON Lines of {"prompt", "answer"} (none: Python\'s help topics)')
    parser.add_argument("--output", type=Path, default=Path("saves/accelerate_loop"), help="(%(default)s)")
    parser.add_argument("--token_budget", type=int, default=2048, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=4, help="rows a rank would have at a time (%(default)s)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="of such batches (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--save_steps", type=int, default=10, help="optimizer steps between checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --output")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="a real model wants about 1e-5 (%(default)s)")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    precision = "bf16" if has_gpu and torch.cuda.is_bf16_supported() else "no"
    accelerator = Accelerator(cpu=not has_gpu, mixed_precision=precision)
    with accelerator.main_process_first():  # under torchrun one rank makes the files, the others read them
        path = args.model or build_tiny_qwen2(args.output / "tiny_qwen2")
    if args.data:
        rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    else:
        rows = [{"prompt": f"What does the Python reference say on {name}?", "answer": text.strip()}
                for name, topic in topics.items() for text in topic.split("\n\n")[1:15] if text.strip()]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # Give it the whole dataset on every rank: each rank takes its own share.
    loader = ODBDataLoader(
        Chats(rows, tokenizer), args.batch_size, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer),
        num_workers=1, pin_memory=has_gpu, gradient_accumulation_steps=args.gradient_accumulation_steps,
        token_budget=args.token_budget, audit_dir=args.output,
    )  # fmt: skip
    # An optimizer step has batch_size x gradient_accumulation_steps x ranks samples, so their number is known. The
    # schedule is not prepared: accelerate would step it once for each rank.
    samples, total_steps = 0, args.epochs * loader.num_optimizer_steps
    schedule = LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    if args.resume:
        accelerator.load_state(str(args.output / "checkpoint"))  # with the loader's place in its epoch

    # As a context manager the loader ends its workers, and reports an error of this rank to the others.
    with loader:
        for epoch in range(loader.epoch, args.epochs):
            loader.set_epoch(epoch)  # a new order; after `load_state` its place in this epoch
            total = torch.zeros((), device=accelerator.device)
            # Each optimizer step comes in as many micro-batches as the budget needs, as many on every rank.
            for batch in loader:
                info = pop_step_info(batch)  # takes out what is not for the model
                # Ranks exchange gradients once for each optimizer step. A rank that has no sample in a micro-batch when
                # others have gets one with loss_scale 0. It is run all the same: DDP waits for every rank's backward.
                with nullcontext() if info.ends_optimizer_step else accelerator.no_sync(model):
                    loss = model(**batch).loss * info.loss_scale  # do not divide by the accumulation steps
                    accelerator.backward(loss)
                total += loss.detach()
                if not info.ends_optimizer_step:
                    continue

                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

                # loss_scale is made for gradients that DDP averages over ranks. So the scaled losses, summed over
                # micro-batches and averaged over ranks, are the mean over all answer tokens of the step.
                mean = accelerator.reduce(total, "mean").item()
                samples += info.optimizer_step_samples  # of all ranks
                step = schedule.last_epoch
                accelerator.print(f"epoch {epoch} step {step} samples {samples} loss {mean:.5f}", flush=True)
                total.zero_()
                if step % args.save_steps == 0:
                    accelerator.save_state(str(args.output / "checkpoint"))

    steps, num_ranks = schedule.last_epoch, accelerator.num_processes
    accelerator.print(f"{samples} samples of {len(rows)} rows in {steps} optimizer steps, ranks: {num_ranks}")
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output / "model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
