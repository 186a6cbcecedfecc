"""Read the files of a run, which may still be written, incomplete or broken: its logs, its summary and its audits."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass as schema

from odb_factory.planning import Media

RUN_LOG, TRAINER_LOG, TRAINER_STATE = "odb_log.jsonl", "trainer_log.jsonl", "trainer_state.json"
SUMMARY = "odb_summary.json"

# ----------------------------------------------------------------------------------------------------------------------
# What the lines and files hold. Keys without a field are not read.

STRICT = ConfigDict(strict=True)
Count = Annotated[int, Field(ge=0, le=2**53)]  # exact as a float
SmallCount = Annotated[int, Field(ge=0, lt=2**31)]  # a product of two fits into 64 bits
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Finite = Annotated[float, Field(gt=-1e300, lt=1e300)]
BUDGET: TypeAdapter[int | None] = TypeAdapter(Positive | None, config=STRICT)
Sums = dict[str, Count | Finite]
Object = dict[str, object]


@schema(slots=True, config=STRICT)
class Begin:
    """RUN_LOG: a process begins to train. config: the odb block. See docs/metrics.md, "Run log"."""

    event: Literal["begin"]
    time: Finite
    optimizer_steps: Count
    ranks: Positive
    config: Object
    max_steps: Count | None = None
    arguments: Object | None = None
    about: Object | None = None
    versions: Object | None = None
    layout: dict[Literal["name", "reason"], str] | None = None

    @model_validator(mode="after")
    def _has_budgets(self) -> Begin:
        for name in ("token_budget", "max_patches"):
            BUDGET.validate_python(self.config.get(name))
        return self


@schema(slots=True, config=STRICT)
class RowCounts:
    """Rows apart from the others so far. left_out: by reason."""

    left_out: dict[str, Count] | None = None
    remainder: Count | None = None
    overlong: Count | None = None
    over_budget: Count | None = None


@schema(slots=True, config=STRICT)
class Logged:
    """RUN_LOG: a log entry. sums: see `StepStatistics`, since the entry before, on all ranks."""

    event: Literal["log"]
    time: Finite
    optimizer_step: Count
    logs: dict[str, bool | float]  # a loss may be NaN
    sums: Sums | None = None
    rows: RowCounts | None = None

    @model_validator(mode="after")
    def _has_sums(self) -> Logged:
        if self.sums is not None and not {"optimizer_steps", "samples", "tokens"} <= self.sums.keys():
            raise ValueError("sums lack optimizer_steps, samples or tokens")
        return self


@schema(slots=True, config=STRICT)
class End:
    """RUN_LOG: a process has finished its training."""

    event: Literal["end"]
    time: Finite
    optimizer_step: Count


@schema(slots=True, config=STRICT)
class TrainerLogLine:
    """TRAINER_LOG, written by LLaMA-Factory. elapsed_time: "1 day, 2:03:04"."""

    current_steps: Count
    elapsed_time: Annotated[str, Field(pattern=r"^([0-9]{1,6} days?, )?[0-9]{1,9}:[0-9]{2}:[0-9]{2}$")]
    total_steps: Count | None = None
    loss: float | None = None
    lr: float | None = None
    epoch: float | None = None
    eval_loss: float | None = None


@schema(slots=True, config=STRICT)
class TrainerState:
    """TRAINER_STATE, written by the Trainer at each checkpoint and at the end."""

    log_history: list[dict[str, object]]
    max_steps: Count | None = None
    num_train_epochs: Count | Finite | None = None
    train_batch_size: Count | None = None
    logging_steps: Count | Finite | None = None
    eval_steps: Count | Finite | None = None
    save_steps: Count | Finite | None = None


@schema(slots=True, config=STRICT)
class Summary(RowCounts):
    """SUMMARY, written at the end of a run with odb."""

    optimizer_steps: Count = -1
    samples: Count | None = None
    tokens: Count | None = None
    padded_tokens: Count | None = None
    micro_steps: Count | None = None
    idle_micro_batches: Count | None = None
    units: Count | None = None
    units_cv: Finite | None = None
    balance: Finite | None = None
    patch_balance: Finite | None = None
    encoder_patches: list[Count] | None = None
    moved: Count | None = None
    oom_cuts: Count | None = None
    data_wait_s: Finite | None = None


@schema(slots=True, config=STRICT)
class AuditLine:
    """odb_audit_rank*.jsonl: a micro-batch, or a part of one that `oom: split` has cut, on one rank."""

    optimizer_step: SmallCount
    micro_batches: Positive
    micro_batch: SmallCount
    ids: list[Count]
    lengths: list[SmallCount]
    rows: SmallCount
    length: SmallCount
    patches: SmallCount
    units: SmallCount
    idle: bool
    data_wait_s: Finite
    time: Finite
    part: SmallCount = 0
    parts: Positive = 1
    image_patches: SmallCount = 0
    video_patches: SmallCount = 0
    audio_frames: SmallCount = 0

    @model_validator(mode="after")
    def _is_consistent(self) -> AuditLine:
        if len(self.ids) != len(self.lengths):
            raise ValueError("ids and lengths are not of one length")
        if self.micro_batch >= self.micro_batches or self.part >= self.parts:
            raise ValueError("micro_batch or part is beyond the last")
        return self


RUN_LOG_LINE: TypeAdapter[Begin | Logged | End] = TypeAdapter(
    Annotated[Begin | Logged | End, Field(discriminator="event")]
)

Line = TypeVar("Line")
LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
"""Python writes a file name that is not UTF-8 with such escapes, which strict JSON does not have."""


@dataclass
class Files:
    """The files of an output folder. read: their names so far. broken: of each file with lines or entries that are not
    what they must be their `count`, the first `line` (None: the whole file) and what is `wrong`."""

    folder: Path
    read: list[str] = field(default_factory=list)
    broken: dict[str, dict[str, Any]] = field(default_factory=dict)

    def lines(self, name: str, kind: TypeAdapter[Line]) -> Iterator[Line]:
        """The whole lines of a file, one at a time; none where there is no such file."""
        if not (self.folder / name).is_file():
            return
        self.read.append(name)
        with (self.folder / name).open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    record = self._parsed(name, line, kind, number)
                    if record is not None:
                        yield record

    def whole(self, name: str, kind: TypeAdapter[Line]) -> Line | None:
        """A file of one JSON object; None where there is none or it is broken."""
        if not (self.folder / name).is_file():
            return None
        self.read.append(name)
        return self._parsed(name, (self.folder / name).read_text(encoding="utf-8", errors="replace"), kind, None)

    def count_broken(self, name: str, line: int | None, wrong: str) -> None:
        self.broken.setdefault(name, {"file": name, "count": 0, "line": line, "wrong": wrong})["count"] += 1

    def _parsed(self, name: str, text: str, kind: TypeAdapter[Line], number: int | None) -> Line | None:
        try:
            try:
                return kind.validate_json(text)
            except ValidationError:
                return kind.validate_json(LONE_SURROGATE.sub("?", text))
        except ValidationError as error:
            is_cut = number is not None and not text.endswith("\n")
            self.count_broken(name, number, "half written" if is_cut else wrong(error))
        return None


def wrong(error: ValidationError) -> str:
    """What is wrong in a few words: the first mistake and where it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


