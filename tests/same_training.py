"""Train with stock LLaMA-Factory and with an `odb:` block, and compare the two (I9).

`CELLS` of a test module names the trainings; `run_cells` runs them on one or several ranks, `check_cell` compares them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import wave
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cpu_meter import CPUMeter
from distributed.ranks import Outcome, run_ranks
from distributed.shims.training_record import TrainingRecord
from llamafactory.hparams import get_train_args
from llamafactory.train import callbacks, tuner
from safetensors.torch import load_file
from support import CHECKPOINTS, noise, read_jsonl, training_config

from odb_factory import memory

RELATIVE = 1e-5
"""Largest relative difference of losses and weights (float32)."""
EXACT = 1e-12
"""Largest relative difference of any other figure: the order of a sum may differ."""
PREFERENCES = {"rewards/": 2e-4, "logps/": 2e-3, "kl": 2e-3, "odds_ratio_loss": 2e-4, "sft_loss": 2e-4}
"""Largest absolute differences of the figures of preference trainers: log-probabilities of about -100, and their
differences."""
INCLUDE_PADDING = ("logits/",)
"""Figures that include padding."""
SPEED_FIGURES = ("runtime", "per_second", "flops_per")
"""Parts of the names of figures that depend on speed."""
NUM_TRAINED, NUM_EVAL, NUM_PICTURES = 22, 4, 14
"""With 2 x 3 pairs per optimizer step, the last step of an epoch has stock micro-batches of 3 pairs and of 1."""
ODB = {"token_budget": 640, "eval_token_budget": "auto", "audit": True}
"""The budget could hold all pairs of the last optimizer step in one micro-batch, if their weights were equal."""
WHOLE: dict[str, dict[str, Any]] = {"pt": {"packing": False}}
"""Stock's argument for whole documents, which odb sets by itself."""
ROWS = {"pt": "documents", "sft": "talks", "kto": "judged"}
HEAD_BIAS = "v_head.summary.bias"
"""A reward model's loss depends on differences of scores: the gradient of the head's bias is rounding, which Adam turns
into full steps."""
LIMIT_S = 240

Config = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Training:
    """The results of a training.

    rows: for each optimizer step the sorted checksums of the rows of all ranks, without idle micro-batches.
    num_micro_batches: per optimizer step, on each rank.
    log: the Trainer's log history. weights: as saved at the end. folders: the remaining checkpoints.
    engine: classes of the wrapped model and optimizer. audit: the lines of all ranks; empty for stock.
    """

    rows: list[list[int]]
    num_micro_batches: list[int]
    learning_rates: list[list[float]]
    log: list[dict[str, Any]]
    state: dict[str, Any]
    progress: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    folders: set[str]
    engine: set[str]
    audit: list[dict[str, Any]]


@dataclass(frozen=True)
class Deviation:
    """The largest relative differences between two trainings."""

    loss: float
    grad_norm: float
    eval_loss: float
    weights: float
    """Norm of the difference of all weights."""
    figures: dict[str, float] = field(default_factory=dict)
    """Other figures that differ."""
    preferences: dict[str, float] = field(default_factory=dict)
    """Absolute differences of the figures of a preference trainer."""


# A training


def train(config: dict[str, Any], num_ranks: int = 1, env: dict[str, str] | None = None) -> Training:
    """Run real LLaMA-Factory on `config`: in this process, or in new processes for several ranks or another
    environment."""
    output_dir = Path(config["output_dir"])
    record = output_dir.with_name(f"{output_dir.name}_record")
    if num_ranks == 1 and env is None:
        tuner.run_exp(dict(config), callbacks=[TrainingRecord(record)])
    else:
        output_dir.mkdir(parents=True)
        launch([config | {"ddp_backend": "gloo"}], record.parent, num_ranks, env=env or {})
    return read(output_dir, num_ranks)


def launch(
    configs: list[dict[str, Any]], folder: Path, num_ranks: int = 2, limit_s: float = LIMIT_S, **more: Any
) -> list[Outcome]:
    """Run all trainings, one after the other, in the processes of one launch. more: arguments of `run_ranks`."""
    more |= {"world_size": num_ranks, "limit_s": limit_s, "configs": configs}
    return run_ranks("same_training:train_all", folder, **more)


def memory_counted(is_counted: bool) -> AbstractContextManager[Any]:
    """A context in which a CPU counts its memory like an accelerator, so that trainings rehearse."""
    meter = CPUMeter(2**40)
    return mock.patch.object(memory, "find_meter", return_value=meter) if is_counted else nullcontext()


