"""Run LLaMA-Factory's command line and write down every micro-batch it trains on.

`python examples/benchmark/recorder.py BATCHES.jsonl my.yaml` does what `llamafactory-cli train my.yaml` does, torchrun
included where it is asked for. The recording is the same for every way of batching: it looks at the tensors that
reach `Trainer.training_step`. One JSON line a micro-batch: `optimizer_step` (its number in the run, from 0), `lengths`
(real tokens of each sample), `rows` and `length` (of the tensor; a flat one has one row), `begin` and `end` (Unix time,
seconds), `cpu_begin` and `cpu_end` (CPU time of the process, seconds), `peak_memory` (largest resident set so far,
bytes; 0 where it is not known). Rank 1 writes to BATCHES.jsonl.1, and so on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The folder of a script comes first on sys.path, where its modules would pass for top-level ones.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes; getrusage counts in KiB elsewhere


def _peak_memory() -> int:
    """Bytes; 0 on Windows, which has no `resource`."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def record_of(record: Path, rank: int) -> Path:
    return record if rank == 0 else record.with_name(f"{record.name}.{rank}")


def main() -> None:
    record, config = sys.argv[1:]

    from llamafactory import cli, launcher
    from llamafactory.extras.misc import is_env_enabled

    if is_env_enabled("FORCE_TORCHRUN") and "RANK" not in os.environ:
        launcher.__file__ = __file__  # given to torchrun, with the arguments after "train"
        sys.argv = ["llamafactory-cli", "train", record, config]
        cli.main()
        return

    from llamafactory.train.tuner import run_exp
    from odb_factory.comm.gloo import pause_at_exit
    from transformers import Trainer

    if "RANK" in os.environ:
        pause_at_exit()
    training_step = Trainer.training_step
    with record_of(Path(record), int(os.environ.get("RANK", 0))).open("w", encoding="utf-8", buffering=1) as lines:

        def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.state.max_steps:  # a measurement of odb's, before the training
                return training_step(self, model, inputs, *args, **kwargs)
            rows, length = inputs["input_ids"].shape
            line: dict[str, Any] = {"lengths": _real_tokens(inputs), "rows": rows, "length": length}
            line |= {"optimizer_step": self.state.global_step}
            line |= {"begin": time.time(), "cpu_begin": time.process_time()}
            loss = training_step(self, model, inputs, *args, **kwargs)
            line |= {"end": time.time(), "cpu_end": time.process_time()}
            line |= {"peak_memory": _peak_memory()}
            lines.write(json.dumps(line) + "\n")
            return loss

        setattr(Trainer, "training_step", recorded)  # noqa: B010
        sys.argv = ["llamafactory-cli", config]
        run_exp()


def _real_tokens(inputs: Any) -> list[int]:
    """Of each row, from its attention mask: [rows, length], or [rows, 1, length, length] of added minima and zeros.

    Of a flat row from its positions, which restart with each sample; a segment without labels is no sample.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        positions = inputs["position_ids"].reshape(-1, inputs["input_ids"].shape[1])[0]
        starts = (positions == 0).nonzero().flatten().tolist()
        segments = (inputs["labels"][0] != -100).tensor_split(starts[1:])
        return [len(segment) for segment in segments if segment.any()]
    if mask.dim() == 4:
        mask = mask.diagonal(dim1=-2, dim2=-1)[:, 0] == 0  # a padding token does not see itself
    return mask.sum(-1).tolist()


if __name__ == "__main__":
    main()
