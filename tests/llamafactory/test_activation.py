"""Activation in every process that imports torch."""

from __future__ import annotations

import os
import subprocess
import sys

import llamafactory.hparams.parser as parser
import pytest
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from odb_factory.llamafactory.activation import activate, deactivate, is_active

ACTIVE = "import torch, sys; print(any(type(f).__name__ == 'SeamFinder' for f in sys.meta_path))"
IMPORTS = """
import sys; before = set(sys.modules)
from odb_factory.llamafactory.activation import activate; activate()
print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
WITHOUT_A_BLOCK = """
import sys, llamafactory.train.tuner
print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('odb_factory.')}))
"""
FAILURE = """
import odb_factory.llamafactory.activation as activation
def fail(): raise RuntimeError('broken on purpose')
activation.is_active = fail
activation.activate(); print('torch goes on')
"""
MISSING_SEAM = """
import types, llamafactory.hparams.parser
from odb_factory.llamafactory import hooks
hooks.hook(types.SimpleNamespace(__name__='llamafactory.data.loader'))
from llamafactory.hparams import get_train_args
try: get_train_args({'odb': {'token_budget': 8}})
except Exception as error: print('llamafactory.data.loader._get_preprocessed_dataset' in str(error))
"""
PROCESSES: dict[str, tuple[str, dict[str, str], str, str]] = {
    "import torch activates": (ACTIVE, {}, "True", ""),
    "disabled": (ACTIVE, {"ODB_FACTORY_DISABLE": "1"}, "False", ""),
    "only the standard library is imported": (IMPORTS, {}, "['odb_factory']", ""),
    "no block": (WITHOUT_A_BLOCK, {}, "config errors llamafactory log refusals version", ""),
    "a failure only warns": (FAILURE, {}, "torch goes on", "broken on purpose"),
    "a seam that this release lacks": (MISSING_SEAM, {}, "True", ""),
}
"""Code, environment, last line of the output, text in the standard error."""


@pytest.mark.parametrize("case", PROCESSES)
def test_process(case: str) -> None:
    code, env, printed, warned = PROCESSES[case]
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == printed, ended.stderr
    assert warned in ended.stderr


def test_hooks_are_placed_once_and_reversible() -> None:
    wrapped = parser.get_train_args
    assert wrapped.__wrapped__ is not wrapped
    activate()
    assert parser.get_train_args is wrapped, "a second activation changes nothing"
    deactivate()
    try:
        assert parser.get_train_args is wrapped.__wrapped__
        assert "train" not in vars(CustomSeq2SeqTrainer), "the class inherits the method, as in stock"
        assert not is_active()
    finally:
        activate()
    assert is_active()
    assert parser.get_train_args.__wrapped__ is wrapped.__wrapped__
    assert "exec_module" not in vars(parser.__loader__), "a hooked module keeps its own loader"


RANKS = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); time.sleep(60)"


def test_sigterm_reaches_torchrun() -> None:
    """A container or job ends with its first process, which must end after the ranks have saved."""
    command = [sys.executable, "-c", RANKS]
    code = f"import os; from odb_factory.llamafactory.hooks import become_torchrun as run; run({command}, os.environ)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(30) == 3
