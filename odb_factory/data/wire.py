"""What travels between ranks, as bytes: reports and last words, and the collectives that carry them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from odb_factory.batching import ROW, CostModel, Window
from odb_factory.data.agreement import Report

LONGEST_REASON = 2000


def all_gather(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The messages of all ranks. Sizes travel first, then messages padded to the longest."""
    size = torch.tensor([len(message)])
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    mine = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(messages, mine, group=group)
    return [text.numpy().tobytes()[: int(size)] for text, size in zip(messages, sizes)]


def all_to_all(parcels: Sequence[bytes], group: dist.ProcessGroup) -> list[bytes]:
    """The parcels for this rank. Sizes travel first."""
    sizes = torch.tensor([len(parcel) for parcel in parcels])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    outgoing = torch.frombuffer(bytearray(b"".join(parcels)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(incoming, outgoing, coming.tolist(), sizes.tolist(), group=group)
    return [text.numpy().tobytes() for text in incoming.split(coming.tolist())]


def encode(content: Report | str) -> bytes:
    """A report, or the reason why there is none: length of a JSON header, the header, the rows of the window."""
    if isinstance(content, str):
        head, rows = {"stopped": content[:LONGEST_REASON]}, b""
    else:
        head = {
            "dry": content.window.dry,
            "rejected": content.rejected,
            "overlong": content.overlong,
            "order": content.order,
            "model": dataclasses.astuple(content.model),
        }
        rows = content.window.rows.tobytes()
    text = json.dumps(head).encode()
    return len(text).to_bytes(4, "little") + text + rows


def decode(message: bytes) -> Report | str:
    """Undo `encode`."""
    end = 4 + int.from_bytes(message[:4], "little")
    head = json.loads(message[4:end])
    if "stopped" in head:
        return head["stopped"]
    window = Window(np.frombuffer(message, dtype=ROW, offset=end), head["dry"])
    return Report(window, Counter(head["rejected"]), head["overlong"], head["order"], CostModel(*head["model"]))
