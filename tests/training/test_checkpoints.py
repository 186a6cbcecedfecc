"""Checkpoints that are damaged, cut off or none: refused in one line, or an older one is taken; no row is lost."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import run_ranks
from toy import NUM_ROWS
from training.test_resume import BLOCK, FILL, train
from training.toy_training import audit
from transformers import Trainer

from odb_factory.data.progress import read_state
from odb_factory.errors import ConfigError, DataError, ODBError
from odb_factory.training import checkpoint as module
from odb_factory.training.checkpoint import (
    MARK,
    MARKER,
    TRAINER_STATE,
    check_optimizer,
    find_checkpoint,
    read_marker,
    read_states,
    write_marker,
)
from odb_factory.training.checks import compare_output_dirs

RANK_0 = "odb_state_rank0.json"
STEPS = 4


@pytest.fixture(scope="module")
def run(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after optimizer step 4 of its epoch, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_text, folder, block=BLOCK, stop=STEPS, num_train_epochs=1)
    return folder


@pytest.fixture(scope="module")
def filled(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with `fill`, where a resume needs the states of all ranks."""
    folder = tmp_path_factory.mktemp("filled")
    train(tiny_text, folder, block=FILL, stop=STEPS, num_train_epochs=1)
    return folder


def copied(run: Path, to: Path, *steps: int) -> Path:
    """A copy of the run with the checkpoints of these steps; returns the last."""
    to.mkdir(exist_ok=True)
    shutil.copy(run / "odb_audit_rank0.jsonl", to)
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to / f"checkpoint-{steps[-1]}"


def find(
    asked: Any,
    *,
    output_dir: Path | str = "",
    rank: int = 0,
    world_size: int = 1,
    ignore_data: bool = False,
    by_deepspeed: bool = False,
    gather: Callable[[Any], list[Any]] = lambda message: [message],
) -> Path | None:
    """On one rank, or as changed."""
    config = SimpleNamespace(resume="ignore_data" if ignore_data else "strict")
    args = SimpleNamespace(output_dir=output_dir, process_index=rank, world_size=world_size)
    odb = SimpleNamespace(config=config, gather=gather)
    found = find_checkpoint(SimpleNamespace(args=args, odb=odb, is_deepspeed_enabled=by_deepspeed), asked)
    return found and found.folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path) -> None:
    """As a person would: one number."""
    saved = json.loads(path.read_text())
    content = saved["content"]
    content["optimizer_steps"] += 1
    path.write_text(json.dumps(saved))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "truncated": truncate,
    "empty": lambda path: path.write_text(""),
    "a list": lambda path: path.write_text("[]"),
    "no fields": lambda path: path.write_text("{}"),
    "binary": lambda path: path.write_bytes(bytes(range(128, 256))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "of version 2": lambda path: path.write_text(json.dumps({"version": 2, "data": {}})),
    "edited": edit,
}


def refused(asked: Any, **options: Any) -> str:
    """The one line that says why it is not resumed."""
    with pytest.raises(ODBError) as caught:
        find(asked, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def passed_over(run: Path, folder: Path, file: str, damage: Callable[[Path], Any]) -> Path:
    """A checkpoint with this file damaged, alone; beside older ones the newest undamaged of these is taken."""
    asked = copied(run, folder / "two", 2, 3, 4)
    damage(asked / file)
    assert find(asked) == asked.with_name("checkpoint-3")
    damage(asked.with_name("checkpoint-3") / file)
    assert find(True, output_dir=asked.parent) == asked.with_name("checkpoint-2")
    alone = copied(run, folder / "alone", 4)
    damage(alone / file)
    return alone


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_or_the_older_checkpoint_taken(run: Path, tmp_path, damage: str, caplog) -> None:
    alone = passed_over(run, tmp_path, RANK_0, DAMAGES[damage])
    assert f"two/checkpoint-4/{RANK_0}" in caplog.text and "resuming checkpoint-2" in caplog.text
    line = refused(str(alone))
    assert all(words in line for words in (str(alone / RANK_0), "name an older checkpoint", "resume: ignore_data"))
    assert find(alone, ignore_data=True) == alone


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_marker_loses_nothing(run: Path, tmp_path, damage: str, caplog) -> None:
    """The older checkpoint is taken; where there is none, the states of all ranks say the same as a marker."""
    alone = passed_over(run, tmp_path, MARKER, DAMAGES[damage])
    assert find(alone) == alone
    assert str(alone / MARKER) in caplog.text and "cut off" in caplog.text


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "edited"])
def test_without_a_trainer_state_it_is_no_checkpoint(run: Path, tmp_path, damage: str) -> None:
    """Before any weights are loaded; and what does not help is not advised."""
    alone = passed_over(run, tmp_path, TRAINER_STATE, DAMAGES[damage])
    for ignore_data in (False, True):
        line = refused(alone, ignore_data=ignore_data)
        assert str(alone / TRAINER_STATE) in line and "model_name_or_path" in line and "ignore_data" not in line
    assert find(tmp_path / "two" / "checkpoint-4", ignore_data=True) == tmp_path / "two" / "checkpoint-2"


