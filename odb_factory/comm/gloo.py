"""Bytes between ranks over gloo process groups, with a limit on calls that may never return."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh

from odb_factory.comm.lifeline import Lifeline, lifeline_of, world_size_of
from odb_factory.errors import CollectiveError, ConfigError, DataError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# Which ranks a loop's loader shares its samples with, as it is when the first batch is asked for.


def find_process_group(given: dist.ProcessGroup | None, *, is_prepared: bool) -> dist.ProcessGroup | None:
    """The data-parallel ranks: `given`, else those of accelerate's mesh, else None (the default group, if any).

    is_prepared: accelerate has prepared the loader. Raises `ConfigError` where they cannot be told.
    """
    if dist.is_available() and dist.is_initialized():
        return given if given is not None or not is_prepared else _of_accelerate()
    if given is not None:
        raise ConfigError("process_group: torch.distributed, to which it belonged, is no longer initialised.")
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:  # a launcher has started several, and this one does not know of the others
        raise ConfigError(
            f"WORLD_SIZE: {ranks} processes were started, but torch.distributed is not initialised here, so each would "
            "train on the whole dataset; call torch.distributed.init_process_group() before the first batch, or remove "
            "WORLD_SIZE from the environment if this process trains alone."
        )
    return None


def check_process_group(given: object) -> None:
    """Raise `ConfigError` for what is no process group of this rank."""
    if given is None or isinstance(given, dist.ProcessGroup):
        return
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "process_group: this rank is not in it; make the loader on the ranks of the group, each with its own."
        )
    hint = ': take its group, mesh["dp"].get_group()' if isinstance(given, DeviceMesh) else ""
    raise ConfigError(
        f"process_group: expected the torch.distributed.ProcessGroup of the data-parallel ranks, found a "
        f"{type(given).__name__}{hint}."
    )


def _of_accelerate() -> dist.ProcessGroup | None:
    state = AcceleratorState()
    mesh: DeviceMesh | None = getattr(state, "ds_device_mesh", None)
    if mesh is None:
        mesh = getattr(state, "device_mesh", None)
    if mesh is None:
        return None
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    if sizes.get("cp", 1) > 1 or sizes.get("sp", 1) > 1:
        raise ConfigError(
            "accelerate's mesh has a context or sequence parallel dimension, which cuts rows apart after they were "
            "grouped; odb does not support it yet: set its size to 1."
        )
    # accelerate makes dp of several dimensions
    for name in ("dp", *(name for name in sizes if name.startswith("dp"))):
        with contextlib.suppress(KeyError):
            group = mesh[name].get_group()
            if dist.get_world_size(group) == mesh.size() // sizes.get("tp", 1):
                return group
    raise ConfigError(
        f"accelerate's mesh ({', '.join(f'{name} {size}' for name, size in sizes.items())}) has no data-parallel "
        "dimension by which odb could deal out samples; give process_group=, the data-parallel ranks of this one."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Collectives on bytes, over a gloo process group.

T = TypeVar("T")

LOOK_S = 0.02
"""How often a thread that waits looks whether another rank has failed."""
MARGIN_S = 10.0
"""Beyond its own timeout, torch is given this long to notice that it is over."""
EXIT_PAUSE_S = 0.2
GROUP_SIZE = 256
"""Ranks of a group, if no number is given."""
TREE_FAN_OUT = 4
FRAME_BYTES, LEAST_ROOM = 4, 56
"""Of the length of a message; of what travels with it at once."""
CANCEL_TAG, CANCEL_S = 1 << 20, 5.0
SPARE_FILES = 256
"""Open files for what the training opens later: data files, pipes of its workers."""

_kept: list[Any] = []
_connections: weakref.WeakKeyDictionary[Lifeline, dict[int, Connections]] = weakref.WeakKeyDictionary()
"""The connections of each lifeline's ranks, by the size of a group."""


@functools.cache
def pause_at_exit() -> None:
    """From now on this process waits `EXIT_PAUSE_S` seconds at its end, behind everything else that waits for it.

    A thread of gloo's still holds the tensors of a collective when that has completed. If it drops them while the
    interpreter ends, torch aborts the process ("terminate called without an active exception"): with torch 2.12, 3 of
    150 pairs of ranks that ended right behind an all-gather. torchrun then calls a training failed that has ended well.
    """
    atexit.register(_end_exchanges, os.getpid())


