"""`plan_micro_batches`: promises of a plan from lengths; groups, owners, bad input; no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_checks import check_micro_batches

from odb_factory import Cost, plan_micro_batches
from odb_factory.planner import Budget

BUDGET, MAX_PATCHES = 64, 32


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths and arguments that agree with each other; some samples are overlong."""
    lengths = draw(
        st.lists(st.integers(1, BUDGET) | st.sampled_from([1, 32, 33, 64, 65, 200]), min_size=1, max_size=40)
    )
    n, ranks = len(lengths), draw(st.integers(1, 5))
    arguments: dict[str, Any] = {"token_budget": BUDGET, "ranks": ranks, "overlong": "singleton"}
    arguments["layout"] = draw(st.sampled_from(["flat", "padded"]))
    if draw(st.booleans()):
        arguments["patches"] = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
        arguments["max_patches"] = draw(st.none() | st.just(MAX_PATCHES))
    placed = draw(st.sampled_from(["anywhere", "groups", "owners"]))
    if placed == "groups":
        arguments["groups"] = draw(st.lists(st.sampled_from("abcdefgh"), min_size=n, max_size=n))
    if placed == "owners":
        arguments["owners"] = draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
    return lengths, arguments


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_any_plan_keeps_its_promises(world: tuple[list[int], dict[str, Any]]) -> None:
    """I1, I2, I4, I7; a group stays on one rank; I6: equal arguments give the same plan."""
    lengths, arguments = world
    micro_batches = plan_micro_batches(lengths, **arguments)
    assert len(micro_batches) == arguments["ranks"]
    patches = arguments.get("patches", [0] * len(lengths))
    costs = [Cost(*sizes, has_media=sizes[1] > 0) for sizes in zip(lengths, patches)]
    owner = arguments.get("owners")
    if "groups" in arguments:
        rank_of = {i: rank for rank, own in enumerate(micro_batches) for group in own for i in group}
        owner = [rank_of[i] for i in range(len(lengths))]
        assert len(set(zip(arguments["groups"], owner))) == len(set(arguments["groups"]))
    budget = Budget(BUDGET, arguments.get("max_patches"), layout=arguments["layout"])
    check_micro_batches(micro_batches, costs, owner if arguments["ranks"] > 1 else None, budget)
    assert plan_micro_batches(np.array(lengths), **arguments) == micro_batches, "I6"


def test_many_samples_are_balanced_whether_groups_are_kept_or_not() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 1024).astype(int) + 1, 16384)
    for arguments in ({}, {"groups": np.arange(1024) // 8}):
        micro_batches = plan_micro_batches(lengths, token_budget=16384, ranks=8, **arguments)
        loads = [sum(int(lengths[group].sum()) for group in own) for own in micro_batches]
        assert max(loads) <= 1.002 * sum(loads) / 8
        assert len(micro_batches[0]) <= -(-int(lengths.sum()) // (8 * 16384)) + 1


@pytest.mark.parametrize(
    ("lengths", "changes", "named"),
    [
        ([], {}, "lengths"),
        ([1.5], {}, "lengths"),
        ([[1, 2]], {}, "lengths"),
        ([4, 0], {}, "lengths"),
        ([4, 1 << 25], {}, "lengths"),
        ([4, 9], {"token_budget": 8}, "sample 1"),
        ([4, 9], {"patches": [9, 1], "max_patches": 8}, "sample 0"),
        ([4], {"token_budget": 0}, "token_budget"),
        ([4], {"token_budget": 8.0}, "token_budget"),
        ([4], {"ranks": 0}, "ranks"),
        ([4], {"max_patches": 8}, "max_patches"),
        ([4], {"patches": [1], "max_patches": -1}, "max_patches"),
        ([4], {"patches": [1], "max_patches": 0}, "max_patches"),
        ([4], {"patches": [1, 2]}, "patches"),
        ([4], {"patches": [-1]}, "patches"),
        ([4], {"groups": "ab"}, "groups"),
        ([4], {"groups": [[1]]}, "groups"),
        ([4], {"layout": "auto"}, "layout"),
        ([4], {"overlong": "drop"}, "overlong"),
        ([4], {"owners": [1]}, "owners"),
        ([4], {"owners": [0], "groups": [0]}, "owners"),
    ],
)
def test_bad_input_is_refused_in_one_line(lengths: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        plan_micro_batches(lengths, **{"token_budget": 1 << 26, **changes})
    assert "\n" not in str(refused.value)


def test_the_example_of_the_docstring() -> None:
    micro_batches = plan_micro_batches([700, 300, 500, 200, 100], token_budget=1000, ranks=2)
    assert micro_batches == [[[1, 2, 4]], [[0, 3]]]


def test_it_imports_no_torch() -> None:
    code = "import sys; from odb_factory import plan_micro_batches; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
