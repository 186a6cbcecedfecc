"""Communication of the data-parallel ranks: a gather for each plan, samples that move, and the reason why a rank ends.

`Channel`  a gloo group of these ranks for the calls of one thread: `gather` gives every rank the bytes of all ranks,
           `exchange` moves bytes between ranks as every rank has computed from gathered bytes.
`Ring`     each rank always waits for a message of the rank before it, and sends a beat to the rank after it. gloo fails
           that wait when the process is gone; a rank without beats for `silence_s` is frozen. A rank passes a failure
           on and closes its channels, so a death ends all waits.
`Ranks`    both, for the planning of one loader.

All ranks make the calls of a channel in the same order, and the next call depends on gathered bytes alone, so no rank
waits for a call that another rank does not make. Gathered bytes may be pickled, as in torch's object collectives: the
network of the ranks is trusted.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import platform
import resource
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

from odb_factory.config import ODBConfig
from odb_factory.errors import CollectiveError, ConfigError, ODBError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import ROW, BufferMetadata, Limits
from odb_factory.refusals import installed_version

logger = get_logger(__name__)

# The data-parallel ranks of a custom loop.


def find_process_group(process_group: dist.ProcessGroup | None, *, is_prepared: bool) -> dist.ProcessGroup | None:
    """The data-parallel ranks: `process_group`, else those of accelerate's mesh, else None (the default group, if any).

    is_prepared: accelerate has prepared the loader. Raises `ConfigError` if the ranks cannot be determined.
    """
    if dist.is_available() and dist.is_initialized():
        return process_group if process_group is not None or not is_prepared else _of_accelerate()
    if process_group is not None:
        raise ConfigError("process_group: torch.distributed, to which it belonged, is no longer initialised.")
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdigit() and int(ranks) > 1:  # a launcher has started several processes, unknown to this one
        raise ConfigError(
            f"WORLD_SIZE: {ranks} processes were started, but torch.distributed is not initialised here, so each would "
            "train on the whole dataset; call torch.distributed.init_process_group() before the first batch, or remove "
            "WORLD_SIZE from the environment if this process trains alone."
        )
    return None


def check_process_group(process_group: object) -> None:
    """Raise `ConfigError` for anything but a process group of this rank."""
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "process_group: this rank is not in it; make the loader on the ranks of the group, each with its own."
        )
    hint = ': take its group, mesh["dp"].get_group()' if isinstance(process_group, DeviceMesh) else ""
    raise ConfigError(
        f"process_group: expected the torch.distributed.ProcessGroup of the data-parallel ranks, found a "
        f"{type(process_group).__name__}{hint}."
    )


def patience_of(process_group: dist.ProcessGroup | None) -> float:
    """The timeout of the collectives of a process group (seconds): `ddp_timeout` in a trainer; torch's default if the
    backend has no such option."""
    group: Any = process_group or dist.group.WORLD
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [option._timeout for option in options if hasattr(option, "_timeout")]
    return float(max(limits, default=default_pg_timeout).total_seconds())


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _of_accelerate() -> dist.ProcessGroup | None:
    state: Any = AcceleratorState()
    meshes = [getattr(state, name, None) for name in ("ds_device_mesh", "device_mesh")]
    mesh: DeviceMesh | None = next((mesh for mesh in meshes if mesh is not None), None)
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


# A gloo group for the calls of one thread.

YEAR = timedelta(days=365)
"""gloo has no call without a limit."""
LEAST_SILENCE_S = 10.0
"""A busy machine may be silent for some seconds."""
RING_TAG, CANCEL_TAG = 1 << 20, 1 << 21
SPARE_FILES = 256
"""Open files for what the training opens later: data files, pipes of its workers."""


class Channel:
    """A gloo group of the ranks of a `Ring`, for the calls of one thread. `Ring.channel` makes it.

    Living ranks are waited for as long as the training's own collectives do (`ddp_timeout`). The calls raise
    `CollectiveError` if another rank is gone or has failed, or if this rank has.
    """

    def __init__(self, ring: Ring, gloo: Any):
        self.ring, self._gloo = ring, gloo
        self.rank, self.world_size = ring.rank, ring.world_size

    def gather(self, payload: bytes, about: str) -> list[bytes]:
        """The bytes of every rank, in rank order. about: the purpose of the call, for messages."""
        if self.world_size == 1:
            return [payload]
        sizes = self._all(torch.tensor([len(payload)]), about)
        max_size = max(int(size) for size in sizes)
        padded = torch.zeros(max_size, dtype=torch.uint8)
        padded[: len(payload)] = _tensor(payload)
        contents = self._all(padded, about)
        return [content[: int(size)].numpy().tobytes() for content, size in zip(contents, sizes)]

    def exchange(self, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], about: str) -> dict[int, bytes]:
        """The bytes from each rank in `incoming`. outgoing: by receiver; incoming: number of bytes by sender.

        Ranks that neither send nor receive need not call it.
        """
        received = {sender: torch.empty(size, dtype=torch.uint8) for sender, size in incoming.items()}
        sent = {rank: _tensor(content) for rank, content in outgoing.items()}
        with self._naming(about):
            works = [self._gloo.recv([tensor], sender, 0) for sender, tensor in received.items()]
            works += [self._gloo.send([tensor], receiver, 0) for receiver, tensor in sent.items()]
            for work in works:
                work.wait(self.ring.patience)
        return {sender: tensor.numpy().tobytes() for sender, tensor in received.items()}

    def _all(self, tensor: torch.Tensor, about: str) -> list[torch.Tensor]:
        answers = [torch.empty_like(tensor) for _ in range(self.world_size)]
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self.ring.patience
        with self._naming(about):
            self._gloo.allgather([answers], [tensor], options).wait(self.ring.patience)
        return answers

    @contextlib.contextmanager
    def _naming(self, about: str) -> Any:
        """Raise the reason that the ring knows in place of gloo's error."""
        self.ring.check()
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(self.ring.why_lost(about, error, time.monotonic() - started)) from None

    def cancel(self) -> None:
        """End all waits in this channel, in any thread: a receive that times out closes its connections."""
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros(1, dtype=torch.uint8)
            self._gloo.recv([nothing], self.ring.before, CANCEL_TAG).wait(timedelta(milliseconds=1))


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


