"""How much of the time is spent on real tokens, by the cost model of the planner, and how much could be at most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planning import CostModel, MicroStepTotals

FIXED = CostModel().fixed
"""The fixed cost of a micro-step, in tokens: assumed, not measured."""


def time_of(totals: Sequence[MicroStepTotals], fixed: int = FIXED) -> int:
    """Of these micro-steps in tokens: ranks wait for the one with most, and every micro-step costs `fixed` beside."""
    return sum(fixed + one.max_rank_tokens for one in totals)


def step_efficiency(totals: Sequence[MicroStepTotals], ranks: int, fixed: int = FIXED) -> float:
    """Real tokens / (ranks x time), 0 to 1: it counts padding, waiting and the fixed cost of micro-steps."""
    spent = ranks * time_of(totals, fixed)
    return sum(one.tokens for one in totals) / spent if spent else 1.0


def least_time(tokens: np.ndarray, ranks: int, token_budget: int, fixed: int = FIXED) -> float:
    """No cut of these samples into micro-steps takes less, padded or not: a rank has at least the mean load of all, or
    the longest sample, and a micro-step at most the token budget. tokens: of the samples of an optimizer step."""
    load = int(tokens.sum(dtype=np.int64)) / ranks
    within = int(np.minimum(tokens, token_budget).sum(dtype=np.int64)) / ranks  # a longer one goes alone
    return max(load, int(tokens.max())) + fixed * -(-within // token_budget)
