"""`Lifeline`: which ranks live, why one has failed, and which one the others wait for.

The ranks form a tree of TCP connections: rank r holds one to its parent, rank (r - 1) // FAN_OUT, and one to each of
its children. One thread of each rank reads and writes them.

1. A connection that closes without a word is the end of a process: the ranks beside it learn of it at once.
2. A failure floods the tree; every rank raises it wherever it waits for the others.
3. Twice a second each rank reports upwards which of the ranks below it has come least far, and the root reports
   downwards which rank that is of all. The rank so named adds where its main thread stands. So every rank knows
   whom it waits for, and one of them logs it once a minute. Within a micro-batch a rank may hold up the others without
   being behind in any of our calls: one whose main thread stands still outside of torch and of our calls logs where.
4. A rank that is silent while its connection stands is frozen: it is named, and given up after `silence_s`.

Nothing but the addresses goes through the process group's store, so its server may end.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch.distributed as dist

from odb_factory.comm.standing import long_waits, main_thread_line
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)

FAN_OUT = 8
TICK_S = 0.5
STORE_CALLS_A_S = 100
"""Of all ranks together, at most, while they wait for the addresses of others."""
LINE_EVERY_S = 60.0
"""How often a wait is logged."""
FROZEN_S = 30.0
"""A rank that is silent for so long is named."""
LEAST_SILENCE_S = 10.0
"""A busy machine may be silent for some seconds."""
GRACE_S = 3.0
"""What a rank has sent before its orderly end, or before it went on, may take so long to arrive; a failure that no
thread has asked for by then is logged."""
END_S = 6.0
"""A process that belongs to the training ends so long after a failure of another rank, if not before."""
ACK_S = 5.0
"""A failing rank waits so long, at most, until the ranks beside it have heard why."""
FLUSH_S = 1.0
CONNECT_S = 10.0
LONGEST_LINE, LONGEST_REASON = 1 << 16, 4000
"""Bytes of a line; characters of the reason of a failure, each of which takes at most 12 bytes in a line."""
COLLECTIVES = "/torch/distributed/"
"""In the name of the file where a main thread stands that waits in a collective of the training."""
TORCH = "/torch/"
FAILED_COLLECTIVE = "a failed collective"
"""The stream of those who were in it; the first by name, so that it is looked at first."""
ALIVE = "which is alive"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of a process that torchrun has started."""


@dataclass
class Report:
    """What is known of some of the ranks, of which `first` is the lowest.

    streams: by name of a stream of calls that all ranks make: the least count of any rank, a rank that stands there,
    the largest count, and a rank that stands there. missing: the lowest rank, if any, that has `ended`, is `absent`
    (not connected), or is `frozen`. texts: where the ranks stand that others wait for.
    """

    first: int
    streams: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def merge(reports: Sequence[Report]) -> Report:
    """The report of all their ranks. A rank that does not know a stream has made none of its calls."""
    merged = Report(min(report.first for report in reports))
    for name in sorted({name for report in reports for name in report.streams}):
        counts = [report.streams.get(name) or [0, report.first, 0, report.first] for report in reports]
        least, most = min(counts, key=lambda count: count[0]), max(counts, key=lambda count: count[2])
        merged.streams[name] = [*least[:2], *most[2:]]
    for report in reports:
        merged.texts |= report.texts
        for kind, rank in report.missing.items():
            merged.missing[kind] = min(rank, merged.missing.get(kind, rank))
    return merged


