"""Strangers that connect to the port at which a rank listens for other ranks do not disturb the training (I12)."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from toy import Rows, pad

from odb_factory import ODBDataLoader

CONNECTIONS, MOST_KEPT = 100, 50
JOINS_S = 2.0
SENT: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(4096),
    "garbage": random.Random(3).randbytes(1 << 17),
    "a line without an end": b"a" * (1 << 17),
    "another token": b"00000000000000000000000000000000 1\n",
    "no rank": b"x y\n\n\n",
    "a failure": b'["failure", [0, "rank 1 left the training: a stranger"]]\n["done", null]\n',
    "lines that are not UTF-8": b"\xff\xfe 1\n" * 100,
}


def own_ports() -> list[tuple[str, int]]:
    """The IPv4 addresses at which this process listens (/proc)."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(path))
    addresses = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        address, state, inode = (line.split()[k] for k in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in sockets:
            host, port = address.split(":")
            addresses.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return addresses


def intrude(before: set[tuple[str, int]], over: threading.Event, kept: list[socket.socket], count: list[int]) -> None:
    """Connect to the first port that opens, as long as the training lasts; every third stranger stays, up to MOST_KEPT:
    this process has a descriptor for each end of a connection."""
    while not (addresses := sorted(set(own_ports()) - before)):
        time.sleep(0.001)
    while not over.is_set():
        for content in SENT.values():
            count[0] += 1
            try:
                stranger = socket.create_connection(addresses[0], 5)
            except OSError:
                continue
            stranger.settimeout(5)
            with suppress(OSError):  # turned away while it sends
                stranger.sendall(content)
            if count[0] % 3 or len(kept) == MOST_KEPT:
                stranger.close()
            else:
                kept.append(stranger)


def train(rank: int) -> dict[str, Any]:
    """Strangers connect to rank 0 as soon as it listens; rank 1 connects later."""
    ids: list[int] = []
    over, kept, count = threading.Event(), [], [0]
    if rank == 0:
        threading.Thread(target=intrude, args=(set(own_ports()), over, kept, count), daemon=True).start()
    else:
        time.sleep(JOINS_S)
    with ODBDataLoader(
        Rows(num_rows=400), token_budget=64, batch_size=4, buffer_size=4, collate_fn=pad, num_workers=1
    ) as loader:
        for batch in loader:
            ids += [int(row[0]) for row in batch["input_ids"]]
            dist.all_reduce(torch.ones(1))
        over.set()
    dist.barrier()
    for stranger in kept:
        stranger.close()
    return {"ids": ids, "strangers": count[0]}


def test_strangers_at_the_port_disturb_no_training(tmp_path: Path) -> None:
    ranks = run_ranks("distributed.test_strangers:train", tmp_path, limit_s=120)
    for outcome in ranks:
        assert "Traceback" not in outcome.output and "stranger" not in outcome.output, outcome.output[-4000:]
        assert "watches" not in outcome.output and "cannot read" not in outcome.output, outcome.output[-4000:]
    assert sorted(id for outcome in ranks for id in outcome.value["ids"]) == list(range(1, 401))
    assert ranks[0].value["strangers"] >= CONNECTIONS