def train_all(rank: int, configs: list[dict[str, Any]], counted: Sequence[str] = ()) -> int:
    """Run the workflow of each configuration in a rank, as `llamafactory-cli train` does, with a record next to its
    output. counted: output folders of trainings that count their memory."""
    os.environ["LOCAL_RANK"] = str(rank)
    for config in configs:
        model_args, data_args, training_args, finetuning_args, generating_args = get_train_args(dict(config))
        watching = [callbacks.LogCallback(), TrainingRecord(f"{config['output_dir']}_record")]
        run = getattr(tuner, f"run_{finetuning_args.stage}")
        more = (generating_args,) if finetuning_args.stage == "sft" else ()
        with memory_counted(config["output_dir"] in counted):
            run(model_args, data_args, training_args, finetuning_args, *more, watching)
        gc.collect()
    return len(configs)


def read(output_dir: Path, num_ranks: int) -> Training:
    """Read the output of a training, and the records of its ranks if there are any."""
    records = [output_dir.with_name(f"{output_dir.name}_record.{rank}") for rank in range(num_ranks)]
    ranks = [read_jsonl(path) if path.exists() else [] for path in records]
    audits = [path for path in sorted(output_dir.glob("odb_audit_rank*.jsonl")) if path.stat().st_size]
    audit = [read_jsonl(path) for path in audits]
    rows: list[list[int]] = [[] for _ in ranks[0]]
    for rank, lines in enumerate(ranks):
        assert [len(line["micro_batches"]) for line in lines] == [len(line["micro_batches"]) for line in ranks[0]], "I1"
        logs = audit[rank] if audit and lines else []
        counts = Counter(line["optimizer_step"] for line in logs)
        assert not logs or [*counts.values()] == [len(line["micro_batches"]) for line in lines], "all are audited"
        is_idle = iter([line["idle"] for line in logs])
        for step, line in zip(rows, lines):
            for batch in line["micro_batches"]:
                step.extend([] if next(is_idle, False) else batch)
    state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
    return Training(
        rows=[sorted(step) for step in rows],
        num_micro_batches=[len(line["micro_batches"]) for line in ranks[0]],
        learning_rates=[line["learning_rates"] for line in ranks[0]],
        log=state.pop("log_history"),
        state=state,
        progress=[line for path in output_dir.glob("trainer_log.jsonl") for line in read_jsonl(path)],
        weights={name: tensor for path in output_dir.glob("*.safetensors") for name, tensor in load_file(path).items()},
        folders={path.name for path in output_dir.glob("checkpoint-*")},
        engine={name for lines in ranks for line in lines for name in line["engine"]},
        audit=[line for lines in audit for line in lines],
    )


# The comparison


def deviation(ours: Training, stock: Training) -> Deviation:
    """Compare two trainings; `AssertionError` if they do not log the same figures at the same optimizer steps."""
    losses: dict[str, float] = {"loss": 0.0, "grad_norm": 0.0, "eval_loss": 0.0}
    figures, preferences = dict[str, float](), dict[str, float]()
    assert [entry["step"] for entry in ours.log] == [entry["step"] for entry in stock.log]
    for our_entry, stock_entry in zip(ours.log, stock.log):
        names = {name for name in stock_entry if not name.startswith("odb/")}
        assert {name for name in our_entry if not name.startswith("odb/")} == names
        for name in names:
            figure, kind = name.removeprefix("eval_"), "loss" if name == "train_loss" else name
            if any(part in name for part in SPEED_FIGURES) or figure.startswith(INCLUDE_PADDING):
                continue
            prefix = next((prefix for prefix in PREFERENCES if figure.startswith(prefix)), None)
            difference = _relative(our_entry[name], stock_entry[name])
            if prefix is not None:
                preferences[prefix] = max(preferences.get(prefix, 0.0), abs(our_entry[name] - stock_entry[name]))
            elif kind in losses:
                losses[kind] = max(losses[kind], difference)
            elif difference > EXACT:
                figures[name] = max(figures.get(name, 0.0), difference)
    for name in ("global_step", "max_steps", "num_train_epochs", "epoch", "total_flos", "num_input_tokens_seen"):
        if ours.state[name] != stock.state[name]:
            figures[f"state.{name}"] = _relative(ours.state[name], stock.state[name])
    assert ours.weights.keys() == stock.weights.keys()
    weights = 0.0
    if names := stock.weights.keys() - {HEAD_BIAS}:  # FSDP saves no weights here
        our_vector, stock_vector = (
            torch.cat([run.weights[name].double().flatten() for name in sorted(names)]) for run in (ours, stock)
        )
        weights = ((our_vector - stock_vector).norm() / stock_vector.norm()).item()
    return Deviation(**losses, weights=weights, figures=figures, preferences=preferences)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def check_same_training(
    ours: Training,
    stock: Training,
    *,
    shards_parameters: bool = False,
    counts_other_tokens: bool = False,
    compares_preferences: bool = True,
) -> Deviation:
    """I9: the same rows in every optimizer step, the same figures, the same model except for rounding.

    shards_parameters: the Trainer counts FLOPs from the parameters that are gathered at that moment, also in stock.
    compares_preferences: if stock's preference figures include all ranks.
    counts_other_tokens: tokens and FLOPs differ: odb counts the longer of the two rows of a KTO example, and another
    stock batch size pads to other lengths.
    """
    assert len(ours.rows) == len(stock.rows) > 0
    for number, (our_rows, stock_rows) in enumerate(zip(ours.rows, stock.rows)):
        assert our_rows == stock_rows, f"optimizer step {number} has other rows"
    assert ours.learning_rates == stock.learning_rates, "to the last digit"
    assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in stock.weights.values())
    differences = deviation(ours, stock)
    not_compared = {"total_flos"} if shards_parameters or counts_other_tokens else set()
    not_compared |= {"num_input_tokens_seen"} if counts_other_tokens else set()
    assert not {name.removeprefix("state.") for name in differences.figures} - not_compared, differences
    keys = ("current_steps", "total_steps", "percentage", "epoch")
    our_progress, stock_progress = ([[line.get(key) for key in keys] for line in run.progress] for run in (ours, stock))
    assert our_progress == stock_progress and ours.folders == stock.folders
    assert max(differences.loss, differences.eval_loss, differences.weights) < RELATIVE, differences
    if compares_preferences:
        assert all(size < PREFERENCES[name] for name, size in differences.preferences.items()), differences
    return differences


