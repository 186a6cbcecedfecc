"""Notice a loop that never takes the step info out of its batches, so that no loss is weighed."""

from __future__ import annotations

import weakref

from odb_factory.log import get_logger
from odb_factory.loop.step_info import ODBStepInfo, Receipt

NOT_TAKEN = (
    "a batch was dropped with its step info in it, so its loss was not weighed: call pop_step_info(batch) before "
    "model(**batch), which may swallow the key, and multiply the mean loss by loss_scale (said once)."
)
MOST_WATCHED = 64
"""Batches whose step info may still be taken out; a loop that collects more of them is not watched."""
logger = get_logger(__name__)


class Receipts:
    """Of the step infos handed over in an iteration, those that have not been taken out yet."""

    def __init__(self) -> None:
        self._handed_over: list[tuple[weakref.ref[ODBStepInfo], Receipt]] = []
        self._has_warned = False

    def begin(self) -> None:
        """The iteration before may have been broken off with a batch in hand."""
        self._handed_over = []

    def add(self, info: ODBStepInfo) -> None:
        """The batch alone may hold the info from now on."""
        self._handed_over.append((weakref.ref(info), info.receipt))

    def check(self) -> None:
        """Say, once, that a step info has gone with its batch and was never taken out."""
        open_ones = [(info, receipt) for info, receipt in self._handed_over if not receipt.taken]
        if not self._has_warned and any(info() is None for info, _ in open_ones):
            self._has_warned = True
            logger.warning(NOT_TAKEN)
        self._handed_over = [(info, receipt) for info, receipt in open_ones if info() is not None][-MOST_WATCHED:]