# The ring that ends all waits.

BEAT_S = 1.0
SEND_S = 1.0
"""Longest wait until the rank after this one, which may be frozen, has the reason of a failure."""
CAUSE_S = 5.0
"""A collective may fail before the ring knows why: longest wait for the reason."""
END_S = 6.0
"""A process that belongs to the training ends this long after a failure of another rank, at the latest."""
EXIT_S = 0.2
MESSAGE = 4096
"""Bytes of a message of the ring."""
BEAT, ENDED, FAILED = b".", b"=", b"!"
GONE = "rank {} has ended without a word (killed, perhaps by the out-of-memory killer); look for its own last message."
ENDED_EARLY = "rank {} has ended its program while others go on; all ranks must take the same optimizer steps."
SILENT = (
    "rank {} gave no sign of life for {:g} s: its process is stopped, or its node or network is gone; look for its own "
    "last message, or raise exchange_timeout_s if it was only slow."
)
LATE = (
    "rank {} has waited {:.0f} s in {}, the timeout of the process group (ddp_timeout), for another rank, which is "
    "alive; look for what holds it up (py-spy dump shows where each rank stands), or raise ddp_timeout."
)
ABSENT = (
    "rank {} has waited {:g} s (exchange_timeout_s) for {}, which has not come to the start of odb; does each rank "
    "have the same `odb:` block and program?"
)


