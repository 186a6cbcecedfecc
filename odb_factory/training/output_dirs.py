"""Whether the ranks of a node write to the same folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

from odb_factory.log import get_logger

logger = get_logger(__name__)


def compare_output_dirs(output_dir: str, gather: Callable[[bytes], list[bytes]]) -> None:
    """Warn, in one line, where ranks of one node have different ones. Collective.

    A checkpoint would then lie in parts in several folders, and none could be gone on from. Nodes may have disks of
    their own. gather: gives what each rank says to all ranks.
    """
    mine = [socket.gethostname(), os.path.abspath(output_dir)]
    first: dict[str, tuple[int, str]] = {}
    for rank, answer in enumerate(gather(json.dumps(mine).encode())):
        node, folder = json.loads(answer)
        other, expected = first.setdefault(node, (rank, folder))
        if folder != expected:
            logger.warning(
                "output_dir: rank %d of this node has %r and rank %d has %r, so a checkpoint would lie in parts "
                "in both and could not be gone on from; give all ranks one folder (no time or process id in its name)",
                other,
                expected,
                rank,
                folder,
            )
            return
