"""Collectives on bytes, over a gloo process group."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from odb_factory.comm.bounded import bounded
from odb_factory.comm.coordinator import CollectiveError
from odb_factory.errors import one_line

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0001, 0.02
"""Between two looks whether a collective has ended."""
MARGIN_S = 10.0
"""Beyond its own timeout, torch is given this long to notice that it is over."""
EXIT_PAUSE_S = 0.2
FRAME_BYTES = 64
"""What `all_gather_small` sends of each rank at first."""


@functools.cache
def pause_at_exit() -> None:
    """From now on this process waits `EXIT_PAUSE_S` seconds at its end, behind everything else that waits for it.

    A thread of gloo's still holds the tensors of a collective when that has completed. If it drops them while the
    interpreter ends, torch aborts the process ("terminate called without an active exception"): with torch 2.12, 3 of
    150 pairs of ranks that ended right behind an all-gather. torchrun then calls a training failed that has ended well.
    """
    atexit.register(time.sleep, EXIT_PAUSE_S)


def open_group(parent: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of the ranks of `parent` (None: the default group). All its ranks call this.

    A group of its own, so that planning messages never meet the collectives of the training. Where a parent is given,
    only its ranks take part, and nothing is created on the default group.
    Raises `CollectiveError` if a rank does not come within `timeout_s` seconds.
    """
    pause_at_exit()

    def make() -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(parent),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=parent is not None,
            group_desc="odb_factory",
        )
        return group

    try:
        return bounded(make, timeout_s + MARGIN_S)
    except Exception as error:
        raise CollectiveError(
            f"rank {dist.get_rank(parent)}: the {dist.get_world_size(parent)} ranks cannot make a process group for "
            "planning; iterate the loader on every rank at the same place of the program, and keep rank 0 alive until "
            f"all have ended ({one_line(error)})."
        ) from None


def all_gather(message: bytes, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> list[bytes]:
    """The messages of all ranks, in rank order. Sizes travel first, then messages padded to the longest.

    check: called while this rank waits for the others; what it raises ends the wait.
    """
    size = torch.tensor([len(message)])
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    _wait(dist.all_gather(sizes, size, group=group, async_op=True), check)
    mine = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(mine) for _ in range(group.size())]
    _wait(dist.all_gather(messages, mine, group=group, async_op=True), check)
    return [text.numpy().tobytes()[: int(size)] for text, size in zip(messages, sizes)]


def all_gather_small(message: bytes, group: dist.ProcessGroup, check: Callable[[], None] = lambda: None) -> list[bytes]:
    """As `all_gather`, in one collective where every message has less than `FRAME_BYTES` bytes."""
    fits = len(message) < FRAME_BYTES
    mine = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
    mine[0] = len(message) if fits else FRAME_BYTES
    if fits and message:
        mine[1 : 1 + len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    frames = [torch.empty_like(mine) for _ in range(group.size())]
    _wait(dist.all_gather(frames, mine, group=group, async_op=True), check)
    if any(int(frame[0]) == FRAME_BYTES for frame in frames):
        return all_gather(message, group, check)
    return [frame.numpy().tobytes()[1 : 1 + int(frame[0])] for frame in frames]


def all_to_all(
    buffers: Sequence[bytes], group: dist.ProcessGroup, check: Callable[[], None] = lambda: None
) -> list[bytes]:
    """What the ranks have sent to this one, in rank order. Sizes travel first. check: see `all_gather`."""
    sizes = torch.tensor([len(buffer) for buffer in buffers])
    coming = torch.empty_like(sizes)
    _wait(dist.all_to_all_single(coming, sizes, group=group, async_op=True), check)
    outgoing = torch.frombuffer(bytearray(b"".join(buffers)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
    work = dist.all_to_all_single(incoming, outgoing, coming.tolist(), sizes.tolist(), group=group, async_op=True)
    _wait(work, check)
    return [text.numpy().tobytes() for text in torch.split(incoming, coming.tolist())]


def _wait(work: dist.Work, check: Callable[[], None]) -> None:
    """Wait for a collective; raises what it raises (its timeout, a lost peer), or what `check` does."""
    pause_s = SHORTEST_PAUSE_S
    while not work.is_completed():
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    work.wait()


def gather_once(message: bytes, timeout_s: float) -> list[bytes]:
    """The messages of all ranks of the default group, before there is a coordinator; alone this rank's.

    Raises `CollectiveError` if a rank does not answer within `timeout_s` seconds.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [message]
    group = open_group(None, timeout_s)
    try:
        return all_gather(message, group)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()} had no answer from another rank within {timeout_s:g} s before the training; look "
            f"for its own last message ({one_line(error)})."
        ) from None
    finally:
        dist.destroy_process_group(group)