def test_a_copy_without_our_files_is_not_called_stock(run: Path, tmp_path) -> None:
    alone = copied(run, tmp_path / "alone", 4)
    for path in alone.glob("odb_state*"):
        path.unlink()
    assert "odb_state_rank0.json: it is missing" in refused(alone)


def save_by_stock(folder: Path) -> None:
    """As stock training writes `trainer_state.json`, which carries our mark along."""
    state = json.loads((folder / TRAINER_STATE).read_text())
    assert state["stateful_callbacks"][MARK] == {"args": {"optimizer_steps": 4}, "attributes": {}}
    state["stateful_callbacks"][MARK]["args"]["optimizer_steps"] = 2
    (folder / TRAINER_STATE).write_text(json.dumps(state))


def test_a_checkpoint_that_stock_training_has_overwritten_is_refused(run: Path, tmp_path) -> None:
    """Its weights have seen other rows than the files beside them record."""
    alone = copied(run, tmp_path / "alone", 4)
    save_by_stock(alone)
    assert "was written without odb, and odb_state*.json files are beside it" in refused(alone)


def test_what_is_no_checkpoint_is_refused(run: Path, tiny_text: Path, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    messages = {
        5: "5 is no folder",
        2.5: "2.5 is no folder",
        str(tmp_path / "nowhere"): "is no folder",
        str(tmp_path / "empty"): "trainer_state.json: it is missing",
        str(tiny_text): "trainer_state.json: it is missing",
        str(run): f"holds checkpoints and is none; name one of them, '{run}/checkpoint-4' is the newest",
        True: "holds no checkpoint",
    }
    for asked, words in messages.items():
        for ignore_data in (False, True):
            assert words in refused(asked, output_dir=tmp_path / "empty", ignore_data=ignore_data)
    assert "holds no checkpoint" in refused(True, output_dir=tmp_path / "nowhere")
    assert find(None) is find(False) is find("") is None
    with pytest.raises(ConfigError, match="5 is no folder"):
        train(tiny_text, tmp_path / "out", resume=5, block=BLOCK)


# The Trainer's own files

SHARDED = ("model.safetensors", "model-00001-of-00001.safetensors")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def sharded(path: Path) -> None:
    """As a larger model is saved, and a shard of it is lost."""
    path.unlink()
    index = {"weight_map": {"lm_head.weight": SHARDED[1]}}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", Path.unlink, "it holds no weights"),
        ("model.safetensors", cut_off, "it was cut off"),
        ("model.safetensors", sharded, f"{SHARDED[1]}: it is missing"),
        ("optimizer.pt", Path.unlink, "so the optimizer would restart"),
        ("optimizer.pt", truncate, "it was cut off"),
        ("scheduler.pt", Path.unlink, "so the schedule would restart"),
        ("scheduler.pt", DAMAGES["empty"], "it is empty"),
    ],
)
def test_a_damaged_file_of_the_trainer_is_refused_or_the_older_checkpoint_taken(
    run: Path, tmp_path, file: str, damage: Callable[[Path], Any], words: str, caplog
) -> None:
    """Before the model is loaded; the Trainer would continue with a fresh optimizer, or end in safetensors' error."""
    alone = passed_over(run, tmp_path, file, damage)
    line = refused(alone)
    assert str(alone) in line and words in line and "name an older checkpoint" in line
    assert words in caplog.text


