"""TRL's SFTTrainer with batches formed online: one more line.

python examples/custom_workflow/trl_sft.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from odb_factory import enable_odb
from odb_factory.cli.demo import build_tiny_qwen2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a chat model (none: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("saves/trl_sft"), help="(%(default)s)")
    args = parser.parse_args()
    training = SFTConfig(
        output_dir=str(args.output), use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
        per_device_train_batch_size=16, learning_rate=2e-3, num_train_epochs=1, save_strategy="no", report_to="none",
    )  # fmt: skip
    with training.main_process_first():  # under torchrun one rank makes the files, the others read them
        path = args.model or build_tiny_qwen2(args.output / "tiny_qwen2")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.warnings_issued = {}  # TRL 0.24 asks for it, and transformers 5 has it no more
    rows = [{"prompt": [{"role": "user", "content": f"What does the Python reference say on {name}?"}],
             "completion": [{"role": "assistant", "content": text.strip()}]}
            for name, topic in topics.items() for text in topic.split("\n\n")[1:8] if text.strip()]  # fmt: skip
    trainer = SFTTrainer(
        model, training, train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(path)
    )
    enable_odb(trainer, token_budget=512, audit=True)  # that is all
    trainer.train()


if __name__ == "__main__":
    main()
