"""The agreement of all ranks on an optimizer step before it begins: one small message of all ranks.

A rank sends its message for step s when the training has taken the last micro-batch of step s - 1 and the collate
workers have collated the first micro-batches of s (all of them, or as many as they prefetch). So the exchange runs in a
thread while that last micro-batch is computed, and the training waits for nothing in the usual case. It asks for the
answer when it holds the first micro-batch of s; a message that has not been sent by then is sent at once and covers the
micro-batches that have been collated by then. No micro-batch waits anywhere but in the DataLoader's own prefetch.

A row that fails (`on_error: skip`: it cannot be collated) and is known in time leaves the step and its divisors on all
ranks. Another one is late: the other rows keep their planned weights, and all ranks are told with the next message what
share of the loss is lost. That message also tells how many micro-batches of the step before were over a budget.

After the last step of a pass, or when it is left, one more message says that this rank is through. Every rank sends the
same number of messages, so ranks that leave an epoch together leave nothing behind.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, TypeVar

from odb_factory.comm.lifeline import known_failure
from odb_factory.comm.ranks import LEFT_EPOCH, Ranks
from odb_factory.data.samples import MicroBatch, OptimizerStep, SampleInfo
from odb_factory.errors import CollectiveError, one_line
from odb_factory.planning import MicroStepTotals

Totals = TypeVar("Totals", bound=MicroStepTotals)
CHECK_S = 0.1
"""How often a training thread that waits for an answer looks whether another rank has failed."""


class LateRow(NamedTuple):
    """A row that failed after its optimizer step began; all ranks learn of it with the next step.

    share: of the loss of its step, which is lost. empties: its micro-batch has no row left and idles.
    """

    tokens: int
    units: int
    share: float
    empties: bool


@dataclass(slots=True)
class Reports:
    """What all ranks have reported. failed: rows that could not be collated; late: those of them that are late.

    over_budget: micro-batches of two or more samples that the collator has made larger than the budgets.
    """

    failed: int = 0
    late: list[LateRow] = field(default_factory=list)
    over_budget: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        """What all ranks have told of earlier steps."""
        late = [LateRow(*row) for row in answer.get("late", ())]
        self.failed += len(late)
        self.late += late
        self.over_budget += answer.get("over", 0)

    def take(self) -> Reports:
        """All of it, of which nothing stays here."""
        taken, self.failed, self.late, self.over_budget = replace(self), 0, [], 0
        return taken


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of an optimizer step before its first forward.

    step: without the rows that failed. failed: these, each with the index of its micro-batch. emptied:
    micro-batches of all ranks that have no row left, by index.
    """

    step: OptimizerStep
    failed: Sequence[tuple[int, SampleInfo]]
    emptied: Counter[int]

    @classmethod
    def of(cls, step: OptimizerStep, answer: Mapping[str, Any]) -> Agreed:
        """step: as planned. answer: of all ranks."""
        failed = [(index, SampleInfo(*row)) for index, *row in answer.get("failed", ())]
        emptied = Counter(answer.get("emptied", ()))
        agreed, rows = cls(step, failed, emptied), [row for _, row in failed]
        units, divisors = agreed.failed_units, {row.stock_mean: row.stock_units for row in rows}
        left = replace(
            _without(step, rows, emptied.total()),
            num_stock_means=step.num_stock_means - sum(0 < divisors[mean] == units[mean] for mean in divisors),
        )
        return replace(agreed, step=left)

    def apply(self, micro_batch: MicroBatch) -> MicroBatch:
        """A micro-batch of the step, as planned, without these rows."""
        if not self.failed:
            return replace(micro_batch, step=self.step)
        rows = {(index, row.id) for index, row in self.failed}  # one may be in several micro-batches
        here = [row for index, row in self.failed if index == micro_batch.index]
        totals = _without(micro_batch.totals, here, self.emptied[micro_batch.index])
        units = self.failed_units
        left = (one for one in micro_batch.samples if (micro_batch.index, one.id) not in rows)
        samples = tuple(one._replace(stock_units=one.stock_units - units[one.stock_mean]) for one in left)
        return replace(micro_batch, step=self.step, totals=totals, samples=samples)

    @property
    def failed_units(self) -> Counter[int]:
        """What the rows that failed count in the means that stock takes, by the number of the mean."""
        return sum((Counter({row.stock_mean: row.stock_counted}) for _, row in self.failed), Counter())


