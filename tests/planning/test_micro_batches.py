"""`plan_micro_batches`: every sample once, one K on all ranks, budgets, groups, weights, bad input; no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_bounds import fewest_bins

from odb_factory import MicroBatchPlan, plan_micro_batches

BUDGET, MAX_PATCHES = 64, 32


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths and arguments that agree with each other; some samples are overlong, some carry no loss."""
    lengths = draw(
        st.lists(st.integers(1, BUDGET) | st.sampled_from([1, 32, 33, 64, 65, 200]), min_size=1, max_size=40)
    )
    n, ranks = len(lengths), draw(st.integers(1, 5))
    arguments: dict[str, Any] = {"token_budget": BUDGET, "ranks": ranks, "overlong": "singleton"}
    arguments["layout"] = draw(st.sampled_from(["flat", "padded"]))
    arguments["loss"] = draw(st.sampled_from(["token_mean", "sample_mean", "prompt_mean"]))
    if draw(st.booleans()):
        arguments["patches"] = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
        arguments["max_patches"] = draw(st.none() | st.just(MAX_PATCHES))
    if draw(st.booleans()):
        arguments["loss_tokens"] = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    placed = draw(st.sampled_from(["anywhere", "groups", "owners"]))
    if placed == "groups" or arguments["loss"] == "prompt_mean":
        arguments["groups"] = draw(st.lists(st.sampled_from("abcdefgh"), min_size=n, max_size=n))
        arguments["keep_groups"] = placed == "groups"
    if placed == "owners":
        arguments["owners"] = draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
    return lengths, arguments


def check(lengths: list[int], arguments: dict[str, Any], plan: MicroBatchPlan) -> None:
    n, ranks = len(lengths), arguments["ranks"]
    assert len(plan.micro_batches) == ranks
    assert {len(own) for own in plan.micro_batches} == {plan.num_micro_steps}, "I1: one K"
    places = [(r, k, i) for r, own in enumerate(plan.micro_batches) for k, part in enumerate(own) for i in part]
    assert sorted(i for *_, i in places) == list(range(n)), "I2: every sample once"
    assert all(plan.rank[i] == r and plan.micro_step[i] == k for r, k, i in places)
    patches, most = arguments.get("patches", [0] * n), arguments.get("max_patches")
    for part in (part for own in plan.micro_batches for part in own if len(part) > 1):
        sizes = [lengths[i] for i in part]
        assert (sum(sizes) if arguments["layout"] == "flat" else len(sizes) * max(sizes)) <= BUDGET, "I4"
        assert most is None or sum(patches[i] for i in part) <= most, "I4"
    for own in plan.micro_batches:
        busy = [bool(part) for part in own]
        assert busy == sorted(busy, reverse=True), "I7: idle behind the last micro-batch only"
    assert all(any(own[k] for own in plan.micro_batches) for k in range(plan.num_micro_steps))
    if arguments.get("keep_groups"):
        homes = {(group, int(rank)) for group, rank in zip(arguments["groups"], plan.rank)}
        assert len(homes) == len(set(arguments["groups"])), "a group is computed by one rank"
    if "owners" in arguments:
        assert plan.rank.tolist() == arguments["owners"]


def expected_weights(lengths: list[int], arguments: dict[str, Any]) -> list[float]:
    units, groups = arguments.get("loss_tokens", lengths), arguments.get("groups")
    if arguments["loss"] == "token_mean":
        return [unit / max(sum(units), 1) for unit in units]
    if arguments["loss"] == "sample_mean":
        return [1 / len(units)] * len(units)
    weights = []
    for unit, group in zip(units, groups):
        own = [other for other, its in zip(units, groups) if its == group]
        weights.append((unit / sum(own) if sum(own) else 1 / len(own)) / len(set(groups)))
    return weights


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_any_plan_keeps_its_promises(world: tuple[list[int], dict[str, Any]]) -> None:
    lengths, arguments = world
    plan = plan_micro_batches(lengths, **arguments)
    check(lengths, arguments, plan)
    assert np.allclose(plan.sample_weights, expected_weights(lengths, arguments))
    units = arguments.get("loss_tokens", lengths)
    has_loss = arguments["loss"] != "token_mean" or sum(units) > 0
    assert math.isclose(sum(map(sum, plan.micro_batch_weights)), has_loss, abs_tol=1e-9)
    per_token = [weight * unit for weight, unit in zip(plan.token_weights, units)]
    assert np.allclose(per_token, np.where(np.array(units) > 0, plan.sample_weights, 0))
    again = plan_micro_batches(np.array(lengths), **arguments)
    assert again.micro_batches == plan.micro_batches, "I6"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60), st.integers(1, 6))