# ----------------------------------------------------------------------------------------------------------------------
# The log of a run: its entries in the order of optimizer steps, with the seconds of training at each. A run with odb is
# read from RUN_LOG; a stock run from TRAINER_LOG (losses and whole seconds) and TRAINER_STATE (all figures, no times).

SAME = 1e-3
"""Losses of two files that differ by less, relatively, are of the same run; releases of transformers round them."""


@dataclass(slots=True)
class Entry:
    """A log entry. first_step: of the optimizer steps since the entry before. seconds: of training until it, of which
    `taken` since the entry before; None: not known."""

    step: int
    values: dict[str, float]
    first_step: int = 0
    seconds: float | None = None
    taken: float | None = None
    sums: Sums | None = None
    rows: RowCounts | None = None


@dataclass
class History:
    """entries: those with a training loss. evaluations: those of evaluations. results: of the end of the run.

    begins: of each process that trained with odb; ended: whether it came to its end. restarts: how often training
    began again at an earlier checkpoint. state: what the Trainer saved beside its history.
    """

    entries: list[Entry] = field(default_factory=list)
    evaluations: list[Entry] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    begins: list[Begin] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    restarts: int = 0
    finished_at: int | None = None
    max_steps: int | None = None
    state: TrainerState | None = None
    other_run: str | None = None
    _seconds_before: float = 0.0
    _begin_step: int = 0

    @property
    def last_step(self) -> int:
        return self.entries[-1].step if self.entries else 0

    def go_back(self, step: int) -> float:
        """Forget what came after this optimizer step: it is repeated. Returns the seconds of training until then."""
        for entries in (self.entries, self.evaluations):
            entries[:] = [entry for entry in entries if entry.step <= step]
        self.results, self._begin_step = {}, step
        self._seconds_before = max((entry.seconds or 0.0 for entry in self.entries), default=0.0)
        return self._seconds_before

    def add(self, entry: Entry) -> None:
        if "train_runtime" in entry.values:
            self.results |= entry.values
        elif "loss" in entry.values:
            steps = (entry.sums or {}).get("optimizer_steps") or entry.step - max(self.last_step, self._begin_step)
            entry.first_step = entry.step - int(steps) + 1
            if entry.seconds is not None:
                entry.taken, self._seconds_before = entry.seconds - self._seconds_before, entry.seconds
            self.entries.append(entry)
        elif any(name.startswith("eval_") for name in entry.values):
            self.evaluations.append(entry)


