"""Read the files of a run: its log, its audits, what it was asked to do."""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text, for people.

UNKNOWN = "not known"


def number(value: float | None, digits: int = 4) -> str:
    """With thousands separated, so many significant digits of what is no whole number."""
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def counted(count: int, what: str) -> str:
    """ "1 sample", "12 samples"."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def percent(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def seconds_text(value: float | None) -> str:
    """ "3 h 05 min", "2 min 04 s", "12.3 s"."""
    if value is None:
        return UNKNOWN
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


# ----------------------------------------------------------------------------------------------------------------------
# What a line or a file of a run must be, so that whoever reads it on meets no surprise.
# A `Check` says whether a value of JSON is as it must be. A key that may be missing may be null, too; keys that are
# not named here are not looked at.

Check = Callable[[Any], bool]
LARGEST = 2**53
"""Whole numbers up to it are exact as floats, and their sums fit into 64 bits."""
LARGEST_NUMBER = 1e300
"""Of figures that sums and ratios are made of: these do not overflow."""


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def small_count(value: Any) -> bool:
    """Of which a product still fits into 64 bits, or a sum of millions."""
    return count(value) and value < 2**31


def positive(value: Any) -> bool:
    return small_count(value) and value > 0


def is_number(value: Any) -> bool:
    """NaN and infinity among them, which a loss may be."""
    if type(value) is float:
        return abs(value) < LARGEST_NUMBER or not math.isfinite(value)
    return type(value) is int and abs(value) < LARGEST_NUMBER


def finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def anything(value: Any) -> bool:
    return True


def each(check: Check) -> Check:
    """A list of such."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def by_name(check: Check) -> Check:
    """An object of such, whatever their keys."""
    return lambda value: type(value) is dict and all(map(check, value.values()))


