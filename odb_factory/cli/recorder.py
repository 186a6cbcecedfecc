"""Run LLaMA-Factory's command line and write down every micro-batch it trains on.

`python -m odb_factory.cli.recorder BATCHES.jsonl train my.yaml` does what `llamafactory-cli train
my.yaml` does. The recording is the same for every way of batching: it looks at the tensors that
reach `Trainer.training_step`. One JSON line a micro-batch: `lengths` (real tokens of each row),
`length` (of the padded row), `begin` and `end` (seconds since the epoch of the clock).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    record, *arguments = sys.argv[1:]
    sys.argv = ["llamafactory-cli", *arguments]

    from llamafactory.cli import main as llamafactory_main
    from transformers import Trainer

    training_step = Trainer.training_step
    with Path(record).open("w", encoding="utf-8", buffering=1) as lines:

        def recorded(self, model, inputs, *args, **kwargs):
            line = {
                "lengths": inputs["attention_mask"].sum(-1).tolist(),
                "length": inputs["input_ids"].shape[1],
                "begin": time.time(),
            }
            loss = training_step(self, model, inputs, *args, **kwargs)
            lines.write(json.dumps(line | {"end": time.time()}) + "\n")
            return loss

        Trainer.training_step = recorded
        llamafactory_main()


if __name__ == "__main__":
    main()