def _end_exchanges(process: int) -> None:
    """A thread that still waits in gloo would abort the process, too. process: not one that was forked from it."""
    if os.getpid() == process:
        time.sleep(EXIT_PAUSE_S)
        for connections in [one for by_size in _connections.values() for one in by_size.values() if one.users]:
            connections.cancel()


def allow_open_files(num_sockets: int) -> None:
    """Raise this process's soft limit of open files to the hard one if so many more sockets need it.

    Raises `ConfigError` if that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_sockets + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"open files: this process may have {hard}, and needs {needed} to reach {num_sockets} other ranks; "
                "raise the limit before the start (ulimit -Hn, LimitNOFILE= of a service, or --ulimit nofile= of a "
                "container)."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def patience_of(process_group: dist.ProcessGroup | None) -> float:
    """How long the ranks of a process group wait for each other in its own collectives (seconds): `ddp_timeout` in a
    trainer."""
    group: Any = process_group or dist.group.WORLD
    limits = [group._get_backend(device).options._timeout.total_seconds() for device in group._device_types]
    return float(max(limits))


def bounded(call: Callable[[], T], limit_s: float, check: Callable[[float], None] = lambda waited_s: None) -> T:
    """Return `call()`, or raise what it raises; `TimeoutError` after `limit_s` seconds. check: called with the seconds
    waited; what it raises ends the wait. The call runs in a daemon thread, which is given up: torch and gloo wait with
    no other limit than the patience of the group."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    started = time.monotonic()
    threading.Thread(target=run, name="odb-bounded", daemon=True).start()
    while not wait([answer], LOOK_S).done:
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        check(waited_s)
    return answer.result()


class Turn(NamedTuple):
    """What a rank sends and receives at the same time: (rank, bytes) and (rank, at most so many bytes)."""

    sends: Sequence[tuple[int, bytes]] = ()
    receives: Sequence[tuple[int, int]] = ()


Exchange = Generator[Turn, list[bytes], T]
"""A rank's part of an exchange: who runs it moves the bytes of each turn and sends back what has been received."""
Merge = Callable[[Sequence[bytes]], bytes]


