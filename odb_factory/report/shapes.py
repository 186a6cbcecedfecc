"""What a line or a file of a run must be, so that whoever reads it on meets no surprise.

A `Check` says whether a value of JSON is as it must be. A key that may be missing may be null, too; keys that are not
named here are not looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 2**53
"""Whole numbers up to it are exact as floats, and their sums fit into 64 bits."""
LARGEST_NUMBER = 1e300
"""Of figures that sums and ratios are made of: these do not overflow."""


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def small_count(value: Any) -> bool:
    """Of which a product still fits into 64 bits, or a sum of millions."""
    return count(value) and value < 2**31


def positive(value: Any) -> bool:
    return small_count(value) and value > 0


def number(value: Any) -> bool:
    """NaN and infinity among them, which a loss may be."""
    if type(value) is float:
        return abs(value) < LARGEST_NUMBER or not math.isfinite(value)
    return type(value) is int and abs(value) < LARGEST_NUMBER


def finite(value: Any) -> bool:
    return number(value) and math.isfinite(value)


def text(value: Any) -> bool:
    return isinstance(value, str)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def anything(value: Any) -> bool:
    return True


def each(check: Check) -> Check:
    """A list of such."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def by_name(check: Check) -> Check:
    """An object of such, whatever their keys."""
    return lambda value: type(value) is dict and all(map(check, value.values()))


def fields(must: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """An object with at least the keys of `must`."""

    needed, possible = tuple(must.items()), tuple((may or {}).items())

    def check(value: Any) -> bool:
        if type(value) is not dict:
            return False
        for name, is_right in needed:
            if name not in value or not is_right(value[name]):
                return False
        for name, is_right in possible:
            found = value.get(name)
            if found is not None and not is_right(found):
                return False
        return True

    return check


def data_sets_file(value: Any) -> bool:
    return text(value) and re.fullmatch(r"odb_data_sets_[0-9a-f]{8}\.zlib", value) is not None


_LOGGED = dict.fromkeys(("loss", "learning_rate", "lr", "grad_norm", "epoch", "eval_loss"), number)
_LIMITS = {"token_budget": positive, "max_patches": positive}
_ROWS_OF = fields({"names": each(text)}, {"file": data_sets_file})
_ABOUT = fields({}, {"dataset": each(text), "rows_of": _ROWS_OF})
_LOGS = by_name(lambda value: number(value) or flag(value))
_SUMS = fields(dict.fromkeys(("optimizer_steps", "samples", "tokens"), count))
_ROWS = {"left_out": by_name(count), "not_trained": count, "overlong": count, "over_budget": count}
_BEGIN = fields(
    {"time": finite, "optimizer_steps": count, "ranks": positive, "config": fields({}, _LIMITS)},
    {
        "max_steps": count,
        "arguments": by_name(anything),
        "versions": by_name(anything),
        "about": _ABOUT,
        "layout": fields({"name": text, "reason": text}),
    },
)
_LOG = fields(
    {"time": finite, "optimizer_step": count, "epoch": number, "logs": _LOGS},
    {"sums": lambda value: _SUMS(value) and by_name(number)(value), "rows": fields({}, _ROWS)},
)
_END = fields({"time": finite, "optimizer_step": count})
_EVENT = fields({"event": text})
_OF_EVENT = {"begin": _BEGIN, "log": _LOG, "end": _END}


def run_log_line(value: Any) -> bool:
    return _EVENT(value) and _OF_EVENT.get(value["event"], lambda _: False)(value)


def elapsed(value: Any) -> bool:
    """ "1 day, 2:03:04", as LLaMA-Factory writes it."""
    return text(value) and re.fullmatch(r"([0-9]{1,6} days?, )?[0-9]{1,9}:[0-9]{2}:[0-9]{2}", value) is not None


trainer_log_line = fields({"current_steps": count, "elapsed_time": elapsed}, _LOGGED | {"total_steps": count})
trainer_state = fields({"log_history": each(anything)}, {"max_steps": count})
log_history_entry = fields({"step": count}, _LOGGED)
_TOTALS = (
    "micro_steps", "idle_micro_batches", "padded_tokens", "units", "units_cv", "padding_ratio", "balance",
    "patch_balance", "moved", "oom_cuts", "data_wait_s",
)  # fmt: skip
summary = fields({"optimizer_steps": count, "samples": count, "tokens": count}, _ROWS | dict.fromkeys(_TOTALS, number))
_PART = fields({"part": small_count, "parts": positive})
_AUDIT = fields(
    {
        "optimizer_step": small_count,
        "micro_batches": positive,
        "micro_batch": small_count,
        "ids": each(count),
        "lengths": each(small_count),
        "rows": small_count,
        "length": small_count,
        "patches": small_count,
        "units": small_count,
        "idle": flag,
        "data_wait_s": finite,
        "time": finite,
    }
)


def audit_line(value: Any) -> bool:
    """Lines without `part` and `parts` are of releases that never cut a micro-batch."""
    if (
        not _AUDIT(value)
        or len(value["ids"]) != len(value["lengths"])
        or value["micro_batch"] >= value["micro_batches"]
    ):
        return False
    is_cut = "part" in value or "parts" in value
    return not is_cut or (_PART(value) and value["part"] < value["parts"])