def fields(must: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """An object with at least the keys of `must`."""

    needed, possible = tuple(must.items()), tuple((may or {}).items())

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return False
        for name, is_right in needed:
            if name not in value or not is_right(value[name]):
                return False
        for name, is_right in possible:
            found = value.get(name)
            if found is not None and not is_right(found):
                return False
        return True

    return check


def data_sets_file(value: Any) -> bool:
    return text(value) and re.fullmatch(r"odb_data_sets_[0-9a-f]{8}\.zlib", value) is not None


_LOGGED = dict.fromkeys(("loss", "learning_rate", "lr", "grad_norm", "epoch", "eval_loss"), is_number)
_LIMITS = {"token_budget": positive, "max_patches": positive}
_ROWS_OF = fields({"names": each(text)}, {"file": data_sets_file})
_ABOUT = fields({}, {"dataset": each(text), "rows_of": _ROWS_OF})
_LOGS = by_name(lambda value: is_number(value) or flag(value))
_SUMS = fields(dict.fromkeys(("optimizer_steps", "samples", "tokens"), count))
_ROWS = {"left_out": by_name(count), "not_trained": count, "overlong": count, "over_budget": count}
_BEGIN = fields(
    {"time": finite, "optimizer_steps": count, "ranks": positive, "config": fields({}, _LIMITS)},
    {
        "max_steps": count,
        "arguments": by_name(anything),
        "versions": by_name(anything),
        "about": _ABOUT,
        "layout": fields({"name": text, "reason": text}),
    },
)
_LOG = fields(
    {"time": finite, "optimizer_step": count, "epoch": is_number, "logs": _LOGS},
    {"sums": lambda value: _SUMS(value) and by_name(is_number)(value), "rows": fields({}, _ROWS)},
)
_END = fields({"time": finite, "optimizer_step": count})
_EVENT = fields({"event": text})
_OF_EVENT = {"begin": _BEGIN, "log": _LOG, "end": _END}


def run_log_line(value: Any) -> bool:
    return _EVENT(value) and _OF_EVENT.get(value["event"], lambda _: False)(value)


def elapsed(value: Any) -> bool:
    """ "1 day, 2:03:04", as LLaMA-Factory writes it."""
    return text(value) and re.fullmatch(r"([0-9]{1,6} days?, )?[0-9]{1,9}:[0-9]{2}:[0-9]{2}", value) is not None


trainer_log_line = fields({"current_steps": count, "elapsed_time": elapsed}, _LOGGED | {"total_steps": count})
trainer_state = fields({"log_history": each(anything)}, {"max_steps": count})
log_history_entry = fields({"step": count}, _LOGGED)
_TOTALS = (
    "micro_steps", "idle_micro_batches", "padded_tokens", "units", "units_cv", "padding_ratio", "balance",
    "patch_balance", "moved", "oom_cuts", "data_wait_s",
)  # fmt: skip
summary = fields(
    {"optimizer_steps": count, "samples": count, "tokens": count}, _ROWS | dict.fromkeys(_TOTALS, is_number)
)
_PART = fields({"part": small_count, "parts": positive})
_AUDIT = fields(
    {
        "optimizer_step": small_count,
        "micro_batches": positive,
        "micro_batch": small_count,
        "ids": each(count),
        "lengths": each(small_count),
        "rows": small_count,
        "length": small_count,
        "patches": small_count,
        "units": small_count,
        "idle": flag,
        "data_wait_s": finite,
        "time": finite,
    }
)


def audit_line(value: Any) -> bool:
    """Lines without `part` and `parts` are of releases that never cut a micro-batch."""
    if (
        not _AUDIT(value)
        or len(value["ids"]) != len(value["lengths"])
        or value["micro_batch"] >= value["micro_batches"]
    ):
        return False
    is_cut = "part" in value or "parts" in value
    return not is_cut or (_PART(value) and value["part"] < value["parts"])


# ----------------------------------------------------------------------------------------------------------------------
# The files of a run, read while they may still be written.


@dataclass
class FilesRead:
    """What was read. broken: by file, how many lines are no JSON object or not what they must be; see `shapes`.

    broken_files: files of one JSON object of which the same is true. half_written: files whose last line has no end
    yet, as in a run under way; that line is left out.
    """

    names: list[str] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    broken_files: list[str] = field(default_factory=list)
    half_written: list[str] = field(default_factory=list)

    def lines(self, path: Path, is_right: Check) -> Iterator[dict[str, Any]]:
        """The records of a file of JSON lines, one at a time; none where there is no such file."""
        if not path.is_file():
            return
        self.names.append(path.name)
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = _object(line)
                if record is None and not line.endswith("\n"):
                    self.half_written.append(path.name)
                elif record is not None and is_right(record):
                    yield record
                elif line.strip():
                    self._count_broken(path.name)

    def whole(self, path: Path, is_right: Check) -> dict[str, Any]:
        """A file of one JSON object; empty where there is none."""
        if not path.is_file():
            return {}
        name = _name(path)
        self.names.append(name)
        record = _object(path.read_text(encoding="utf-8", errors="replace"))
        if record is not None and is_right(record):
            return record
        self.broken_files.append(name)
        return {}

    def those_right(self, path: Path, entries: Iterable[Any], is_right: Check) -> Iterator[dict[str, Any]]:
        """Entries of a list in a file, counted as its lines are."""
        for entry in entries:
            if is_right(entry):
                yield entry
            else:
                self._count_broken(_name(path))

    def _count_broken(self, name: str) -> None:
        self.broken[name] = self.broken.get(name, 0) + 1


def _name(path: Path) -> str:
    return path.name if not path.parent.name.startswith("checkpoint-") else f"{path.parent.name}/{path.name}"


def _object(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# ----------------------------------------------------------------------------------------------------------------------
# The log of a run: its entries in the order of optimizer steps, with the seconds of training at each.
# Three files tell of it. `odb_log.jsonl` has all, of the optimizer steps that odb took. LLaMA-Factory's
# `trainer_log.jsonl` has losses and whole seconds, the Trainer's `trainer_state.json` the figures without times;
# stock runs have these two alone. What a run did behind the checkpoint from which it went on later is left out, and
# seconds count the processes one after the other.

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
    for line in files.lines(path, run_log_line):
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
    for line in files.lines(path, trainer_log_line):
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
    state = files.whole(path, trainer_state)
    if not state and checkpoints:
        path = checkpoints[-1] / TRAINER_STATE
        state = files.whole(path, trainer_state)
    for line in files.those_right(path, state.get("log_history", ()), log_history_entry):
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
        if is_number(value) and name not in NO_FIGURES
    }


def _interned(values: Any) -> Any:
    """The same with keys that all entries share: those of a long log take most of its memory."""
    return None if values is None else {sys.intern(name): value for name, value in values.items()}


def _seconds(text: str) -> float:
    """`elapsed_time` as LLaMA-Factory writes it, "1 day, 2:03:04"."""
    days, _, clock = text.rpartition(", ")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days.split()[0] if days else 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# ----------------------------------------------------------------------------------------------------------------------
# What a run was asked to do.

MODEL_CARD = "README.md"
_SECTION = re.compile(r"^### (Training hyperparameters|Framework versions)$(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^- ([^:\n]{1,60}): (.{1,300})$|^- (\w+) (\S{1,40})$", re.MULTILINE)


def read_model_card(folder: Path, files: FilesRead) -> dict[str, dict[str, str]]:
    """The settings that the Trainer writes into the model card at the end of a training, by section."""
    path = folder / MODEL_CARD
    if not path.is_file():
        return {}
    found = {}
    for title, text in _SECTION.findall(path.read_text(encoding="utf-8", errors="replace")):
        found[title] = {key or package: value or version for key, value, package, version in _ITEM.findall(text)}
    if found:
        files.names.append(MODEL_CARD)
    return found


def asked(history: History, card: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """block, arguments, about, versions and layout of the last process with odb; else what the model card says."""
    if not history.processes:
        return {
            "from": MODEL_CARD if card else None,
            "arguments": dict(card.get("Training hyperparameters", {})),
            "versions": dict(card.get("Framework versions", {})),
        }
    begin = history.processes[-1].begin
    about = {name: value for name, value in (begin.get("about") or {}).items() if name != "rows_of"}
    found: dict[str, Any] = {
        "from": "odb_log.jsonl",
        "ranks": begin.get("ranks"),
        "block": begin.get("config"),
    }
    return (
        found
        | {name: begin.get(name) for name in ("layout", "arguments")}
        | {
            "about": about,
            "versions": begin.get("versions"),
        }
    )


# ----------------------------------------------------------------------------------------------------------------------
# The audits of all ranks as arrays: what each micro-batch was, and each sample in it.

COLUMNS = (
    "rank", "step", "micro_batches", "micro_batch", "part", "parts", "samples", "tokens", "padded_tokens", "patches",
    "units", "idle",
)  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """batches: columns of equal length, one entry a micro-batch, or a part of one that was cut (`oom: split`):
    `COLUMNS`, `data_wait_s`, `time`, `ranks`.

    An idle one has no tokens and patches here, whatever it is computed with. lengths, ids: of each sample, in tokens;
    batch_of: the micro-batch it is in. steps: by optimizer step, of those that are whole: see `_steps`.
    incomplete: optimizer steps of which lines are missing, as at the end of a run under way.
    """

    batches: dict[str, np.ndarray]
    lengths: np.ndarray
    ids: np.ndarray
    batch_of: np.ndarray
    steps: dict[str, np.ndarray]
    incomplete: int

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.batches["rank"])]