def _without(totals: Totals, rows: Sequence[SampleInfo], emptied: int) -> Totals:
    """Sums without these rows. emptied: micro-batches that have no row left."""
    return replace(
        totals,
        samples=totals.samples - len(rows),
        tokens=totals.tokens - sum(row.tokens for row in rows),
        squares=totals.squares - sum(row.tokens**2 for row in rows),
        units=totals.units - sum(row.units for row in rows),
        active_ranks=totals.active_ranks - emptied,
    )


def merge_messages(messages: Sequence[bytes]) -> bytes:
    """One message of several ranks: lists are joined, numbers added; through: the ranks that say so, the lowest."""
    merged: dict[str, Any] = {}
    for message in filter(None, messages):
        for key, value in json.loads(message).items():
            before = merged.get(key)
            merged[key] = value if before is None else min(before, value) if key == "through" else before + value
    return json.dumps(merged, separators=(",", ":")).encode() if merged else b""


class CollateNotes:
    """What collate workers report to the training process beside their batches: one pipe for each worker.

    Make it before the workers start. `tell` is for the workers, `readers` for the training process.
    """

    def __init__(self, num_workers: int):
        pipes = [Pipe(duplex=False) for _ in range(num_workers)]
        self.readers = [reader for reader, _ in pipes]
        self._writers = [writer for _, writer in pipes]

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": [], "_writers": self._writers}

    def forget(self) -> None:
        """Pass over what workers that live on have told of an earlier pass."""
        while ready := wait(self.readers, 0):
            for reader in ready:
                assert isinstance(reader, Connection)
                reader.recv_bytes()

    def tell(self, worker: int, micro_batch: MicroBatch, failed: Sequence[int]) -> None:
        """failed: the places in it of the rows that cannot be collated."""
        self._writers[worker].send_bytes(json.dumps(_note(micro_batch, failed)).encode())


def _note(micro_batch: MicroBatch, failed: Sequence[int]) -> dict[str, Any]:
    """What is told of a micro-batch that has been collated."""
    step = micro_batch.step
    note: dict[str, Any] = {"step": step.index, "micro_batches": step.num_micro_batches}
    if failed:
        note["failed"] = [(micro_batch.index, *micro_batch.samples[i]) for i in failed]
        note["emptied"] = [micro_batch.index] if len(failed) == len(micro_batch.samples) else []
    return note