class Exchanges:
    """The exchanges of a rank with the others, as turns: they need no network, so they can be run and counted in one
    process. Ranks that follow each other form groups; the first rank of a group leads it.

    Within a group and among the leaders messages are gathered by Bruck's exchange (Bruck et al. 1997: log2 of the ranks
    turns, each message is received once); between a leader and its group they go along a tree.
    group_size: ranks of a group; the last group may have fewer.

        exchanges = Exchanges(rank=0, world_size=2, group_size=2)
        turns = exchanges.gather(b"mine")
        next(turns)  # Turn(sends=[(1, b"...")], receives=[(1, 60)])
    """

    def __init__(self, rank: int, world_size: int, group_size: int):
        self.rank, self.world_size, self.group_size = rank, world_size, group_size
        self.leader = rank - rank % group_size
        self.group = range(self.leader, min(self.leader + group_size, world_size))
        self.leaders = range(0, world_size, group_size)
        first = self.leader + TREE_FAN_OUT * (rank - self.leader) + 1
        self._parent = self.leader + (rank - self.leader - 1) // TREE_FAN_OUT
        self._children = range(min(first, self.group.stop), min(first + TREE_FAN_OUT, self.group.stop))
        self._rooms: dict[str, int] = {}

    def gather(self, message: bytes) -> Exchange[list[bytes]]:
        """The messages of the ranks of the group, in rank order."""
        return (yield from self._bruck("group", self.group, message))

    def gather_all(self, message: bytes) -> Exchange[list[bytes]]:
        """The messages of all ranks, in rank order."""
        gathered = yield from self.gather(message)
        if len(self.leaders) == 1:
            return gathered
        packed = b"".join(_framed(text, len(text)) for text in gathered)
        if self.rank == self.leader:
            packed = b"".join((yield from self._bruck("all leaders", self.leaders, packed)))
        packed = yield from self._hand_down("all", packed)
        return [text for _, text in _frames(packed, len(packed))]

    def reduce(self, message: bytes, merge: Merge) -> Exchange[bytes]:
        """`merge` of the messages of all ranks, the same bytes on all. merge: of some messages, in an order that is not
        that of the ranks."""
        messages = [message, *(yield from self._receive("reduced", self._children))]
        merged = merge(messages)
        if self.rank != self.leader:
            yield from self._send("reduced", [self._parent], merged)
        elif len(self.leaders) > 1:
            merged = merge((yield from self._bruck("leaders", self.leaders, merged)))
        return (yield from self._hand_down("reduced", merged))

    def swap(self, given: Mapping[int, bytes], sources: Sequence[int]) -> Exchange[dict[int, bytes]]:
        """What each of `sources` gives to this rank. given: to other ranks of the group, not empty, which name this
        rank as a source. Messages travel only where something is given."""
        lengths = [(rank, len(text).to_bytes(FRAME_BYTES, "little")) for rank, text in given.items()]
        coming = yield Turn(lengths, [(rank, FRAME_BYTES) for rank in sources])
        sizes = [int.from_bytes(length, "little") for length in coming]
        return dict(zip(sources, (yield Turn(list(given.items()), list(zip(sources, sizes))))))

    def _bruck(self, kind: str, ranks: range, message: bytes) -> Exchange[list[bytes]]:
        """The messages of these ranks, in order; once more with enough room where one was longer than expected."""
        place, count = ranks.index(self.rank), len(ranks)
        while True:
            room, mine = self._room(kind), [(len(message), message)]
            while (have := len(mine)) < count:
                sent = min(have, count - have)
                text = b"".join(_framed(text, room, length) for length, text in mine[:sent])
                to, source = ranks[(place - have) % count], ranks[(place + have) % count]
                (received,) = yield Turn([(to, text)], [(source, sent * (FRAME_BYTES + room))])
                mine += itertools.islice(_frames(received, room), sent)
            self._learn(kind, longest := max(length for length, _ in mine))
            if longest <= room or count == 1:
                return [mine[(number - place) % count][1] for number in range(count)]

    def _hand_down(self, kind: str, message: bytes) -> Exchange[bytes]:
        """The leader's message, to its whole group."""
        if self.rank != self.leader:
            (message,) = yield from self._receive(kind, [self._parent])
        yield from self._send(kind, self._children, message)
        self._learn(kind, len(message))
        return message

    def _send(self, kind: str, ranks: Sequence[int], message: bytes) -> Exchange[None]:
        room = self._room(kind)
        if ranks:
            yield Turn([(rank, _framed(message, room)) for rank in ranks])
            if len(message) > room:
                yield Turn([(rank, message[room:]) for rank in ranks])

    def _receive(self, kind: str, ranks: Sequence[int]) -> Exchange[list[bytes]]:
        if not ranks:
            return []
        room = self._room(kind)
        received = yield Turn((), [(rank, FRAME_BYTES + room) for rank in ranks])
        frames = [next(_frames(text, room)) for text in received]
        longer = [(rank, length - room) for rank, (length, _) in zip(ranks, frames) if length > room]
        rests = dict(zip((rank for rank, _ in longer), (yield Turn((), longer)) if longer else ()))
        return [text + rests.get(rank, b"") for rank, (_, text) in zip(ranks, frames)]

    def _room(self, kind: str) -> int:
        """Bytes of a message that travel at once: as all who take part have learnt from the last of its kind."""
        return self._rooms.get(kind, LEAST_ROOM)

    def _learn(self, kind: str, length: int) -> None:
        self._rooms[kind] = max(LEAST_ROOM, length + length // 8, self._room(kind) * 3 // 4)


def _framed(text: bytes, room: int, length: int | None = None) -> bytes:
    """As much of a message as there is room for, behind its length."""
    return (len(text) if length is None else length).to_bytes(FRAME_BYTES, "little") + text[:room]


def _frames(text: bytes, room: int) -> Iterator[tuple[int, bytes]]:
    """The length of each message, and as much of it as there was room for."""
    position = 0
    while position < len(text):
        length = int.from_bytes(text[position : position + FRAME_BYTES], "little")
        position += FRAME_BYTES
        yield length, text[position : position + min(length, room)]
        position += min(length, room)


class Connections:
    """Connections of a rank: to the ranks of its group and, if it leads it, to the other leaders.

    group, leaders: gloo backends of these, None where there is nobody else. Threads may run exchanges at the same time,
    each with a tag of its own. training: of this process, by number. users: `Group`s.
    """

    def __init__(self, exchanges: Exchanges, group: Any = None, leaders: Any = None, training: int = 0):
        self.exchanges, self._backends = exchanges, [one for one in (group, leaders) if one is not None]
        self._group, self._leaders, self.training = group, leaders, training
        self.users, self.tags = 0, itertools.count()
        self._running: set[int] = set()

    def run(self, exchange: Exchange[T], tag: int) -> T:
        """Returns what the exchange returns; raises what gloo raises."""
        self._running.add(thread := threading.get_ident())
        try:
            turn = next(exchange)
            while True:
                buffers = [torch.zeros(size, dtype=torch.uint8) for _, size in turn.receives]
                works = [self._of("recv", rank, buffer, tag) for (rank, _), buffer in zip(turn.receives, buffers)]
                for rank, text in turn.sends:
                    works.append(self._of("send", rank, torch.frombuffer(bytearray(text), dtype=torch.uint8), tag))
                for work in works:
                    work.wait()
                turn = exchange.send([buffer.numpy().tobytes() for buffer in buffers])
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self._running.discard(thread)

    def _of(self, name: str, rank: int, buffer: torch.Tensor, tag: int) -> dist.Work:
        group, leaders = self.exchanges.group, self.exchanges.leaders
        backend, ranks = (self._group, group) if rank in group else (self._leaders, leaders)
        work: dist.Work = getattr(backend, name)([buffer], ranks.index(rank), tag)
        return work

    def cancel(self) -> None:
        """End what waits in `run`, in whatever thread, and wait for its end (it would abort a process that ends): a
        receive that times out closes the connections of a backend."""
        until = time.monotonic() + CANCEL_S
        while self._running and time.monotonic() < until:
            for backend in self._backends:
                with contextlib.suppress(RuntimeError):
                    nothing = torch.zeros(1, dtype=torch.uint8)
                    backend.recv([nothing], int(backend.rank() == 0), CANCEL_TAG).wait(timedelta(milliseconds=1))
            time.sleep(LOOK_S)


class Group:
    """Bytes of all ranks to all of them, or to those of the group that a rank is in; one rank alone answers itself.

    Ranks wait for each other as long as `parent` does, and not for a rank that is gone. The gloo groups are separate,
    so that these messages never meet the collectives of the training; all `Group`s of a parent share them. Where a
    parent is given, only its ranks take part. All ranks make their groups in the same order, in the main thread; one
    thread uses a group.
    parent: None for the default group, if there is one. silence_s: how long a rank may give no sign of life. name: what
    the calls are for, in messages. group_size: ranks of a group, of whole nodes where it holds one (that of rank 0
    counts); None: any. Raises `CollectiveError`, as all its methods do, where another rank has failed or is missed.

        group = Group(None, 600, "planning")
        group.all_gather(b"mine", "round 3")  # [b"mine", b"theirs"]
    """

    def __init__(self, parent: dist.ProcessGroup | None, silence_s: float, name: str, group_size: int | None = None):
        self.rank, self.world_size = 0, world_size_of(parent)
        self.is_busy = False
        self.lifeline = lifeline_of(parent, silence_s)
        self.exchanges = Exchanges(0, 1, 1)
        self._connections: Connections | None = None
        if self.world_size == 1:
            return
        pause_at_exit()
        self.rank = dist.get_rank(parent)
        self._stream, self._steps = self.lifeline.stream(name), ""
        self._count = itertools.count(1)
        self._patience_s = patience_of(parent)
        by_size, training = _connections.setdefault(self.lifeline, {}), self.lifeline.generation
        for size, one in list(by_size.items()):
            if one.training != training:
                del by_size[size]
        connections = next(iter(by_size.values()), None) if group_size is None else None
        if connections is None:
            every, phase = dist.get_process_group_ranks(parent), f"making the process group for {name}"
            limit_s = self._patience_s + MARGIN_S
            size = self._call(phase, lambda: self._common_size(every, group_size or GROUP_SIZE), limit_s)
            connections = by_size[size] = by_size.get(size) or self._connect(size, phase, limit_s)
        connections.users += 1
        self._connections, self._tag = connections, next(connections.tags)
        # What has been learnt from one thread's messages is of no use to another's.
        self.exchanges = Exchanges(self.rank, self.world_size, connections.exchanges.group_size)

    def _connect(self, size: int, phase: str, limit_s: float) -> Connections:
        mine = Exchanges(self.rank, self.world_size, size)
        leaders = mine.leaders if self.rank == mine.leader else range(0)
        try:
            allow_open_files(len(mine.group) - 1 + max(len(leaders) - 1, 0))
        except ConfigError as error:
            self.lifeline.abort(f"rank {self.rank} left the training: {one_line(error)}")
            raise

        patience, name = timedelta(seconds=self._patience_s), self.lifeline.stream("connections")

        def make(ranks: range) -> Any:
            if len(ranks) < 2:
                return None
            # Not `dist.new_group`: its name depends on how many groups a process has made before.
            store = dist.PrefixStore(f"{name} {ranks}", self.lifeline.store())
            return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), patience)

        generation = self.lifeline.generation
        return self._call(phase, lambda: Connections(mine, make(mine.group), make(leaders), generation), limit_s)

    def _common_size(self, every: Sequence[int], group_size: int) -> int:
        """The ranks of a group, from rank 0: its setting, in whole nodes."""
        of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        of_node = sum(rank // of_node == every[0] // of_node for rank in every)
        size = group_size - group_size % of_node if group_size > of_node else group_size
        return self.lifeline.common("ranks of a group", min(size, self.world_size))

    def all_gather(self, message: bytes, phase: str) -> list[bytes]:
        """The messages of all ranks, in rank order.

        phase: what the messages are about. Raises `DataError` where another rank has taken a `step` that this one has
        not.
        """
        return self._run(self.exchanges.gather_all(message), phase)

    def gather(self, message: bytes, phase: str) -> list[bytes]:
        """The messages of the ranks of the group, in rank order."""
        return self._run(self.exchanges.gather(message), phase)

    def reduce(self, message: bytes, merge: Merge, phase: str) -> bytes:
        """As `Exchanges.reduce`."""
        return self._run(self.exchanges.reduce(message, merge), phase)

    def swap(self, given: Mapping[int, bytes], sources: Sequence[int], phase: str) -> dict[int, bytes]:
        """As `Exchanges.swap`."""
        return self._run(self.exchanges.swap(given, sources), phase)

    def step(self, phase: str) -> None:
        """This rank takes the next of the steps that all ranks take. phase: which step."""
        if self.world_size > 1:
            self._steps = self._steps or self.lifeline.stream("steps")
            self.lifeline.enter(self._steps, phase)

    def close(self, *, failed: bool = False) -> None:
        """Give the connections back; safe to call twice."""
        connections, self._connections = self._connections, None
        if connections is None:
            return
        for stream in (self._stream, self._steps):
            self.lifeline.leave(stream)
        connections.users -= 1
        if self.is_busy:
            connections.cancel()
        if failed or self.is_busy or self.lifeline.failure is not None:
            by_size = _connections.get(self.lifeline, {})
            for size in [size for size, one in by_size.items() if one is connections]:
                del by_size[size]  # what comes next has connections of its own
            _kept.append(connections)

    def _run(self, exchange: Exchange[T], phase: str) -> T:
        if self.world_size == 1:
            return Connections(self.exchanges).run(exchange, 0)
        assert self._connections is not None
        connections, tag = self._connections, self._tag
        return self._call(phase, lambda: connections.run(exchange, tag))

    def _call(self, phase: str, call: Callable[[], T], limit_s: float = math.inf) -> T:
        self.lifeline.enter(self._stream, f"{phase} (message {next(self._count)})")
        started = time.monotonic()
        self.is_busy = True
        try:
            result = bounded(call, limit_s, partial(self.lifeline.check_wait, self._stream, self._steps or None))
        except DataError:
            raise  # it is known why
        except Exception as error:
            waited_s = time.monotonic() - started
            failure = self.lifeline.cause() or self._missed(phase, waited_s, error)
            self.lifeline.abort(failure)
            raise CollectiveError(failure) from None
        self.is_busy = False
        return result

    def _missed(self, phase: str, waited_s: float, error: Exception) -> str:
        late = self.lifeline.late(self._stream) or self.lifeline.latest()
        if waited_s >= 0.9 * self._patience_s:
            whom = late or "another rank"
            return (
                f"rank {self.rank} has waited {waited_s:.0f} s in {phase}, the timeout of the process group "
                f"(ddp_timeout), for {whom}; look for what holds it up, or raise ddp_timeout."
            )
        return (
            f"rank {self.rank} lost {late or 'another rank'} in {phase}; look for its own last message "
            f"({one_line(error)})."
        )


def release(group: dist.ProcessGroup, *, failed: bool = False) -> None:
    """Give a group back. One in use, or whose ranks are gone, is kept to the end of the process: its destructor waits
    for the collective under way, and so would `dist.destroy_process_group()`."""
    if failed:
        _kept.append(group)
    elif dist.is_initialized():
        dist.destroy_process_group(group)


def gather_once(message: bytes, silence_s: float, parent: dist.ProcessGroup | None = None) -> list[bytes]:
    """The messages of all ranks of `parent`, in the main thread. parent, silence_s: as in `Group`."""
    group = Group(parent, silence_s, "a comparison before training")
    try:
        return group.all_gather(message, "comparing what the ranks say")
    finally:
        group.close()
