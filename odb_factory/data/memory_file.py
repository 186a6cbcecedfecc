"""Send an object to another process, with its tensors and arrays in one file in memory that has no name.

torch sends a file for each tensor, which the receiver asks a thread of the sender for, in several messages; a sender
that computes answers late. Here the file of a batch follows at once, over a socket that both have from the beginning.
It has no name, so nothing remains of it, whoever is killed, and the limit of /dev/shm does not hold for it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from odb_factory.data.serialize import reduce_tensor

ALIGNMENT = 64
"""Bytes; a multiple of the size of every number."""
MOST_BUFFERS = 512
"""Of one call of `writev`."""
Dumped = tuple[bytes, tuple[int, ...]]
"""The object without what is in the file, and the bytes of each buffer in it."""


def dump(value: Any, connection: socket.socket) -> Dumped:
    """Pickle `value` and send the file with its tensors over `connection`. Raises what pickle raises."""
    pickled, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(pickled, pickle.HIGHEST_PROTOCOL, True, buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    if raw:
        file = os.memfd_create("odb-batch")
        try:
            _write(file, raw)
            socket.send_fds(connection, [b"f"], [file])
        finally:
            os.close(file)
    return pickled.getvalue(), tuple(view.nbytes for view in raw)


def load(dumped: Dumped, connection: socket.socket) -> Any:
    """Undo `dump`, in the order of its calls. The tensors are in the memory of the file, which lives as long as they
    do; nobody else has it."""
    pickled, sizes = dumped
    buffers, start = [], 0
    if sizes:
        file = socket.recv_fds(connection, 1, 1)[1][0]
        try:
            memory = memoryview(mmap.mmap(file, 0))
        finally:
            os.close(file)
        for size in sizes:
            buffers.append(memory[start : start + size])
            start += size + -size % ALIGNMENT
    return pickle.loads(pickled, buffers=buffers)


def _write(file: int, buffers: Sequence[memoryview]) -> None:
    pending = [part for buffer in buffers for part in (buffer, memoryview(bytes(-buffer.nbytes % ALIGNMENT)))]
    while pending:
        written = os.writev(file, pending[:MOST_BUFFERS])
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_tensor(obj)
