"""Pieces of the page: escaped text, tables, figures with their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

MOST_ROWS = 40
"""Of the table under a chart; all entries are in the JSON."""


def text(value: object) -> str:
    return escape(str(value), quote=True)


def key(run: int) -> str:
    """The colour of a run."""
    return f'<span class="key s{run}"></span>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "", differs: Sequence[bool] = ()) -> str:
    """rows: of cells that are escaped here. differs: rows to stress."""
    made = []
    for number, row in enumerate(rows):
        stressed = ' class="differs"' if number < len(differs) and differs[number] else ""
        made.append(f"<tr{stressed}>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>")
    heads = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    of_kind = f' class="{kind}"' if kind else ""
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(made)}</tbody>"
    return f'<div class="scroll"><table{of_kind}>{inner}</table></div>'


def some(rows: Sequence[Any]) -> Sequence[Any]:
    """All rows, or `MOST_ROWS` of them at even distances, the first and the last among them."""
    last = len(rows) - 1
    return rows if last < MOST_ROWS else [rows[k * last // (MOST_ROWS - 1)] for k in range(MOST_ROWS)]


def figure(
    title: str,
    caption: str,
    drawing: str,
    head: Sequence[str],
    rows: Sequence[Any],
    cells: Callable[[Any], Sequence[object]] = list,
) -> str:
    """A chart and the table of what it shows. caption: HTML. cells: of a row, called for those that are shown."""
    shown, count = [cells(row) for row in some(rows)], len(rows)
    of_all = f"{len(shown)} of {count} rows; all are in the JSON" if count > len(shown) else f"{count} rows"
    return (
        f"<figure><h3>{text(title)}</h3><p>{caption}</p>{drawing}"
        f"<details><summary>As a table ({of_all})</summary>{table(head, shown)}</details></figure>"
    )
