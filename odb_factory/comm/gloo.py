"""Bytes between ranks over gloo process groups, with a limit on calls that may never return."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

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
    if not (dist.is_available() and dist.is_initialized()):
        _check_alone(given)
        return None
    if given is not None:
        return given
    return _of_accelerate() if is_prepared else None


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


def _check_alone(given: dist.ProcessGroup | None) -> None:
    """A launcher has started several processes, and this one does not know of the others."""
    if given is not None:
        raise ConfigError("process_group: torch.distributed, to which it belonged, is no longer initialised.")
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:
        raise ConfigError(
            f"WORLD_SIZE: {ranks} processes were started, but torch.distributed is not initialised here, so each would "
            "train on the whole dataset; call torch.distributed.init_process_group() before the first batch, or remove "
            "WORLD_SIZE from the environment if this process trains alone."
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
    for name in ("dp", *sizes):  # accelerate makes dp of several dimensions
        if not name.startswith("dp"):
            continue
        try:
            group = mesh[name].get_group()
        except KeyError:
            continue
        if dist.get_world_size(group) == mesh.size() // sizes.get("tp", 1):
            return group
    raise ConfigError(
        f"accelerate's mesh ({', '.join(f'{name} {size}' for name, size in sizes.items())}) has no data-parallel "
        "dimension by which odb could deal out samples; give process_group=, the data-parallel ranks of this one."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Collectives on bytes, over a gloo process group.

T = TypeVar("T")

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.02
"""Between two looks whether a call has ended."""
MARGIN_S = 10.0
"""Beyond its own timeout, torch is given this long to notice that it is over."""
EXIT_PAUSE_S = 0.2
FRAME_BYTES = 56
LENGTH_BYTES = 8
SPARE_FILES = 256
"""Open files for what the training opens later: data files, pipes of its workers."""

_kept: list[dist.ProcessGroup] = []


@dataclass
class _Shared:
    """The gloo group of the main thread's messages. training: of this process, by number; users: `Group`s."""

    group: dist.ProcessGroup
    training: int
    users: int = 0


_shared: weakref.WeakKeyDictionary[Lifeline, _Shared] = weakref.WeakKeyDictionary()


@functools.cache
def pause_at_exit() -> None:
    """From now on this process waits `EXIT_PAUSE_S` seconds at its end, behind everything else that waits for it.

    A thread of gloo's still holds the tensors of a collective when that has completed. If it drops them while the
    interpreter ends, torch aborts the process ("terminate called without an active exception"): with torch 2.12, 3 of
    150 pairs of ranks that ended right behind an all-gather. torchrun then calls a training failed that has ended well.
    """
    atexit.register(time.sleep, EXIT_PAUSE_S)


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