def test_the_optimizer_and_schedule_of_deepspeed_are_in_its_own_files(tmp_path) -> None:
    """Without ZeRO its optimizer is in the file of the model; a schedule of its configuration is always there."""
    with pytest.raises(DataError, match="the optimizer would restart"):
        check_optimizer(tmp_path)
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "mp_rank_00_model_states.pt").touch()
    check_optimizer(tmp_path)


def test_deepspeed_loads_its_own_states_on_as_many_ranks(run: Path, tmp_path) -> None:
    """Before it makes its engine; without it the Trainer would continue with a fresh optimizer and schedule."""
    alone = copied(run, tmp_path, 4)
    for ignore_data in (False, True):
        assert "it holds no state of DeepSpeed" in refused(alone, by_deepspeed=True, ignore_data=ignore_data)
    states = alone / "global_step4"
    states.mkdir()
    shutil.copy(alone / "scheduler.pt", states / "mp_rank_00_model_states.pt")
    two_ranks = {"by_deepspeed": True, "world_size": 2, "gather": lambda message: [message, message]}
    assert find(alone, by_deepspeed=True) == find(alone, **two_ranks) == alone, "without ZeRO"
    shutil.copy(alone / "scheduler.pt", states / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert find(alone, by_deepspeed=True) == alone
    for ignore_data in (False, True):
        line = refused(alone, ignore_data=ignore_data, **two_ranks)
        assert "among 1 ranks, and DeepSpeed does not load it on 2" in line and "ignore_data" not in line
    (alone / "latest_universal").touch()
    assert find(alone, **two_ranks) == alone
    assert "are DeepSpeed's, which this training does not use, so they would restart" in refused(alone)
    assert find(alone, ignore_data=True) == alone


def zeroed(path: Path) -> None:
    """What a loss of power can leave of a file."""
    path.write_bytes(bytes(path.stat().st_size))


def zeroed_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


def flipped_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"])
@pytest.mark.parametrize(
    ("damage", "has_hashes"),
    [(zeroed, True), (truncate, True), (zeroed_half, True), (flipped_bit, True), (zeroed, False), (truncate, False)],
)
def test_content_that_cannot_be_loaded_is_passed_over(
    run: Path, tmp_path: Path, damage: Callable[[Path], None], file: str, has_hashes: bool, caplog
) -> None:
    """Any change of a file is found where it was hashed; a head of zeros and a missing end also where it was not."""
    asked = copied(run, tmp_path, 3, 4)
    hashes = asked / "odb_hashes_rank0.json"
    if not has_hashes:
        hashes.unlink()
    assert find(asked) == asked
    damage(asked / file)
    assert find(asked) == asked.with_name("checkpoint-3")
    assert str(asked / file) in caplog.text


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def callbacks_as_a_list(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stateful_callbacks": [1]}))


def path_outside(path: Path) -> None:
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": "../../x"}}))


INDEX = "model.safetensors.index.json"
HOSTILE = [(RANK_0, nested), (TRAINER_STATE, nested), (TRAINER_STATE, callbacks_as_a_list), (INDEX, nested)]


@pytest.mark.parametrize(("file", "damage"), [*HOSTILE, (INDEX, path_outside)])
def test_hostile_files_are_passed_over(
    run: Path, tmp_path: Path, file: str, damage: Callable[[Path], None], caplog
) -> None:
    """Never a traceback, which on one rank alone would leave the others waiting."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "checkpoint-²").mkdir()
    passed_over(run, tmp_path, file, damage)
    assert f"two/checkpoint-4/{file}" in caplog.text


def test_a_stock_checkpoint_that_says_it_is_incomplete(tiny_text: Path, tmp_path: Path, caplog) -> None:
    train(tiny_text, tmp_path, stop=2, num_train_epochs=1)
    asked = tmp_path / "checkpoint-2"
    assert find(asked) == asked
    (asked / "checkpoint-is-incomplete.txt").touch()
    assert find(asked) == asked
    assert "its saving was cut off" in caplog.text and "checkpoint-is-incomplete.txt" in caplog.text


def test_ignore_data_takes_a_model_without_its_optimizer_and_says_so(run: Path, tiny_text, tmp_path, caplog) -> None:
    """As `save_only_model: true` leaves it."""
    checkpoint = copied(run, tmp_path, 4)
    (checkpoint / "optimizer.pt").unlink()
    block = BLOCK | {"resume": "ignore_data"}
    train(tiny_text, tmp_path, resume=str(checkpoint), block=block, num_train_epochs=1)
    assert "so the optimizer would restart" in caplog.text
    assert rows_of(tmp_path, 0) == ONCE
    truncate(tmp_path / "checkpoint-4" / "scheduler.pt")
    assert "scheduler.pt: it was cut off" in refused(checkpoint, ignore_data=True)


# Trainings that are resumed


def rows_of(folder: Path, before: int) -> Counter:
    """Rows of the audit: those up to optimizer step `before`, and those of the resumed run."""
    lines = audit(folder)
    return Counter(row for line in lines[:before] + lines[STEPS:] for row in line["ids"])


ONCE = Counter(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("steps", "file", "resumed_from"), [((4,), MARKER, 4), ((3, 4), MARKER, 3), ((3, 4), RANK_0, 3)], ids=str
)
def test_every_row_once(run: Path, tiny_text, tmp_path, steps: tuple[int, ...], file: str, resumed_from: int) -> None:
    """I2, over a checkpoint that was cut off or damaged."""
    checkpoint = copied(run, tmp_path / "out", *steps)
    (checkpoint / file).unlink()
    train(tiny_text, tmp_path / "out", resume=str(checkpoint), block=BLOCK, num_train_epochs=1)
    assert rows_of(tmp_path / "out", resumed_from) == ONCE


@pytest.mark.parametrize("damage", ["missing", "truncated", "of version 2"])
def test_ignore_data_resumes_whatever_the_state_is_in(run: Path, tiny_text, tmp_path, damage: str) -> None:
    checkpoint = copied(run, tmp_path / "out", 3, 4)
    DAMAGES[damage](checkpoint / RANK_0)
    block = BLOCK | {"resume": "ignore_data"}
    trainer = train(tiny_text, tmp_path / "out", resume=str(checkpoint), block=block, num_train_epochs=1)
    assert rows_of(tmp_path / "out", 0) == ONCE
    assert trainer.state.log_history[-1]["step"] == STEPS + 8


class KilledWhenSaving(Trainer):
    """Dies after the Trainer's part of the checkpoint of step 4, when the older ones have been deleted."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.state.global_step == STEPS:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("limit", "left", "resumed_from"), [(1, [4], 4), (None, [1, 2, 3, 4], 3)])
def test_a_checkpoint_cut_off_loses_nothing(
    run: Path, tiny_text, tmp_path, limit: int | None, left: list[int], resumed_from: int
) -> None:
    """Also under `save_total_limit: 1`, where the one before is gone, and over a whole one of an older run."""
    if limit is None:
        copied(run, tmp_path, 4)
        (tmp_path / "checkpoint-4" / "odb_state_rank1.json").write_text("of a run with more ranks")
    with pytest.raises(KeyboardInterrupt):
        train(
            tiny_text,
            tmp_path,
            block=BLOCK,
            num_train_epochs=1,
            save_total_limit=limit,
            trainer_class=KilledWhenSaving,
        )
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in left}
    assert [path.name for path in (tmp_path / "checkpoint-4").glob("odb_state*")] == [RANK_0]
    unfinished = [folder / "_odb_state_rank0.json.0123456789abcdef" for folder in (tmp_path, tmp_path / "checkpoint-4")]
    for path in unfinished:
        path.touch()  # as a kill in the middle of a write leaves it
    train(tiny_text, tmp_path, resume=True, block=BLOCK, num_train_epochs=1)
    assert rows_of(tmp_path, resumed_from) == ONCE
    assert not any(path.exists() for path in unfinished)


def test_a_checkpoint_that_the_trainer_deletes_at_once_ends_nothing(run: Path, tiny_text, tmp_path, caplog) -> None:
    """It may take it for the oldest, beside a higher number of an older run."""
    copied(run, tmp_path, 4)
    trainer = train(tiny_text, tmp_path, block=BLOCK, num_train_epochs=1, save_total_limit=1, stop=2)
    assert trainer.state.global_step == 2
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert "checkpoint-2" in left or "deleted by the Trainer" in caplog.text


class OfATrial(Trainer):
    """Saves where a hyper-parameter search lets a trial save."""

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), "run-7")


