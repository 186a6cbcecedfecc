"""Run trainings of LLaMA-Factory's v1 in one launch; `v1_trainings.py FILE`: a JSON list of arguments."""

import json
import sys
from pathlib import Path

from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.trainers.sft_trainer import run_sft

if __name__ == "__main__":
    # All trainings share one process group.
    destroy, DistributedInterface.destroy = DistributedInterface().destroy, lambda self: None
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        run_sft(arguments)
    destroy()
