"""A Hugging Face Trainer with batches formed online: one more line.

python examples/custom_workflow/hf_trainer.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from odb_factory import enable_odb
from odb_factory.cli.demo import build_tiny_qwen2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a chat model (none: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("saves/hf_trainer"), help="(%(default)s)")
    parser.add_argument("--token_budget", type=int, default=2048, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="a real model wants about 1e-5 (%(default)s)")
    args = parser.parse_args()

    training = TrainingArguments(
        output_dir=str(args.output), use_cpu=not torch.cuda.is_available(), num_train_epochs=2,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(), learning_rate=args.learning_rate,
        eval_strategy="epoch", save_strategy="no", logging_steps=5, dataloader_num_workers=1, report_to="none",
    )  # fmt: skip
    with training.main_process_first():  # under torchrun one rank makes the files, the others read them
        path = args.model or build_tiny_qwen2(args.output / "tiny_qwen2")
    tokenizer = AutoTokenizer.from_pretrained(path)

    rows = Dataset.from_list(
        [{"prompt": f"What does the Python reference say on {name}?", "answer": text.strip()}
         for name, topic in topics.items() for text in topic.split("\n\n")[1:15] if text.strip()]
    )  # fmt: skip

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        turn = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return {"input_ids": asked + answer, "labels": [-100] * len(asked) + answer}

    # Any dataset whose items have `input_ids` and `labels` will do; tokenizing in `__getitem__` saves this pass.
    parts = rows.map(encode, remove_columns=rows.column_names).train_test_split(0.1, seed=0)
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(path), training, DataCollatorForSeq2Seq(tokenizer),
        train_dataset=parts["train"], eval_dataset=parts["test"],
    )  # fmt: skip
    enable_odb(trainer, token_budget=args.token_budget, audit=True)  # that is all
    trainer.train()
    trainer.save_model(str(args.output / "model"))


if __name__ == "__main__":
    main()