def read_audit(folder: Path, processes: Sequence[Process], files: FilesRead) -> Audit | None:
    """None where there is none, or none whose lines can be used. What was taken again after a resume counts once, as it
    was taken last."""
    pattern = re.compile(r"odb_audit_rank([0-9]{1,9})\.jsonl")
    found = {path: pattern.fullmatch(path.name) for path in folder.glob("odb_audit_rank*")}
    paths = {int(match[1]): path for path, match in found.items() if match}
    if not paths:
        return None
    columns = {name: array("q") for name in COLUMNS}
    seconds = {name: array("d") for name in ("data_wait_s", "time")}
    lengths, ids, batch_of = array("q"), array("q"), array("q")
    for rank, path in sorted(paths.items()):
        for line in files.lines(path, audit_line):
            values, times, samples, numbers = _values(rank, line)
            batch_of.extend([len(columns["rank"])] * len(samples))
            lengths.extend(samples)
            ids.extend(numbers)
            for name, value in zip(COLUMNS, values, strict=True):
                columns[name].append(value)
            for name, time in zip(seconds, times, strict=True):
                seconds[name].append(time)
    batches = {name: np.array(values) for name, values in (columns | seconds).items()}
    keep = _taken_last(batches, processes)
    owners = np.array(batch_of, dtype=np.int64)
    of_kept, place = keep[owners], np.cumsum(keep) - 1
    if not keep.any():
        return None
    batches = {name: values[keep] for name, values in batches.items()}
    batches["ranks"] = _num_ranks(batches["step"], processes, len(paths))
    steps, incomplete = _steps(batches)
    return Audit(batches, np.array(lengths)[of_kept], np.array(ids)[of_kept], place[owners[of_kept]], steps, incomplete)


