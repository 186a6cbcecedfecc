"""Trainings of LLaMA-Factory's v1, one after the other in the processes of one launch: `v1_trainings.py FILE`.

The file holds a list of [command, arguments].
"""

import importlib
import json
import sys
from pathlib import Path

from llamafactory.v1.accelerator.interface import DistributedInterface

if __name__ == "__main__":
    destroy, DistributedInterface.destroy = DistributedInterface().destroy, lambda self: None  # one group for all
    for command, arguments in json.loads(Path(sys.argv[1]).read_text()):
        trainer = importlib.import_module(f"llamafactory.v1.trainers.{command}_trainer")
        getattr(trainer, f"run_{command}")(arguments)
    destroy()