def wait_for(is_done: Callable[[], bool], check: Callable[[float], None], limit_s: float = math.inf) -> None:
    """Return once `is_done()`. check: called with the seconds waited; what it raises ends the wait. Raises
    `TimeoutError` after `limit_s` seconds."""
    pause_s, started = SHORTEST_PAUSE_S, time.monotonic()
    while not is_done():
        waited_s = time.monotonic() - started
        if waited_s >= limit_s:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        check(waited_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def bounded(call: Callable[[], T], limit_s: float, check: Callable[[float], None] = lambda waited_s: None) -> T:
    """Return `call()`, or raise what it raises. limit_s, check: as of `wait_for`. The call runs in a daemon thread,
    which is given up at the limit: torch makes process groups without another one than the patience of the group."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="odb-bounded", daemon=True).start()
    wait_for(answer.done, check, limit_s)
    return answer.result()


class Group:
    """Bytes of all ranks to all of them, over a gloo group; one rank alone answers itself.

    Ranks wait for each other as long as `parent` does, and not for a rank that is gone. The gloo group is separate, so
    that these messages never meet the collectives of the training. Where a parent is given, only its ranks take part,
    and nothing is created on the default group. All ranks make their groups in the same order; one thread uses a group.
    parent: None for the default group, if there is one. silence_s: how long a rank may give no sign of life. name: what
    the calls are for, in messages. is_main: the main thread makes all calls; its groups share one gloo group, a
    connection to each rank. Raises `CollectiveError`, as all its methods do, where another rank has failed or is
    missed.

        group = Group(None, 600, "planning")
        group.all_gather(b"mine", "round 3")  # [b"mine", b"theirs"]
    """

    def __init__(self, parent: dist.ProcessGroup | None, silence_s: float, name: str, *, is_main: bool = False):
        self.rank, self.world_size = 0, world_size_of(parent)
        self.is_busy = False
        self._group: dist.ProcessGroup | None = None
        self.lifeline = lifeline_of(parent, silence_s)
        if self.world_size == 1:
            return
        pause_at_exit()
        self.rank = dist.get_rank(parent)
        self._stream, self._steps = self.lifeline.stream(name), ""
        self._count = itertools.count(1)
        self._patience_s = patience_of(parent)
        self._shared: _Shared | None = None
        if not is_main:
            self._group = self._make(parent, name)
            return
        shared, training = _shared.get(self.lifeline), self.lifeline.generation
        if shared is None or shared.training != training:
            if shared is not None and not shared.users:
                release(shared.group)
            shared = _shared[self.lifeline] = _Shared(self._make(parent, name), training)
        self._shared, self._group = shared, shared.group
        shared.users += 1

    def _make(self, parent: dist.ProcessGroup | None, name: str) -> dist.ProcessGroup:
        try:
            allow_open_files(self.world_size - 1)
        except ConfigError as error:
            self.lifeline.abort(f"rank {self.rank} left the training: {one_line(error)}")
            raise

        def make() -> dist.ProcessGroup:
            group: dist.ProcessGroup = dist.new_group(
                dist.get_process_group_ranks(parent),
                backend="gloo",
                timeout=timedelta(seconds=self._patience_s),
                use_local_synchronization=parent is not None,
                group_desc="odb_factory",
            )
            return group

        return self._call(
            f"making the process group for {name}", lambda check: bounded(make, self._patience_s + MARGIN_S, check)
        )

    def all_gather(self, message: bytes, phase: str) -> list[bytes]:
        """The messages of all ranks, in rank order, in one collective where all have `FRAME_BYTES` bytes or less.

        phase: what the messages are about. Raises `DataError` where another rank has taken a `step` that this one has
        not.
        """

        def gather(check: Callable[[float], None]) -> list[bytes]:
            answers = self._gather(message, FRAME_BYTES, check)
            longest = max(length for length, _ in answers)
            if longest > FRAME_BYTES:
                answers = self._gather(message, longest, check)
            return [text for _, text in answers]

        return [message] if self.world_size == 1 else self._call(phase, gather, self._steps or None)

    def step(self, phase: str) -> None:
        """This rank takes the next of the steps that all ranks take. phase: which step."""
        if self.world_size > 1:
            self._steps = self._steps or self.lifeline.stream("steps")
            self.lifeline.enter(self._steps, phase)

    def _gather(self, message: bytes, room: int, check: Callable[[float], None]) -> list[tuple[int, bytes]]:
        """The length of each rank's message, and as much of it as there is room for (bytes)."""
        mine = torch.zeros(LENGTH_BYTES + room, dtype=torch.uint8)
        sent = len(message).to_bytes(LENGTH_BYTES, "little") + message[:room]
        mine[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        frames = [torch.empty_like(mine) for _ in range(self.world_size)]
        _finish(dist.all_gather(frames, mine, group=self._group, async_op=True), check)
        answers = []
        for frame in frames:
            text = frame.numpy().tobytes()
            length = int.from_bytes(text[:LENGTH_BYTES], "little")
            answers.append((length, text[LENGTH_BYTES : LENGTH_BYTES + length]))
        return answers

    def all_to_all(self, buffers: Sequence[bytes], phase: str) -> list[bytes]:
        """What the ranks have sent to this one, in rank order. Sizes travel first. phase: as above."""

        def exchange(check: Callable[[float], None]) -> list[bytes]:
            group = self._group
            sizes = torch.tensor([len(buffer) for buffer in buffers])
            coming = torch.empty_like(sizes)
            _finish(dist.all_to_all_single(coming, sizes, group=group, async_op=True), check)
            outgoing = torch.frombuffer(bytearray(b"".join(buffers)) or bytearray(1), dtype=torch.uint8)
            outgoing, incoming = outgoing[: int(sizes.sum())], torch.empty(int(coming.sum()), dtype=torch.uint8)
            split = coming.tolist()
            work = dist.all_to_all_single(incoming, outgoing, split, sizes.tolist(), group=group, async_op=True)
            _finish(work, check)
            return [text.numpy().tobytes() for text in torch.split(incoming, split)]

        return list(buffers) if self.world_size == 1 else self._call(phase, exchange)

    def close(self, *, failed: bool = False) -> None:
        """Give the group back; safe to call twice."""
        if self.world_size == 1:
            return
        group, self._group = self._group, None
        for stream in (self._stream, self._steps):
            self.lifeline.leave(stream)
        failed = failed or self.is_busy or self.lifeline.failure is not None
        if group is not None and self._shared is not None:
            self._shared.users -= 1
            if _shared.get(self.lifeline) is self._shared:
                if not failed:  # another group uses it, or will
                    return
                del _shared[self.lifeline]
            elif self._shared.users:
                return
        if group is not None:
            release(group, failed=failed)

    def _call(self, phase: str, call: Callable[[Callable[[float], None]], T], steps: str | None = None) -> T:
        self.lifeline.enter(self._stream, f"{phase} (message {next(self._count)})")
        started = time.monotonic()
        self.is_busy = True
        try:
            result = call(partial(self.lifeline.check_wait, self._stream, steps))
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


def _finish(work: dist.Work, check: Callable[[float], None]) -> None:
    """Wait for a collective; raises what it raises (its timeout, a lost peer), or what `check` does."""
    wait_for(work.is_completed, check)
    work.wait()


def release(group: dist.ProcessGroup, *, failed: bool = False) -> None:
    """Give a group back. One in use, or whose ranks are gone, is kept to the end of the process: its destructor waits
    for the collective under way, and so would `dist.destroy_process_group()`."""
    if failed:
        _kept.append(group)
    elif dist.is_initialized():
        dist.destroy_process_group(group)


def gather_once(message: bytes, silence_s: float, phase: str = "comparing what the ranks say") -> list[bytes]:
    """The messages of all ranks of the default group, in the main thread. silence_s, phase: as in `Group`."""
    group = Group(None, silence_s, "a comparison before training", is_main=True)
    try:
        return group.all_gather(message, phase)
    finally:
        group.close()
