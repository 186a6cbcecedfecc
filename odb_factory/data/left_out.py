"""The rows that are left out: one way for all reasons, from the first read to collation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_factory.log import get_logger

MAX_LOGGED = 10
COLLATION = "collation"
"""What rows are counted under that could be read when they were observed, and cannot be collated."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A row that this rank leaves out. lost_weight: its share of the loss of its optimizer step, if that is lost."""

    id: int
    reason: str
    message: str
    epoch: int
    lost_weight: float


class LeftOut:
    """What one rank leaves out. The first rows are logged; all of them wait for `through`, to be written.

    path: of the file that they will be written to, for the log.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._num_logged = 0
        self._lock = threading.Lock()
        self._rows: deque[tuple[int, LeftOutRow]] = deque()

    def leave_out(
        self, ids: Sequence[int], reason: str, message: str, *, epoch: int, step: int, lost_weight: float = 0.0
    ) -> None:
        """Note that these rows are not trained on in an optimizer step (its index in the epoch). Any thread."""
        with self._lock:
            for id in ids:
                self._rows.append((step, LeftOutRow(id, reason, message, epoch, lost_weight)))
                self._log(reason, message)

    def through(self, step: int) -> list[dict[str, Any]]:
        """The rows of the optimizer steps up to this one that have not been asked for yet."""
        with self._lock:
            now = [row for index, row in self._rows if index <= step]
            self._rows = deque(one for one in self._rows if one[0] > step)
        return [asdict(row) for row in now]

    def forget(self) -> None:
        """A pass begins: rows of steps that were not taken will be found again."""
        with self._lock:
            self._rows.clear()

    def _log(self, reason: str, message: str) -> None:
        self._num_logged += 1
        if self._num_logged <= MAX_LOGGED:
            logger.warning("left out (%s): %s", reason, message)
        if self._num_logged == MAX_LOGGED:
            where = "counted" if self.path is None else f"listed in {self.path}"
            logger.warning("further rows that are left out are not logged but %s", where)