def test_k_is_close_to_the_least(lengths: list[int], ranks: int) -> None:
    """Beside a bound on bins that no packing undercuts; largest first by itself needs at most 11/9 of it and one."""
    plan = plan_micro_batches(lengths, token_budget=BUDGET, ranks=ranks)
    least = -(-fewest_bins(np.array(lengths), BUDGET) // ranks)
    assert least <= plan.num_micro_steps <= -(-11 * least // 9) + 1


def test_many_samples_are_balanced_whether_groups_are_kept_or_not() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 1024).astype(int) + 1, 16384)
    for arguments in ({}, {"groups": np.arange(1024) // 8}):
        plan = plan_micro_batches(lengths, token_budget=16384, ranks=8, **arguments)
        of_ranks = np.bincount(plan.rank, lengths)
        assert of_ranks.max() <= 1.001 * of_ranks.mean()
        assert plan.num_micro_steps <= -(-int(lengths.sum()) // (8 * 16384)) + 1


@pytest.mark.parametrize(
    ("lengths", "changes", "said"),
    [
        ([], {}, "lengths must be a sequence of one or more integers"),
        ([1.5], {}, "lengths must be a sequence of one or more integers, got (1,) of float64"),
        ([[1, 2]], {}, "lengths must be a sequence of one or more integers"),
        ([4, 0], {}, "lengths must be between 1 and 16,777,216, got 0 to 4"),
        ([4, 1 << 25], {}, "lengths must be between"),
        ([4, 9], {"token_budget": 8}, "sample 1 has 9 tokens and 0 patches, more than a micro-batch may have"),
        ([4, 9], {"patches": [9, 1], "max_patches": 8}, "sample 0 has 4 tokens and 9 patches"),
        ([4], {"token_budget": 0}, "token_budget must be an integer between 1 and"),
        ([4], {"token_budget": 8.0}, "token_budget must be an integer"),
        ([4], {"ranks": 0}, "ranks must be an integer"),
        ([4], {"max_patches": 8}, "max_patches needs patches"),
        ([4], {"patches": [1], "max_patches": -1}, "max_patches must be an integer"),
        ([4], {"patches": [1, 2]}, "patches has 2 entries, lengths has 1"),
        ([4], {"patches": [-1]}, "patches must be between 0 and"),
        ([4], {"loss_tokens": [1, 2]}, "loss_tokens has 2 entries, lengths has 1"),
        ([4], {"groups": "ab"}, "groups has 2 entries, lengths has 1"),
        ([4], {"groups": [[1]]}, "groups must have an id for each sample"),
        ([4], {"loss": "prompt_mean"}, "loss='prompt_mean' needs groups"),
        ([4], {"loss": "mean"}, "loss must be one of token_mean, sample_mean, prompt_mean, got 'mean'"),
        ([4], {"layout": "auto"}, "layout must be one of flat, padded, got 'auto'"),
        ([4], {"overlong": "drop"}, "overlong must be one of error, singleton, got 'drop'"),
        ([4], {"owners": [1]}, "owners has rank 1, but there are 1 ranks"),
        ([4], {"owners": [0], "groups": [0]}, "owners already places the samples"),
    ],
)
def test_bad_input_is_refused_in_one_line(lengths: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        plan_micro_batches(lengths, **{"token_budget": 1 << 26, **changes})
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_example_of_the_docstring() -> None:
    plan = plan_micro_batches([700, 300, 500, 200, 100], token_budget=1000, ranks=2)
    assert plan.micro_batches == [[[0, 3]], [[1, 2, 4]]]
    assert plan.micro_batch_weights == [[0.5], [0.5]]
    assert plan.rank.tolist() == [0, 1, 1, 0, 1] and plan.micro_step.tolist() == [0] * 5


def test_it_imports_no_torch() -> None:
    code = "import sys; from odb_factory import plan_micro_batches; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
