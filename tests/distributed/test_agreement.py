"""I11: ranks that differ end for the same reason, in one line, before a model is loaded. I12: strangers are ignored."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from support import training_config
from toy import Observer, Rows, core_loader, pad

from odb_factory import ODBDataLoader
from odb_factory.data.order import StockMean
from odb_factory.data.ranks import Ranks, releases
from odb_factory.errors import ODBError
from odb_factory.planner import Plan

NUM_ROWS = 120


def take_epoch(**options: Any) -> dict[str, Any]:
    """Batches and rows of an epoch on this rank, or the error that ended it."""
    rows: list[int] = []
    batches = 0
    if "stock_mean" in options:  # JSON has only its name
        options["stock_mean"] = StockMean(options["stock_mean"])
    defaults = {"num_workers": 0, "accumulation": 2, "seed": 0}
    sizes = [(k, 2 + k * 7 % 39, "") for k in range(NUM_ROWS)]
    try:
        with core_loader(sizes, observer=Observer(), ranks=Ranks(None, 30), **defaults | options) as loader:
            for micro_batch, _, _ in loader:
                batches += 1
                rows += micro_batch.ids
    except ODBError as error:
        return {"batches": batches, "error": str(error)}
    return {"batches": batches, "rows": rows}


KEEP = {"global_batch_size": "keep"}
ORDER = list(range(NUM_ROWS))
DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"token_budget": 100}, {"token_budget": 200}, "odb.token_budget (100 on rank 0; 200 on rank 1)"),
    ({"token_budget": 100, "balance": True}, {"token_budget": 200, "balance": True}, "odb.token_budget"),
    ({"accumulation": 1}, {"accumulation": 4}, "gradient_accumulation_steps"),
    ({**KEEP, "batch_size": 1}, {**KEEP, "batch_size": 2}, "per_device_train_batch_size"),
    (KEEP, {}, "odb.global_batch_size ('keep' on rank 0; 'fill' on rank 1)"),
    (KEEP, {"global_batch_size": 16}, "odb.global_batch_size ('keep' on rank 0; 16 on rank 1)"),
    (KEEP, {**KEEP, "drop_last": True}, "drop_last"),
    (KEEP, {**KEEP, "stock_mean": "micro_batch"}, "what stock's loss is the mean of"),
    ({}, {"loss_scaling": "approx"}, "odb.loss_scaling"),
    ({}, {"join": False}, "odb.join"),
    ({"seed": 1}, {"seed": 2}, "seed"),
    ({**KEEP, "balance": True}, KEEP, "odb.balance"),
    ({"sampler": ORDER}, {"sampler": ORDER[::-1]}, "different orders"),
    ({"resolved": "flat"}, {}, "layout of the micro-batches ('flat' on rank 0; 'padded' on rank 1)"),
    ({"agree_on": {"x": 1}}, {"agree_on": {"x": True}}, "x (1 on rank 0; True on rank 1)"),
    ({}, {"agree_on": {f"key {k}": "x" * 1000 for k in range(20)}}, "key 0 (nothing on rank 0; 'xxx"),
]
"""The options of rank 0 and of rank 1, and words of the message of both."""


MAY_DIFFER = {"exchange_timeout_s": 30, "audit": False}, {"exchange_timeout_s": 60, "audit": True}


def each_difference(rank: int, *, differences: list[tuple[dict, dict]]) -> list[dict[str, Any]]:
    """Take all epochs in the same processes: after a failed agreement the ranks can start again."""
    return [take_epoch(**pair[rank]) for pair in differences]


def test_settings_that_differ(tmp_path: Path) -> None:
    pairs = [(first, second) for first, second, _ in DIFFERENCES]
    ended = run_ranks("distributed.test_agreement:each_difference", tmp_path, differences=[*pairs, MAY_DIFFER])
    rows = [row for outcome in ended for row in outcome.value.pop()["rows"]]
    assert sorted(rows) == list(range(NUM_ROWS)), "those of MAY_DIFFER"
    for (*_, words), *values in zip(DIFFERENCES, *(outcome.value for outcome in ended), strict=True):
        for value in values:
            assert value["batches"] == 0, words
            assert words in value["error"] and "\n" not in value["error"] and len(value["error"]) < 1200, value


def other_plan(rank: int) -> dict[str, Any]:
    """Rank 1 computes another plan from the same metadata, as another version might."""
    if rank == 1:
        checksum = Plan.checksum
        Plan.checksum = lambda plan: checksum(plan) + 1
    return take_epoch(balance=True)


def test_plans_that_differ(tmp_path: Path) -> None:
    """I6 is checked with the next gather, so one optimizer step may have been yielded."""
    for outcome in run_ranks("distributed.test_agreement:other_plan", tmp_path):
        assert "different plans" in outcome.value["error"] and outcome.value["batches"] <= 2


LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_alpha": 16}
COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.1}}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora_alpha (16 on rank 0; 128 on rank 1)": (LORA, {"lora_alpha": 128}),
    "finetuning_type": ({}, LORA),
    "use_dft_loss": ({}, {"use_dft_loss": True}),
    "rope_scaling": ({}, {"rope_scaling": "linear"}),
    "image_max_pixels": ({"image_max_pixels": 65536}, {"image_max_pixels": 16384}),
    "cutoff_len": ({}, {"cutoff_len": 100}),
    "learning_rate": ({}, {"learning_rate": 0.5}),
    "odb.token_budget (1024 on rank 0; 99 on rank 1)": ({}, {"odb": {"token_budget": 99}}),
    "lr_scheduler_kwargs.min_lr": (COSINE, {"lr_scheduler_kwargs": {"min_lr": 0.2}}),
    "do_train": ({}, {"do_train": False}),
    # Rank 1 alone is refused: the message names the difference, not the refusal.
    "auto_find_batch_size": ({}, {"auto_find_batch_size": True}),
}
"""Words of the message of both ranks; options of both ranks, and of rank 1."""


def end_of_arguments(config: dict[str, Any]) -> str:
    from llamafactory.hparams import get_train_args

    try:
        get_train_args(config)
    except ODBError as error:
        return str(error)
    return "went on"


def each_argument(rank: int, *, config: dict[str, Any]) -> dict[str, str]:
    """Read all arguments in one process: after a failed agreement the ranks can start again."""
    from odb_factory import memory
    from odb_factory.llamafactory import activation

    activation.activate()
    os.environ["LOCAL_RANK"] = str(rank)
    ends = {}
    for words, (both, differs) in ARGUMENTS.items():
        ends[words] = end_of_arguments(config | both | (differs if rank else {}))
    version = metadata.version
    for words, of_ranks in {"release of torch (": ["2.0.0", "2.1.0"], "build": ["2.1.0+cu126", "2.1.0+cpu"]}.items():
        release_of = {"torch": of_ranks[rank]}
        with mock.patch.object(metadata, "version", lambda name, of=release_of: of.get(name) or version(name)):
            releases.cache_clear()
            ends[words] = end_of_arguments(config)
    releases.cache_clear()
    paths = {"model_name_or_path": config["model_name_or_path"] + "/."} if rank else {}
    ends["paths"] = end_of_arguments(config | paths)
    with mock.patch.object(memory, "find_meter", return_value=None if rank else CPUMeter(1)):
        ends["one refused"] = end_of_arguments(config | {"odb": {"token_budget": "auto"}})
    both_refused = {"accelerator_config": {"dispatch_batches": True}}
    ends["both refused"] = end_of_arguments(config | both_refused)
    return ends


TRAINERS = {
    "lora_alpha": "peft_config.default.lora_alpha (16 on rank 0; 128 on rank 1)",
    "config": "model.config.rms_norm_eps (1e-06 on rank 0; 0.1 on rank 1)",
    "weight_decay": "weight_decay (0.0 on rank 0; 0.5 on rank 1)",
}


def each_trainer(rank: int, *, path: str, out: str) -> dict[str, Any]:
    """Trainers of transformers, without LLaMA-Factory."""
    from peft import LoraConfig, get_peft_model
    from toy import Rows, pad
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from odb_factory import enable_odb

    os.environ["LOCAL_RANK"] = str(rank)
    ends = {}
    for name in (*TRAINERS, "workers"):
        differs = bool(rank) and name
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        model.config.rms_norm_eps = 0.1 if differs == "config" else 1e-6
        if name == "lora_alpha":
            lora = LoraConfig(task_type="CAUSAL_LM", lora_alpha=128 if differs else 16, target_modules=["q_proj"])
            model = get_peft_model(model, lora)
        arguments = TrainingArguments(
            f"{out}/{name}",
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=1,
            save_strategy="no",
            report_to="none",
            weight_decay=0.5 if differs == "weight_decay" else 0.0,
            dataloader_num_workers=1 if differs == "workers" else 0,
        )
        trainer = enable_odb(Trainer(model, arguments, train_dataset=Rows(), data_collator=pad), token_budget=512)
        try:
            trainer.train()
            ends[name] = "trained"
        except ODBError as error:
            ends[name] = f"{error} (after {trainer.state.global_step} optimizer steps)"
    return ends


def test_trainers_without_llamafactory_compare_their_settings(tiny_text: Path, tmp_path: Path) -> None:
    ranks = run_ranks(
        "distributed.test_agreement:each_trainer", tmp_path, limit_s=200, path=str(tiny_text), out=str(tmp_path)
    )
    first, second = (outcome.value for outcome in ranks)
    assert first == second, "both end for the same reason"
    for name, words in TRAINERS.items():
        assert first[name].startswith("the ranks differ in ") and words in first[name], first[name]
        assert first[name].endswith("(after 0 optimizer steps)")
    assert first["workers"] == "trained"


def test_settings_of_the_model_are_compared_before_it_is_loaded(tiny_text, data_dir, tmp_path) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 1024}, ddp_backend="gloo")
    ranks = run_ranks("distributed.test_agreement:each_argument", tmp_path, limit_s=200, config=config)
    first, second = (outcome.value for outcome in ranks)
    assert first == second, "both end for the same reason"
    for words in (*ARGUMENTS, "release of torch ("):
        assert first[words].startswith("the ranks differ in ") and words in first[words] and "\n" not in first[words], (
            first[words]
        )
    assert first["build"] == first["paths"] == "went on"
    assert first["one refused"].startswith("rank 1 stopped: odb.token_budget: 'auto' tries micro-batches on an acc")
    assert first["both refused"].startswith("accelerator_config.dispatch_batches: True")
    assert not any("the ranks differ in" in outcome.output for outcome in ranks), "paths and builds may differ"


CONNECTIONS, MOST_KEPT = 100, 50
JOINS_S = 2.0
SENT: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(4096),
    "garbage": random.Random(3).randbytes(1 << 17),
    "a line without an end": b"a" * (1 << 17),
    "another token": b"00000000000000000000000000000000 1\n",
    "no rank": b"x y\n\n\n",
    "a failure": b'["failure", [0, "rank 1 left the training: a stranger"]]\n["done", null]\n',
    "lines that are not UTF-8": b"\xff\xfe 1\n" * 100,
}


def own_ports() -> list[tuple[str, int]]:
    """The IPv4 addresses at which this process listens (/proc)."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(path))
    addresses = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        address, state, inode = (line.split()[k] for k in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in sockets:
            host, port = address.split(":")
            addresses.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return addresses


def intrude(before: set[tuple[str, int]], over: threading.Event, kept: list[socket.socket], count: list[int]) -> None:
    """Connect to the first port that opens, as long as the training lasts; every third stranger stays, up to MOST_KEPT:
    this process has a descriptor for each end of a connection."""
    while not (addresses := sorted(set(own_ports()) - before)):
        time.sleep(0.001)
    while not over.is_set():
        for content in SENT.values():
            count[0] += 1
            try:
                stranger = socket.create_connection(addresses[0], 5)
            except OSError:
                continue
            stranger.settimeout(5)
            with suppress(OSError):  # turned away while it sends
                stranger.sendall(content)
            if count[0] % 3 or len(kept) == MOST_KEPT:
                stranger.close()
            else:
                kept.append(stranger)


def train_beside_strangers(rank: int) -> dict[str, Any]:
    """Strangers connect to rank 0 as soon as it listens; rank 1 connects later."""
    ids: list[int] = []
    over, kept, count = threading.Event(), [], [0]
    if rank == 0:
        threading.Thread(target=intrude, args=(set(own_ports()), over, kept, count), daemon=True).start()
    else:
        time.sleep(JOINS_S)
    with ODBDataLoader(
        Rows(num_rows=400), token_budget=64, batch_size=4, buffer_size=4, collate_fn=pad, num_workers=1
    ) as loader:
        for batch in loader:
            ids += [int(row[0]) for row in batch["input_ids"]]
            dist.all_reduce(torch.ones(1))
        over.set()
    dist.barrier()
    for stranger in kept:
        stranger.close()
    return {"ids": ids, "strangers": count[0]}


def test_strangers_at_the_port_disturb_no_training(tmp_path: Path) -> None:
    ranks = run_ranks("distributed.test_agreement:train_beside_strangers", tmp_path, limit_s=120)
    for outcome in ranks:
        assert "Traceback" not in outcome.output and "stranger" not in outcome.output, outcome.output[-4000:]
        assert "watches" not in outcome.output and "cannot read" not in outcome.output, outcome.output[-4000:]
    assert sorted(id for outcome in ranks for id in outcome.value["ids"]) == list(range(1, 401))
    assert ranks[0].value["strangers"] >= CONNECTIONS
