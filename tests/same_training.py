"""The same YAML trained by stock LLaMA-Factory and with an `odb:` block, and how far the two trainings differ (I9)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from distributed.launch import Run
from distributed.ranks import run_ranks
from distributed.shims.training_record import TrainingRecord
from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from support import read_jsonl, shimmed

RELATIVE = 1e-5
"""Largest difference of losses and weights (float32)."""
PREFERENCES = {"rewards/": 2e-4, "logps/": 2e-3, "kl": 2e-3, "odds_ratio_loss": 2e-4, "sft_loss": 2e-4}
"""Largest differences of what trainers for preferences log, themselves: log-probabilities of some hundred, and their
differences."""
BY_THE_CUT = ("logits/",)
"""Figures over padding."""
OF_THE_CLOCK = ("runtime", "per_second", "flops_per")
"""Parts of names of figures that depend on how fast a training was."""


@dataclass(frozen=True)
class Training:
    """What a training has computed.

    rows: of each optimizer step the sorted checksums of the rows of all ranks; an idle micro-batch has none.
    num_micro_batches: of each optimizer step, on each rank.
    log: the Trainer's log history. weights: as saved at the end. folders: the checkpoints that are left.
    """

    rows: list[list[int]]
    num_micro_batches: list[int]
    learning_rates: list[list[float]]
    log: list[dict[str, Any]]
    state: dict[str, Any]
    progress: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    folders: set[str]


@dataclass(frozen=True)
class Deviation:
    """The largest relative differences between two trainings."""

    loss: float
    grad_norm: float
    eval_loss: float
    weights: float
    """Of the norm of all weights."""
    tensor: float
    """Of the norm of one tensor."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of every other figure that differs at all."""
    preferences: dict[str, float] = field(default_factory=dict)
    """Of the figures of a trainer for preferences, the difference itself."""


def train(config: dict[str, Any], num_ranks: int = 1, env: dict[str, str] | None = None) -> Training:
    """Run real LLaMA-Factory on `config` to its end: in this process, with several ranks in processes of their own, and
    by torchrun where they need another environment."""
    output_dir = Path(config["output_dir"])
    record = output_dir.with_name(f"{output_dir.name}_record")
    if num_ranks == 1 and env is None:
        run_exp(dict(config), callbacks=[TrainingRecord(record)])
    elif env is None:
        output_dir.mkdir(parents=True)
        configs = [config | {"ddp_backend": "gloo"}]
        ended = run_ranks("stage_ranks:train_stages", record.parent, world_size=num_ranks, limit_s=240, configs=configs)
        assert all(rank.returncode == 0 for rank in ended), "\n".join(rank.said[-3000:] for rank in ended)
    else:
        shim = shimmed("record_training") | {"RECORD_TRAINING": str(record)}
        with Run(config | {"ddp_backend": "gloo"}, num_ranks=num_ranks, env=env | shim) as run:
            launched = run.end()
            assert launched.returncodes == [0], str(launched)
    return read(output_dir, record, num_ranks)


def side_by_side(
    config: dict[str, Any], odb: dict[str, Any], num_ranks: int = 1, env: dict[str, str] | None = None, **stock: Any
) -> tuple[Training, Training]:
    """The training of `config` with this block, audited, and without, in folders of its output_dir. stock: changes of
    the one without."""
    folder = Path(config["output_dir"])
    ours = config | {"output_dir": str(folder / "odb"), "odb": odb | {"audit": True}}
    return train(ours, num_ranks, env), train(config | {"output_dir": str(folder / "stock")} | stock, num_ranks, env)


def read(output_dir: Path, record: Path, num_ranks: int) -> Training:
    ranks = [read_jsonl(record.with_name(f"{record.name}.{rank}")) for rank in range(num_ranks)]
    idle = [_idle(output_dir / f"odb_audit_rank{rank}.jsonl", ranks[rank]) for rank in range(num_ranks)]
    rows: list[list[int]] = [[] for _ in ranks[0]]
    for lines, is_idle in zip(ranks, idle, strict=True):
        assert len(lines) == len(rows), "I1"
        for number, line in enumerate(lines):
            assert len(line["micro_batches"]) == len(ranks[0][number]["micro_batches"]), "I1"
            for position, batch in enumerate(line["micro_batches"]):
                rows[number] += [] if is_idle[number][position] else batch
    state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
    return Training(
        rows=[sorted(step) for step in rows],
        num_micro_batches=[len(line["micro_batches"]) for line in ranks[0]],
        learning_rates=[line["learning_rates"] for line in ranks[0]],
        log=state.pop("log_history"),
        state=state,
        progress=read_jsonl(output_dir / "trainer_log.jsonl"),
        weights={name: tensor for path in output_dir.glob("*.safetensors") for name, tensor in load_file(path).items()},
        folders={path.name for path in output_dir.glob("checkpoint-*")},
    )


