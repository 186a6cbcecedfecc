"""Who is compared in the `planning` benchmark: each cuts the samples of an epoch with the code that a training runs.

A contestant returns a `Cut`, or in a sentence why there is none. What is not installed is said, not imitated.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import importlib.metadata
import importlib.util
import io
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import rivals
from simulation import LONGEST, TOKEN_BUDGET, Cut, Epoch, cut_of_batches, cut_of_plan

from odb_factory import plan_micro_batches
from odb_factory.planning import Budget, BufferMetadata, CostModel, Plan, plan_buffers, plan_optimizer_step

WINDOW = 1024
ROWS = (1, 2, 4, 8)
MANY = 131_072
"""Samples after which those who walk through a list in Python stop."""
PREPROCESSED_TOGETHER = 1000
"""Samples that LLaMA-Factory (`preprocessing_batch_size`) and TRL (`datasets.map`) pack at once."""
WORDS_A_TOKEN, CHARACTERS_A_TOKEN = 0.75, 4.5
"""dynabatch asks for them beside the tokens of a text."""
DYNABATCH_SAMPLES = 8192
"""A model is asked for each of its batches."""
REBALANCE_RANKS, REBALANCE_STEPS = 8, 2
"""Every rank computes the batches of all, which for more of them takes hours here."""

Batches = Sequence[Sequence[int]]
Kept = Callable[[Epoch, int, int], Cut | str]
"""(epoch, N, optimizer steps) of a way that keeps N samples an optimizer step."""
Own = Callable[[Epoch], Cut | str]
"""A way that chooses itself how many samples an optimizer step has."""


def _deal(batches: Batches, ranks: int) -> list[Batches]:
    """Batches as accelerate deals them: in turn, a full micro-step at a time."""
    return [batches[k : k + ranks] for k in range(0, len(batches) - ranks + 1, ranks)]


def _rows_fit(epoch: Epoch, batch_size: int, rows: int) -> str | None:
    if batch_size % (rows * epoch.ranks):
        return f"{batch_size:,} samples are not {rows} rows on {epoch.ranks:,} ranks"
    return None


def fixed(epoch: Epoch, batch_size: int, count: int, rows: int) -> Cut | str:
    if why := _rows_fit(epoch, batch_size, rows):
        return why
    samples = _first(epoch, batch_size, count)
    batches = np.arange(len(samples)).reshape(-1, rows)
    return cut_of_batches(samples, _deal(batches, epoch.ranks), len(samples) // batch_size)


def length_grouped(epoch: Epoch, batch_size: int, count: int, rows: int) -> Cut | str:
    """The sampler of transformers, as its Trainer and so LLaMA-Factory make it."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if why := _rows_fit(epoch, batch_size, rows):
        return why
    samples = _whole(epoch, batch_size)
    generator = torch.Generator().manual_seed(epoch.seed)
    accumulated = batch_size // epoch.ranks
    order = list(LengthGroupedSampler(accumulated, lengths=samples["tokens"].tolist(), generator=generator))
    batches = np.array(order).reshape(-1, rows)
    return cut_of_batches(samples, _deal(batches, epoch.ranks), len(samples) // batch_size)


def rebalanced(epoch: Epoch, batch_size: int, count: int, rows: int, ask: rivals.Rebalancer) -> Cut | str:
    """transformers' `batch_rebalance`."""
    if why := _rows_fit(epoch, batch_size, rows):
        return why
    if epoch.ranks > REBALANCE_RANKS:
        return f"every rank computes the batches of all: too slow for more than {REBALANCE_RANKS} ranks here"
    samples = _first(epoch, batch_size, min(count, REBALANCE_STEPS))
    of_ranks = ask(samples["tokens"].tolist(), batch_size, epoch.ranks, batch_size // (rows * epoch.ranks))
    return cut_of_batches(samples, list(zip(*of_ranks)), len(samples) // batch_size)


def keep(epoch: Epoch, batch_size: int, count: int, layout: str, balance: bool) -> Cut:
    totals, steps = [], 0
    for shares in epoch.optimizer_steps(batch_size, count):
        buffers = [BufferMetadata(rows, exhausted=False) for rows in shares]
        totals += plan_optimizer_step(buffers, epoch.budget(layout), balance=balance).totals
        steps += 1
    return cut_of_plan(totals, epoch.ranks, steps)


def rounds(
    samples: Sequence[np.ndarray],
    budget: Budget,
    buffer_size: int,
    *,
    balance: bool = False,
    join: bool = True,
    accumulation: int = 1,
    model: CostModel = CostModel(),
    endless: bool = False,
    seed: int = 0,
) -> Iterator[Plan]:
    """One epoch over the samples of each rank (as `ROW`); endless: from the beginning again, without end.

    buffer_size: samples that a rank holds.
    """
    held, drawn = [rows[:0] for rows in samples], [0] * len(samples)
    for round_index in itertools.count():
        for rank, rows in enumerate(samples):
            wanted = drawn[rank] + np.arange(buffer_size - len(held[rank]))
            fresh = rows[wanted % len(rows)] if endless else rows[wanted[wanted < len(rows)]]
            drawn[rank] += len(fresh)
            held[rank] = np.concatenate([held[rank], fresh])
        plan = plan_buffers(
            [BufferMetadata(rows, not endless and drawn[rank] == len(samples[rank])) for rank, rows in enumerate(held)],
            budget,
            seed=seed,
            epoch=0,
            round_index=round_index,
            accumulation=accumulation,
            join=join,
            balance=balance,
            model=model,
        )
        yield plan
        if plan.final:
            return
        gone = np.zeros(sum(map(len, held)), bool)
        for groups in plan.groups:
            for group in groups:
                gone[group] = True
        for rank, (start, end) in enumerate(zip(plan.starts, plan.starts[1:])):
            held[rank] = held[rank][~gone[start:end]]
            held[rank]["age"] = np.minimum(held[rank]["age"], 254) + 1


def fill(epoch: Epoch, layout: str = "padded", balance: bool = False) -> Cut:
    plans = rounds(epoch.shares, epoch.budget(layout), WINDOW, balance=balance)
    totals = [one for plan in plans for one in plan.totals]
    return cut_of_plan(totals, epoch.ranks, len(totals))


def packing(epoch: Epoch) -> Cut | str:
    """LLaMA-Factory's `packing` and `neat_packing`: the same packs, each padded to `cutoff_len` + 1 = the budget."""
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    if epoch.images:
        return "packs are of text"
    lengths, packs = epoch.samples["tokens"][:MANY].tolist(), []
    for start in range(0, len(lengths), PREPROCESSED_TOGETHER):
        packs += greedy_knapsack(lengths[start : start + PREPROCESSED_TOGETHER], TOKEN_BUDGET - 1)
    return _packed(packs, epoch, TOKEN_BUDGET)


def bfd(epoch: Epoch) -> Cut | str:
    """TRL's `packing_strategy: bfd`; padding-free, so that a pack takes its own tokens."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed"
    import datasets
    import pyarrow
    from trl import pack_dataset

    if epoch.images:
        return "packs are of text"
    lengths = epoch.samples["tokens"][:MANY]
    ids = pyarrow.ListArray.from_arrays(np.concatenate([[0], lengths.cumsum()]), np.zeros(lengths.sum(), np.int8))
    datasets.disable_progress_bar()
    packed = pack_dataset(datasets.Dataset(pyarrow.table({"input_ids": ids})), TOKEN_BUDGET, "bfd")
    return _packed(packed["seq_lengths"], epoch, None)


def _packed(packs: Sequence[Sequence[int]], epoch: Epoch, length: int | None) -> Cut:
    """A pack a micro-batch, in random order. length: what each is padded to, None: its own tokens."""
    packs = list(packs)
    random.Random(epoch.seed).shuffle(packs)
    packs = packs[: len(packs) // epoch.ranks * epoch.ranks]
    tokens = np.array([sum(pack) for pack in packs])
    padded = (np.full_like(tokens, length) if length else tokens).reshape(-1, epoch.ranks)
    samples = sum(map(len, packs))
    return Cut(epoch.ranks, padded.sum(axis=1), padded.max(axis=1), int(tokens.sum()), samples, len(padded))


def dynabatch(epoch: Epoch) -> Cut | str:
    """Its sampler: all samples sorted, batches of as many rows as a model of memory allows, shuffled."""
    if importlib.util.find_spec("dynabatch") is None:
        return "dynabatch is not installed"
    from dynabatch.sampler import DynaBatchSampler

    if epoch.images:
        return "it is for text"
    samples = epoch.samples[: max(DYNABATCH_SAMPLES, 32 * epoch.ranks)]
    tokens = samples["tokens"]
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        sampler = DynaBatchSampler(
            token_lengths=tokens.tolist(),
            word_lengths=(tokens * WORDS_A_TOKEN).astype(int).tolist(),
            char_lengths=(tokens * CHARACTERS_A_TOKEN).astype(int).tolist(),
            min_batch_size=TOKEN_BUDGET // LONGEST,
            threshold=0.9,
            shuffle=True,
        )
    steps = _deal(list(sampler), epoch.ranks)
    return cut_of_batches(samples, steps, len(steps))


def really_run(epoch: Epoch, name: str, most_ranks: int) -> Cut | str:
    """A whole loader, with a process a rank."""
    if epoch.ranks > most_ranks:
        return f"it is run with a process a rank: too many here for {epoch.ranks:,} ranks (`--processes {most_ranks}`)"
    if epoch.images:
        return "its processes are given text"
    padded = rivals.run(name, epoch.shares, token_budget=TOKEN_BUDGET, window=WINDOW)
    tokens, samples = int(epoch.samples["tokens"].sum()), len(epoch.samples)
    return Cut(epoch.ranks, padded.sum(axis=0), padded.max(axis=0), tokens, samples, padded.shape[1])


def _first(epoch: Epoch, batch_size: int, count: int) -> np.ndarray:
    """The samples of the optimizer steps that are planned."""
    return epoch.samples[: min(count, len(epoch.samples) // batch_size) * batch_size]


def _whole(epoch: Epoch, batch_size: int) -> np.ndarray:
    """All samples of whole optimizer steps: the more there are, the better length grouping can group."""
    return epoch.samples[: min(len(epoch.samples), MANY) // batch_size * batch_size]


# ----------------------------------------------------------------------------------------------------------------------
# How trainers of reinforcement learning cut a batch of lengths by a token budget, written from what they publish:
# the function of each takes lengths, ranks and budget and returns the micro-batches of each rank.

Cutter = Callable[[Sequence[int], int, int], list[list[list[int]]]]


def differencing(sizes: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp 1982): indices in parts of nearly equal sums.

    A partial solution is `parts` sums in descending order. The two with the largest differences are merged, largest
    with smallest, until one is left. equal_counts: begin with one sample in each part, of like size.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    step = parts if equal_counts else 1
    solutions = []
    for number, first in enumerate(range(0, len(order), step)):
        own = order[first : first + step]
        sums = [sizes[i] for i in own] + [0] * (parts - len(own))
        solutions.append((sums[-1] - sums[0], number, sums, [[i] for i in own] + [[]] * (parts - len(own))))
    heapq.heapify(solutions)
    while len(solutions) > 1:
        (_, number, sums, members), (_, _, others, more) = heapq.heappop(solutions), heapq.heappop(solutions)
        merged = [(a + b, k) for k, (a, b) in enumerate(zip(sums, reversed(others)))]
        merged.sort(reverse=True)
        sums, members = [total for total, _ in merged], [members[k] + more[parts - 1 - k] for _, k in merged]
        heapq.heappush(solutions, (sums[-1] - sums[0], number, sums, members))
    return solutions[0][3]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Each sample, in the order given, into the first bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i, size in enumerate(sizes):
        k = next((k for k, left in enumerate(room) if size <= left), len(bins))
        if k == len(bins):
            bins.append([])
            room.append(capacity)
        bins[k].append(i)
        room[k] -= size
    return bins


def as_verl(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Samples to ranks, as many on each, then those of each rank to K micro-batches, both by differencing.

    K is the most of any rank's tokens by the budget, so a micro-batch may be above it.
    """
    shares = differencing(lengths, ranks, equal_counts=True)
    count = max(-(-sum(lengths[i] for i in share) // budget) for share in shares)
    parts = [differencing([lengths[i] for i in share], count) for share in shares]
    return [[[share[i] for i in part] for part in own] for share, own in zip(shares, parts)]


def as_slime(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """First fit of all samples; the largest bins are split until their number is a multiple of the ranks; then they go
    to ranks, as many to each, by differencing."""
    bins = first_fit(lengths, budget)
    while len(bins) % ranks:
        largest = max((own for own in bins if len(own) > 1), key=lambda own: sum(lengths[i] for i in own))
        bins.remove(largest)
        halves = differencing([lengths[i] for i in largest], 2)
        bins += [[largest[i] for i in half] for half in halves]
    shares = differencing([sum(lengths[i] for i in own) for own in bins], ranks, equal_counts=True)
    return [[bins[k] for k in share] for share in shares]


def as_odb(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    return plan_micro_batches(lengths, token_budget=budget, ranks=ranks)


def as_odb_in_groups(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    groups = np.arange(len(lengths)) // ANSWERS
    return plan_micro_batches(lengths, token_budget=budget, ranks=ranks, groups=groups)


ANSWERS = 8
"""Samples of a group that is kept together."""
CUTTERS: dict[str, Cutter] = {
    "verl's (differencing twice)": as_verl,
    "slime's (first fit, differencing)": as_slime,
    "odb": as_odb,
    f"odb, groups of {ANSWERS} kept on a rank": as_odb_in_groups,
}


def cut_by(cutter: Cutter, epoch: Epoch, batch_size: int, count: int, token_budget: int) -> tuple[Cut, float]:
    """Its cut of optimizer steps, flat, and the mean seconds of a step.

    The micro-batches of a rank go from large to small, which is best for every cutter.
    """
    most, padded, tokens, spent = [], [], 0, 0.0
    for shares in epoch.optimizer_steps(batch_size, count):
        lengths = np.stack([rows["tokens"] for rows in shares], axis=1).reshape(-1).tolist()
        began = time.process_time()
        of_ranks = cutter(lengths, epoch.ranks, token_budget)
        spent += time.process_time() - began
        sums = np.array([sorted((sum(lengths[i] for i in own) for own in mine), reverse=True) for mine in of_ranks])
        most.append(sums.max(axis=0))
        padded.append(sums.sum(axis=0))
        tokens += sum(lengths)
    return Cut(epoch.ranks, *map(np.concatenate, (padded, most)), tokens, count * batch_size, count), spent / count


# ----------------------------------------------------------------------------------------------------------------------
ODB = "odb, keep, flat"
ODB_WAYS = {
    f"{', flat' * (layout == 'flat')}{', `balance: false`' * (not balance)}": {"layout": layout, "balance": balance}
    for layout in ("padded", "flat")
    for balance in (True, False)
}
ONLINE = "online-dynamic-batching"


def keeping(rebalancer: rivals.Rebalancer | None) -> dict[str, Kept]:
    """Who keeps N, by name."""

    def missing(epoch: Epoch, batch_size: int, count: int, rows: int) -> str:
        return "no environment with a newer transformers (`--newer-transformers`)"

    version = f" (transformers {rebalancer.version})" if rebalancer else ""
    ways = {"fixed": fixed, "length-grouped": length_grouped, f"batch_rebalance{version}": missing}
    if rebalancer:
        ways[f"batch_rebalance{version}"] = functools.partial(rebalanced, ask=rebalancer)
    found: dict[str, Kept] = {
        f"{name}, {rows} row{'s' * (rows > 1)}": functools.partial(way, rows=rows)
        for name, way in ways.items()
        for rows in ROWS
    }
    return found | {f"odb, keep{name}": functools.partial(keep, **how) for name, how in ODB_WAYS.items()}


def choosing(most_ranks: int) -> dict[str, Own]:
    """Who chooses N, by name. most_ranks: up to so many, whole loaders are run."""
    published = {name: functools.partial(really_run, name=name, most_ranks=most_ranks) for name in rivals.LOADERS}
    if not published:
        published[ONLINE] = lambda epoch: "it is not installed"
    version = f" {importlib.metadata.version('dynabatch')}" if importlib.util.find_spec("dynabatch") else ""
    return {
        "LLaMA-Factory's packing, neat_packing": packing,
        "TRL's bfd packing, padding-free": bfd,
        **published,
        f"dynabatch{version}": dynabatch,
        **{f"odb, fill{name}": functools.partial(fill, **how) for name, how in ODB_WAYS.items()},
    }