class _Peer(asyncio.Protocol):
    """A connection, in the lifeline's thread. rank: -1 for a stranger, who is turned away without the token."""

    transport: asyncio.Transport

    def __init__(self, lifeline: Lifeline, rank: int = -1, greeting: bytes = b""):
        self._lifeline, self.rank, self._greeting = lifeline, rank, greeting
        self._rest = b""
        self.silent_s = 0.0
        self.is_done = self.is_named = False
        self.report = Report(rank)
        self.phase = "the start"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._greeting)
        self._lifeline._meet(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.silent_s = 0.0
        for line in lines:
            if self.rank < 0:
                self._lifeline._greet(self, line)
            else:
                self._lifeline._hear(self, line)
            if self.transport.is_closing():
                return
        if len(self._rest) > LONGEST_LINE:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lifeline._lose(self)

    def send(self, kind: str, content: Any = None) -> None:
        if not self.transport.is_closing():
            self.transport.write(json.dumps([kind, content]).encode() + b"\n")


class Lifeline:
    """Knows of all ranks. `check` raises in the thread that calls it what has happened to another rank; the process is
    ended only where `end_process` is set.

    store: of the process group, where ranks find each other's addresses; None: ranks do not connect. One rank alone
    has a lifeline too, which logs its long waits for its own workers. silence_s: how long a rank may give no sign of
    life.
    `start` does not wait for the other ranks, so it is called as early as there is a process group.

        >>> lifeline = lifeline_of(None, silence_s=600)
        >>> lifeline.abort("rank 0 left the training: ValueError: ...")  # other ranks: check() raises CollectiveError
    """

    end_process: Callable[[str], None] | None = None
    """Ends this process, which belongs to the training, with the failure of another rank as its last line, where the
    main thread has not come to it within END_S seconds: it may be in a collective that never returns."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, silence_s: float):
        self.rank, self.world_size, self.silence_s = rank, world_size, silence_s
        self.failure: str | None = None
        self.all_ranks = Report(rank)
        self.generation = 0
        """How many trainings of this process came before the one under way."""
        self._store = store if world_size > 1 else None
        self._parent = (rank - 1) // FAN_OUT if rank else None
        children = range(FAN_OUT * rank + 1, min(FAN_OUT * rank + FAN_OUT + 1, world_size))
        self._expected = {*children, *([] if self._parent is None else [self._parent])}
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []
        self._token = secrets.token_hex(16)
        self._counts: dict[str, int] = {}
        self._phases: dict[str, str] = {}
        self._num_streams: collections.Counter[str] = collections.Counter()
        self._since: dict[str, tuple[object, float]] = {}
        self._logged: dict[str, float] = {}
        self._failed: tuple[int, float, str] | None = None
        """Of the first failure of any rank: the generation, when this rank has learned of it, and the reason."""
        self._unacknowledged: set[int] = set()
        self._has_begun = self._is_known = self._is_closing = False
        self._closed = threading.Event()
        self._launcher = os.getppid() if TORCHRUN in os.environ else None
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Future[None]
        self._thread = threading.Thread(target=self._run, name="odb-lifeline", daemon=True)

    # For other threads

    def start(self) -> None:
        """Begin to watch; a second call does nothing."""
        if self._thread.ident is not None:
            return
        self._loop = asyncio.SelectorEventLoop()
        self._end = self._loop.create_future()
        if self._store is not None:
            self._listen()
        self._thread.start()

    def renew(self) -> None:
        """A training begins on all ranks: a failure of the one before no longer counts, unless a rank is gone."""
        self.generation += self._has_begun
        self._has_begun = True
        is_past = self._failed is not None and self._failed[0] < self.generation
        if is_past and not any(peer.is_done for peer in self._peers.values()):
            self.failure = self._failed = None
            self._is_known = False

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed."""
        if self.failure is not None:
            self._is_known = True
            raise CollectiveError(self.failure)

    def stream(self, name: str) -> str:
        """A name of its own for a new stream of calls that all ranks make; they make their streams in one order."""
        self._num_streams[name] += 1
        return f"{name} {self._num_streams[name]}"

    def enter(self, stream: str, phase: str) -> None:
        """This rank makes its next call of a stream. phase: what it does there."""
        self._phases[stream] = phase
        self._counts[stream] = self._counts.get(stream, 0) + 1

    def leave(self, stream: str) -> None:
        """This rank makes no more calls of a stream."""
        self._counts.pop(stream, None)
        self._phases.pop(stream, None)

    def common(self, name: str, value: int) -> int:
        """The value of rank 0, for all ranks; may wait for it. name: what it is, the same on all ranks."""
        store, key = self.store(), f"odb_factory/{self.stream(name)}"
        if self.rank == 0:
            store.set(key, str(value))
        return value if self.rank == 0 else int(store.get(key))

    def store(self) -> dist.Store:
        """Where the ranks find each other; a connection of its own where that is possible: a call of it may hang."""
        store: Any = self._store or dist.distributed_c10d._get_default_store()
        return cast(dist.Store, store.clone() if hasattr(store, "clone") else store)

    def check_wait(self, stream: str, steps: str | None, waited_s: float) -> None:
        """Raise `CollectiveError` if this rank, which has waited `waited_s` seconds for all others, waits in vain, and
        `DataError` if it is itself where no other rank comes.

        steps: a stream of which the other ranks make no further call before they come here; nor do they wait for this
        rank in a collective of the training.
        """
        self.check()
        missing, phase = self.all_ranks.missing, self._phases.get(stream, "")
        if steps is not None:
            where = self._gone_on(stream, steps, waited_s)
            if min(self._same_s("gone on", bool(where)), waited_s) > GRACE_S and where:
                raise DataError(
                    f"rank {self.rank} is in {phase}, and {where}: a rank alone does what all ranks must do at the "
                    "same place of the program."
                )
        if self._same_s("ended", "ended" in missing) > GRACE_S and "ended" in missing:
            raise CollectiveError(
                f"rank {missing['ended']} has ended its program while rank {self.rank} waits for it in {phase}; all "
                "ranks must take the same optimizer steps, so look for its own last message."
            )
        if "absent" in missing and waited_s > self.silence_s:
            reason = (
                f"rank {self.rank} has waited {waited_s:.0f} s in {phase} for {self.late(stream)}; look for its own "
                "last message, or raise exchange_timeout_s."
            )
            self.abort(reason)
            raise CollectiveError(reason)

    def _gone_on(self, stream: str, steps: str, waited_s: float) -> str:
        """Why another rank does not come to where this one waits; empty if it may."""
        most, ahead = self.all_ranks.streams.get(steps, [0, 0, 0, 0])[2:]
        if most > self._counts.get(steps, 0):
            return f"rank {ahead} has gone on to its next optimizer step"
        late = self.late(stream)
        return f"another collective holds {late}" if waited_s > FROZEN_S / 2 and COLLECTIVES in late else ""

    def late(self, stream: str) -> str:
        """Which rank all wait for in a stream and where it stands, for messages; empty if none is behind."""
        known = self.all_ranks
        if "absent" in known.missing:
            return (
                f"rank {known.missing['absent']}, which has not connected to the other ranks (its YAML may have no "
                "`odb:` block, or it still loads its data)"
            )
        if "frozen" in known.missing:
            return f"rank {known.missing['frozen']}, which gives no sign of life"
        least, rank, most, _ = known.streams.get(stream, [0, 0, 0, 0])
        if least == most or rank == self.rank:
            return ""
        return f"rank {rank}, {ALIVE} {known.texts.get(str(rank), '')}".rstrip()

    def latest(self) -> str:
        """Which rank is behind in any stream, as `late` says it."""
        return next((text for text in map(self.late, self.all_ranks.streams) if text), "")

    def abort(self, reason: str) -> None:
        """Let the other ranks know why this one ends; wait a little until those beside it have heard. The first failure
        that a rank hears of stands."""
        if self._failed is not None or self._is_closing or not self._thread.is_alive():
            return
        reason = reason[:LONGEST_REASON]
        self._failed = self.generation, time.monotonic(), reason
        self._unacknowledged = {rank for rank, peer in list(self._peers.items()) if not peer.is_done}
        self._call(lambda: self._flood("failure", [self.generation, reason]))
        until = time.monotonic() + ACK_S
        while self._unacknowledged and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.01)

    def cause(self) -> str | None:
        """Why another rank has failed; waits a little, for a collective may notice first."""
        until = time.monotonic() + 2 * TICK_S
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.failure

    def close(self) -> None:
        """End in an orderly way: the ranks beside this one do not take it for dead."""
        if not self._is_closing and self._thread.is_alive():
            self._is_closing = True
            self._call(lambda: self._end.set_result(None))
            self._thread.join(FLUSH_S + 2 * TICK_S)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, which would stand on after its death. The numbers of
        their files stay taken, for objects that will not be used again name them."""
        peers = [peer.transport.get_extra_info("socket") for peer in [*self._peers.values(), *self._strangers]]
        null = os.open(os.devnull, os.O_RDWR)
        for one in [*peers, self._listener]:
            if one is not None and one.fileno() >= 0:
                os.dup2(null, one.fileno(), inheritable=False)
        os.close(null)

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(function)

    def _same_s(self, about: str, value: object) -> float:
        """For how many seconds `value` has been the same at every call."""
        now = time.monotonic()
        before, since = self._since.get(about, (value, now))
        self._since[about] = value, since if before == value else now
        return now - self._since[about][1]

    # Addresses

    def _listen(self) -> None:
        try:
            address = own_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            logger.warning("rank %d cannot be watched by the other ranks: %s", self.rank, one_line(error))
            return
        own = json.dumps([address, self._listener.getsockname()[1], self._token])
        threading.Thread(target=self._join, args=(own,), name="odb-lifeline-join", daemon=True).start()

    def _join(self, own: str) -> None:
        """Publish this rank's address and connect to the parent. A call of the store may hang: it has this thread."""
        pause_s = TICK_S / 4
        try:
            store = self.store()
            store.set(f"odb_factory/lifeline/{self.rank}", own)
            if self._parent is None:
                return
            key = f"odb_factory/lifeline/{self._parent}"
            while not store.check([key]):
                if self._closed.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, max(4 * TICK_S, self.world_size / STORE_CALLS_A_S))
            host, port, token = json.loads(store.get(key))
            connection = socket.create_connection((host, port), CONNECT_S)
            peer = _Peer(self, self._parent, f"{token} {self.rank}\n".encode())
            joining = self._loop.create_connection(lambda: peer, sock=connection)
            asyncio.run_coroutine_threadsafe(joining, self._loop).result(CONNECT_S)
        except Exception as error:
            if not self._closed.is_set():
                logger.warning(
                    "rank %d cannot connect to rank %s (%s): the end of another rank is noticed late here; open the "
                    "ports between the nodes",
                    self.rank,
                    self._parent,
                    one_line(error),
                )

    # In its thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._watch())
        except Exception:
            if not sys.is_finalizing():
                logger.exception("rank %d no longer watches the other ranks", self.rank)
        finally:
            self._closed.set()
            self.abandon()
            self._loop.close()

    async def _watch(self) -> None:
        if self._listener is not None:
            await self._loop.create_server(lambda: _Peer(self), sock=self._listener)
        while not self._end.done():
            self._tick()
            await asyncio.wait([self._end], timeout=TICK_S)
        self._flood("done")
        peers, until = [*self._peers.values(), *self._strangers], time.monotonic() + FLUSH_S
        while any(peer.transport.get_write_buffer_size() for peer in peers) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for peer in peers:
            peer.transport.abort()
        await asyncio.sleep(0)  # the loop closes the connections

    def _meet(self, peer: _Peer) -> None:
        """A connection stands."""
        if peer.rank < 0:
            self._strangers.append(peer)
            if len(self._strangers) > 4 * FAN_OUT:
                self._strangers[0].transport.abort()
            return
        self._peers[peer.rank] = peer
        peer.report.first = peer.rank
        if self._failed is not None:
            peer.send("failure", [self._failed[0], self._failed[2]])

    def _greet(self, peer: _Peer, line: bytes) -> None:
        """A stranger who does not know the token is turned away."""
        token, _, rank = line.decode(errors="replace").partition(" ")
        if token == self._token and rank.isdecimal() and int(rank) in self._expected - {self._parent}:
            self._strangers.remove(peer)
            peer.rank = int(rank)
            self._meet(peer)
        else:
            peer.transport.abort()

    def _lose(self, peer: _Peer) -> None:
        """A connection has closed."""
        if peer in self._strangers:
            self._strangers.remove(peer)
        elif not peer.is_done:
            self._leave_out(
                peer,
                f"rank {peer.rank} has ended without a word (last seen in: {peer.phase}): its process was killed or "
                "has crashed; look for its own last message, for the system's out-of-memory killer (dmesg), or for a "
                "signal of the job scheduler.",
            )

    def _leave_out(self, peer: _Peer, failure: str | None = None) -> None:
        """Nothing more is expected of a rank, because it has ended, or of this failure."""
        peer.is_done = True
        self._unacknowledged.discard(peer.rank)
        if failure is not None:
            self._note(failure, self.generation)

    def _hear(self, peer: _Peer, line: bytes) -> None:
        try:
            kind, content = json.loads(line)
            if kind == "report":
                peer.phase, peer.report = content[0], Report(**content[1])
                if peer.rank == self._parent:
                    self.all_ranks = peer.report
            elif kind == "failure":
                peer.send("ack")
                generation, failure = content
                if generation >= self.generation:  # else it belongs to a training that this rank has left
                    self._note(failure, generation, told_by=peer.rank)
            elif kind == "ack":
                self._unacknowledged.discard(peer.rank)
            elif kind == "done":
                self._leave_out(peer)
        except (ValueError, TypeError, LookupError):
            logger.warning("rank %d sent what rank %d cannot read", peer.rank, self.rank)

    def _note(self, failure: str, generation: int, told_by: int | None = None) -> None:
        """Pass the first failure of a training on, then raise it where this rank waits.

        generation: of the training; a rank that tells of it may have begun the next one already.
        """
        if (self._failed is None or generation > self._failed[0]) and not self._is_closing:
            self._flood("failure", [generation, failure], told_by)
            self._failed, self.failure = (generation, time.monotonic(), failure), failure
            if self.end_process is None:
                self._log_failure(failure)

    def _log_failure(self, failure: str) -> None:
        if not self._is_known:
            self._is_known = True
            logger.error("%s", failure)

    def _flood(self, kind: str, content: Any = None, told_by: int | None = None) -> None:
        for rank, peer in self._peers.items():
            if rank != told_by:
                peer.send(kind, content)

    def _tick(self) -> None:
        self._report()
        self._watch_silence()
        self._log_waits()
        if self.failure is not None and self._failed is not None:
            failed_s = time.monotonic() - self._failed[1]
            if failed_s > GRACE_S:
                self._log_failure(self.failure)
            if failed_s > END_S and self.end_process is not None:
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
        peers = self._peers.items()
        mine = Report(self.rank, {name: [n, self.rank] * 2 for name, n in list(self._counts.items())})
        for kind, ranks in (
            ("absent", self._expected.difference(self._peers)),
            ("ended", [rank for rank, peer in peers if peer.is_done]),
            ("frozen", [rank for rank, peer in peers if peer.is_named]),
        ):
            if ranks:
                mine.missing[kind] = min(ranks)
        late = {name: counts[1] for name, counts in self.all_ranks.streams.items() if counts[0] < counts[2]}
        if self.rank in late.values():
            mine.texts[str(self.rank)] = self._standing(late)
        report = merge([mine, *(peer.report for rank, peer in peers if rank != self._parent)])
        report.texts = {rank: text for rank, text in report.texts.items() if int(rank) in late.values()}
        if self._parent is None:
            self.all_ranks = report
        elif self._parent not in self._peers:
            self.all_ranks = Report(self.rank, missing={"absent": self._parent})
        phase = next(reversed(self._phases.values()), "the start")
        for rank, peer in peers:
            if not peer.transport.get_write_buffer_size():  # one that is frozen reads nothing
                known = report if rank == self._parent else self.all_ranks
                peer.send("report", [phase, asdict(known)])

    def _standing(self, streams: Iterable[str]) -> str:
        phases = [self._phases[name] for name in sorted(streams) if name in self._phases]
        waits = long_waits(TICK_S)
        doing = f" and waits for {waits[0]}" if waits else f"; its main thread is at {main_thread_line()[0]}"
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
                self._leave_out(
                    peer,
                    f"rank {peer.rank} gave no sign of life for {limit_s:g} s (last seen in: {peer.phase}): its "
                    "process is stopped, or its node or network is gone; look for its own last message, or raise "
                    "exchange_timeout_s if it was only slow.",
                )

    def _log_waits(self) -> None:
        """Once a minute: whom all wait for, on one rank that waits; what this rank itself waits for; and where its main
        thread stands: within a micro-batch the others may wait for it in a collective of the training, of which nobody
        knows, and their threads that work ahead may be before or behind its own. A main thread inside torch computes,
        or is one of those that wait; one inside a call of ours waits while any rank is behind."""
        for name, counts in self.all_ranks.streams.items():
            waited_s = self._same_s(name, counts)
            if waited_s >= LINE_EVERY_S and counts[3] == self.rank and (late := self.late(name)):
                self._log_wait(name, f"rank {self.rank} has waited {waited_s:.0f} s for {late}")
        for text in long_waits(LINE_EVERY_S)[:1]:
            self._log_wait("worker", f"rank {self.rank} has no data to go on with: it waits for {text}")
        if self.world_size > 1:
            line, is_ours = main_thread_line()
            stood_s = self._same_s("line", line)
            is_late = any(least < most for least, _, most, _ in self.all_ranks.streams.values())
            waits = TORCH in line or (is_ours and is_late) or long_waits(TICK_S)
            if stood_s >= LINE_EVERY_S and not waits:
                self._log_wait("line", f"rank {self.rank} has been at {line} for {stood_s:.0f} s")

    def _log_wait(self, about: str, text: str) -> None:
        if time.monotonic() - self._logged.get(about, -LINE_EVERY_S) >= LINE_EVERY_S:
            self._logged[about] = time.monotonic()
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
    family, kind, protocol, _, found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(found)  # sends nothing
        address: str = one.getsockname()[0]
        return address