def report(name: str, differences: Deviation) -> None:
    """Print a line, which pytest -s shows."""
    print(f"{name}: {differences}")


# Cells


@dataclass(frozen=True)
class Cell:
    """A training with and without odb: `changes` for both, odb's `block`, and `stock`'s own changes.

    model: `text`, or another name of the test module.
    """

    stage: str = "sft"
    changes: Mapping[str, Any] = field(default_factory=dict)
    model: str = "text"
    block: Mapping[str, Any] = field(default_factory=dict)
    stock: Mapping[str, Any] = field(default_factory=dict)
    counts_memory: bool = False

    @property
    def is_flat(self) -> bool:
        return self.block.get("layout", "flat") == "flat"


def run_cells(
    cells: Mapping[str, Cell], config_of: Config, folder: Path, num_ranks: int = 1, **more: Any
) -> dict[str, tuple[Training, Training]]:
    """Run each cell with odb and with stock, in this process or in the processes of one launch. more: arguments of
    `launch`."""
    configs, folders, counted = [], {}, []
    for number, (name, cell) in enumerate(cells.items()):
        common = {"ddp_find_unused_parameters": cell.stage == "rm"} if num_ranks > 1 else {}
        common |= {"model": cell.model, "num_ranks": num_ranks, **cell.changes}
        folders[name] = folder / f"{number}_odb", folder / f"{number}_stock"
        odb_changes = {"odb": ODB | {"layout": "flat"} | dict(cell.block)}
        stock_changes = WHOLE.get(cell.stage, {}) | dict(cell.stock)
        for output_dir, changes in zip(folders[name], (odb_changes, stock_changes)):
            configs.append(config_of(cell.stage, output_dir, **common | changes))
        counted += [configs[-2]["output_dir"]] if cell.counts_memory else []
    if num_ranks == 1:
        for config in configs:
            with memory_counted(config["output_dir"] in counted):
                tuner.run_exp(dict(config), callbacks=[TrainingRecord(f"{config['output_dir']}_record")])
    else:
        folder.mkdir(exist_ok=True)
        launch(configs, folder, num_ranks, counted=counted, **more)
    return {name: (read(odb, num_ranks), read(stock, num_ranks)) for name, (odb, stock) in folders.items()}


def check_cell(
    name: str, cell: Cell, ours: Training, stock: Training, num_ranks: int = 1, shards_parameters: bool = False
) -> Deviation:
    """Check that both trainings are the same, and that odb's micro-batches have several samples within their budgets;
    flat micro-batches have no padding."""
    is_kto = cell.stage == "kto"
    options = {"counts_other_tokens": is_kto or bool(cell.stock), "compares_preferences": not is_kto or num_ranks == 1}
    differences = check_same_training(ours, stock, shards_parameters=shards_parameters, **options)
    report(name, differences)
    several = [line for line in ours.audit if len(line["ids"]) > 1]
    assert several
    for line in ours.audit if cell.is_flat else ():
        # KTO computes the two rows of an example one after the other; the audit has the length of the longer row.
        padding = line["length"] - sum(line["segments"])
        assert line["rows"] == 1 and (padding == 0 or (is_kto and padding > 0)), f"no padding: {line}"
    budget = dict(ODB) | dict(cell.block)
    assert all(line["rows"] * line["length"] <= budget["token_budget"] for line in several), "I4"
    max_patches = budget.get("max_patches")
    assert max_patches is None or 0 < max(line["patches"] for line in several) <= max_patches, "I4"
    return differences