class StepAgreement:
    """The agreements of one pass over an epoch.

    reports: what all ranks report is added here by the thread that calls `agree_on` and `close`. reweighs: rows that
    fail leave the divisor of their step; else they are all late.

        agreement = StepAgreement(ranks, Reports(), reweighs=True)
        agreement.start(first_step=0, notes=notes, window=4)
        agreed = agreement.agree_on(micro_batch, failed=())  # with the first micro-batch of the step in hand
        agreement.taken(micro_batch)  # each one that is handed to the training
        agreement.close(timeout_s=7)
    """

    def __init__(self, ranks: Ranks, reports: Reports, *, reweighs: bool):
        self._ranks, self._reports, self._reweighs = ranks, reports, reweighs
        self._changed = threading.Condition()
        self._notes: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._mine = Reports()
        self._answers: dict[int, dict[str, Any]] = {}
        self._window = self._next = self._opened = 0
        self._asked = -1
        self._has_begun = self._is_through = self._is_over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._waker: Connection | None = None

    def start(self, first_step: int, notes: CollateNotes | None, window: int) -> None:
        """first_step: index of the optimizer step that the pass begins with. notes: of the collate workers; None: this
        process collates, and each agreement runs in the training thread. window: micro-batches that the workers collate
        ahead."""
        self._next = self._opened = first_step
        self._window, self._has_begun = window, True
        if notes is not None:
            woken, self._waker = Pipe(duplex=False)
            sources = [*notes.readers, woken]
            self._thread = threading.Thread(target=self._run, args=(sources,), name="odb-agreement", daemon=True)
            self._thread.start()

    def agree_on(self, micro_batch: MicroBatch, failed: Sequence[int]) -> Agreed:
        """What all ranks have agreed on for the step of this micro-batch, its first.

        failed: the places in it of the rows that cannot be collated. Raises `CollectiveError` if another rank ended.
        """
        step = micro_batch.step
        if self._thread is None:
            self._notes[step.index].append(_note(micro_batch, failed))
            self._exchange()
        else:
            with self._changed:
                self._asked = step.index
                self._wake()
                while step.index not in self._answers and self._error is None:
                    self._ranks.check()
                    self._changed.wait(CHECK_S)
            if self._error is not None:
                raise CollectiveError(one_line(self._error))
        answer = self._answers.pop(step.index)
        if "through" in answer:
            raise CollectiveError(known_failure() or f"rank {answer['through']} stopped: {LEFT_EPOCH}")
        agreed = Agreed.of(step, answer)
        self._reports.add(answer)
        self._reports.failed += len(agreed.failed)
        return agreed

    def taken(self, micro_batch: MicroBatch, late: Sequence[LateRow] = (), *, is_over_budget: bool = False) -> None:
        """The training has taken this micro-batch. late: rows of it that all ranks have not left out of its step."""
        with self._changed:
            self._mine.late += late
            self._mine.over_budget += is_over_budget
            if micro_batch.ends_optimizer_step:
                self._opened = micro_batch.step.index + 1
                self._is_through |= micro_batch.step.last
                self._wake()

    def stop(self) -> None:
        """The pass is left: the next message says so."""
        with self._changed:
            self._is_through = True
            self._wake()

    def close(self, timeout_s: float) -> None:
        """Send the last message and wait for those of the others, for `timeout_s` seconds if they do not come."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)
        elif self._has_begun and not self._is_over:
            try:
                self._exchange()
            except CollectiveError:
                pass  # the others have ended before this rank
        for answer in self._answers.values():
            self._reports.add(answer)

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.send_bytes(b"")

    def _run(self, sources: Sequence[Connection]) -> None:
        """sources: what workers tell, and what wakes this thread."""
        try:
            while not self._is_over:
                while not self._is_ready():
                    self._read(wait(sources))
                while ready := wait(sources, 0):  # of micro-batches that the training may have in hand already
                    self._read(ready)
                self._exchange()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._waker = None

    def _is_ready(self) -> bool:
        """Whether the next message is to be sent."""
        with self._changed:
            step = self._next
            if self._is_through or self._asked >= step:
                return True
            notes = self._notes[step]
            awaited = min(notes[0]["micro_batches"], self._window) if notes else self._window
            return self._opened >= step and len(notes) >= awaited

    def _read(self, ready: Sequence[Any]) -> None:
        """Take a note of each of these; an empty one says that something else has changed."""
        for source in ready:
            if note := source.recv_bytes():
                told = json.loads(note)
                if told["step"] >= self._next:  # else its message has been sent, and nobody would take the note
                    self._notes[told["step"]].append(told)

    def _exchange(self) -> None:
        """Send the next message and keep what all ranks say."""
        step = self._next
        with self._changed:
            mine, notes = self._mine.take(), self._notes.pop(step, [])
        message: dict[str, Any] = {"late": mine.late} if mine.late else {}
        if mine.over_budget:
            message["over"] = mine.over_budget
        if self._is_through:
            message["through"] = self._ranks.rank
        else:
            for key in ("failed", "emptied") if self._reweighs else ():
                if told := [row for note in notes for row in note.get(key, ())]:
                    message[key] = told
        packed = json.dumps(message, separators=(",", ":")).encode() if message else b""
        answer = json.loads(self._ranks.reduce_step(packed, merge_messages, step) or b"{}")
        with self._changed:
            self._answers[step] = answer
            self._is_over = "through" in answer
            self._next = step + 1
            self._changed.notify_all()