def read_history(files: Files) -> History:
    """RUN_LOG where it has lines, else the logs of LLaMA-Factory and the Trainer."""
    history, stock = _read_run_log(files), _read_stock(files)
    if not history.entries and not history.begins:
        return stock
    history.state = stock.state
    if _is_of_another_run(stock.entries, history.entries):
        history.other_run, history.state = TRAINER_LOG if TRAINER_LOG in files.read else TRAINER_STATE, None
    return history


def _is_of_another_run(entries: Iterable[Entry], others: Iterable[Entry]) -> bool:
    """Whether losses of the same optimizer steps differ."""
    losses = {entry.step: entry.values["loss"] for entry in entries}
    pairs = [(losses[other.step], other.values["loss"]) for other in others if other.step in losses]
    return any(abs(mine - loss) > SAME * abs(mine) for mine, loss in pairs)


def _read_run_log(files: Files) -> History:
    history, offset = History(), 0.0
    begin: Begin | None = None  # of the process whose lines follow; None: it is lost
    for line in files.lines(RUN_LOG, RUN_LOG_LINE):
        if isinstance(line, Begin):
            history.restarts += bool(history.begins)
            offset = history.go_back(line.optimizer_steps)
            begin, history.max_steps, history.finished_at = line, line.max_steps, None
            history.begins.append(line)
            history.ended.append(False)
        elif isinstance(line, End):
            history.finished_at = line.optimizer_step
            history.ended[-1:] = [True] if begin else history.ended[-1:]
        else:
            entry = Entry(line.optimizer_step, line.logs, sums=line.sums, rows=line.rows)
            if "loss" in entry.values and history.last_step >= entry.step:  # a restart whose begin line is lost
                history.restarts += 1
                history.go_back(entry.step - int((entry.sums or {}).get("optimizer_steps", 1)))
                begin = None
            if begin is not None:
                entry.seconds = offset + line.time - begin.time
            history.add(entry)
    return history


def _read_stock(files: Files) -> History:
    """Figures by the state, seconds by the log, which is ahead of the state while a run is under way."""
    logged, stated = _read_trainer_log(files), _read_state(files)
    if _is_of_another_run(logged.entries, stated.entries):
        logged.other_run = TRAINER_STATE  # of an earlier run in the folder: that of this one is not yet written
        return logged
    for kept, others in ((logged.entries, stated.entries), (logged.evaluations, stated.evaluations)):
        found = {entry.step: entry for entry in kept}
        for other in others:
            found.setdefault(other.step, other).values = other.values
        kept[:] = [found[step] for step in sorted(found)]
    logged.state, logged.results, logged.finished_at = stated.state, stated.results, stated.finished_at
    logged.max_steps = stated.max_steps or logged.max_steps
    return logged