class Ring:
    """Tells all ranks why a rank ends. One ring for each process group, from `ring_of` to the end of the process.

    silence_s: how long a rank may give no sign of life. end_process: ends this process, whatever its main thread is
    doing, `END_S` after a failure that the main thread does not know; None: the process goes on.
    group: the process group, if it lives. main: the channel of the main thread. is_closing: the ring is not used any
    more. failure: why a rank has failed; is_known: the main thread knows.
    """

    def __init__(self, parent: dist.ProcessGroup | None, silence_s: float):
        self.rank, self.world_size, self.silence_s = 0, world_size_of(parent), silence_s
        self.patience = YEAR
        self.end_process: Callable[[str], None] | None = None
        self.failure: str | None = None
        self.is_known = self.is_closing = self._before_has_ended = False
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._idle: list[Channel] = []
        self._count = 0
        if self.world_size == 1:
            self.before = self.after = 0
            self.main = Channel(self, None)
            return
        self.rank = dist.get_rank(parent)
        self.before, self.after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self.patience = min(timedelta(seconds=patience_of(parent)), YEAR)
        group: Any = parent or dist.group.WORLD
        self.group = weakref.ref(group)
        generation = _generations[group] = _generations.get(group, 0) + 1
        self._store = dist.PrefixStore(f"odb_factory {generation}", _get_process_group_store(group))
        self.main = self.channel()
        loops = (self._listen, "odb-ring"), (self._beat, "odb-beat")
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in loops]
        for thread in self._threads:
            thread.start()

    def channel(self) -> Channel:
        """A channel that no other thread uses. All ranks call this in the same order, in the main thread."""
        if self.world_size == 1:
            return self.main
        if self._idle:
            return self._idle.pop()
        self._count += 1
        try:
            _allow_open_files(self.world_size)
            store = dist.PrefixStore(f"channel {self._count}", self._store)
            self._meet(store)
            gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timedelta(seconds=self.silence_s))
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(self.why_lost("connecting the ranks", error)) from None
        self._channels.append(channel := Channel(self, gloo))
        return channel

    def give_back(self, channel: Channel) -> None:
        """Keep a channel that no thread uses any more for the next call of `channel`."""
        if channel is not self.main and self.failure is None:
            self._idle.append(channel)

    def check(self) -> None:
        """Raise `CollectiveError` if a rank has failed."""
        if self.failure is not None:
            self.is_known |= threading.current_thread() is threading.main_thread()
            raise CollectiveError(self.failure)

    def fail(self, reason: str) -> None:
        """Tell all ranks why this one ends. Each rank keeps the first reason that it receives."""
        self.is_known |= threading.current_thread() is threading.main_thread()
        if self.world_size > 1:
            self._note(f"rank {self.rank} left the training: {reason}")

    def cause(self, wait_s: float = CAUSE_S) -> str | None:
        """Why a rank has failed; waits for the reason, because a collective may fail before it arrives."""
        until = time.monotonic() + wait_s
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.02)
        self.is_known |= self.failure is not None
        return self.failure

    def why_lost(self, about: str, error: Exception, waited_s: float = 0.0) -> str:
        """Why a call has failed; tells all ranks."""
        is_late = waited_s > 0.9 * self.patience.total_seconds()
        if (cause := self.cause(0.0 if is_late else CAUSE_S)) is None:
            cause = f"rank {self.rank} lost another rank in {about}; look for its own last message ({one_line(error)})."
            if is_late:
                cause = LATE.format(self.rank, waited_s, about)
            if self._before_has_ended:
                cause = ENDED_EARLY.format(self.before)
            self._note(cause)
        return self.failure or cause

    def close(self) -> None:
        """End in order: tell the rank after this one, and end the threads that wait."""
        if self.world_size == 1 or self.is_closing:
            return
        self.is_closing = True
        with contextlib.suppress(RuntimeError):  # the rank after this one may have ended first
            if self.failure is None:
                self._send(ENDED)
        time.sleep(EXIT_S)  # a thread of gloo still holds the tensors of a call that has completed
        for channel in self._channels:
            channel.cancel()
        for thread in self._threads:
            thread.join(SEND_S)

    def _meet(self, store: Any) -> None:
        """Wait until all ranks are here: gloo, which connects them, would wait for a rank that is gone."""
        store.set(f"rank {self.rank}", "here")
        store.add("ranks", 1)
        until = time.monotonic() + self.silence_s
        while store.add("ranks", 0) < self.world_size:
            self.check()
            if self._before_has_ended:
                self._note(ENDED_EARLY.format(self.before))
            if time.monotonic() > until:
                absent = [rank for rank in range(self.world_size) if not store.check([f"rank {rank}"])]
                named = " and ".join([f"rank {rank}" for rank in absent[:2]] + ["more"] * (len(absent) > 2))
                raise CollectiveError(ABSENT.format(self.rank, self.silence_s, named))
            time.sleep(max(0.02, self.world_size / 2000))  # the store answers all ranks

    def _listen(self) -> None:
        """The thread that waits for the rank before this one."""
        message = torch.empty(MESSAGE, dtype=torch.uint8)
        while True:
            started = time.monotonic()
            limit_s = max(self.silence_s, LEAST_SILENCE_S)
            try:
                self.main._gloo.recv([message], self.before, RING_TAG).wait(timedelta(seconds=limit_s))
            except RuntimeError:
                if not (self.is_closing or self.failure is not None):
                    is_silent = time.monotonic() - started > 0.9 * limit_s
                    self._note(SILENT.format(self.before, limit_s) if is_silent else GONE.format(self.before))
                return
            content = message.numpy().tobytes().rstrip(b"\0")
            if content[:1] == ENDED:
                self._before_has_ended = True
                return
            if content[:1] == FAILED:
                self._note(content[1:].decode(errors="replace"))
                return

    def _beat(self) -> None:
        """The thread that sends a sign of life to the rank after this one, which may have ended."""
        with contextlib.suppress(RuntimeError):
            while not self.is_closing and self.failure is None:
                self._send(BEAT, YEAR)
                time.sleep(BEAT_S)

    def _send(self, message: bytes, limit: timedelta = timedelta(seconds=SEND_S)) -> None:
        """Send to the rank after this one. gloo holds a message until its receiver asks for it, which a frozen rank
        never does."""
        if not self._channels:
            return  # the ranks are not connected yet
        padded = message[:MESSAGE].ljust(MESSAGE, b"\0")
        self._channels[0]._gloo.send([_tensor(padded)], self.after, RING_TAG).wait(limit)

    def _note(self, reason: str) -> None:
        """Keep the first failure, pass it on, and end all waits."""
        with self._lock:
            if self.failure is not None or self.is_closing:
                return
            self.failure = reason
        with contextlib.suppress(RuntimeError):
            self._send(FAILED + reason.encode())
        for channel in self._channels:
            channel.cancel()
        threading.Thread(target=self._end_if_unknown, name="odb-end", daemon=True).start()

    def _end_if_unknown(self) -> None:
        """The main thread may be in a collective of the training that never returns."""
        time.sleep(END_S)
        if self.is_known or self.is_closing or self.failure is None:
            return
        logger.error("%s", self.failure)
        if self.end_process is not None:
            self.end_process(self.failure)


