"""A checker of plans in both layouts (optimizer steps, rounds of `fill`, `plan_micro_batches`); strategies for costs
and budgets; `shape_of`: the collated shape of a group, independent of `Budget.collated`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from odb_factory.planner import (
    VIDEO,
    Budget,
    Collation,
    Cost,
    Media,
    MicroStepTotals,
    Plan,
    make_metadata,
    plan_buffers,
    plan_optimizer_step,
)
from odb_factory.planner.cost import STEP_COST

World = Sequence[Sequence[Cost]]
"""For each rank the samples of the optimizer step that it holds."""


def numbered(world: World) -> tuple[list[Cost], list[int]]:
    """Costs and ranks of the samples, numbered through the ranks as in a plan."""
    return [cost for own in world for cost in own], [rank for rank, own in enumerate(world) for _ in own]


def check_groups(groups: Sequence[Sequence[Sequence[Cost]]], budget: Budget) -> None:
    """I1, I4. groups: [rank][micro_step], the costs of the samples."""
    assert len({len(own) for own in groups}) == 1, "I1: the same K on all ranks"
    for group in filter(None, itertools.chain(*groups)):
        assert len(group) == 1 or within(group, budget), "I4"
        assert len({cost.modality for cost in group}) == 1, "modalities share no micro-batch"


def check_micro_batches(
    micro_batches: Sequence[Sequence[Sequence[int]]],
    costs: Sequence[Cost],
    owner: Sequence[int] | None,
    budget: Budget,
    complete: bool = True,
) -> None:
    """I1, I2, I4, I7. micro_batches: [rank][micro_step], numbers of samples. owner: the rank that each sample stays on;
    None: ranks share samples. complete: no sample may wait (`fill`)."""
    times = Counter(i for own in micro_batches for group in own for i in group)
    assert set(times.values()) <= {1} and set(times) <= set(range(len(costs))), "I2: no sample twice"
    assert not complete or len(times) == len(costs), "I2: every sample"
    assert all(any(step) for step in zip(*micro_batches)), "a sample in every micro-step"
    check_groups([[[costs[i] for i in group] for group in own] for own in micro_batches], budget)
    for rank, own in enumerate(micro_batches):
        assert owner is None or all(owner[i] == rank for group in own for i in group), "a rank keeps its samples"
        busy = [bool(group) for group in own]
        assert busy == sorted(busy, reverse=True), "I7: a rank idles after its last micro-batch"
    if not complete:
        return
    # Ranks that share samples idle only if a modality has too few: then each sample is alone in its micro-batch.
    every = {cost.modality for cost in costs}
    for groups in [list(itertools.chain(*micro_batches))] if owner is None else micro_batches:
        shared = {costs[group[0]].modality for group in groups if len(group) > 1}
        assert all(groups) or shared != every, "I7: a rank idles only if samples are too few"


def totals_of(groups: Sequence[Sequence[Cost]], budget: Budget) -> MicroStepTotals:
    """The totals of a micro-step, counted independently. groups: its micro-batches."""
    groups = [group for group in groups if group]
    shapes = [shape_of(group, budget) for group in groups]
    lengths = [cost.tokens for group in groups for cost in group]
    return MicroStepTotals(
        samples=len(lengths),
        tokens=sum(lengths),
        padded_tokens=sum(rows * length for rows, length, _ in shapes),
        patches=sum(patches for *_, patches in shapes),
        units=sum(cost.units for group in groups for cost in group),
        active_ranks=len(groups),
        max_rank_tokens=max((rows * length for rows, length, _ in shapes), default=0),
        max_rank_patches=max((patches for *_, patches in shapes), default=0),
    )


def check_plan(plan: Plan, world: World, budget: Budget, shares: bool, complete: bool = True) -> None:
    """The promises and the totals of plans of optimizer steps and rounds. shares: ranks share samples."""
    costs, owner = numbered(world)
    check_micro_batches(plan.groups, costs, None if shares else owner, budget, complete)
    for step, totals in zip(zip(*plan.groups), plan.totals, strict=True):
        moved = sum(owner[i] != rank for rank, group in enumerate(step) for i in group)
        assert totals == replace(totals_of([[costs[i] for i in group] for group in step], budget), moved=moved)


# Optimizer steps


def planned(world: World, budget: Budget, *, balance: bool) -> Plan:
    buffers = [make_metadata(own, exhausted=False) for own in world]
    return plan_optimizer_step(buffers, budget, balance=balance)


def step_costs(plan: Plan) -> list[int]:
    """The cost of each micro-step, in tokens."""
    return [STEP_COST + step.max_rank_tokens for step in plan.totals]


def check_optimizer_step(world: World, budget: Budget, *, balance: bool = True) -> Plan:
    """Plan an optimizer step, and check all its promises."""
    plan = planned(world, budget, balance=balance)
    shares = balance and len(world) > 1
    check_plan(plan, world, budget, shares)
    busy = [step.active_ranks for step in plan.totals]
    order = [(-ranks, -cost) for ranks, cost in zip(busy, step_costs(plan))]
    assert order == sorted(order), "the costliest micro-step comes first"
    held = [len(own) for own in world]
    assert busy[:1] == [min(sum(held), len(world)) if shares else sum(map(bool, held))][: len(busy)], "I5"
    return plan


# Rounds


class Window(NamedTuple):
    """The samples a rank holds, their positions (none: 0, 1, 2, ...), and whether its sampler is exhausted."""

    costs: Sequence[Cost]
    positions: Sequence[int] = ()
    exhausted: bool = False


def plan_round(world: Sequence[Window], budget: Budget, **options: Any) -> Plan:
    """options: of `plan_buffers`."""
    options = {"seed": 0, "epoch": 0, "round_index": 0} | options
    buffers = [make_metadata(costs, exhausted, positions=positions) for costs, positions, exhausted in world]
    return plan_buffers(buffers, budget, **options)


def emitted_of(plan: Plan, rank: int) -> list[int]:
    """The samples that leave the window of a rank, as indices in the window."""
    start, end = plan.starts[rank : rank + 2]
    return [i - start for steps in plan.groups for group in steps for i in group if start <= i < end]


def check_round(world: Sequence[Window], budget: Budget, *, balance: bool = False, **options: Any) -> Plan:
    """Plan a round with join, and check all its promises."""
    plan = plan_round(world, budget, balance=balance, **options)
    balance = balance and len(world) > 1
    assert plan.final is all(window.exhausted for window in world)
    check_plan(plan, [window.costs for window in world], budget, balance, complete=plan.final)
    for rank, window in enumerate(world):
        gone = emitted_of(plan, rank)
        assert gone or not window.costs or balance, "I5: progress on every rank that holds a sample"
        if not plan.final and not all(plan.groups[rank]):
            left = {cost.modality for i, cost in enumerate(window.costs) if i not in gone}
            assert balance or window.exhausted, "I7: a rank idles when it has run out of samples"
            assert left.isdisjoint({window.costs[i].modality for i in gone}), "I7"
    if plan.final and plan.totals and not balance:
        assert any(map(all, plan.groups)), "I7: the rank with most groups sets the length"
    return plan


collations = st.builds(
    Collation,
    pad_to_multiple_of=st.sampled_from([1, 2, 3, 8]),
    dummy_media_tokens=st.sampled_from([0, 1, 5, 20]),
    dummy_media_patches=st.sampled_from([0, 1, 4]),
    dummy_audio_tokens=st.sampled_from([0, 0, 2, 7]),
    dummy_audio_patches=st.sampled_from([0, 0, 3]),
)
limits: Any = {
    "token_budget": st.integers(1, 100),
    "max_patches": st.none() | st.integers(1, 12),
    "collation": collations,
}
budgets = st.builds(Budget, row_multiple=st.sampled_from([1, 1, 1, 2, 4]), **limits)
flat_budgets = st.builds(Budget, layout=st.just("flat"), pad_to_multiple_of=st.sampled_from([1, 1, 4, 16]), **limits)


@st.composite
def costs(draw: st.DrawFn, num_modalities: int = 1) -> Cost:
    """A sample with or without media and audio; sometimes beyond every budget above."""
    tokens = draw(st.integers(1, 30) | st.sampled_from([1, 50, 99, 100, 101, 300]))
    patches = draw(st.just(0) | st.integers(0, 8) | st.sampled_from([12, 13, 40]))
    video, audio = draw(st.just((0, 0)) | st.tuples(st.integers(0, patches), st.integers(0, patches)))
    video = min(video, patches - audio)
    has_media = patches > audio or draw(st.booleans())
    modality = draw(st.integers(0, num_modalities - 1)) if has_media and num_modalities > 1 else 0
    media: Media | None = Media(patches - video - audio, video, 2 * audio)
    if video == audio == 0 and modality != VIDEO:
        media = None
    units, has_audio = draw(st.integers(1, tokens)), audio > 0 or draw(st.booleans())
    return Cost(tokens, patches, units, has_media, modality, has_audio=has_audio, media=media)


def shape_of(group: Sequence[Cost], budget: Budget) -> tuple[int, int, int]:
    """(rows, row length, patches) of a group in the layout of the budget, built one token at a time."""
    rows, multiple = [["token"] * cost.tokens for cost in group], budget.collation.pad_to_multiple_of
    patches = ["patch"] * sum(cost.patches for cost in group)
    if not any(cost.has_media for cost in group):
        rows[0] += ["filler"] * budget.collation.dummy_media_tokens
        patches += ["filler"] * budget.collation.dummy_media_patches
    if not any(cost.has_audio for cost in group):
        rows[0] += ["silence"] * budget.collation.dummy_audio_tokens
        patches += ["silence"] * budget.collation.dummy_audio_patches
    if budget.layout == "flat":
        rows, multiple = [list(itertools.chain(*rows))], budget.pad_to_multiple_of
    while len({len(row) for row in rows}) > 1 or len(rows[0]) % multiple:
        longest = max(len(row) for row in rows)
        whole = all(len(row) == longest for row in rows)
        for row in rows:
            row += ["pad"] * (longest - len(row) + whole)
    return len(rows), len(rows[0]), len(patches)


def within(group: Sequence[Cost], budget: Budget) -> bool:
    rows, length, patches = shape_of(group, budget)
    return rows * length <= budget.token_budget and (budget.max_patches is None or patches <= budget.max_patches)
