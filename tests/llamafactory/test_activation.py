"""Activation: in every process that imports torch, at no cost, never in the way."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ACTIVE = "import torch, sys; print(any(type(f).__name__ == 'SeamFinder' for f in sys.meta_path))"


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=120
    )


def test_import_torch_activates_unless_disabled() -> None:
    assert run(ACTIVE).stdout.strip() == "True"
    assert run(ACTIVE, ODB_FACTORY_DISABLE="1").stdout.strip() == "False"


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); from odb_factory.llamafactory.activation import activate; activate();"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert run(code).stdout.strip() == "['odb_factory']"


def test_a_run_without_a_block_imports_neither_planner_nor_workers() -> None:
    code = (
        "import sys, llamafactory.train.tuner\n"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('odb_factory.')}))"
    )
    assert run(code).stdout.splitlines()[-1] == "config errors llamafactory log refusals version"


def test_a_failure_warns_and_never_reaches_import_torch() -> None:
    code = (
        "import sys, odb_factory.llamafactory.activation as a\n"
        "def fail(): raise RuntimeError('broken on purpose')\n"
        "a.is_active = fail\n"
        "a.activate(); print('torch goes on')"
    )
    done = run(code)
    assert "torch goes on" in done.stdout
    assert "broken on purpose" in done.stderr and "odb-factory doctor" in done.stderr


def test_hooks_are_placed_once_and_reversible() -> None:
    import llamafactory.hparams.parser as parser
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    from odb_factory.llamafactory.activation import activate, deactivate, is_active

    wrapped = parser.get_train_args
    assert wrapped.__wrapped__ is not wrapped
    activate()
    assert parser.get_train_args is wrapped, "a second activation changes nothing"
    deactivate()
    try:
        assert parser.get_train_args is wrapped.__wrapped__
        assert "train" not in vars(CustomSeq2SeqTrainer), "it inherits the method, as stock"
        assert not is_active()
    finally:
        activate()
    assert is_active()
    assert parser.get_train_args.__wrapped__ is wrapped.__wrapped__


def test_a_release_without_a_seam_is_named_only_when_odb_is_used() -> None:
    code = (
        "import types, llamafactory.hparams.parser as parser\n"
        "from odb_factory.llamafactory import hooks\n"
        "hooks.hook(types.SimpleNamespace(__name__='llamafactory.data.loader'))\n"
        "print(hooks._missing)\n"
        "from llamafactory.hparams import get_train_args\n"
        "get_train_args({'odb': {'token_budget': 8}})"
    )
    done = run(code, HF_HUB_OFFLINE="1")
    assert "llamafactory.data.loader._get_preprocessed_dataset" in done.stdout
    assert "odb-factory doctor" in done.stderr.strip().splitlines()[-1]


def test_a_finder_of_old_style_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.meta_path` may hold finders without `find_spec`."""
    import llamafactory

    from odb_factory.llamafactory.activation import SeamFinder

    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    spec = SeamFinder().find_spec("llamafactory.launcher", llamafactory.__path__)
    assert spec.name == "llamafactory.launcher"


def test_a_hooked_module_keeps_its_own_loader() -> None:
    import llamafactory.hparams.parser as parser

    assert parser.__loader__ is parser.__spec__.loader
    assert "exec_module" not in vars(parser.__loader__)


RANKS = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); time.sleep(60)"


def test_sigterm_reaches_torchrun() -> None:
    """A container or a job ends with its first process, which must end after the ranks, when they have saved."""
    command = [sys.executable, "-c", RANKS]
    code = f"import os; from odb_factory.llamafactory.launch import become_torchrun as run; run({command}, os.environ)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(30) == 3
