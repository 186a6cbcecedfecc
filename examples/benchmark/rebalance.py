"""The batches of `train_sampling_strategy: batch_rebalance`, for processes whose transformers does not have it.

Runs in an environment of its own. First it writes its version of transformers; then it reads a JSON line with lengths,
batch_size (of an optimizer step), ranks and accumulation, and writes one with the batches of every rank.
"""

from __future__ import annotations

import json
import sys

import transformers
from transformers.trainer_pt_utils import BatchRebalanceSampler


def main() -> None:
    print(json.dumps(transformers.__version__), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        batches = [
            list(
                BatchRebalanceSampler(
                    lengths=asked["lengths"],
                    effective_batch_size=asked["batch_size"],
                    dp_size=asked["ranks"],
                    grad_accum=asked["accumulation"],
                    rank=rank,
                    shuffle=False,  # the samples are drawn at random
                )
            )
            for rank in range(asked["ranks"])
        ]
        print(json.dumps(batches), flush=True)


if __name__ == "__main__":
    main()
