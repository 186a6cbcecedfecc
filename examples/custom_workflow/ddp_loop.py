"""A custom training loop in plain PyTorch, one process or DistributedDataParallel, with batches formed online.

python examples/custom_workflow/ddp_loop.py
torchrun --nproc_per_node 2 examples/custom_workflow/ddp_loop.py

With --resume it continues after its last checkpoint, also with another number of ranks if batch_size x
gradient_accumulation_steps x ranks stays the same.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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
    parser.add_argument("--output", type=Path, default=Path("saves/ddp_loop"), help="(%(default)s)")
    parser.add_argument("--token_budget", type=int, default=2048, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=4, help="rows a rank would have at a time (%(default)s)")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="of such batches (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--save_steps", type=int, default=10, help="optimizer steps between checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in --output")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="a real model wants about 1e-5 (%(default)s)")
    args = parser.parse_args()

    # torchrun sets these three; without it this is the only process.
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")

    path = args.model or args.output / "tiny_qwen2"
    if args.model is None and rank == 0:
        build_tiny_qwen2(path)
    if ranks > 1:
        dist.barrier()  # the others wait for the files
    network = AutoModelForCausalLM.from_pretrained(path).float().to(device).train()
    model = DistributedDataParallel(network, [local_rank] if on_gpu else None) if ranks > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    checkpoint = args.output / "checkpoint.pt"

    if args.data:
        rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    else:
        rows = [{"prompt": f"What does the Python reference say on {name}?", "answer": text.strip()}
                for name, topic in topics.items() for text in topic.split("\n\n")[1:15] if text.strip()]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(path)
    dataset = Chats(rows, tokenizer)

    # On every rank, once the process group is there; give it the whole dataset: each rank takes its own share.
    # As a context manager it ends its workers, and reports an error of this rank to the others.
    with ODBDataLoader(
        dataset, args.batch_size, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer), num_workers=1,
        pin_memory=on_gpu, gradient_accumulation_steps=args.gradient_accumulation_steps,
        token_budget=args.token_budget, audit_dir=args.output,
    ) as loader:  # fmt: skip
        # An optimizer step has batch_size x gradient_accumulation_steps x ranks samples, so their number is known.
        total_steps = args.epochs * loader.num_optimizer_steps
        schedule = LambdaLR(optimizer, lambda step: 1 - step / total_steps)
        step = samples = 0
        if args.resume:
            saved = torch.load(checkpoint, map_location=device)
            network.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            loader.load_state_dict(saved["loader"])  # the same on every rank
            step, samples = saved["step"], saved["samples"]
        for epoch in range(loader.epoch, args.epochs):
            loader.set_epoch(epoch)  # a new order; where a state was loaded, its place in this epoch
            total = torch.zeros((), device=device)
            # Each optimizer step comes in as many micro-batches as the budget needs, as many on every rank.
            for batch in loader:
                info = pop_step_info(batch)  # takes out what is not for the model
                batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
                # Ranks exchange gradients once for each optimizer step. A rank that has no sample in a micro-batch when
                # others have gets one with loss_scale 0. It is run all the same: DDP waits for every rank's backward.
                with model.no_sync() if ranks > 1 and not info.ends_optimizer_step else nullcontext():
                    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu and torch.cuda.is_bf16_supported()):
                        loss = model(**batch).loss * info.loss_scale  # do not divide by the accumulation steps
                    loss.backward()
                total += loss.detach()
                if not info.ends_optimizer_step:
                    continue

                samples += info.optimizer_step_samples  # of all ranks
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

                # loss_scale is made for gradients that DDP averages over ranks. So the scaled losses, summed over
                # micro-batches and ranks and divided by the ranks, are the mean over all answer tokens of the step.
                if ranks > 1:
                    dist.all_reduce(total)
                step += 1
                if rank == 0:
                    print(f"epoch {epoch} step {step} samples {samples} loss {total.item() / ranks:.5f}", flush=True)
                total.zero_()

                if step % args.save_steps == 0 and rank == 0:
                    parts = {"model": network, "optimizer": optimizer, "schedule": schedule, "loader": loader}
                    saved = {name: part.state_dict() for name, part in parts.items()}
                    torch.save(saved | {"step": step, "samples": samples}, checkpoint)

    if rank == 0:
        print(f"{samples} samples of {len(dataset)} rows in {step} optimizer steps on {ranks} rank{'s' * (ranks > 1)}")
        network.save_pretrained(args.output / "model")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
