"""`Exchange`: what ranks tell each other in the training thread, over a gloo group of its own."""

from __future__ import annotations

import torch.distributed as dist

from odb_factory.comm.data_parallel import world_size_of
from odb_factory.comm.gloo import Group


class Exchange:
    """Small messages of all data-parallel ranks to all of them; alone, of this rank to itself.

    process_group: as in `make_coordinator`, whose group is used by the planning thread at the same time. All ranks make
    theirs at the same place of the program. timeout_s: how long a rank may give no sign of life (seconds).

        answers = Exchange(None, 600).gather(b"done", "optimizer step 3")  # [b"done", b"done"]
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float):
        several = world_size_of(process_group) > 1
        self._group = Group(process_group, timeout_s, "agreements of an optimizer step") if several else None
        self._steps: str | None = None
        self.world_size = 1 if self._group is None else self._group.world_size

    def gather(self, message: bytes, phase: str) -> list[bytes]:
        """The messages of all ranks, in rank order. phase: what it is about. Raises `CollectiveError` if a rank has
        failed, is missed, or has taken a `step` that this one has not."""
        return [message] if self._group is None else self._group.all_gather(message, phase, self._steps)

    def step(self, phase: str) -> None:
        """This rank takes the next of the steps that all ranks take. phase: which one."""
        if self._group is not None:
            self._steps = self._steps or self._group.lifeline.stream("steps")
            self._group.lifeline.enter(self._steps, phase)

    def close(self, *, failed: bool = False) -> None:
        """Give the group back; safe to call twice. One that others may wait in is left to the end of the process."""
        if self._group is not None:
            if self._steps is not None:
                self._group.lifeline.leave(self._steps)
            self._group.close(failed=failed)
            self._group = None
