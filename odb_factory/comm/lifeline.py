"""`Lifeline`: which ranks live, why one has failed, and which one the others wait for.

The ranks form a tree of TCP connections: rank r holds one to its parent, rank (r - 1) // FAN_OUT, and one to each of
its children. One thread of each rank reads and writes them.

1. A connection that closes without a word is the end of a process: the ranks beside it learn of it at once.
2. A failure floods the tree; every rank raises it wherever it waits for the others.
3. Twice a second each rank reports upwards which of the ranks below it has come least far, and the root reports
   downwards which rank that is of all. The rank so named adds where its main thread stands. So every rank knows
   whom it waits for, and one of them logs it once a minute. Within a micro-batch no rank is behind in any of our calls:
   there a rank whose main thread stands still outside of torch logs where, for others may wait for it.
4. A rank that is silent while its connection stands is frozen: it is named, and given up after `silence_s`.

Nothing but the addresses goes through the process group's store, so its server may end.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from odb_factory.comm.standing import long_waits, main_thread_line
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)

FAN_OUT = 8
TICK_S = 0.5
LINE_EVERY_S = 60.0
"""How often a wait is logged."""
FROZEN_S = 30.0
"""A rank that is silent for so long is named."""
LEAST_SILENCE_S = 10.0
"""A busy machine may be silent for some seconds."""
ENDED_GRACE_S = 3.0
"""What a rank has sent before its orderly end, or before it went on, may take so long to arrive."""
TOLD_S = 3.0
"""A failure that no thread has asked for after so many seconds is logged."""
END_S = 6.0
"""A process that belongs to the training ends so long after a failure of another rank, if not before."""
ACK_S = 5.0
"""A failing rank waits so long, at most, until the ranks beside it have heard why."""
FLUSH_S = 1.0
CONNECT_S = 10.0
LONGEST_LINE = 1 << 16
COLLECTIVES = "/torch/distributed/"
"""In the name of the file where a main thread stands that waits in a collective of the training."""
TORCH = "/torch/"
FAILED_COLLECTIVE = "a failed collective"
"""The stream of those who were in it; the first by name, so that it is looked at first."""
ALIVE = "which is alive"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of a process that torchrun has started."""

Streams = dict[str, list[int]]
"""By name of a stream of calls that all ranks make: the least count of any rank, a rank that stands there, the largest
count, and a rank that stands there."""


@dataclass
class Report:
    """What is known of some of the ranks. first: the lowest of them. A rank that has ended, has not connected, or is
    frozen: the lowest one, if any. texts: where the ranks stand that others wait for."""

    first: int
    streams: Streams = field(default_factory=dict)
    ended: int | None = None
    absent: int | None = None
    frozen: int | None = None
    texts: dict[str, str] = field(default_factory=dict)


def merge(reports: Sequence[Report]) -> Report:
    """The report of all their ranks. A rank that does not know a stream has made none of its calls."""
    streams: Streams = {}
    for name in sorted({name for report in reports for name in report.streams}):
        counts = [report.streams.get(name) or [0, report.first, 0, report.first] for report in reports]
        least, most = min(counts, key=lambda count: count[0]), max(counts, key=lambda count: count[2])
        streams[name] = [*least[:2], *most[2:]]

    def lowest(values: Iterable[int | None]) -> int | None:
        return min((value for value in values if value is not None), default=None)

    return Report(
        min(report.first for report in reports),
        streams,
        ended=lowest(report.ended for report in reports),
        absent=lowest(report.absent for report in reports),
        frozen=lowest(report.frozen for report in reports),
        texts={rank: text for report in reports for rank, text in report.texts.items()},
    )