def test_a_trial_and_restored_callbacks(tiny_text, tmp_path) -> None:
    """States stand beside the Trainer's files; `restore_callback_states_from_checkpoint` can recreate our mark."""
    train(tiny_text, tmp_path, block=BLOCK, stop=STEPS, num_train_epochs=1, trainer_class=OfATrial)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == []
    checkpoint = tmp_path / "run-7" / "checkpoint-4"
    assert {RANK_0, MARKER, TRAINER_STATE} <= {path.name for path in checkpoint.iterdir()}
    trainer = train(
        tiny_text,
        tmp_path,
        resume=str(checkpoint),
        block=BLOCK,
        num_train_epochs=1,
        restore_callback_states_from_checkpoint=True,
    )
    assert rows_of(tmp_path, STEPS) == ONCE
    last = max((tmp_path).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert json.loads((last / TRAINER_STATE).read_text())["stateful_callbacks"][MARK]["args"] == {
        "optimizer_steps": trainer.state.global_step
    }
    assert not [one for one in trainer.callback_handler.callbacks if type(one).__module__.startswith("odb_factory")]


# Ranks


def on_ranks(asked: list[Any]) -> list[Any]:
    """What `find_checkpoint` returns or raises on ranks that are threads; asked: by each."""

    def drive(seat: Any) -> Any:
        gather = seat._group.all_gather
        try:
            return find(asked[seat.rank], rank=seat.rank, world_size=len(asked), gather=gather)
        except ODBError as error:
            return error

    return run_ranks(len(asked), drive)


def of_two_ranks(run: Path, to: Path, *steps: int) -> Path:
    """Checkpoints as two ranks with one disk would have written them."""
    last = copied(run, to, *steps)
    for step in steps:
        folder = to / f"checkpoint-{step}"
        saved = json.loads((folder / RANK_0).read_text())["content"]
        for rank in (0, 1):
            data = saved["data"] | {"rank": rank, "world_size": 2}
            state = module.RankState(saved["optimizer_steps"], read_state(data), saved["run"])
            module.write_rank_state(folder, state)
        write_marker(folder, 2, step)
    return last


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([["a", "/out"], ["a", "/out"], ["b", "/elsewhere"]], []),
        ([["a", "/out"], ["b", "/x"], ["a", "/out2"]], ["rank 0 of this node has '/out' and rank 2 has '/out2'"]),
    ],
)
def test_ranks_of_a_node_that_write_elsewhere_are_named(answers: list[list[str]], said: list[str], caplog) -> None:
    """Nodes may have disks of their own."""
    compare_output_dirs("/out", lambda mine: answers)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(said)
    assert all(words in line and "\n" not in line for words, line in zip(said, lines))