def _read_trainer_log(files: Files) -> History:
    history, offset, last = History(), 0.0, 0.0
    for line in files.lines(TRAINER_LOG, TypeAdapter(TrainerLogLine)):
        days, _, clock = line.elapsed_time.rpartition(", ")
        hours, minutes, seconds = (int(part) for part in clock.split(":"))
        elapsed = float(int(days.split()[0] if days else 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
        if elapsed < last or (line.loss is not None and history.last_step >= line.current_steps):
            history.restarts += 1
            offset = history.go_back(line.current_steps - 1)
        history.max_steps, last = line.total_steps or history.max_steps, elapsed
        found = {"loss": line.loss, "learning_rate": line.lr, "epoch": line.epoch, "eval_loss": line.eval_loss}
        values = {name: value for name, value in found.items() if value is not None}
        history.add(Entry(line.current_steps, values, seconds=offset + elapsed))
    return history


def _read_state(files: Files) -> History:
    """Of the folder, or of its newest checkpoint."""
    history, kind, name = History(), TypeAdapter(TrainerState), TRAINER_STATE
    history.state = files.whole(name, kind)
    steps = [path.name.removeprefix("checkpoint-") for path in files.folder.glob("checkpoint-*")]
    if history.state is None and any(map(str.isdecimal, steps)):
        name = f"checkpoint-{max(int(step) for step in steps if step.isdecimal())}/{TRAINER_STATE}"
        history.state = files.whole(name, kind)
    if history.state is None:
        return history
    history.max_steps = history.state.max_steps or None
    for number, logged in enumerate(history.state.log_history, 1):
        step = logged.pop("step", None)
        if isinstance(step, int):
            figures = ((key, value) for key, value in logged.items() if isinstance(value, int | float))
            history.add(Entry(step, {key: value for key, value in figures if not abs(value) > 1e300}))
            if "train_runtime" in logged:
                history.finished_at = step
        else:
            files.count_broken(name, number, "step is not a whole number")
    return history


# ----------------------------------------------------------------------------------------------------------------------
# The audits of all ranks as arrays: each micro-batch, and each sample in it.

NUMBERS = (
    "rank", "step", "micro_batches", "micro_batch", "part", "parts", "samples", "tokens", "padded_tokens", "patches",
    "units", "idle", *Media._fields,
)  # fmt: skip
COLUMNS = [*((name, "i8") for name in (*NUMBERS, "ranks")), ("data_wait_s", "f8"), ("time", "f8")]


@dataclass(frozen=True)
class Audit:
    """batches: a record of `COLUMNS` for each micro-batch, or each part of one that was cut (`oom: split`). An idle one
    has no tokens and patches here. lengths, ids: of each sample, in tokens. steps: see `_steps`; incomplete: optimizer
    steps whose lines are not all there, as at the end of a run under way."""

    batches: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    steps: dict[str, np.ndarray]
    incomplete: int


def read_audit(files: Files, begins: Iterable[Begin]) -> Audit | None:
    """None where there is no line that can be used. What was repeated after a resume counts once, as computed last."""
    names = {
        path.name: re.fullmatch(r"odb_audit_rank([0-9]{1,9})\.jsonl", path.name) for path in files.folder.iterdir()
    }
    ranks = sorted((int(match[1]), name) for name, match in names.items() if match)
    records, lengths, ids, kind = [], array("q"), array("q"), TypeAdapter(AuditLine)
    for rank, name in ranks:
        for line in files.lines(name, kind):
            padded, patches = (0, 0) if line.idle else (line.rows * line.length, line.patches)
            media = (getattr(line, name) for name in Media._fields)
            place = rank, line.optimizer_step, line.micro_batches, line.micro_batch, line.part, line.parts
            sums = len(line.ids), sum(line.lengths), padded, patches, line.units, line.idle
            records.append((*place, *sums, *media, len(ranks), line.data_wait_s, line.time))
            lengths.extend(line.lengths)
            ids.extend(line.ids)
    batches = np.array(records, dtype=COLUMNS)
    keep = np.ones(len(batches), dtype=bool)
    for begin in begins:
        keep &= (batches["time"] >= begin.time) | (batches["step"] <= begin.optimizer_steps)
        batches["ranks"][batches["step"] > begin.optimizer_steps] = begin.ranks
    if not keep.any():
        return None
    of_kept = np.repeat(keep, batches["samples"])
    batches = batches[keep]
    steps, incomplete = _steps(batches)
    return Audit(batches, np.array(lengths)[of_kept], np.array(ids)[of_kept], steps, incomplete)


def _steps(batches: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
    """By optimizer step, over all ranks: `step`, `micro_batches` (K), sums, and `awaited_tokens` and `awaited_patches`
    as in `StepStatistics`; and how many are incomplete."""
    numbers, first, of_line = np.unique(batches["step"], return_index=True, return_inverse=True)
    micro_batches, ranks = batches["micro_batches"][first], batches["ranks"][first]
    found = np.bincount(of_line, weights=1 / batches["parts"])
    whole = np.isclose(found, micro_batches * ranks)
    steps = {"step": numbers, "micro_batches": micro_batches}
    for name in ("samples", "tokens", "padded_tokens", "patches", "units"):
        steps[name] = np.bincount(of_line, weights=batches[name]).astype(np.int64)
    width, num_ranks = int(batches["micro_batch"].max()) + 1, int(batches["rank"].max()) + 1
    micro_step, of_micro_step = np.unique(of_line * width + batches["micro_batch"], return_inverse=True)
    place, of_place = np.unique(of_micro_step * num_ranks + batches["rank"], return_inverse=True)
    for name, awaited in (("padded_tokens", "awaited_tokens"), ("patches", "awaited_patches")):
        most = np.zeros(len(micro_step), dtype=np.int64)
        np.maximum.at(most, place // num_ranks, np.bincount(of_place, batches[name]).astype(np.int64))
        steps[awaited] = ranks * np.bincount(micro_step // width, weights=most).astype(np.int64)
    return {name: values[whole] for name, values in steps.items()}, int(np.count_nonzero(~whole))