class _Peer:
    """A connection. rank: -1 until the other side has said who it is."""

    def __init__(self, connection: socket.socket, rank: int = -1):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.rank = connection, rank
        self.outgoing, self.incoming = bytearray(), bytearray()
        self.silent_s = 0.0
        self.is_done = self.is_named = False
        self.report = Report(rank)
        self.phase = "the start"

    def send(self, kind: str, content: Any = None) -> None:
        self.outgoing += json.dumps([kind, content]).encode() + b"\n"

    def flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()  # reading tells how it has ended

    def lines(self) -> tuple[list[bytes], bool]:
        """Whole lines that have arrived, and whether the connection stands."""
        is_open = True
        try:
            while chunk := self.connection.recv(1 << 16):
                self.incoming += chunk
                if len(self.incoming) > LONGEST_LINE:
                    break
            else:
                is_open = False
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *whole, rest = self.incoming.split(b"\n")
        self.incoming = bytearray(rest)
        return [bytes(line) for line in whole], is_open and len(rest) <= LONGEST_LINE


class Lifeline:
    """This rank's place in the tree. `check` raises in the thread that calls it what has happened to another rank; the
    process is ended only where `end_process` is set.

    store: of the process group, where ranks find each other's addresses; None: ranks do not connect. One rank alone
    has a lifeline too, which logs its long waits for its own workers. silence_s: how long a rank may give no sign of
    life.
    Opening does not wait for the other ranks, so it is done as early as there is a process group.

        >>> lifeline = lifeline_of(None, silence_s=600)
        >>> lifeline.fail("rank 0 left the training: ValueError: ...")  # other ranks: check() raises CollectiveError
    """

    end_process: Callable[[str], None] | None = None
    """Ends this process, which belongs to the training, with the failure of another rank as its last line, where the
    main thread has not come to it within END_S seconds: it may be in a collective that never returns."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, silence_s: float):
        self.rank, self.world_size, self.silence_s = rank, world_size, silence_s
        self.failure: str | None = None
        self.all_ranks = Report(rank)
        parent = (rank - 1) // FAN_OUT if rank else None
        children = range(FAN_OUT * rank + 1, min(FAN_OUT * rank + FAN_OUT + 1, world_size))
        self._parent, self._expected = parent, {*children, *([] if parent is None else [parent])}
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        self._joining: collections.deque[_Peer] = collections.deque()
        self._token = secrets.token_hex(16)
        self._counts: dict[str, int] = {}
        self._phases: dict[str, str] = {}
        self._num_streams: collections.Counter[str] = collections.Counter()
        self._words: collections.deque[tuple[str, Any]] = collections.deque()
        self._unacknowledged: set[int] = set()
        self._said: dict[str, float] = {}
        self._moved: dict[str, tuple[list[int], float]] = {}
        self._line = "", 0.0
        self._ended_since: float | None = None
        self._passed_since: float | None = None
        self._failed_at: float | None = None
        self._generation = self._failed_in = 0
        self._has_begun = False
        self._told = self._closing = False
        self._closed = threading.Event()
        self._launcher = os.getppid() if TORCHRUN in os.environ else None
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._listener: socket.socket | None = None
        if store is not None and world_size > 1:
            self._listen(store)
        self._thread = threading.Thread(target=self._run, name="odb-lifeline", daemon=True)
        self._thread.start()

    # For other threads

    def renew(self) -> None:
        """A training begins on all ranks: a failure of the one before no longer counts, unless a rank is gone."""
        self._generation += self._has_begun
        self._has_begun = True
        if self._failed_in < self._generation and not any(peer.is_done for peer in self._peers.values()):
            self.failure = self._failed_at = None
            self._told = False

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed."""
        if self.failure is not None:
            self._told = True
            raise CollectiveError(self.failure)

    def stream(self, name: str) -> str:
        """A name of its own for a new stream of calls that all ranks make; they make their streams in one order."""
        self._num_streams[name] += 1
        return f"{name} {self._num_streams[name]}"

    def enter(self, stream: str, phase: str) -> None:
        """This rank makes its next call of a stream. phase: what it does there."""
        self._phases[stream] = phase
        self._counts[stream] = self._counts.get(stream, 0) + 1

    def collective_failed(self) -> None:
        """This rank was in a collective of the training that failed. A rank that was not is behind in this stream."""
        self._counts[FAILED_COLLECTIVE] = 1

    def leave(self, stream: str) -> None:
        """This rank makes no more calls of a stream."""
        self._counts.pop(stream, None)
        self._phases.pop(stream, None)

    def check_wait(self, stream: str, steps: str | None, waited_s: float) -> None:
        """Raise `CollectiveError` if this rank, which has waited `waited_s` seconds for all others, waits in vain, and
        `DataError` if it is itself where no other rank comes.

        steps: a stream of which the other ranks make no further call before they come here; nor do they wait for this
        rank in a collective of the training.
        """
        self.check()
        known, phase = self.all_ranks, self._phases.get(stream, "")
        if steps is not None:
            self._check_passed(stream, steps, phase, waited_s)
        if known.ended is not None:
            self._ended_since = self._ended_since or time.monotonic()
            if time.monotonic() - self._ended_since > ENDED_GRACE_S:
                raise CollectiveError(
                    f"rank {known.ended} has ended its program while rank {self.rank} waits for it in {phase}; all "
                    "ranks must take the same optimizer steps, so look for its own last message."
                )
        if known.absent is not None and waited_s > self.silence_s:
            reason = (
                f"rank {self.rank} has waited {waited_s:.0f} s in {phase} for rank {known.absent}, which has not "
                "connected to the other ranks: its YAML may have no `odb:` block, or it may still load its data; look "
                "for its own last message, or raise exchange_timeout_s."
            )
            self.fail(reason)
            raise CollectiveError(reason)

    def _check_passed(self, stream: str, steps: str, phase: str, waited_s: float) -> None:
        most, ahead = self.all_ranks.streams.get(steps, [0, 0, 0, 0])[2:]
        late = self.late(stream)
        if most > self._counts.get(steps, 0):
            where = f"rank {ahead} has gone on to its next optimizer step"
        elif waited_s > FROZEN_S / 2 and COLLECTIVES in late:
            where = f"another collective holds {late}"
        else:
            self._passed_since = None
            return
        self._passed_since = self._passed_since or time.monotonic()
        if time.monotonic() - self._passed_since > ENDED_GRACE_S:
            raise DataError(
                f"rank {self.rank} is in {phase}, and {where}: a rank alone does what all ranks must do at the same "
                "place of the program."
            )

    def late(self, stream: str) -> str:
        """Which rank all wait for in a stream and where it stands, for messages; empty if none is behind."""
        known = self.all_ranks
        if known.absent is not None:
            return (
                f"rank {known.absent}, which has not connected to the other ranks (its YAML may have no `odb:` block, "
                "or it still loads)"
            )
        if known.frozen is not None:
            return f"rank {known.frozen}, which gives no sign of life"
        least, rank, most, _ = known.streams.get(stream, [0, 0, 0, 0])
        if least == most or rank == self.rank:
            return ""
        return f"rank {rank}, {ALIVE} {known.texts.get(str(rank), '')}".rstrip()

    def latest(self) -> str:
        """Which rank is behind in any stream, as `late` says it."""
        return next((text for text in map(self.late, self.all_ranks.streams) if text), "")

    def fail(self, reason: str) -> None:
        """Let the other ranks know why this one ends; wait a little until those beside it have heard. The first failure
        that a rank hears of stands."""
        if self._failed_at is not None or self._closing or not self._thread.is_alive():
            return
        self._failed_at, self._failed_in = time.monotonic(), self._generation
        self._put("failure", [self._generation, reason])
        until = time.monotonic() + ACK_S
        while (self._words or self._unacknowledged) and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.01)

    def cause(self, patience_s: float = 2 * TICK_S) -> str | None:
        """Why another rank has failed; waits a little, for a collective may notice first."""
        until = time.monotonic() + patience_s
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.failure

    def close(self) -> None:
        """End in an orderly way: the ranks beside this one do not take it for dead."""
        if self._closing or self._closed.is_set():
            return
        self._closing = True
        self._put("done", None)
        self._thread.join(FLUSH_S + 2 * TICK_S)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's sockets, which would stand on after its death."""
        peers = [*self._peers.values(), *self._strangers, *self._joining]
        for one in [*(peer.connection for peer in peers), self._wake, self._woken, self._listener]:
            if one is not None:
                one.close()

    def _put(self, kind: str, content: Any) -> None:
        self._words.append((kind, content))
        self._wake.send(b".")

    # Addresses

    def _listen(self, store: dist.Store) -> None:
        try:
            address = own_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=128)
            self._listener.setblocking(False)
            place = json.dumps([address, self._listener.getsockname()[1], self._token])
        except OSError as error:
            logger.warning("rank %d cannot be watched by the other ranks: %s", self.rank, one_line(error))
            return
        threading.Thread(target=self._connect, args=(store, place), name="odb-lifeline-join", daemon=True).start()

    def _connect(self, store: dist.Store, place: str) -> None:
        """Publish this rank's address and connect to the parent. A call of the store may hang: it has this thread."""
        pause_s = TICK_S / 4
        try:
            store = store.clone() if hasattr(store, "clone") else store
            store.set(f"odb_factory/lifeline/{self.rank}", place)
            if self._parent is None:
                return
            key = f"odb_factory/lifeline/{self._parent}"
            while not store.check([key]):
                if self._closed.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, 4 * TICK_S)
            host, port, token = json.loads(store.get(key))
            connection = socket.create_connection((host, port), CONNECT_S)
            connection.sendall(f"{token} {self.rank}\n".encode())
        except Exception as error:
            if not self._closed.is_set():
                logger.warning(
                    "rank %d cannot connect to rank %s (%s): the end of another rank is noticed late here; open the "
                    "ports between the nodes",
                    self.rank,
                    self._parent,
                    one_line(error),
                )
            return
        assert self._parent is not None
        self._joining.append(_Peer(connection, self._parent))
        self._wake.send(b".")

    # In its thread

    def _run(self) -> None:
        next_tick = time.monotonic()
        try:
            while not self._closed.is_set():
                self._turn(max(next_tick - time.monotonic(), 0))
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    self._tick()
        except Exception:
            if not sys.is_finalizing():
                logger.exception("rank %d no longer watches the other ranks", self.rank)
        finally:
            self._closed.set()
            self.abandon()

    def _turn(self, timeout_s: float) -> None:
        """Read, write, accept; returns when something has come, or after `timeout_s` seconds."""
        while self._joining:
            self._join(self._joining.popleft())
        peers = [*self._peers.values(), *self._strangers]
        poll = select.poll()
        by_number: dict[int, _Peer | None] = {self._woken.fileno(): None}
        poll.register(self._woken, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for peer in peers:
            if peer.connection.fileno() >= 0:
                by_number[peer.connection.fileno()] = peer
                poll.register(peer.connection, select.POLLIN | (select.POLLOUT if peer.outgoing else 0))
        for number, _ in poll.poll(timeout_s * 1000):
            if number == self._woken.fileno():
                self._woken.recv(1 << 10)
            elif self._listener is not None and number == self._listener.fileno():
                self._accept()
            elif (found := by_number.get(number)) is not None:
                found.flush()
                self._read(found)
        while self._words:
            kind, content = self._words[0]
            if kind == "failure":
                self._unacknowledged = {rank for rank, peer in self._peers.items() if not peer.is_done}
            self._flood(kind, content)
            self._words.popleft()
            if kind == "done":
                self._end()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= 4 * FAN_OUT:
            self._strangers.pop(0).connection.close()
        self._strangers.append(_Peer(connection))

    def _join(self, peer: _Peer) -> None:
        self._peers[peer.rank] = peer
        peer.report.first = peer.rank
        if self.failure is not None:
            peer.send("failure", [self._failed_in, self.failure])

    def _read(self, peer: _Peer) -> None:
        lines, is_open = peer.lines()
        if peer.rank < 0:
            self._greet(peer, lines, is_open)
            return
        peer.silent_s = 0.0
        for line in lines:
            try:
                kind, content = json.loads(line)
                self._hear(peer, kind, content)
            except (ValueError, TypeError):
                logger.warning("rank %d sent what rank %d cannot read", peer.rank, self.rank)
        if not is_open:
            peer.connection.close()
            if not peer.is_done:
                peer.is_done = True
                self._note(
                    f"rank {peer.rank} has ended without a word (last seen in: {peer.phase}): its process was killed "
                    "or has crashed; look for its own last message, for the system's out-of-memory killer (dmesg), or "
                    "for a signal of the job scheduler."
                )

    def _greet(self, peer: _Peer, lines: list[bytes], is_open: bool) -> None:
        """A stranger who does not know the token is turned away."""
        if lines:
            token, _, rank = lines[0].decode(errors="replace").partition(" ")
            if token == self._token and rank.isdigit() and int(rank) in self._expected - {self._parent}:
                self._strangers.remove(peer)
                peer.rank = int(rank)
                self._join(peer)
                return
            is_open = False
        if not is_open:
            self._strangers.remove(peer)
            peer.connection.close()

    def _hear(self, peer: _Peer, kind: str, content: Any) -> None:
        if kind == "report":
            peer.phase = content.pop("phase")
            peer.report = Report(**content)
            if peer.rank == self._parent:
                self.all_ranks = peer.report
        elif kind == "failure":
            peer.send("ack")
            peer.flush()
            generation, failure = content
            if generation >= self._generation:  # else it belongs to a training that this rank has left
                self._note(failure, told_by=peer.rank, generation=generation)
        elif kind == "ack":
            self._unacknowledged.discard(peer.rank)
        elif kind == "done":
            peer.is_done = True
            self._unacknowledged.discard(peer.rank)

    def _note(self, failure: str, told_by: int | None = None, generation: int | None = None) -> None:
        """Pass the first failure of a training on, then raise it where this rank waits.

        generation: of the training; None: the one under way. A rank that told it may have begun the next already.
        """
        generation = self._generation if generation is None else generation
        if (self._failed_at is None or generation > self._failed_in) and not self._closing:
            self._flood("failure", [generation, failure], told_by)
            self._failed_at, self._failed_in = time.monotonic(), generation
            self.failure = failure
            if self.end_process is None:
                self._log(failure)

    def _log(self, failure: str) -> None:
        if not self._told:
            self._told = True
            logger.error("%s", failure)

    def _flood(self, kind: str, content: Any, told_by: int | None = None) -> None:
        for rank, peer in self._peers.items():
            if rank != told_by and peer.connection.fileno() >= 0:
                peer.send(kind, content)
                peer.flush()

    def _end(self) -> None:
        until = time.monotonic() + FLUSH_S
        while any(peer.outgoing for peer in self._peers.values()) and time.monotonic() < until:
            for peer in self._peers.values():
                peer.flush()
            time.sleep(0.01)
        self._closed.set()

    def _tick(self) -> None:
        self._report()
        self._watch_silence()
        self._log_waits()
        if self.failure is not None:
            waited_s = time.monotonic() - (self._failed_at or 0)
            if waited_s > TOLD_S:
                self._log(self.failure)
            if waited_s > END_S and self.end_process is not None:
                self.end_process(self.failure)
        if self._launcher is not None and os.getppid() != self._launcher:
            logger.warning(
                "rank %d: the launcher that started this process (pid %d) has ended; the training goes on, and the "
                "ranks still watch each other; end it with: kill %d",
                self.rank,
                self._launcher,
                os.getpid(),
            )
            self._launcher = None

    def _report(self) -> None:
        absent = min(self._expected.difference(self._peers), default=None)
        mine = Report(self.rank, {name: [n, self.rank] * 2 for name, n in list(self._counts.items())}, absent=absent)
        mine.ended = min((rank for rank, peer in self._peers.items() if peer.is_done), default=None)
        mine.frozen = min((rank for rank, peer in self._peers.items() if peer.is_named), default=None)
        late = {name for name, (least, rank, most, _) in self.all_ranks.streams.items() if least < most}
        phase = next(reversed(self._phases.values()), "the start")
        if any(self.all_ranks.streams[name][1] == self.rank for name in late):
            mine.texts[str(self.rank)] = self._standing(late)
        below = [peer.report for rank, peer in self._peers.items() if rank != self._parent]
        report = merge([mine, *below])
        named = {str(self.all_ranks.streams[name][1]) for name in late}
        report.texts = {rank: text for rank, text in report.texts.items() if rank in named}
        if self._parent is None:
            self.all_ranks = report
        elif self._parent not in self._peers:
            self.all_ranks = Report(self.rank, absent=self._parent)
        for rank, peer in self._peers.items():
            if peer.connection.fileno() >= 0 and not peer.outgoing:  # one that is frozen reads nothing
                known = report if rank == self._parent else self.all_ranks
                peer.send("report", dataclasses.asdict(known) | {"phase": phase})
                peer.flush()

    def _standing(self, streams: Iterable[str]) -> str:
        phases = [self._phases[name] for name in sorted(streams) if name in self._phases]
        waits = long_waits(TICK_S)
        doing = f" and waits for {waits[0]}" if waits else f"; its main thread is at {main_thread_line()}"
        return f"(last seen in: {', '.join(phases) or 'the start'}{doing})"

    def _watch_silence(self) -> None:
        limit_s = max(self.silence_s, LEAST_SILENCE_S)
        for peer in self._peers.values():
            if peer.is_done:
                continue
            # Counted in ticks, not by a clock: a process that was stopped itself does not blame the others.
            peer.silent_s += TICK_S
            if peer.is_named and peer.silent_s <= TICK_S:
                peer.is_named = False
                logger.warning("rank %d gives signs of life again", peer.rank)
            if not peer.is_named and peer.silent_s >= min(FROZEN_S, limit_s):
                peer.is_named = True
                logger.warning(
                    "no sign of life from rank %d for %.0f s: its process is stopped, its node or network is gone; it "
                    "is given up after %.0f s (exchange_timeout_s)",
                    peer.rank,
                    peer.silent_s,
                    limit_s,
                )
            if peer.silent_s >= limit_s:
                peer.is_done = True
                self._note(
                    f"rank {peer.rank} gave no sign of life for {limit_s:g} s (last seen in: {peer.phase}): its "
                    "process is stopped, or its node or network is gone; look for its own last message, or raise "
                    "exchange_timeout_s if it was only slow."
                )

    def _log_waits(self) -> None:
        """Once a minute: whom all wait for, on one rank that waits; what this rank itself waits for."""
        now = time.monotonic()
        for name, counts in self.all_ranks.streams.items():
            before, since = self._moved.get(name, (counts, now))
            since = since if before == counts else now
            self._moved[name] = counts, since
            if now - since >= LINE_EVERY_S and counts[3] == self.rank and (late := self.late(name)):
                self._say(name, f"rank {self.rank} has waited {now - since:.0f} s for {late}")
        for text in long_waits(LINE_EVERY_S)[:1]:
            self._say("worker", f"rank {self.rank} has no data to go on with: it waits for {text}")
        self._log_standstill(now)

    def _log_standstill(self, now: float) -> None:
        """Log where this rank's main thread stands while no rank is behind in any stream: within a micro-batch the
        others may wait for it in a collective of the training, of which nobody knows. A thread inside torch computes,
        or is one of those that wait."""
        if self.world_size == 1:
            return
        line = main_thread_line()
        if line != self._line[0]:
            self._line = line, now
        is_known = any(least < most for least, _, most, _ in self.all_ranks.streams.values()) or long_waits(TICK_S)
        if now - self._line[1] >= LINE_EVERY_S and TORCH not in line and not is_known:
            self._say("line", f"rank {self.rank} has been at {line} for {now - self._line[1]:.0f} s")

    def _say(self, about: str, text: str) -> None:
        if time.monotonic() - self._said.get(about, -LINE_EVERY_S) >= LINE_EVERY_S:
            self._said[about] = time.monotonic()
            logger.warning("%s", text)


def own_address() -> str:
    """The address at which the other ranks reach this one: that of gloo's interface where the environment names one,
    else that by which this machine reaches MASTER_ADDR."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            packed = fcntl.ioctl(one.fileno(), 0x8915, struct.pack("256s", interface[:15].encode()))  # SIOCGIFADDR
            return socket.inet_ntoa(packed[20:24])
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, kind, protocol, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(place)  # sends nothing
        address: str = one.getsockname()[0]
        return address


# One for each process group

_by_group: weakref.WeakKeyDictionary[Any, Lifeline] = weakref.WeakKeyDictionary()
_open: list[Lifeline] = []


def lifeline_of(process_group: dist.ProcessGroup | None, silence_s: float) -> Lifeline:
    """That of the ranks of `process_group` (None: the default group); opened at the first call.

    It lives until the process ends, for another rank may still need it when this one has closed its loader.
    """
    group = process_group or dist.group.WORLD
    lifeline = _by_group.get(group)
    if lifeline is None:
        lifeline = Lifeline(dist.get_rank(group), dist.get_world_size(group), _store_of(group), silence_s)
        _by_group[group] = lifeline
        _open.append(lifeline)
    lifeline.silence_s = silence_s
    return lifeline


def patience_of(process_group: dist.ProcessGroup | None) -> float:
    """How long the ranks of a process group wait for each other in its own collectives (seconds): `ddp_timeout` in a
    trainer."""
    group: Any = process_group or dist.group.WORLD
    limits = [group._get_backend(device).options._timeout.total_seconds() for device in group._device_types]
    return float(max(limits))


def known_failure(patience_s: float = 2 * TICK_S) -> str | None:
    """Why another rank has failed; waits a little, for a collective may notice first."""
    return next((cause for line in _open if (cause := line.cause(patience_s))), None)


def latest_wait(patience_s: float = 4 * TICK_S) -> str:
    """After a collective of the training has failed: which rank did not come to it, and where that rank stands; empty
    if none is known. Waits a little until the others have said where they are."""
    for line in _open:
        line.collective_failed()
    until = time.monotonic() + patience_s
    while True:
        late = next((late for line in _open if (late := line.latest())), "")
        if (late and not late.endswith(ALIVE)) or time.monotonic() > until or not _open:
            return late
        time.sleep(TICK_S / 2)


def end_all(reason: str | None) -> None:
    """The main thread ends this process; let the other ranks know why, unless they know (None)."""
    for lifeline in _open:
        lifeline.end_process = None
        if reason is not None:
            lifeline.fail(f"rank {lifeline.rank} left the training: {reason}")


def _store_of(group: Any) -> dist.Store | None:
    try:
        store: dist.Store = group.get_group_store()
        return store
    except (AttributeError, RuntimeError):  # a backend without a store
        return None


def _close_all() -> None:
    for lifeline in _open:
        lifeline.close()


def _abandon_all() -> None:
    for lifeline in _open:
        lifeline.abandon()
    _open.clear()
    _by_group.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
