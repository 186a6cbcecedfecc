"""Lightning with batches formed online: the module stays as it is, the loader and a callback are new.

python examples/custom_workflow/lightning_fit.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from odb_factory import ODBDataLoader
from odb_factory.cli.demo import build_tiny_qwen2
from odb_factory.integrations.lightning import OnlineBatching, OptimizerSteps


class Module(LightningModule):
    def __init__(self, path: str):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path).train()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss  # of one micro-batch: the mean over its tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="name or folder of a model (none: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("saves/lightning_fit"), help="(%(default)s)")
    args = parser.parse_args()
    path = args.model or build_tiny_qwen2(args.output / "tiny_qwen2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [text.strip() for topic in topics.values() for text in topic.split("\n\n")[1:8] if text.strip()]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with ODBDataLoader(
        [{"input_ids": row, "labels": row} for row in ids], batch_size=16, shuffle=True, num_workers=1,
        collate_fn=DataCollatorForSeq2Seq(tokenizer), token_budget=2048, audit_dir=args.output,
    ) as loader:  # fmt: skip
        trainer = Trainer(max_epochs=1, callbacks=[OnlineBatching()], default_root_dir=args.output, logger=False)
        trainer.fit(Module(path), OptimizerSteps(loader))
        loss = trainer.callback_metrics["odb/loss"]
        print(f"{len(ids)} rows in {trainer.global_step} optimizer steps, loss {loss:.4f}")


if __name__ == "__main__":
    main()
