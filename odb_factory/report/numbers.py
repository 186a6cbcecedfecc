"""Numbers as text, for people."""

from __future__ import annotations

import math

UNKNOWN = "not known"


def number(value: float | None, digits: int = 4) -> str:
    """With thousands separated, so many significant digits of what is no whole number."""
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def counted(count: int, what: str) -> str:
    """ "1 sample", "12 samples"."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def percent(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{100 * value:.{digits}f}%"


def seconds_text(value: float | None) -> str:
    """ "3 h 05 min", "2 min 04 s", "12.3 s"."""
    if value is None:
        return UNKNOWN
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"