def _values(rank: int, line: Mapping[str, Any]) -> tuple[list[int], list[float], list[int], list[int]]:
    """In the order of `COLUMNS`; the seconds; lengths and ids of the samples."""
    lengths, ids, idle = line["lengths"], line["ids"], bool(line["idle"])
    padded, patches = (0, 0) if idle else (line["rows"] * line["length"], line["patches"])
    place = [line[name] for name in ("optimizer_step", "micro_batches", "micro_batch")]
    values = [rank, *place, line.get("part", 0), line.get("parts", 1), len(ids), sum(lengths)]
    return [*values, padded, patches, line["units"], idle], [line["data_wait_s"], line["time"]], lengths, ids


def _taken_last(batches: Mapping[str, np.ndarray], processes: Sequence[Process]) -> np.ndarray:
    """Which lines stand: those that no later process has gone back behind."""
    keep = np.ones(len(batches["step"]), dtype=bool)
    for process in processes:
        keep &= (batches["time"] >= process.time) | (batches["step"] <= process.optimizer_steps)
    return keep


def _num_ranks(steps: np.ndarray, processes: Sequence[Process], otherwise: int) -> np.ndarray:
    """Of each optimizer step the ranks of the process that took it."""
    world = np.full(len(steps), otherwise)
    for process in processes:
        world[steps > process.optimizer_steps] = process.ranks
    return world


def _steps(batches: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """Of each optimizer step over all ranks: `step`, `micro_batches` (K), sums of `samples`, `tokens`, `padded_tokens`,
    `patches` and `units`, `awaited_tokens` and `awaited_patches` as in `StepStatistics`; and how many are incomplete.
    """
    numbers, of_line = np.unique(batches["step"], return_inverse=True)
    first = np.zeros(len(numbers), dtype=np.int64)
    first[of_line] = np.arange(len(of_line))
    micro_batches, world = batches["micro_batches"][first], batches["ranks"][first]
    found = np.bincount(of_line, weights=1 / batches["parts"], minlength=len(numbers))
    whole = np.isclose(found, micro_batches * world)
    steps = {"step": numbers, "micro_batches": micro_batches}
    for name in ("samples", "tokens", "padded_tokens", "patches", "units"):
        steps[name] = np.bincount(of_line, weights=batches[name], minlength=len(numbers)).astype(np.int64)
    places = np.stack((of_line, batches["micro_batch"], batches["rank"]))
    place, of_place = np.unique(places, axis=1, return_inverse=True)
    micro_step, of_micro_step = np.unique(place[:2], axis=1, return_inverse=True)
    for name, awaited in (("padded_tokens", "awaited_tokens"), ("patches", "awaited_patches")):
        most = np.zeros(micro_step.shape[1], dtype=np.int64)
        whole_batch = np.bincount(of_place.reshape(-1), weights=batches[name]).astype(np.int64)
        np.maximum.at(most, of_micro_step.reshape(-1), whole_batch)
        steps[awaited] = world * np.bincount(micro_step[0], weights=most, minlength=len(numbers)).astype(np.int64)
    return {name: values[whole] for name, values in steps.items()}, int(np.count_nonzero(~whole))


def dataset_numbers(
    rows_of: Mapping[str, Any] | None, ids: np.ndarray, folder: Path
) -> tuple[list[str], np.ndarray] | None:
    """Names of the data sets, and of each sample the number of its own; None where that is not known.

    rows_of: as `odb_factory.training.run` writes it.
    """
    try:
        names = [str(name) for name in (rows_of or {})["names"]]
        content = (folder / (rows_of or {})["file"]).read_bytes()
        of_sample = np.frombuffer(zlib.decompress(content), dtype="<i2")[ids]
    except (KeyError, TypeError, ValueError, IndexError, OSError, zlib.error):
        return None
    return names, of_sample
