"""The real LLaMA-Factory on a CPU, one rank: preference pairs, rewards, examples of KTO, a model with mixers, and one
with the vocabulary of Qwen3 (151,936 entries).

Each is trained for one epoch of the same samples, 32 an optimizer step: by stock in fixed batches of 4, 2 and 1 rows
(samples), by odb flat and padded, whose token_budget is what a fixed batch of 4 may have. The texts are those of
`train.py`. Contestants take turns; the tables have medians over the seeds.

    python examples/benchmark/stages.py                        # three seeds, about half an hour on two cores
    python examples/benchmark/stages.py --trainings dpo --seeds 1
    python examples/benchmark/stages.py --trainings evaluation # stock's batches beside eval_token_budget
    python examples/benchmark/stages.py --trainings encoder    # two ranks, with and without balance_encoder
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
from runs import Run, sft_config, train
from workloads import GLOBAL_BATCH_SIZE, WORKLOADS, build_text

from odb_factory.cli.tiny_model import build_tiny_qwen3_vl

ROWS, CUTOFF = 4, 1024
VOCABULARY = 151_936
KINDS = ("untied", "mixers", "vocabulary")
STOCK = {f"stock, {rows} rows": rows for rows in (4, 2, 1)}


@dataclass(frozen=True)
class Trained:
    """rows: padded to one length that the trainer makes of a sample. changes: to the configuration."""

    dataset: str
    rows: int
    changes: dict[str, Any]
    model: str = "tied"

    def contestants(self) -> dict[str, dict[str, Any]]:
        budget = {"token_budget": self.rows * ROWS * CUTOFF}
        kept = {name: of_rows(rows) for name, rows in STOCK.items()}
        return kept | {
            "odb": of_rows(ROWS) | {"odb": budget},
            "odb, padded": of_rows(ROWS) | {"odb": budget | {"layout": "padded"}},
        }


def of_rows(rows: int) -> dict[str, int]:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GLOBAL_BATCH_SIZE // rows}


TRAININGS = {
    "dpo": Trained("pairs", 2, {"stage": "dpo"}),
    "orpo": Trained("pairs", 2, {"stage": "dpo", "pref_loss": "orpo"}),
    "rm": Trained("pairs", 2, {"stage": "rm"}, "untied"),
    "kto": Trained("judged", 1, {"stage": "kto"}),
    "Qwen3.5": Trained("text", 1, {"stage": "sft"}, "mixers"),
    # The logits of a token are 600 KB in float32: two optimizer steps are enough to see what they cost.
    "V = 151,936": Trained("text", 1, {"stage": "sft", "max_steps": 2}, "vocabulary"),
}


def build(folder: Path, samples: int) -> tuple[dict[str, Path], Path]:
    """Models, and the data: texts, as pairs (the rejected answer is another text's), and as judged answers."""
    model, data = build_text(folder, samples)
    texts = json.loads((data / "text.json").read_text(encoding="utf-8"))
    pairs, judged = [], []
    for number, text in enumerate(texts):
        asked = {"from": "human", "value": text["instruction"]}
        answer = {"from": "gpt", "value": text["output"]}
        other = {"from": "gpt", "value": texts[(7 * number + 3) % len(texts)]["output"]}
        pairs.append({"conversations": [asked], "chosen": answer, "rejected": other})
        judged.append({"conversations": [asked, answer], "good": number % 3 > 0})
    columns = {"messages": "conversations"}
    sides = {"chosen": "chosen", "rejected": "rejected"}
    info = json.loads((data / "dataset_info.json").read_text(encoding="utf-8"))
    for name, rows, more in (
        ("pairs", pairs, {"ranking": True, "columns": columns | sides}),
        ("judged", judged, {"columns": columns | {"kto_tag": "good"}}),
    ):
        (data / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        info[name] = {"file_name": f"{name}.json", "formatting": "sharegpt"} | more
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return {"tied": model} | {name: changed(model, folder / name, name) for name in KINDS}, data


def changed(model: Path, folder: Path, kind: str) -> Path:
    """untied: a head of its own, which stock can save beside a value head. mixers: Gated DeltaNet in three layers of
    four, as in Qwen3.5. vocabulary: as many entries as Qwen3 has, tied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    if not folder.exists():
        shutil.copytree(model, folder)
        config = AutoConfig.from_pretrained(folder)
        config.tie_word_embeddings = kind == "vocabulary"
        config.vocab_size = VOCABULARY if kind == "vocabulary" else config.vocab_size
        torch.manual_seed(0)
        if kind == "mixers":
            sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
            heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
            given = {name: getattr(config, name) for name in (*sizes, "bos_token_id", "eos_token_id", "pad_token_id")}
            made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**given, **heads, num_hidden_layers=4, head_dim=16))
        else:
            made = AutoModelForCausalLM.from_config(config)
        made.save_pretrained(folder)
    return folder


def take_turns(
    name: str,
    folder: Path,
    contestants: Mapping[str, Mapping[str, Any]],
    seeds: int,
    config: Mapping[str, Any],
    ranks: int = 1,
) -> dict[str, list[Run]]:
    """Runs of each contestant, one a seed. contestants: what each changes in the configuration. The name is that of
    the folder of the runs, too."""
    runs: dict[str, list[Run]] = {contestant: [] for contestant in contestants}
    for seed in range(seeds):
        for number, (contestant, changes) in enumerate(contestants.items()):
            output = folder / name.replace(" ", "_") / f"{number}_{seed}"  # LLaMA-Factory splits commands at spaces
            runs[contestant].append(train({**config, "seed": seed, "output_dir": str(output), **changes}, ranks=ranks))
            seconds = runs[contestant][-1].cpu_seconds
            print(f"{name}, {contestant}, seed {seed}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return runs


def training_losses(runs: Sequence[Run]) -> list[float]:
    return [loss for run in runs for _, _, loss in run.losses()]


def compare(name: str, folder: Path, models: dict[str, Path], data: Path, seeds: int) -> dict[str, Any]:
    """CPU seconds and the largest resident set of each contestant (bytes), a number a seed, and how far odb's losses
    are from those of 4 rows."""
    trained = TRAININGS[name]
    config = sft_config(
        models[trained.model], data, folder, dataset=trained.dataset, template="qwen3_nothink", cutoff_len=CUTOFF
    )
    plain = {"eval_strategy": "no", "eval_dataset": None}
    runs = take_turns(name, folder, trained.contestants(), seeds, config | plain | trained.changes)
    return {
        "cpu_seconds": {who: [run.cpu_seconds for run in mine] for who, mine in runs.items()},
        "peak_memory": {who: [run.batches[0][-1]["peak_memory"] for run in mine] for who, mine in runs.items()},
        "losses_differ_by": page.furthest(*(training_losses(runs[who]) for who in ("stock, 4 rows", "odb"))),
    }


def tables(results: dict[str, dict[str, Any]]) -> list[str]:
    """CPU seconds, medians; odb as a share of the best of stock, and of stock's 4 rows. Then peaks of memory, MiB."""
    names = list(next(iter(results.values()))["cpu_seconds"])
    rows, peaks = [], []
    for name, result in results.items():
        median = {who: statistics.median(found) for who, found in result["cpu_seconds"].items()}
        best, ours = min(median[who] for who in STOCK), median["odb"]
        of_stock = [f"{ours / best:.2f}", f"{ours / median['stock, 4 rows']:.2f}"]
        rows.append([name, *(f"{median[who]:.1f}" for who in names), *of_stock, f"{result['losses_differ_by']:.0e}"])
        peaks.append([name, *(f"{statistics.median(result['peak_memory'][who]) / 2**20:,.0f}" for who in names)])
    heads = ["training", *names, "odb by the best of stock", "odb by 4 rows", "losses differ by at most"]
    return [page.table(heads, rows), page.table(["peak memory, MiB", *names], peaks)]


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation, and the vision tower on two ranks.

EVALUATED = WORKLOADS[:2]
TOWER_SAMPLES, TOWER_BUDGET = 96, 1024
IMAGES_LIE = {"even": "two images in each sample", "uneven": "two in every other one, all read by one rank"}
BALANCED = {"each rank its own images": False, "balance_encoder": True}


def compare_evaluations(folder: Path, samples: int, seeds: int) -> dict[str, Any]:
    """Seconds of two evaluations a seed, and the loss of the first.

    Stock's batches of 4, 2 and 1 rows; odb has the memory of 4 rows.
    """
    results: dict[str, Any] = {}
    twice = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    for work in EVALUATED:
        model, data = work.build(folder, samples if work.can_pack else samples // 2)
        budget = ROWS * work.row
        online = {"odb": {"token_budget": budget, "eval_token_budget": budget}}
        contestants = {name: {"per_device_eval_batch_size": rows} for name, rows in STOCK.items()}
        config = sft_config(
            *(model, data, folder), dataset=work.dataset, template=work.template, cutoff_len=work.cutoff_len
        )
        config |= of_rows(2) | twice | {"eval_dataset": work.dataset}
        ours = {"odb": {"per_device_eval_batch_size": ROWS} | online}
        runs = take_turns(f"evaluation of {work.name}", folder, contestants | ours, seeds, config)
        entries = {
            who: [[entry for entry in run.history() if "eval_loss" in entry] for run in mine]
            for who, mine in runs.items()
        }
        results[work.name] = {
            "seconds": {who: [entry["eval_runtime"] for run in mine for entry in run] for who, mine in entries.items()},
            "losses": {who: [run[0]["eval_loss"] for run in mine] for who, mine in entries.items()},
        }
    return results


def table_of_evaluations(results: dict[str, Any]) -> str:
    rows = []
    for name, result in results.items():
        median = {who: statistics.median(found) for who, found in result["seconds"].items()}
        furthest = page.furthest(result["losses"]["stock, 4 rows"], result["losses"]["odb"])
        best = min(median[who] for who in STOCK)
        rows.append(
            [name, *(f"{found:.1f}" for found in median.values()), f"{median['odb'] / best:.2f}", f"{furthest:.0e}"]
        )
    heads = ["seconds of an evaluation", *STOCK, "odb", "odb by the best of stock", "losses differ by at most"]
    return page.table(heads, rows)


def build_tower(folder: Path, samples: int) -> tuple[Path, Path]:
    """A tiny Qwen3-VL whose tower takes most of the time, and noise pictures, in data sets named by how they lie."""
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoModelForImageTextToText

    model, data = folder / "tower", folder / "pictures"
    if not model.exists():
        shutil.copytree(build_tiny_qwen3_vl(folder / "tiny_qwen3_vl"), model)
        config = AutoConfig.from_pretrained(model)
        vision = config.vision_config
        vision.depth, vision.hidden_size, vision.intermediate_size = 8, 192, 768
        vision.deepstack_visual_indexes = [2]
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(model)
    data.mkdir(parents=True, exist_ok=True)
    pictures = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(pictures):
        Image.effect_noise((256 + 32 * number, 256), 60).convert("RGB").save(data / name)
    info = {}
    for lie in IMAGES_LIE:
        rows = []
        for number in range(samples):
            images = [pictures[(number // 2 + k) % 4] for k in range(2)] if lie == "even" or number % 2 == 0 else []
            asked = {"from": "human", "value": "<image>" * len(images) + "what is it"}
            answer = {"from": "gpt", "value": "a red cat " * (3 if images else 40)}
            rows.append({"conversations": [asked, answer], "images": images})
        (data / f"{lie}.json").write_text(json.dumps(rows), encoding="utf-8")
        columns = {"messages": "conversations", "images": "images"}
        info[lie] = {"file_name": f"{lie}.json", "formatting": "sharegpt", "columns": columns}
    (data / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return model, data


def compare_towers(folder: Path, samples: int, seeds: int) -> dict[str, Any]:
    """Seconds of each training from its second optimizer step on (the first compiles and allocates), two ranks."""
    model, data = build_tower(folder, min(samples, TOWER_SAMPLES))
    trained = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    plain = {"eval_strategy": "no", "eval_dataset": None, "disable_shuffling": True}
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    results: dict[str, Any] = {}
    for lie in IMAGES_LIE:
        # Uneven pictures stay with the rank that reads them.
        block = {"token_budget": TOWER_BUDGET, "balance": lie == "even"}
        contestants = {name: {"odb": block | {"balance_encoder": balanced}} for name, balanced in BALANCED.items()}
        config = sft_config(model, data, folder, dataset=lie, template="qwen3_vl_nothink", cutoff_len=CUTOFF)
        runs = take_turns(f"images {lie}", folder, contestants, seeds, config | plain | trained | rows, ranks=2)
        results[lie] = {
            "seconds": {name: [_after_first_step(run) for run in mine] for name, mine in runs.items()},
            "losses": {name: training_losses(mine) for name, mine in runs.items()},
        }
    return results


def _after_first_step(run: Run) -> float:
    begins = [batch["begin"] for mine in run.batches for batch in mine if batch["optimizer_step"] == 1]
    return max(mine[-1]["end"] for mine in run.batches) - min(begins)


def table_of_towers(results: dict[str, Any]) -> str:
    rows = []
    for lie, result in results.items():
        own, balanced = (result["seconds"][name] for name in BALANCED)
        shares = sorted(ours / theirs for ours, theirs in zip(balanced, own, strict=True))
        furthest = page.furthest(*(result["losses"][name] for name in BALANCED))
        medians = [f"{statistics.median(found):.1f}" for found in (own, balanced)]
        rows.append(
            [
                f"{lie}: {IMAGES_LIE[lie]}",
                *medians,
                f"{statistics.median(shares):.2f}",
                f"{shares[0]:.2f} to {shares[-1]:.2f}",
                f"{furthest:.0e}",
            ]
        )
    return page.table(["seconds, two ranks", *BALANCED, "share", "its spread", "losses differ by at most"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = ("evaluation", "encoder")
    parser.add_argument("--trainings", nargs="+", choices=(*TRAININGS, *others), default=list(TRAININGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_stages"), help="(%(default)s)")
    given = parser.parse_args()
    folder = given.output_dir.resolve()
    figures: dict[str, Any] = {}
    shown: list[str] = []
    if names := [name for name in given.trainings if name in TRAININGS]:
        models, data = build(folder, given.samples)
        figures |= {name: compare(name, folder, models, data, given.seeds) for name in names}
        shown += tables(figures)
    if "evaluation" in given.trainings:
        figures["evaluation"] = compare_evaluations(folder, given.samples, given.seeds)
        shown.append(table_of_evaluations(figures["evaluation"]))
    if "encoder" in given.trainings:
        figures["encoder"] = compare_towers(folder, given.samples, given.seeds)
        shown.append(table_of_towers(figures["encoder"]))
    page.write(folder, figures, shown)


if __name__ == "__main__":
    main()
