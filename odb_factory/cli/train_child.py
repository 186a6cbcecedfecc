"""What torchrun runs in each process of `odb-factory train`: activate, then as LLaMA-Factory's launcher.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of a script comes first on sys.path, where its modules would pass for top-level ones.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]

    from odb_factory.llamafactory import activation

    activation.activate()

    from llamafactory.train.tuner import run_exp

    run_exp()
