"""The own figures of trainers for preferences are means over what was trained, whatever the cut and what was idle.

That they are stock's in real trainings is for `test_stages.py` (dpo) and `test_kto.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from accounting.steps import cut, measured, optimizer_step, random_rows

from odb_factory.accounting.losses import loss_of, token_weights
from odb_factory.accounting.statistics import Computing
from odb_factory.llamafactory.kto import ExampleMetrics
from odb_factory.training.pair_metrics import PairMetrics

NUM_ROWS, WORLD_SIZE, MICRO_BATCHES = (12, 6), 2, 4
IDLE = float("nan")


class OfRank(SimpleNamespace):
    """What the figures are taken from and stored in, on one rank."""

    def __init__(self, rank: int, scaling: str):
        config = SimpleNamespace(loss_scaling=scaling)
        odb = SimpleNamespace(computing=None, evaluation=None, config=config)
        args = SimpleNamespace(process_index=rank)
        super().__init__(odb=odb, args=args, _stored_metrics=defaultdict(lambda: defaultdict(list)))

    def get_batch_loss_metrics(self, metrics: dict[str, float]) -> tuple[float, dict[str, float]]:
        return 0.0, metrics


def trained(scaling: str, seed: int) -> list[list[Computing]]:
    """[rank] -> the micro-batches of two optimizer steps."""
    rng = random.Random(seed)
    ranks: list[list[Computing]] = [[] for _ in range(WORLD_SIZE)]
    for num_rows in NUM_ROWS:
        rows = [dataclasses.replace(row, supervised=1) for row in random_rows(rng, num_rows)]
        slots = cut(rng, num_rows, WORLD_SIZE, MICRO_BATCHES)
        for mine, micro_batches in zip(ranks, optimizer_step(rows, slots, stock_mean="micro_batch")):
            for one in micro_batches:
                loss = loss_of(token_weights(one, scaling, WORLD_SIZE), one.units)
                mine.append(Computing(one, measured(one, 70), loss))
    assert any(one.micro_batch.idle for rank in ranks for one in rank)
    return ranks


def log(trainer: Any) -> dict[str, float]:
    """As LLaMA-Factory takes the figures of a rank to reduce them."""
    stored = trainer._stored_metrics.pop("train")
    assert all(len(values) == 1 for values in stored.values())
    return {key: values[0] for key, values in stored.items()}


@pytest.mark.parametrize("scaling", ["stock", "exact"])
def test_pairs_weigh_the_same_in_all_micro_batches(scaling: str) -> None:
    for seed in range(20):
        ranks, said = trained(scaling, seed), []
        for rank, computed in enumerate(ranks):
            trainer = OfRank(rank, scaling)
            with PairMetrics(trainer).in_place():
                for apart in (100, 0):  # two logging intervals
                    for trainer.odb.computing in computed:
                        ids = trainer.odb.computing.micro_batch.ids
                        value = apart + sum(ids) / len(ids) if ids else IDLE
                        assert trainer.get_batch_loss_metrics({"rewards/chosen": value}) == (0.0, {})
                    figures = log(trainer)
            said.append(figures["rewards/chosen"])
            assert trainer.get_batch_loss_metrics({"rewards/chosen": 1.0})[1] == {"rewards/chosen": 1.0}
        all_ids = [row for rank in ranks for one in rank for row in one.micro_batch.ids]
        assert sum(said) / WORLD_SIZE == pytest.approx(sum(all_ids) / len(all_ids))


def test_sums_over_examples_have_the_same_keys_on_all_ranks() -> None:
    """Rank 1 has seen no desirable example; no rank has seen an undesirable one."""
    step_kl: Any = SimpleNamespace(kl=0.25, num_examples={"chosen": 9, "rejected": 0})
    said = []
    for rank, computed in enumerate(trained("stock", 0)):
        trainer = OfRank(rank, "stock")
        with ExampleMetrics(trainer, step_kl).in_place():
            for trainer.odb.computing in computed:
                counted = 0.0 if rank else float(len(trainer.odb.computing.micro_batch.ids) or IDLE)
                names = () if rank else ("rewards/chosen_sum", "logps/chosen_sum", "logits/chosen_sum", "count/chosen")
                trainer.get_batch_loss_metrics({"kl": 7.0} | dict.fromkeys(names, counted))
        said.append(log(trainer))
    assert list(said[0]) == list(said[1]) == [*names_of("chosen"), "kl"]
    assert said[0]["count/chosen"] == sum(len(one.micro_batch.ids) for one in trained("stock", 0)[0])
    assert said[1]["count/chosen"] == 0.0
    assert [figures["kl"] for figures in said] == [2 * 0.25, 0.0], "once for each optimizer step, by rank 0"


def test_an_optimizer_step_that_is_begun_anew_counts_once() -> None:
    """`oom: split`: the second optimizer step fails in its last micro-batch, and the first of it is cut in two."""
    said = []
    for fails in (False, True):
        trainer = OfRank(0, "exact")
        computed = trained("exact", 0)[0]
        if fails:
            second = computed[MICRO_BATCHES:]
            whole = second[0]
            half = dataclasses.replace(whole.loss, scale=whole.loss.scale / 2)
            parts = [dataclasses.replace(whole, micro_batch=part, loss=half) for part in whole.micro_batch.cut(1)]
            computed = [*computed[:MICRO_BATCHES], *second[:-1], *parts, *second[1:]]
        with PairMetrics(trainer).in_place():
            for trainer.odb.computing in computed:
                value = trainer.odb.computing.micro_batch.index + 1.0
                trainer.get_batch_loss_metrics({"rewards/chosen": value})
        said.append(log(trainer)["rewards/chosen"])
    assert said[0] == pytest.approx(said[1])
    assert said[0] > 0


def names_of(kind: str) -> list[str]:
    return [f"rewards/{kind}_sum", f"logps/{kind}_sum", f"logits/{kind}_sum", f"count/{kind}"]
