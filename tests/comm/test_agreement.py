"""I11: what the line says about ranks whose settings differ."""

from __future__ import annotations

from odb_factory.comm.agreement import difference, encode_settings, name_ranks


def differing(*ranks: dict[str, object]) -> str | None:
    return difference([encode_settings(settings) for settings in ranks])


def test_equal_settings_are_no_difference() -> None:
    assert differing({"a": 1, "b": None}, {"b": None, "a": 1}) is None


def test_a_difference_names_key_values_and_ranks() -> None:
    one, other = {"odb.token_budget": 256, "seed": 0}, {"odb.token_budget": 512, "seed": 0}
    assert differing(one, other) == ("the ranks differ in odb.token_budget (256 on rank 0; 512 on rank 1)")


def test_what_most_ranks_have_comes_first() -> None:
    said = differing({"seed": 1}, {"seed": 2}, {"seed": 2}, {"seed": 2})
    assert said is not None and "seed (2 on ranks 1, 2, 3; 1 on rank 0)" in said


def test_a_key_that_a_rank_has_not_is_a_difference() -> None:
    said = differing({"numpy": "2.0"}, {})
    assert said is not None and "numpy ('2.0' on rank 0; nothing on rank 1)" in said


def test_values_that_differ_at_their_end_are_told_apart() -> None:
    said = differing({"path": "x" * 100 + "a"}, {"path": "x" * 100 + "b"})
    assert said is not None and said.count("(checksum ") == 2


def test_types_are_told_apart() -> None:
    assert differing({"a": 1}, {"a": "1"}) is not None
    assert differing({"a": 1}, {"a": True}) is not None


def test_the_line_stays_short() -> None:
    """However many keys, ranks and characters there are."""
    ranks: list[dict[str, object]] = [{f"key {k}": "x" * 1000 + str(rank) * k for k in range(20)} for rank in range(4)]
    said = differing(*ranks)
    assert said is not None and "and 16 more" in said and len(said) < 1200 and "\n" not in said
    assert name_ranks(range(128)) == "128 ranks (0, 1, 2, ...)"
