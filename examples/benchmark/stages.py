"""The real LLaMA-Factory on a CPU, one rank: preference pairs, rewards, examples of KTO, a model with mixers, and one
with the vocabulary of Qwen3 (151,936 entries).

Each is trained for one epoch of the same samples, 32 an optimizer step: by stock in fixed batches of 4, 2 and 1 rows
(samples), by odb flat and padded, whose token_budget is what a fixed batch of 4 may have. The texts are those of
`train.py`. Contestants take turns; the tables have medians over the seeds.

    python examples/benchmark/stages.py                        # three seeds, about half an hour on two cores
    python examples/benchmark/stages.py --trainings dpo --seeds 1
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page
from workloads import GLOBAL_BATCH_SIZE, build_text

from odb_factory.demo.demo import sft_config, train

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


def compare(name: str, folder: Path, models: dict[str, Path], data: Path, seeds: int) -> dict[str, Any]:
    """CPU seconds and the largest resident set of each contestant (bytes), a number a seed, and how far odb's losses
    are from those of 4 rows."""
    trained = TRAININGS[name]
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    furthest = 0.0
    for seed in range(seeds):
        losses = {}
        for contestant, changes in trained.contestants().items():
            output = folder / f"{name}_{contestant}_{seed}".replace(", ", "_").replace(" ", "_")
            config = sft_config(
                models[trained.model],
                data,
                output,
                dataset=trained.dataset,
                template="qwen3_nothink",
                cutoff_len=CUTOFF,
            )
            without = {"eval_strategy": "no", "eval_dataset": None, "seed": seed}
            run = train(config | without | trained.changes | changes)
            seconds.setdefault(contestant, []).append(run.cpu_seconds)
            peaks.setdefault(contestant, []).append(run.batches[0][-1]["peak_memory"])
            losses[contestant] = [loss for _, _, loss in run.losses()]
            print(f"{name}, {contestant}, seed {seed}: {run.cpu_seconds:.1f} s", file=sys.stderr, flush=True)
        pairs = zip(losses["odb"], losses["stock, 4 rows"])
        furthest = max(furthest, *(abs(ours - stock) / abs(stock) for ours, stock in pairs))
    return {"cpu_seconds": seconds, "peak_memory": peaks, "losses_differ_by": furthest}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_stages"), help="(%(default)s)")
    given = parser.parse_args()
    folder = given.output_dir.resolve()
    models, data = build(folder, given.samples)
    results = {name: compare(name, folder, models, data, given.seeds) for name in given.trainings}
    page.write(folder, results, tables(results))


if __name__ == "__main__":
    main()
