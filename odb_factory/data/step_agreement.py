"""The agreement of all ranks on an optimizer step before it begins: one small message from each rank.

A rank sends its message for step s when the training has taken the last micro-batch of step s - 1 and the collate
workers have collated the first micro-batches of s (all of them, or as many as they prefetch). So the exchange runs in a
thread while that last micro-batch is computed, and the training waits for nothing in the usual case. It asks for the
answer when it holds the first micro-batch of s; a message that has not been sent by then is sent at once and covers the
micro-batches that have been collated by then. No micro-batch waits anywhere but in the DataLoader's own prefetch.

After the last step of a pass, or when it is left, one more message says that this rank is through. Every rank sends the
same number of messages, so ranks that leave an epoch together leave nothing behind.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from odb_factory.comm.coordinator import LEFT_EPOCH, Coordinator
from odb_factory.data.samples import MicroBatch, OptimizerStep
from odb_factory.errors import CollectiveError, one_line

CHECK_S = 0.1
"""How often a training thread that waits for an answer looks whether another rank has failed."""


class CollateNotes:
    """What collate workers tell the training process beside their batches: one pipe for each worker.

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

    def tell(self, worker: int, micro_batch: MicroBatch) -> None:
        note = [micro_batch.step.index, micro_batch.step.num_micro_batches]
        self._writers[worker].send_bytes(json.dumps(note).encode())


class StepAgreement:
    """The agreements of one pass over an epoch.

    wants_save: whether this rank asks for a checkpoint; called when the message of a step is made.

        agreement = StepAgreement(coordinator, wants_save)
        agreement.start(first_step=0, notes=notes, window=4)
        step = agreement.of(micro_batch.step)  # with the first micro-batch of the step in hand
        agreement.taken(micro_batch)  # each one that is handed to the training
        agreement.close(timeout_s=7)
    """

    def __init__(self, coordinator: Coordinator, wants_save: Callable[[], bool]):
        self._coordinator, self._wants_save = coordinator, wants_save
        self._changed = threading.Condition()
        self._collated: Counter[int] = Counter()
        self._num_micro_batches: dict[int, int] = {}
        self._answers: dict[int, list[dict[str, Any]]] = {}
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

    def of(self, step: OptimizerStep) -> OptimizerStep:
        """The step as all ranks have agreed on it. Raises `CollectiveError` if another rank ended."""
        if self._thread is None:
            self._exchange()
        else:
            with self._changed:
                self._asked = step.index
                self._wake()
                while step.index not in self._answers and self._error is None:
                    self._coordinator.check()
                    self._changed.wait(CHECK_S)
            if self._error is not None:
                raise CollectiveError(one_line(self._error))
        answers = self._answers.pop(step.index)
        for rank, answer in enumerate(answers):
            if "through" in answer:
                raise CollectiveError(f"rank {rank} stopped: {LEFT_EPOCH}")
        return replace(step, save_requested=any("save" in answer for answer in answers))

    def taken(self, micro_batch: MicroBatch) -> None:
        """The training has taken this micro-batch."""
        if micro_batch.ends_optimizer_step:
            with self._changed:
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

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.send_bytes(b"")

    def _run(self, sources: Sequence[Connection]) -> None:
        """sources: what workers tell, and what wakes this thread."""
        try:
            while not self._is_over:
                while not self._is_ready():
                    for source in wait(sources):
                        assert isinstance(source, Connection)
                        self._note(source.recv_bytes())
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
            awaited = min(self._num_micro_batches.get(step, self._window), self._window)
            return self._opened >= step and self._collated[step] >= awaited

    def _note(self, note: bytes) -> None:
        """note: of a worker; empty: something else has changed."""
        if note:
            step, num_micro_batches = json.loads(note)
            self._collated[step] += 1
            self._num_micro_batches[step] = num_micro_batches

    def _exchange(self) -> None:
        """Send the next message and keep what all ranks say."""
        step = self._next
        message: dict[str, Any] = {}
        if self._is_through:
            message["through"] = 1
        elif self._wants_save():
            message["save"] = 1
        packed = json.dumps(message, separators=(",", ":")).encode() if message else b""
        answers = [json.loads(answer) if answer else {} for answer in self._coordinator.gather_step(packed, step)]
        with self._changed:
            self._answers[step] = answers
            self._is_over = any("through" in answer for answer in answers)
            self._next = step + 1
            self._collated.pop(step, None)
            self._num_micro_batches.pop(step, None)
            self._changed.notify_all()