def configurations(models: Callable[[str], Path], rows_dir: Path) -> Config:
    """`config_of(stage, output_dir, ...)`: a training with evaluations on the rows of `write_rows`."""

    def config_of(
        stage: str, output_dir: Path, *, model: str = "text", num_ranks: int = 1, **changes: Any
    ) -> dict[str, Any]:
        steps = {"per_device_train_batch_size": 3, "val_size": NUM_EVAL}
        if num_ranks > 1:
            steps = {"per_device_train_batch_size": 2, "val_size": 6, "ddp_backend": "gloo"}
        steps |= {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
        schedule = {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 2}
        evaluation = {"per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 3}
        stage_changes = {
            "stage": stage,
            "dataset": ROWS.get(stage, "pairs"),
            "include_num_input_tokens_seen": stage != "kto",
            "disable_gradient_checkpointing": stage != "sft" or not CHECKPOINTS,
        }
        return training_config(
            models(model), rows_dir, output_dir, **stage_changes | steps | schedule | evaluation | changes
        )

    return config_of


def write_rows(folder: Path) -> Path:
    """Write datasets in the formats of LLaMA-Factory's demo data: documents, conversations with and without media,
    preference pairs and judged answers."""
    folder.mkdir()
    rng = random.Random(5)
    vocabulary = ["the", "model", "reads", "a", "long", "line", "of", "words", "and", "says", "which", "is", "better"]

    def words(count: int) -> str:
        return " ".join(rng.choices(vocabulary, k=count))

    def turn(who: str, count: int) -> dict[str, str]:
        return {"from": who, "value": words(count)}

    numbers = range(NUM_TRAINED + NUM_EVAL)
    documents = [{"text": words(3 + k * 13 % 67)} for k in numbers]
    pairs = [
        {
            "conversations": [turn("human", 3 + k % 9)],
            "chosen": turn("gpt", 2 + k * 13 % 61),
            "rejected": turn("gpt", 2 + k * 29 % 53),
        }
        for k in numbers
    ]
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        noise(size).convert("RGB").save(folder / f"{name}.png")
    talks = [{"conversations": pair["conversations"] + [pair["chosen"]]} for pair in pairs]
    judged = [talk | {"good": k % 3 > 0} for k, talk in enumerate(talks)]
    images_of = ([], ["wide.png"], ["tall.png", "wide.png"])
    albums = [with_media(talk, "images", images_of[k % 3]) for k, talk in enumerate(talks[:NUM_PICTURES])]
    pictures = [
        pair | {"conversations": album["conversations"][:1], "images": album["images"]}
        for pair, album in zip(pairs, albums)
    ]
    clip = ["wide.png"] * 4
    scenes = [with_media(album, "videos", [clip] if k % 4 == 1 else []) for k, album in enumerate(albums)]
    sounds = [
        with_media(talk, "audios", [write_noise(folder / f"{k}_{n}.wav", 3000 + 700 * k) for n in range(k % 3)])
        for k, talk in enumerate(talks)
    ]
    uneven, films = [], []  # the first of two ranks has all media
    frames = [f"frame_{number}.png" for number in range(4)]
    for number, name in enumerate(frames):
        noise((64, 64), seed=number).convert("RGB").save(folder / name)
    for k, talk in enumerate(talks[:24]):  # whole optimizer steps of 2 ranks
        images = [] if k % 2 else (["wide.png"], ["tall.png", "wide.png"])[k // 2 % 2]
        uneven.append(with_media(talk, "images", images))
        films.append(with_media(talk, "videos", [frames[: 2 + k % 3]] if images else []))
    rows = {"documents": documents, "pairs": pairs, "pictures": pictures, "sounds": sounds, "uneven": uneven}
    rows |= {"talks": talks, "judged": judged, "albums": albums, "films": films, "scenes": scenes}
    info: dict[str, dict[str, Any]] = {}
    for name, dataset in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(dataset), encoding="utf-8")
        keys = {key for row in dataset for key in row}
        columns = {"messages": "conversations"} | {key: key for key in keys - {"conversations", "good"}}
        columns |= {"kto_tag": "good"} if "good" in keys else {}
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt", "columns": columns}
        info[name]["ranking"] = "chosen" in keys
    info["documents"] = {"file_name": "documents.json", "columns": {"prompt": "text"}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def with_media(row: dict[str, Any], column: str, files: list[Any]) -> dict[str, Any]:
    """A conversation with a tag for each medium before the question."""
    asked, answer = row["conversations"]
    asked = asked | {"value": f"<{column.removesuffix('s')}>" * len(files) + asked["value"]}
    return row | {"conversations": [asked, answer], column: files}


def write_noise(path: Path, num_samples: int) -> str:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(num_samples).normal(0, 3000, num_samples).astype("<i2").tobytes())
    return str(path)