_rings: list[Ring] = []
"""Closed rings stay: destructors of gloo's objects wait for threads, which a forked process does not have."""
_generations: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of rings that a process group has had, or could not connect."""


def ring_of(process_group: dist.ProcessGroup | None, silence_s: float) -> Ring:
    """The ring of the ranks of `process_group` (None: the default group). From the first call on, which all ranks make,
    a rank that dies ends the others. After a failure that this process knows, another ring begins.

    Raises `CollectiveError` if a rank has failed, or does not come within `silence_s` seconds.
    """
    if world_size_of(process_group) == 1:
        return Ring(process_group, silence_s)
    group = process_group or dist.group.WORLD
    ring = next((ring for ring in reversed(_rings) if ring.group() is group), None)
    if ring is not None and ring.failure is not None:
        if not ring.is_known:
            ring.check()
        ring.close()
    if ring is None or ring.is_closing:
        ring = Ring(process_group, silence_s)
        _rings.append(ring)
    ring.silence_s = silence_s
    return ring


def known_failure() -> str | None:
    """Why another rank has failed."""
    return next((cause for ring in _rings if not ring.is_closing and (cause := ring.cause())), None)


def end_all(reason: str | None) -> None:
    """The main thread ends this process; tell the other ranks why. reason: None if they know."""
    for ring in _rings:
        ring.end_process = None
        if reason is not None:
            ring.fail(reason)


@atexit.register
def _close_all() -> None:
    for ring in _rings:
        ring.close()


def _forget_all() -> None:
    """In a forked process, which has none of the threads."""
    for ring in _rings:
        ring.is_closing = True


os.register_at_fork(after_in_child=_forget_all)


def _allow_open_files(num_sockets: int) -> None:
    """Raise the soft limit of open files of this process if this number of further sockets needs it.

    Raises `ConfigError` if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_sockets + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"open files: this process may have {hard}, and needs {needed} to reach {num_sockets} other ranks; raise "
            "the limit before the start (ulimit -Hn, LimitNOFILE= of a service, or --ulimit nofile= of a container)."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        # As high as possible: the training opens further files.
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def gather_once(message: bytes, silence_s: float, parent: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gather one message from each rank of `parent`, in the main thread. silence_s: as in `ring_of`."""
    return ring_of(parent, silence_s).main.gather(message, "comparing the ranks")


# The planning of a loader.

LEFT_EPOCH = "it left the epoch before its end; all ranks must take the same optimizer steps."
NO_SAMPLES = BufferMetadata(np.zeros(0, ROW), exhausted=True)


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """The message of a rank to all others before each plan: the samples it holds, and counts since this pass began.

    rejected: rows left out when read, by reason. overlong: samples that break a budget alone and are trained on.
    order: the fingerprint of the order of the rows (see `ShardSampler.compare`, `StreamReader.compare`).
    plan: the checksum of the last plan. limits: to which the rank has lowered its budgets; the lowest limits of all
    ranks count. failure: why the rank cannot go on; nothing else counts then.
    """

    buffer: BufferMetadata = NO_SAMPLES
    rejected: Counter[str] = field(default_factory=Counter)
    overlong: int = 0
    order: int = 0
    plan: int = 0
    limits: Limits | None = None
    failure: str | None = None


class Ranks:
    """The data-parallel ranks, for the planning of one loader; a single rank answers itself.

    process_group: these ranks; None: the default group, if there is one. silence_s: how long a rank may give no sign of
    life (seconds). channel: for the planning thread. All ranks make and close this object at the same place of the
    program.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, silence_s: float = 600.0):
        self.silence_s = silence_s
        self.ring = ring_of(process_group, silence_s)
        self.channel = self.ring.channel()
        self.rank, self.world_size = self.ring.rank, self.ring.world_size
        self._is_closed = False

    def gather(self, metadata: RankMetadata) -> list[RankMetadata]:
        """The metadata of every rank, in rank order. Planning thread.

        Raises `CollectiveError`, on all ranks, if one of them cannot go on.
        """
        if self._is_closed:
            raise CollectiveError(self.ring.failure or f"rank {self.rank} has left the training.")
        ranks = [pickle.loads(text) for text in self.channel.gather(pickle.dumps(metadata, 5), "planning")]
        # A rank that only left may have left because another rank failed.
        failures = [(meta.failure == LEFT_EPOCH, rank, meta.failure) for rank, meta in enumerate(ranks) if meta.failure]
        if failures:
            has_left, rank, failure = min(failures)
            cause = self.ring.cause(0.5) if has_left and self.world_size > 1 else None
            raise CollectiveError(cause or f"rank {rank} stopped: {failure}")
        return ranks

    def stop(self, reason: str = LEFT_EPOCH) -> None:
        """Tell the other ranks, in place of the next metadata, why this rank ends its planning. Planning thread."""
        with contextlib.suppress(CollectiveError):  # all end
            self.gather(RankMetadata(failure=reason))

    def close(self) -> None:
        """Give the channel back. The last call."""
        if not self._is_closed:
            self._is_closed = True
            self.ring.give_back(self.channel)


