"""Form the groups of one rank's window: like lengths together, each group under both budgets.

Next-fit decreasing on the padded row length: walk the samples from long to short and open a new
group when the next one would break a budget. Neighbours in the order differ little in length, so
little is padded. Only the last group, that of the shortest samples, can be part-filled for want of
samples; it is marked so that the caller may keep it back for the next window.
"""

from __future__ import annotations

from collections.abc import Sequence

from odb_factory.batching.cost import Budget, Cost


def form_groups(costs: Sequence[Cost], budget: Budget) -> tuple[list[list[int]], list[int]]:
    """Split `range(len(costs))`, samples of one family, into groups under `budget`.

    Returns (full, rest): `full` are groups to which the next sample did not fit, longest rows
    first; `rest` is the part-filled last group (may be empty). Within a group the shortest row
    comes first: a filler that the collator adds to the first row then rarely makes it the longest.
    Every index stands in exactly one group; a sample that breaks a budget alone forms a group of
    its own and counts as full.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i].tokens, -costs[i].patches, i))
    groups: list[list[int]] = []
    group: list[int] = []
    patches, has_media = 0, False
    for i in order:
        cost = costs[i]
        if group:
            media = has_media or cost.has_media
            length = budget.collation.length(costs[group[0]].tokens, cost.tokens, media)
            total = patches + cost.patches + (0 if media else budget.collation.filler_patches)
            if not budget.holds(len(group) + 1, length, total):
                groups.append(group)
                group, patches, has_media = [], 0, False
        group.append(i)
        patches += cost.patches
        has_media = has_media or cost.has_media
    if group and budget.overlong(costs[group[0]]):
        groups.append(group)
        group = []
    for full in groups:
        full.reverse()
    return groups, group[::-1]
