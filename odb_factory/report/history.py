"""The log of a run: its entries in the order of optimizer steps, with the seconds of training at each.

Three files tell of it. `odb_log.jsonl` has all, of the optimizer steps that odb took. LLaMA-Factory's
`trainer_log.jsonl` has losses and whole seconds, the Trainer's `trainer_state.json` the figures without times; stock
runs have these two alone. What a run did behind the checkpoint from which it went on later is left out, and seconds
count the processes one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_factory.report import shapes
from odb_factory.report.files import FilesRead

RUN_LOG, TRAINER_LOG, TRAINER_STATE = "odb_log.jsonl", "trainer_log.jsonl", "trainer_state.json"
RENAMED = {"lr": "learning_rate"}
NO_FIGURES = ("current_steps", "total_steps", "percentage", "step")
SAME = 1e-3
"""Losses of two files that differ by less, relatively, are of the same run; releases of transformers round them."""


@dataclass(slots=True)
class Entry:
    """One log entry. step: optimizer steps taken. seconds: of training until it; None: not known.

    begin_step, begin_seconds: where the process began, whose first entry counts from there.
    sums: see `StepStatistics`, since the entry before. rows: those left out so far, as in the summary.
    tells_odb: its file has figures of odb's if it was trained with odb.
    """

    step: int
    values: dict[str, float]
    seconds: float | None = None
    begin_step: int = 0
    begin_seconds: float = 0.0
    sums: dict[str, float] | None = None
    rows: dict[str, Any] | None = None
    tells_odb: bool = True


@dataclass(slots=True)
class Process:
    """A process that trained with odb. time: when it began (Unix time). begin: what it wrote then.

    ended_at: the optimizer step at which it came to its end; None: it did not.
    """

    time: float
    optimizer_steps: int
    ranks: int
    begin: Mapping[str, Any]
    ended_at: int | None = None

    @property
    def ended(self) -> bool:
        return self.ended_at is not None


@dataclass
class History:
    """entries: those with a training loss. evaluations: those of evaluations. results: of the end of the run.

    processes: those that trained with odb. restarts: how often stock's log goes back to an earlier optimizer step or
    time. whole_seconds: whether times are such. max_steps: that the run is to take. no_begin: `odb_log.jsonl` has lines
    of a process whose begin line is not there. ended_at: the optimizer step at which odb last came to its end, if it
    did. other_runs: files that tell of another run than `odb_log.jsonl`, or the newer one, and what shows it.
    """

    entries: list[Entry] = field(default_factory=list)
    evaluations: list[Entry] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    restarts: int = 0
    whole_seconds: bool = False
    max_steps: int | None = None
    no_begin: bool = False
    ended_at: int | None = None
    other_runs: dict[str, str] = field(default_factory=dict)


def read_history(folder: Path, files: FilesRead) -> History:
    """All logs of an output folder as one."""
    history = _read_run_log(folder / RUN_LOG, files)
    logged, stated = _read_trainer_log(folder / TRAINER_LOG, files), _read_state(folder, files)
    others = [(logged, folder / TRAINER_LOG), (stated, folder / TRAINER_STATE)]
    others.sort(key=lambda other: -_time_of(other[1]))  # where they disagree, the one that was written last counts
    begins = history.processes
    own = [entry for entry in history.entries + history.evaluations if entry.seconds is not None]
    for other, path in others:
        if _disagree(history, other):
            history.other_runs[path.name] = "other losses at the same optimizer steps"
            continue
        # Files from before odb began tell of what it went on from; written since then, of what came after it, too.
        first = begins[0].optimizer_steps if begins and _time_of(path) < begins[0].time else None
        history.entries = _merged(history.entries, other.entries, first)
        history.evaluations = _merged(history.evaluations, other.evaluations, first)
        history.restarts += other.restarts
        if not begins or _time_of(path) >= begins[-1].time:
            history.results = other.results | history.results
            if not begins:  # with `fill` the others have an estimate
                history.max_steps = history.max_steps or other.max_steps
    _go_on_from_stock(history, own)
    exact = {id(entry) for entry in own}
    history.whole_seconds = any(entry.seconds is not None and id(entry) not in exact for entry in history.entries)
    return history


def _go_on_from_stock(history: History, own: list[Entry]) -> None:
    """Where odb went on from a stock checkpoint its seconds begin behind those of stock, if these are known."""
    first = history.processes[0].optimizer_steps if history.processes else 0
    before = [entry.seconds or 0.0 for entry in history.entries if entry.step <= first]
    for entry in own if before else ():
        entry.begin_seconds += max(before)
        if entry.seconds is not None:
            entry.seconds += max(before)


def _read_run_log(path: Path, files: FilesRead) -> History:
    history, offset = History(), 0.0
    process: Process | None = None  # None: its begin line is not there
    for line in files.lines(path, shapes.run_log_line):
        if line["event"] == "begin":
            _go_back(history, line["optimizer_steps"])
            offset = max((entry.seconds or 0.0 for entry in history.entries), default=0.0)
            process = Process(line["time"], line["optimizer_steps"], line["ranks"], line)
            history.processes.append(process)
            history.max_steps, history.ended_at = line.get("max_steps"), None
            continue
        if line["event"] == "end":
            history.no_begin |= process is None
            history.ended_at = line["optimizer_step"]
            if process is not None:
                process.ended_at = history.ended_at
            continue
        entry = Entry(line["optimizer_step"], {**_figures(line["logs"]), "epoch": line["epoch"]})
        entry.sums, entry.rows = _interned(line.get("sums")), _interned(line.get("rows"))
        if "loss" in entry.values and any(one.step >= entry.step for one in history.entries[-1:]):
            _go_back(history, entry.step - int((entry.sums or {}).get("optimizer_steps", 1)))
            process = None
        history.no_begin |= process is None
        if process is not None:
            entry.seconds = offset + line["time"] - process.time
            entry.begin_step, entry.begin_seconds = process.optimizer_steps, offset
        _put(history, entry)
    return history


def _read_trainer_log(path: Path, files: FilesRead) -> History:
    history, offset, last, begin_step = History(), 0.0, 0.0, 0
    for line in files.lines(path, shapes.trainer_log_line):
        entry, elapsed = Entry(line["current_steps"], _figures(line), tells_odb=False), _seconds(line["elapsed_time"])
        history.max_steps = line.get("total_steps", history.max_steps)
        goes_back = "loss" in entry.values and any(one.step >= entry.step for one in history.entries[-1:])
        if elapsed < last or goes_back:
            history.restarts += 1
            _go_back(history, entry.step - 1)
            begin_step = history.entries[-1].step if history.entries else 0
            offset = max((one.seconds or 0.0 for one in history.entries), default=0.0)
        last = elapsed
        entry.seconds, entry.begin_step, entry.begin_seconds = offset + elapsed, begin_step, offset
        _put(history, entry)
    return history


def _read_state(folder: Path, files: FilesRead) -> History:
    """The Trainer's own, of the folder or of its newest checkpoint."""
    history = History()
    checkpoints = sorted(
        (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )
    path = folder / TRAINER_STATE
    state = files.whole(path, shapes.trainer_state)
    if not state and checkpoints:
        path = checkpoints[-1] / TRAINER_STATE
        state = files.whole(path, shapes.trainer_state)
    for line in files.those_right(path, state.get("log_history", ()), shapes.log_history_entry):
        _put(history, Entry(line["step"], _figures(line)))
    history.max_steps = state.get("max_steps") or None
    return history


def _put(history: History, entry: Entry) -> None:
    if "train_runtime" in entry.values:
        history.results |= entry.values
    elif "loss" in entry.values:
        history.entries.append(entry)
    elif any(name.startswith("eval_") for name in entry.values):
        history.evaluations.append(entry)


def _go_back(history: History, step: int) -> None:
    """Forget what came behind this optimizer step: it is taken again."""
    for entries in (history.entries, history.evaluations):
        entries[:] = [entry for entry in entries if entry.step <= step]
    history.results = {}


def _time_of(path: Path) -> float:
    """When it was last written (Unix time); 0 where it is not there."""
    return path.stat().st_mtime if path.exists() else 0.0


def _disagree(history: History, other: History) -> bool:
    """Whether they have different losses at the same optimizer step."""
    losses = {entry.step: entry.values["loss"] for entry in history.entries}
    pairs = [(losses[entry.step], entry.values["loss"]) for entry in other.entries if entry.step in losses]
    return any(abs(mine - theirs) > SAME * abs(mine) for mine, theirs in pairs)


def _merged(entries: list[Entry], others: Iterable[Entry], last: int | None) -> list[Entry]:
    """`entries`, with what `others` know beside them, and until optimizer step `last` (None: the end) alone."""
    found = {entry.step: entry for entry in entries}
    for other in others:
        known = found.get(other.step)
        if known is not None:
            known.values = other.values | known.values
            known.seconds = other.seconds if known.seconds is None else known.seconds
            known.tells_odb |= other.tells_odb
        elif last is None or other.step <= last:
            found[other.step] = other
    return [found[step] for step in sorted(found)]


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        RENAMED.get(name) or sys.intern(name): value
        for name, value in line.items()
        if shapes.number(value) and name not in NO_FIGURES
    }


def _interned(values: Any) -> Any:
    """The same with keys that all entries share: those of a long log take most of its memory."""
    return None if values is None else {sys.intern(name): value for name, value in values.items()}


def _seconds(text: str) -> float:
    """`elapsed_time` as LLaMA-Factory writes it, "1 day, 2:03:04"."""
    days, _, clock = text.rpartition(", ")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days.split()[0] if days else 0) * 86400 + hours * 3600 + minutes * 60 + seconds