def test_all_ranks_resume_the_same_checkpoint(filled: Path, tmp_path) -> None:
    """On a disk of each node something else is damaged; the newest that is whole on all of them is taken."""
    here, there = (of_two_ranks(filled, tmp_path / name, 1, 2, 3, 4) for name in ("here", "there"))
    assert on_ranks([here, there]) == [here, there]
    truncate(there / "odb_state_rank1.json")
    (here.with_name("checkpoint-3") / RANK_0).unlink()
    assert on_ranks([here, there]) == [here.with_name("checkpoint-2"), there.with_name("checkpoint-2")]
    shutil.rmtree(there.with_name("checkpoint-2"))
    assert on_ranks([here, there]) == [here.with_name("checkpoint-1"), there.with_name("checkpoint-1")]
    shutil.rmtree(there.with_name("checkpoint-1"))
    errors = on_ranks([here, there])
    assert {str(error) for error in errors} == {str(errors[1])} and "odb_state_rank1.json" in str(errors[1])
    errors = on_ranks([here, None])
    assert all("ranks [1] find no checkpoint and the others do" in str(error) for error in errors)
    assert on_ranks([None, None]) == [None, None]
    errors = on_ranks([here, 5])
    assert {str(error) for error in errors} == {str(errors[1])} and isinstance(errors[1], ConfigError)


