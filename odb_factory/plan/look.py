"""A look before training: everything that `odb-factory plan` says, as plain values."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from odb_factory.config import ResolvedConfig
from odb_factory.data.loader import make_budget
from odb_factory.data.progress import Layout as LayoutName
from odb_factory.errors import DataError
from odb_factory.plan.arguments import Asked
from odb_factory.plan.observe import Part, Sample, observe, parts_of
from odb_factory.plan.rows import Rows, layout_of, open_rows
from odb_factory.plan.simulate import Outcome, Setting, baseline, num_overlong, planned
from odb_factory.planning import Budget

# ----------------------------------------------------------------------------------------------------------------------
# The plans of a look: one sample under many budgets, in both layouts, on many numbers of ranks.

FEWEST, MOST = 8, 8
"""Budgets from an eighth of the YAML's to eight times it are looked at."""
MOST_RANKS = 64
PLANNING_SECONDS = 30.0
"""What all plans beside the YAML's own may take; they are made of fewer optimizer steps where these take longer."""
PLANS = 25
"""About so many plans are made."""
CLOSE = 0.98
"""A budget is as good as another whose predicted speed is at most so much better."""


def least_budget(outcomes: list[Outcome], own: Outcome) -> Outcome:
    """The smallest budget that is about as fast as any, of those that no more samples break than the YAML's own."""
    within = [one for one in outcomes if one.overlong <= own.overlong] or outcomes
    fastest = max(one.speed for one in within)
    return next(one for one in within if one.speed >= CLOSE * fastest)


