"""The notebook runs in a fresh kernel, and its outputs agree with its text."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "online_grouping.ipynb"
LIMIT_S = 120


COMMITTED = nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def numbers_of(text: str, name: str) -> list[float]:
    """The figures of a run in the notebook's table: batches, padding (%), budget use (%), largest batch (tokens)."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return [float(word.strip("%").replace(",", "")) for word in line.split()[1:]]


@pytest.mark.nightly
def test_the_outputs_agree_with_the_text(tmp_path: Path) -> None:
    notebook = nbformat.from_dict({**COMMITTED})
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources).execute()
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream")
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 3
    fixed, grouped, odb = (numbers_of(text, name) for name in ("fixed", "length-grouped", "odb"))
    assert all(run[3] <= 4096 for run in (fixed, grouped, odb))
    assert odb[0] < fixed[0] / 4 and odb[1] < fixed[1] / 2 and odb[0] * odb[2] < fixed[0] * fixed[2] / 2
    assert "each {1} times" in text
    scaled, mean = (line.split()[-1] for line in text.splitlines() if line.startswith(("sum of the", "mean over")))
    assert float(scaled) == pytest.approx(float(mean), abs=2e-6)


def test_no_outputs_are_committed() -> None:
    assert outputs(COMMITTED) == []