def test_ranks_that_find_a_stock_checkpoint_and_ours_end_alike(filled: Path, tmp_path) -> None:
    here, there = (of_two_ranks(filled, tmp_path / name, 4) for name in ("here", "there"))
    save_by_stock(there)
    for path in there.glob("odb_*"):
        path.unlink()
    assert on_ranks([there, there]) == [there, there]
    errors = on_ranks([here, there])
    assert all(isinstance(error, DataError) and "some ranks find the files of odb" in str(error) for error in errors)


def test_a_rank_reads_its_own_state_alone(run: Path, filled: Path, tmp_path) -> None:
    """Those of the others only to deal out the rest of a filled epoch to another number of ranks."""
    folder = of_two_ranks(filled, tmp_path / "out", 4)
    truncate(folder / "odb_state_rank1.json")
    (state,) = read_states(folder, 0, 2)
    assert state.data.rank == 0
    for rank, world_size in ((0, 1), (2, 3)):
        with pytest.raises(DataError, match="odb_state_rank1.json: it cannot be read"):
            read_states(folder, rank, world_size)
    kept = of_two_ranks(run, tmp_path / "kept", 4)
    (kept / "odb_state_rank1.json").unlink()
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        assert [state.data.rank for state in read_states(kept, rank, world_size)] == [0]


def _write_often(folder: Path, pid: int, barrier: Any, failures: Any) -> None:
    os.getpid = lambda: pid  # containers of several nodes often have the same
    for k in range(100):
        barrier.wait(30)
        try:
            write_marker(folder, 2, k)
        except OSError as error:
            failures.put(repr(error))


def test_two_nodes_may_write_a_marker_at_once(tmp_path) -> None:
    """To one disk, with equal process ids."""
    context = multiprocessing.get_context("fork")
    barrier, failures = context.Barrier(2), context.Queue()
    writers = [context.Process(target=_write_often, args=(tmp_path, 7, barrier, failures)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert failures.empty()
    assert read_marker(tmp_path) == (2, 99)
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path) -> None:
    write_marker(tmp_path, 1, 1)
    with pytest.raises(TypeError):
        module.write_checked(tmp_path / RANK_0, {"not JSON": object()})
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


@pytest.mark.parametrize("above_is_near", [True, False])
def test_a_folder_can_be_copied_while_it_is_written(tmp_path, monkeypatch, above_is_near: bool) -> None:
    """Each rank of Ray Train copies a checkpoint when it has written its own files; the Trainer uploads `output_dir` to
    the hub, but for `_*`. A folder may be a mount or have a quota, into which nothing is moved from the one above."""
    folder, seen = tmp_path / "checkpoint-4", []
    folder.mkdir()
    replace = os.replace

    def watched(fresh: Path, path: Path) -> None:
        seen.append(fresh.parent)
        assert fresh.name.startswith("_")
        if fresh.parent != folder and not above_is_near:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(fresh, path)

    monkeypatch.setattr(os, "replace", watched)
    write_marker(folder, 1, 1)
    assert seen == [tmp_path] + [folder] * (not above_is_near)
    assert read_marker(folder) == (1, 1)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-4", MARKER]
