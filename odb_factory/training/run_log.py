"""`odb_log.jsonl`: what a run was asked to do, and each log entry with its time and its sums; `odb-factory report`
reads it.

Rank 0 writes a line when training begins (or goes on), one with each log entry, and one at the end. Nothing is done
between log entries.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback

from odb_factory.accounting.audit import cut_off_last_line
from odb_factory.errors import one_line
from odb_factory.log import get_logger
from odb_factory.version import installed_version

logger = get_logger(__name__)

RUN_LOG_FILE = "odb_log.jsonl"
ARGUMENTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_ratio",
    "warmup_steps", "num_train_epochs", "max_steps", "optim", "weight_decay", "max_grad_norm", "bf16", "fp16",
    "gradient_checkpointing", "dataloader_num_workers", "dataloader_drop_last", "deepspeed", "fsdp", "seed",
    "data_seed", "logging_steps", "eval_strategy", "resume_from_checkpoint",
)  # fmt: skip
"""Training arguments that a reader of a report asks for."""
PACKAGES = ("odb_factory", "llamafactory", "torch", "transformers", "accelerate", "deepspeed")


class RunLog(TrainerCallback):
    """Comes behind the other callbacks. It goes on behind what a resumed run has written.

    about: what the training arguments do not say, such as model and data sets (JSON types). `rows_of`, the names of the
        data sets and of each row the number of its own (int16), goes into a file beside the log, once.
    """

    def __init__(self, trainer: Any, about: Mapping[str, object]):
        self.trainer, self.about = trainer, about
        self._begin: dict[str, Any] | None = None
        self._file: TextIO | None = None
        self._is_over = not trainer.is_world_process_zero()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The arguments are as they were given now."""
        given = {name: getattr(args, name) for name in ARGUMENTS if hasattr(args, name)}
        self._begin = {
            "event": "begin",
            "time": round(time.time(), 3),
            "optimizer_steps": state.global_step,
            "max_steps": self.trainer.odb_run.total_steps,
            "ranks": self.trainer.odb_run.loader.world_size,
            "arguments": {name: value for name, value in given.items() if value not in (None, "", [])},
            "about": {"model": _model_of(self.trainer), "device": _device(args), **self.about},
            "versions": {name: installed_version(name) for name in PACKAGES if installed_version(name)},
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first line: by now budget and layout are settled, and nothing of the training is refused any more."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            layout = self.trainer.odb_layout
            begin["config"] = self.trainer.odb_run.config.to_dict()
            begin["layout"] = None if layout is None else {"name": layout.name, "reason": layout.reason}
            if "rows_of" in begin["about"] and not self._is_over:
                begin["about"]["rows_of"] = _in_file(begin["about"]["rows_of"], Path(args.output_dir))
            self._write(begin, args.output_dir)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        line = {
            "event": "log",
            "time": round(time.time(), 3),
            "optimizer_step": state.global_step,
            "epoch": run.epoch,
            "logs": {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)},
        }
        if "odb/balance" in line["logs"] and "loss" in line["logs"]:  # the Trainer's own entry, and not that of the end
            line |= {"sums": run.accounting.interval_before.sums(), "rows": run.accounting.rows_apart()}
        self._write(line, args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write(
            {"event": "end", "time": round(time.time(), 3), "optimizer_step": state.global_step}, args.output_dir
        )
        if self._file is not None:
            self._file.close()
        self._is_over = True

    def _write(self, line: Mapping[str, Any], folder: str) -> None:
        """A log that nobody asked for must not end the training that it is about."""
        if self._is_over or self._begin is not None:  # of no interest before the first optimizer step
            return
        try:
            if self._file is None:
                self._file = _opened(Path(folder) / RUN_LOG_FILE, append=line.get("optimizer_steps", 0) > 0)
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            self._is_over = True
            logger.warning(
                "%s cannot be written (%s), so `odb-factory report` will know less; training goes on",
                Path(folder) / RUN_LOG_FILE,
                one_line(error),
            )


def _in_file(rows_of: Mapping[str, Any], folder: Path) -> dict[str, object]:
    """The same with the name of a file in place of the numbers. Its name tells its content: a restart writes none."""
    numbers = rows_of["numbers"].astype("<i2").tobytes()
    path = folder / f"odb_data_sets_{zlib.crc32(numbers):08x}.zlib"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(zlib.compress(numbers))
            part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s), so a report will not know rows by data set", path, one_line(error))
    return {"names": rows_of["names"], "file": path.name}


def _opened(path: Path, *, append: bool) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if append and path.exists():
        cut_off_last_line(path)
    return path.open("a" if append else "w", encoding="utf-8")


def _model_of(trainer: Any) -> str:
    config = getattr(trainer.model, "config", None)
    return str(getattr(config, "_name_or_path", "") or type(trainer.model).__name__)


def _device(args: Any) -> str:
    if args.device.type != "cuda":
        return f"{args.device.type}, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name(args.device)