# Ranks that differ in settings or releases stop in one line before the first step (I11).

PACKAGES = (
    "odb_factory", "llamafactory", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "numpy", "pillow",
    "torchvision",
)  # fmt: skip
"""Distributions that must have the same release on all ranks; the builds may differ."""
LOCAL_KEYS = ("audit", "exchange_timeout_s")
"""Keys of the odb: block that change no plan and no weight."""
MAX_KEYS_NAMED = 3
MAX_VALUE_CHARACTERS = 80


def block_settings(config: ODBConfig) -> dict[str, object]:
    """The keys of the odb: block as settings."""
    return {f"odb.{key}": value for key, value in config.to_dict().items() if key not in LOCAL_KEYS}


@functools.cache
def releases() -> dict[str, object]:
    """The releases that ranks compare: `PACKAGES` without their builds, and major.minor of Python."""
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["Python"] = platform.python_version().rpartition(".")[0]
    return {f"release of {name}": version and version.partition("+")[0] for name, version in versions.items()}


def compare(
    settings: Mapping[str, object], gather: Callable[[bytes], Sequence[bytes]], *, problem: ODBError | None = None
) -> None:
    """Raise the same error on every rank if the settings of the ranks differ. Collective.

    settings: compared by the `repr` of each value, so that 1, 1.0 and "1" differ. gather: sends the bytes of this rank
    and returns the bytes of all ranks, in rank order.
    problem: why this rank cannot continue; all ranks raise it, unless settings differ, which explains more.
    Raises `CollectiveError`; if there is one rank, `problem` itself.
    """
    texts = {name: repr(value) for name, value in settings.items()}
    reason = None if problem is None else one_line(problem)
    ranks = [pickle.loads(text) for text in gather(pickle.dumps((texts, reason), 5))]
    if problem is not None and len(ranks) == 1:
        raise problem
    # A difference of settings explains more than the errors that follow from it.
    differing = []
    for name in dict.fromkeys(name for texts, _ in ranks for name in texts):
        values = [texts.get(name, "nothing") for texts, _ in ranks]
        if (rank := first_unlike(values)) is not None:
            here, there = (
                value[:MAX_VALUE_CHARACTERS] + "..." * (len(value) > MAX_VALUE_CHARACTERS)
                for value in (values[0], values[rank])
            )
            differing.append(f"{name} ({here} on rank 0; {there} on rank {rank})")
    if differing:
        named, num_more = ", ".join(differing[:MAX_KEYS_NAMED]), len(differing) - MAX_KEYS_NAMED
        more = f" and {num_more} more" if num_more > 0 else ""
        raise CollectiveError(f"the ranks differ in {named}{more}; give every rank the same.")
    reasons = [reason for _, reason in ranks]
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CollectiveError(reason if len(set(reasons)) == 1 else f"rank {rank} stopped: {reason}")


def first_unlike(values: Sequence[Hashable]) -> int | None:
    """The first rank whose value differs from the value of rank 0; None if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
