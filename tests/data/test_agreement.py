"""I11: what the line says about ranks whose settings differ."""

from __future__ import annotations

import pytest

from odb_factory.data.agreement import compare, difference
from odb_factory.errors import ConfigError


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([{"a": "1", "b": "None"}, {"b": "None", "a": "1"}], None),
        ([{"odb.seed": "1", "x": "0"}, {"odb.seed": "2", "x": "0"}], "odb.seed (1 on rank 0; 2 on rank 1)"),
        ([{"seed": "1"}, {"seed": "1"}, {"seed": "2"}], "seed (1 on rank 0; 2 on rank 2)"),
        ([{"numpy": "'2.0'"}, {}], "numpy ('2.0' on rank 0; nothing on rank 1)"),
    ],
    ids=["equal", "a value", "a later rank", "a key that a rank lacks"],
)
def test_a_difference_names_key_values_and_ranks(ranks: list[dict[str, str]], named: str | None) -> None:
    line = difference(ranks)
    assert line is None if named is None else line is not None and named in line


def test_the_line_stays_short() -> None:
    """However many keys, ranks and characters there are."""
    ranks = [{f"key {k}": "x" * 1000 + str(rank) * k for k in range(20)} for rank in range(4)]
    line = difference(ranks)
    assert line is not None and "and 16 more" in line and len(line) < 1200 and "\n" not in line


def test_a_rank_alone_raises_its_own_problem() -> None:
    with pytest.raises(ConfigError, match="no"):
        compare({}, lambda message: [message], problem=ConfigError("no"))
