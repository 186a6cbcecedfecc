"""`Exchange`: what ranks tell each other in the training thread, over a gloo group of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from odb_factory.comm.coordinator import CollectiveError
from odb_factory.comm.gloo import all_gather, open_group
from odb_factory.errors import DataError, one_line


class Exchange:
    """Small messages of all data-parallel ranks to all of them; alone, of this rank to itself.

    process_group: as in `make_coordinator`, whose group is used by the planning thread at the same time. All ranks make
    theirs at the same place of the program. timeout_s: how long a rank waits for the others (seconds). check: raises
    `CollectiveError` if another rank has failed; called while this one waits.

        answers = Exchange(None, 600, coordinator.check).gather(b"done", "optimizer step 3")  # [b"done", b"done"]
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float, check: Callable[[], None]):
        self.timeout_s, self._check = timeout_s, check
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1
        self._group: dist.ProcessGroup | None = None if is_alone else open_group(process_group, timeout_s)
        self.world_size = 1 if self._group is None else self._group.size()

    def gather(self, message: bytes, phase: str) -> list[bytes]:
        """The messages of all ranks, in rank order. phase: what it is about. Raises `DataError` if a rank is missing,
        `CollectiveError` if one has failed."""
        if self._group is None:
            return [message]
        try:
            return all_gather(message, self._group, self._check)
        except CollectiveError:
            raise
        except RuntimeError as error:
            self._check()
            raise DataError(
                f"rank {self._group.rank()} had no answer from another rank at the end of {phase} within "
                f"{self.timeout_s:g} s; look for its own last message, or raise exchange_timeout_s if it was only slow "
                f"({one_line(error)})."
            ) from None

    def close(self, *, failed: bool = False) -> None:
        """Give the group back; safe to call twice. One that others may wait in is left to the end of the process."""
        group, self._group = self._group, None
        if group is not None and not failed and dist.is_initialized():
            dist.destroy_process_group(group)
