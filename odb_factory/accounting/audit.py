"""`odb_audit_rank{r}.jsonl`: line by line what was trained on."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from odb_factory.accounting.loss_weights import MicroBatchLoss
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import ConfigError, one_line

AUDIT_FILE = "odb_audit_rank{rank}.jsonl"


LEFT_OUT_FILE = "odb_left_out_rank{rank}.jsonl"


class Lines:
    """A file of one JSON object a line.

    The file is opened with the first line. append: go on after the lines of the run that is resumed; what that one did
    after its last checkpoint then stands there twice. Raises `ConfigError` where the file cannot be opened.
    """

    what = "the list of rows left out"

    def __init__(self, path: Path):
        self.path, self.append = path, False
        self._file: TextIO | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.append and self.path.exists():
                cut_off_last_line(self.path)
            return self.path.open("a" if self.append else "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self.path}: {self.what} cannot be written ({one_line(error)}); give another folder."
            ) from None


class Audit(Lines):
    """One line a micro-batch that this rank has trained on. The key names are public."""

    what = "the audit"

    def __init__(self, folder: str | Path, rank: int):
        super().__init__(Path(folder) / AUDIT_FILE.format(rank=rank))

    def write(
        self,
        micro_batch: MicroBatch,
        measured: Measured,
        loss: MicroBatchLoss,
        optimizer_step: int,
        data_wait_s: float = 0.0,
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """optimizer_step: of the run, from 1. data_wait_s: waited for data since the line before. part, parts: of a
        micro-batch that was cut (`oom: split`), from 0."""
        line: dict[str, Any] = {
            "epoch": micro_batch.step.epoch,
            "optimizer_step": optimizer_step,
            "micro_batch": micro_batch.index,
            "micro_batches": micro_batch.step.num_micro_batches,
            "part": part,
            "parts": parts,
            "ids": list(micro_batch.ids),
            "lengths": list(micro_batch.lengths),
            "rows": measured.rows,
            "length": measured.length,
            "segments": list(measured.segments),
            "patches": measured.patches,
            "units": micro_batch.num_units,
            # On the mean loss of the micro-batch, or on each token loss of each sample.
            "weight": loss.scale
            if loss.row_weights is None
            else [loss.scale * weight for weight in loss.row_weights[: len(micro_batch.ids)]],
            "idle": micro_batch.idle,
            "data_wait_s": round(data_wait_s, 4),
            "time": round(time.time(), 3),
        }
        self.add(line)


def cut_off_last_line(path: Path) -> None:
    """Take away what stands behind the last line end, where a kill has cut off a line; reads from the end only."""
    with path.open("r+b") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
        file.truncate(end)
