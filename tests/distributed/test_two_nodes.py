"""Two nodes: two network namespaces joined by a veth pair, each with its own launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest
from distributed.launch import Node, Run
from distributed.rows import check_audits, check_books, read_audits
from distributed.test_engines import deepspeed_config
from support import training_config

from odb_factory.cli.mm_mix import build_builtin_mix

ADDRESSES = ("10.211.57.1", "10.211.57.2")
"""Addresses of a private network of the two namespaces."""
SAMPLES = 24


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2 (apt-get install iproute2)")
    mark = uuid.uuid4().hex[:6]
    names = [f"odb-{mark}-{k}" for k in range(2)]
    links = [f"odb{mark}{k}" for k in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, link, address in zip(names, links, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield tuple(
            Node(prefix=("ip", "netns", "exec", name), env={"GLOO_SOCKET_IFNAME": link})
            for name, link in zip(names, links)
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@pytest.mark.timeout(420)
def test_two_nodes_train_the_mix_with_zero3(nodes, tiny_vl, tmp_path) -> None:
    """Full fine-tuning of the tiny Qwen3-VL on the small MM-Mix, to the end: every id once (I1, I2, I4, I7)."""
    build_builtin_mix(tmp_path / "mix", samples=SAMPLES)
    config = training_config(
        tiny_vl,
        tmp_path / "mix",
        tmp_path / "out",
        dataset="mm_mix",
        use_cpu=False,
        deepspeed=deepspeed_config(3, tmp_path),
        image_max_pixels=128 * 128,
        video_max_pixels=64 * 64,
        video_maxlen=4,
        gradient_accumulation_steps=2,
        odb={"token_budget": 2048, "max_patches": 1024, "buffer_size": 16, "audit": True},
    )
    with Run(config, nodes=nodes, master=ADDRESSES[0]) as run:
        ended = run.end(360)
        assert ended.returncodes == [0, 0], str(ended)
        assert not run.left_behind()
    audits = read_audits(tmp_path / "out", 2)
    check_audits(audits, ids=range(SAMPLES), accumulation=2, token_budget=2048, max_patches=1024)
    check_books(tmp_path / "out", audits, left_out={})