# One for each process group

_by_group: weakref.WeakKeyDictionary[Any, Lifeline] = weakref.WeakKeyDictionary()
_open: list[Lifeline] = []
_abandoned: list[Lifeline] = []
"""Those of the process from which this one was forked."""


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """1 where torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def lifeline_of(process_group: dist.ProcessGroup | None, silence_s: float) -> Lifeline:
    """That of the ranks of `process_group` (None: the default group), which watches from the first call on; for one
    rank a new one, which has not started.

    It lives until the process ends, for another rank may still need it when this one has closed its loader.
    """
    if world_size_of(process_group) == 1:
        return Lifeline(0, 1, None, silence_s)
    group = process_group or dist.group.WORLD
    lifeline = _by_group.get(group)
    if lifeline is None:
        store = None
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend without a store
            store = cast(Any, group).get_group_store()
        lifeline = _by_group[group] = Lifeline(dist.get_rank(group), dist.get_world_size(group), store, silence_s)
        _open.append(lifeline)
        lifeline.start()
    lifeline.silence_s = silence_s
    return lifeline


def known_failure() -> str | None:
    """Why another rank has failed; waits a little, for a collective may notice first."""
    return next((cause for line in _open if (cause := line.cause())), None)


def latest_wait() -> str:
    """After a collective of the training has failed: which rank did not come to it, and where that rank stands; empty
    if none is known. Waits a little until the others have said where they are."""
    for line in _open:
        line._counts[FAILED_COLLECTIVE] = 1  # a rank that was not in the collective is behind in this stream
    until = time.monotonic() + 4 * TICK_S
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
            lifeline.abort(f"rank {lifeline.rank} left the training: {reason}")


def _close_all() -> None:
    for lifeline in _open:
        lifeline.close()


def _abandon_all() -> None:
    for lifeline in _open:
        lifeline.abandon()
    _abandoned.extend(_open)
    _open.clear()
    _by_group.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