def budgets_around(asked: Asked, least: int) -> list[int]:
    """Powers of two around the YAML's budget, of at least `least`, and that one."""
    own = asked.config.token_budget
    config = asked.config
    least = max(own // FEWEST, least, config.pad_to_multiple_of or 1, *(config.length_buckets or ()))
    powers = [1 << exponent for exponent in range((own * MOST).bit_length())]
    return sorted({own, *(power for power in powers if power >= least)})


class Plans:
    """Plans of one sample. What is planned beside the YAML's own budget is made of as many steps as time allows."""

    def __init__(self, asked: Asked, rows: Rows, layout: LayoutName, step_size: int | None, sample: Sample):
        config = asked.config
        self.asked, self.rows, self.layout = asked, rows, layout
        self.setting = Setting(
            ranks=asked.ranks,
            step_size=step_size,
            batch_size=asked.batch_size,
            accumulation=asked.accumulation,
            balance=bool(config.balance),
            join=config.join,
            overlong=config.overlong,
            group_size=config.balance_group_size,
            buffer_size=config.buffer_size,
            seed=asked.seed,
            equal_weights=rows.stage.equal_weights and config.loss_scaling == "stock",
            collation=rows.collation.in_one_row(),
        )
        begun = time.thread_time()  # what else the machine does is not counted
        self.whole = sample
        self.own = planned(sample, self.setting, self.budget(config.token_budget, config.max_patches))
        seconds = time.thread_time() - begun
        self.sample = _thinned(sample, PLANNING_SECONDS / (PLANS * max(seconds, 1e-3)))
        # What others are compared with is made of the same optimizer steps.
        self.compared = self.own if self.sample is sample else self.under(config.token_budget)

    def budget(self, token_budget: int, max_patches: int | None, layout: LayoutName | None = None) -> Budget:
        """As the loader of a training makes it."""
        config = dataclasses.replace(self.asked.config, token_budget=token_budget, max_patches=max_patches)
        return make_budget(config, self.rows.collation, layout or self.layout)

    def under(self, token_budget: int) -> Outcome:
        """max_patches grows and shrinks with it."""
        config = self.asked.config
        patches = None
        if config.max_patches is not None:
            patches = max(config.max_patches * token_budget // config.token_budget, self._least_patches())
        budget = self.budget(token_budget, patches)
        found = planned(self.sample, self.setting, budget)
        return dataclasses.replace(found, overlong=num_overlong(self.whole, budget))

    def in_other_layout(self) -> Outcome:
        config = self.asked.config
        other: LayoutName = "padded" if self.layout == "flat" else "flat"
        return planned(self.sample, self.setting, self.budget(config.token_budget, config.max_patches, other))

    def without_sizes(self) -> Outcome | None:
        """What rounding sizes up costs is seen beside it."""
        config = self.asked.config
        free = dataclasses.replace(config, length_buckets=None, row_multiple=1, pad_to_multiple_of=None)
        if free == config:
            return None
        return planned(self.sample, self.setting, make_budget(free, self.rows.collation, self.layout))

    def by_ranks(self) -> list[tuple[int, Outcome]]:
        """The same optimizer steps on more and on fewer ranks."""
        assert self.setting.step_size is not None
        most = min(max(MOST_RANKS, self.asked.ranks), self.setting.step_size)
        powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
        found = []
        for ranks in sorted({*powers, self.asked.ranks}):
            setting = dataclasses.replace(self.setting, ranks=ranks)
            budget = self.budget(self.asked.config.token_budget, self.asked.config.max_patches)
            found.append((ranks, self.compared if ranks == self.asked.ranks else planned(self.sample, setting, budget)))
        return found

    def under_patch_caps(self, best: Outcome) -> Iterator[Outcome]:
        """The budget of `best` with caps on patches: powers of two, from what every sample keeps; the last: none."""
        assert best.token_budget is not None
        largest = max(int(step.rows["patches"].max()) for step in self.sample.steps)
        if not largest:
            return
        free = planned(self.sample, self.setting, self.budget(best.token_budget, None))
        cap = 1 << (max(largest, self._least_patches()) - 1).bit_length()
        while cap < free.most_patches:
            yield planned(self.sample, self.setting, self.budget(best.token_budget, cap))
            cap *= 2
        yield free

    def _least_patches(self) -> int:
        """Of micro-batches without media."""
        return max(self.rows.collation.dummies(0, 0)[1], 1)


def _thinned(sample: Sample, share: float) -> Sample:
    """This share of its optimizer steps, evenly spread."""
    if share >= 1:
        return sample
    count = max(round(share * len(sample.steps)), 1)
    spread = np.linspace(0, len(sample.steps) - 1, count).round().astype(int).tolist()
    return dataclasses.replace(sample, steps=[sample.steps[number] for number in dict.fromkeys(spread)])


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Look:
    """asked: the YAML. layout, layout_reason: as resolved before training, without its check of real samples.

    step_size: N, samples of an optimizer step on all ranks; None: filled. parts: the distributions (see `Part`).
    own: under the YAML's budgets; compared: the same over the optimizer steps that all others are planned over, fewer
    where planning takes long; budgets: under a range of them, the YAML's among them. other_layout: under the YAML's
    in the other layout; any_size: without `length_buckets`, `row_multiple` and
    `pad_to_multiple_of`, None where none is set. by_ranks: the same N on other numbers of ranks, () with filled ones.
    patch_caps: the smallest budget that is about as fast as any, under caps on patches.
    bound_by_longest: share of the optimizer steps in which the longest sample is more than the mean load of a rank.
    examples: a message for each reason why a row is left out.
    """

    asked: Asked
    layout: str
    layout_reason: str
    step_size: int | None
    sample: Sample
    parts: list[Part]
    own: Outcome
    compared: Outcome
    budgets: list[Outcome]
    other_layout: Outcome
    any_size: Outcome | None
    fixed: Outcome
    length_grouped: Outcome
    by_ranks: list[tuple[int, Outcome]]
    patch_caps: list[Outcome]
    bound_by_longest: float
    examples: dict[str, str]

    @property
    def config(self) -> ResolvedConfig:
        return self.asked.config


def look(asked: Asked, samples: int) -> Look:
    """Observe about `samples` rows and plan them. Raises what a training would before its first step."""
    rows = open_rows(asked, samples)
    layout = layout_of(asked, rows)
    step_size = _step_size(asked)
    drawn = asked.accumulation * asked.ranks * asked.batch_size
    sample = observe(rows, step_size or drawn, samples)
    examples = {seen.reason: seen.message for seen in reversed(sample.seen) if seen.cost is None}
    if not sample.steps:
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(s.reason for s in sample.seen).items())
        raise DataError(
            f"no row of the training dataset can be trained on ({reasons or 'it has none'})"
            + "".join(f"; {message}" for message in list(examples.values())[:1])
        )
    plans = Plans(asked, rows, layout.name, step_size, sample)
    own = plans.own
    parts = parts_of(sample.seen, rows.sources)
    budgets = [
        plans.compared if budget == own.token_budget else plans.under(budget)
        for budget in budgets_around(asked, least=parts[0].tokens.p50)
    ]
    stacked = [step.rows["tokens"] for step in sample.steps]
    longest = [int(tokens.max()) * asked.ranks > int(tokens.sum(dtype=np.int64)) for tokens in stacked]
    return Look(
        asked=asked,
        layout=layout.name,
        layout_reason=layout.reason,
        step_size=step_size,
        sample=sample,
        parts=parts,
        own=own,
        compared=plans.compared,
        budgets=budgets,
        other_layout=plans.in_other_layout(),
        any_size=plans.without_sizes(),
        fixed=baseline("fixed", sample, plans.setting),
        length_grouped=baseline("length-grouped", sample, plans.setting),
        by_ranks=plans.by_ranks() if step_size else [],
        patch_caps=list(plans.under_patch_caps(least_budget(budgets, own))),
        bound_by_longest=sum(longest) / len(longest),
        examples=examples,
    )


def _step_size(asked: Asked) -> int | None:
    size = asked.config.global_batch_size
    if isinstance(size, int):
        return size
    return asked.batch_size * asked.accumulation * asked.ranks if size == "keep" else None