def _idle(audit: Path, lines: list[dict[str, Any]]) -> list[list[bool]]:
    """Of each micro-batch of each optimizer step whether it is idle; stock's never are."""
    idle: list[list[bool]] = [[False] * len(line["micro_batches"]) for line in lines]
    if audit.exists():
        audited: list[list[bool]] = [[] for _ in lines]
        for line in read_jsonl(audit):
            audited[line["optimizer_step"] - 1].append(line["idle"])
        assert [len(step) for step in audited] == [len(step) for step in idle], "every micro-batch is audited"
        idle = audited
    return idle


def deviation(ours: Training, stock: Training) -> Deviation:
    """Raises `AssertionError` where the two do not even have the same figures at the same optimizer steps."""
    figures: dict[str, float] = {}
    preferences: dict[str, float] = {}
    losses: dict[str, float] = {"loss": 0.0, "grad_norm": 0.0, "eval_loss": 0.0}
    assert [entry["step"] for entry in ours.log] == [entry["step"] for entry in stock.log]
    for mine, its in zip(ours.log, stock.log):
        assert {name for name in mine if not name.startswith("odb/")} == set(its)
        for name in its:
            if any(part in name for part in OF_THE_CLOCK):
                continue
            prefix = next((one for one in PREFERENCES if name.removeprefix("eval_").startswith(one)), None)
            if prefix is not None:
                preferences[prefix] = max(preferences.get(prefix, 0.0), abs(mine[name] - its[name]))
            if prefix is not None or name.removeprefix("eval_").startswith(BY_THE_CUT):
                continue
            kind = name if name in losses else "loss" if name == "train_loss" else None
            difference = _relative(mine[name], its[name])
            if kind is not None:
                losses[kind] = max(losses[kind], difference)
            elif difference:
                figures[name] = max(figures.get(name, 0.0), difference)
    for name in ("global_step", "max_steps", "num_train_epochs", "epoch", "total_flos", "num_input_tokens_seen"):
        if ours.state[name] != stock.state[name]:
            figures[f"state.{name}"] = _relative(ours.state[name], stock.state[name])
    assert ours.weights.keys() == stock.weights.keys()
    pairs = [(ours.weights[name].double(), tensor.double()) for name, tensor in stock.weights.items()]
    assert all(tensor.dtype == torch.float32 for tensor in stock.weights.values())
    if not pairs:  # FSDP has saved none here
        return Deviation(**losses, weights=0.0, tensor=0.0, figures=figures, preferences=preferences)
    differences = torch.stack([(mine - its).norm() for mine, its in pairs])
    norms = torch.stack([its.norm() for _, its in pairs])
    tensor = (differences / norms.clamp_min(1e-12)).max().item()
    weights = (differences.norm() / norms.norm()).item()
    return Deviation(**losses, weights=weights, tensor=tensor, figures=figures, preferences=preferences)


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def check_same_training(
    ours: Training,
    stock: Training,
    *,
    shards_parameters: bool = False,
    counts_both_answers: bool = False,
    of_all_ranks: bool = True,
) -> Deviation:
    """I9: the same rows in every optimizer step, the same figures, the same model but for rounding.

    shards_parameters: the Trainer counts FLOPs by the parameters that are gathered when it looks, in stock too.
    of_all_ranks: stock's figures of preferences are, and so comparable.
    counts_both_answers: odb counts tokens, and FLOPs by them, of the longer of the two rows of an example of KTO.
    """
    assert len(ours.rows) == len(stock.rows)
    for number, (mine, its) in enumerate(zip(ours.rows, stock.rows)):
        assert mine == its, f"optimizer step {number} has other rows"
    assert ours.learning_rates == stock.learning_rates, "to the last digit"
    found = deviation(ours, stock)
    not_compared = {"total_flos", "state.total_flos"} if shards_parameters or counts_both_answers else set()
    assert not found.figures.keys() - not_compared, found
    percentages = [
        [(line["current_steps"], line["total_steps"], line["percentage"], line.get("epoch")) for line in one.progress]
        for one in (ours, stock)
    ]
    assert percentages[0] == percentages[1]
    assert ours.folders == stock.folders
    assert max(found.loss, found.eval_loss, found.weights) < RELATIVE, found
    if of_all_ranks:
        assert all(difference < PREFERENCES[name] for name, difference in found.preferences.items()), found
    return found


def report(name: str, found: Deviation) -> None:
    """One line for those who run the tests with -s."""
    print(
        f"{name}: loss {found.loss:.1e}, grad_norm {found.grad_norm:.1e}, eval_loss {found.eval_loss:.1e}, "
        f"weights {found.weights:.1e}, worst tensor {found.tensor:.1e} "
        f"{found.preferences or ''} {found.figures or ''}"
    )
