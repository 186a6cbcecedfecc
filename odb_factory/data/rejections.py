"""Rows that are left out are named in the log, the first of them."""

from __future__ import annotations

from odb_factory.data.samples import Rejection
from odb_factory.log import get_logger

MAX_LOGGED = 10

logger = get_logger(__name__)


class RejectionLog:
    """Call it with each row that is left out."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, rejection: Rejection) -> None:
        self._count += 1
        if self._count <= MAX_LOGGED:
            logger.warning("left out (%s): %s", rejection.reason, rejection.message)
        if self._count == MAX_LOGGED:
            logger.warning("further rows that are left out are counted, not logged")
