"""I11: the line about ranks whose settings differ. Through their loaders: tests/distributed/test_agreement.py."""

from __future__ import annotations

from odb_factory.data.agreement import difference


def test_the_line_stays_short() -> None:
    """However many keys, ranks and characters there are; a key that a rank lacks is named, too."""
    ranks = [{f"key {k}": "x" * 1000 + str(rank) * k for k in range(20)} for rank in range(4)]
    line = difference(ranks)
    assert line is not None and "and 16 more" in line and len(line) < 1200 and "\n" not in line
    assert "numpy (2.0 on rank 0; nothing on rank 2)" in str(difference([{"numpy": "2.0"}, {"numpy": "2.0"}, {}]))
