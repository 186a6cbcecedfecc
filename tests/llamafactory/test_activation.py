"""Activation in every process that imports torch, the diff for forks, and stock's behaviour that odb_factory relies on.

Every run also compares rows made one at a time with stock's pass, and ends before training if they differ.

"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import av
import llamafactory
import llamafactory.hparams.parser as parser
import pytest
from llamafactory.data import mm_plugin
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from llamafactory.train.tuner import run_exp
from PIL import Image
from stock import load_data
from support import RUN_TIMEOUT_S, read_audit, read_log, run_llamafactory, training_config

from odb_factory.errors import ConfigError
from odb_factory.llamafactory import dataset, media
from odb_factory.llamafactory.activation import activate, deactivate, is_active

pytestmark = pytest.mark.timeout(600)

ACTIVE = "import torch, sys; print(any(type(f).__name__ == 'SeamFinder' for f in sys.meta_path))"
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
    "no block": (WITHOUT_A_BLOCK, {}, "config errors llamafactory log refusals", ""),
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


PATCH = Path(__file__).parents[2] / "patches" / f"llamafactory-{metadata.version('llamafactory')}.diff"


def apply(root: Path, *options: str) -> None:
    """root: the folder of the source, outside of any repository."""
    git = ["git", "apply", *options, str(PATCH)]
    ended = subprocess.run(git, cwd=root, capture_output=True, text=True, env=os.environ | {"GIT_DIR": "nowhere"})
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for PYTHONPATH: the installed release with its patch, which can be reversed."""
    if not PATCH.exists():
        pytest.skip(f"there is no {PATCH.name}, for the release that is installed")
    folder = tmp_path_factory.mktemp("patched")
    package = Path(llamafactory.__file__).parent
    shutil.copytree(package, folder / "src" / "llamafactory", ignore=shutil.ignore_patterns("__pycache__"))
    apply(folder)
    apply(folder, "--reverse")
    for path in (folder / "src" / "llamafactory").rglob("*.py"):
        assert path.read_bytes() == (package / path.relative_to(folder / "src" / "llamafactory")).read_bytes()
    apply(folder)
    return folder / "src"


@pytest.mark.versions
@pytest.mark.parametrize("way", ["patch", pytest.param("both", marks=pytest.mark.nightly)])
def test_odb_attaches_once_by_patch_or_plugin(patched, tiny_text, data_dir, tmp_path, way: str) -> None:
    """Same micro-batches and losses, no preprocessing pass over the training rows."""
    block = {"token_budget": 256, "buffer_size": 24, "audit": True}
    changes = {"max_steps": 2, "val_size": 4, "per_device_train_batch_size": 4}
    plugin, by_patch = (training_config(tiny_text, data_dir, tmp_path / name, **changes) for name in ("plugin", way))
    run_exp(plugin | {"odb": block | {"token_budget": 768}})
    # The fork comes first on the path.
    path = os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path} | ({"ODB_FACTORY_DISABLE": "1"} if way == "patch" else {})
    ended = run_llamafactory(by_patch | {"odb": block}, "odb.token_budget=768", env=env)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.count("online dynamic batching is on") == 1
    assert ("called by the patched workflow" in ended.stdout) == (way == "patch")
    assert not re.search("Running tokenizer .*36/36", ended.stdout), "only rows for evaluation"
    audit = read_audit(tmp_path / way)
    assert {line["optimizer_step"] for line in audit} == {1, 2}
    assert all(line["rows"] * line["length"] <= 768 for line in audit if line["rows"] > 1)
    assert audit == read_audit(tmp_path / "plugin")
    losses = [[entry.get("loss") for entry in read_log(tmp_path / name)] for name in ("plugin", way)]
    assert losses[0] == losses[1]


WITHOUT_ODB_FACTORY = """
import json, sys
sys.modules['odb_factory'] = None
from llamafactory.train.tuner import run_exp
config = json.load(sys.stdin)
run_exp(dict(config))
try: run_exp(config | {'odb': {'token_budget': 8}})
except ImportError as error: print('with a block:', error)
"""


def test_without_a_block_a_patched_fork_trains_where_odb_factory_is_not_installed(
    patched, tiny_text, data_dir, tmp_path
) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", max_steps=2)
    command = [sys.executable, "-P", "-c", WITHOUT_ODB_FACTORY]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(patched)}
    done = subprocess.run(
        command, input=json.dumps(config), env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 0 and "Running tokenizer on dataset" in done.stderr, done.stderr[-3000:]
    assert len([entry for entry in read_log(tmp_path / "out") if "loss" in entry]) == 2
    last_line = done.stdout.splitlines()[-1]
    assert last_line.startswith("with a block:") and "odb_factory" in last_line


BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_vl: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_vl, data_dir, tmp_path / "out", dataset="pictures", odb=BLOCK)


def load(config: dict[str, Any]) -> Any:
    """The training dataset of a run with a block."""
    return load_data(config)["train_dataset"]


@pytest.mark.versions
def test_metadata_of_videos_give_their_patches(config: dict[str, Any], tmp_path: Path) -> None:
    if not hasattr(mm_plugin.Qwen3VLPlugin, "_get_video_token_metadata"):
        pytest.skip("this release decodes videos to know their size")
    video = str(tmp_path / "tiny.avi")
    with av.open(video, "w") as container:  # eight blank frames, one second
        stream = container.add_stream("mjpeg", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 48)))))
        container.mux(stream.encode())
    observer = load(config).media
    real = int(observer.original._get_mm_inputs([], [video], [], observer.processor)["video_grid_thw"].prod())
    assert observer.count_media({"videos": [video]}, []).video_patches == real > 0 and observer._by_formula


CHANGED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "_system": ("align_dataset", lambda row: {"_system": "be brief"}),
    "input_ids": ("_get_preprocessed_dataset", lambda row: {"input_ids": row["input_ids"][:-1]}),
    "labels": ("_get_preprocessed_dataset", lambda row: {"labels": row["input_ids"]}),
    "weights": ("_get_preprocessed_dataset", lambda row: {"weights": 1.0}),
}
"""By column: a pass of stock that does more than the functions that odb calls for each row."""


@pytest.mark.versions
@pytest.mark.parametrize("column", CHANGED)
def test_a_pass_that_does_more_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    name, change = CHANGED[column]
    stock = getattr(dataset, name)
    monkeypatch.setattr(dataset, name, lambda *args, **kwargs: stock(*args, **kwargs).map(change))
    with pytest.raises(ConfigError, match=f"gives another {column.replace('_system', 'input_ids')} "):
        load(config)


def test_a_formula_that_differs_is_not_used(config, monkeypatch) -> None:
    """`_regularize_images` gives other sizes than the processor: patches are then counted from its output."""
    patches = media.MediaObserver.count_media
    online = load(config)
    assert online.media._by_formula
    expected = patches(online.media, online[1], [])
    regular = mm_plugin.Qwen2VLPlugin._regularize_images

    def halved(self: Any, images: Any, **kwargs: Any) -> Any:
        answer = regular(self, images, **kwargs)
        if isinstance(images[0], media.SizeOnlyImage):
            answer["images"] = [image.resize((image.width // 2, image.height // 2)) for image in answer["images"]]
        return answer

    for owner in (mm_plugin.MMPluginMixin, mm_plugin.Qwen2VLPlugin, mm_plugin.Qwen3VLPlugin):
        if "_regularize_images" in vars(owner):
            monkeypatch.setattr(owner, "_regularize_images", halved)
    observer = load(config).media
    assert not observer._by_formula
    assert patches(observer, online[1], []) == expected
