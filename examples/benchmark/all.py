"""Every benchmark, one after the other, into one folder: figures, tables, pictures, and the page made of them.

A part that is done is not run again, so that an interrupted sitting goes on with the same command.

    python examples/benchmark/all.py --rivals              # everything; two to three hours on two quiet cores
    python examples/benchmark/all.py --parts planning start --again
    python examples/benchmark/all.py --publish             # the parts that are done, into docs/
    python examples/benchmark/all.py --short               # the shortest form of everything: shows that it works
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import page
import psutil
import rivals

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LINE = 110
"""Characters of a line of progress."""
PACKAGES = ("torch", "transformers", "llamafactory", "accelerate", "trl")
LOG_LINE = re.compile(r"^\[\d{4}-[^]]*\] \[(INFO|WARNING)\]")
MEASURED = re.compile(r"^[^\[{\"']*\d\.\de[-+]\d\d")
"""A line that a test prints; libraries print similar ones, of dicts and with times."""


class Part(NamedTuple):
    """command: a script of this folder with its options, or another program. short: the shortest form, if there is one.

    about: what the page says before the tables. minutes: on two quiet cores. rivals: run in the environment that has
    them, if there is one.
    """

    name: str
    heading: str
    minutes: int
    about: str
    command: tuple[str, ...]
    short: tuple[str, ...] = ()
    rivals: bool = False


TRAINING = """The real LLaMA-Factory on a CPU, one epoch of the same samples at the same learning rate, 32 samples \
an optimizer step (packing and `fill` cannot have that, so their losses are not comparable): {}. All at most at \
the same peak of memory, in padded tokens of the largest micro-batch. Whatever is computed beyond each sample's own \
tokens, once, counts as padding. Balance: the mean load of the ranks, in padded tokens, by that of the busiest. "CPU \
seconds" are of the busiest training process; the clock's also hold what worker processes take on the same cores. \
glibc's malloc keeps freed memory, for all contestants. Best of a column in bold, losses among those with as many \
optimizer steps as odb. Figures are means of all seeds; shares of time are medians of the seeds' ratios."""
WORKLOADS = {
    "text": "a tiny Qwen2 on 1,280 made-up texts of uneven length",
    "MM-Mix": "a tiny Qwen3-VL on 320 samples of the built-in MM-Mix",
    "all alike": "all samples are of one length, so that nothing can be won",
}
GRADIENT_TESTS = ("training/test_same_training", "training/test_exact_gradient", "llamafactory/test_precision")
SHORT_PLAN = ("--ranks", "2", "--batch-sizes", "64", "--seeds", "1", "--samples", "512")


def training(name: str, workload: str, ranks: int, minutes: int, seeds: int = 3, is_first: bool = False) -> Part:
    heading = f"Training: {workload}, {ranks} rank{'s' * (ranks > 1)}"
    command = ("train.py", "--workloads", workload, "--ranks", str(ranks), "--seeds", str(seeds))
    command += ("--picture",) if is_first else ()
    about = TRAINING.format(WORKLOADS[workload]) if ranks == 1 else "As before, on two ranks."
    return Part(name, heading, minutes, about, command, ("train.py", "--short", "--picture") if is_first else ())


PARTS = (
    Part(
        *("planning", "The plan", 30),
        "In simulation, everybody on the same samples, with the code that a training runs. Step efficiency = real "
        "tokens / (ranks x sum over micro-steps of (largest padded tokens of any rank + the fixed cost)): a model, "
        "linear in tokens, with an assumed 500 for each micro-step; patches are limited, not counted. Lengths are "
        "lognormal with mean and CV 1100/0.48 (UltraChat), 700/0.29 (LLaVA), 900/1.00 (ShareGPT4o), and 80 % around "
        "150 with 20 % around 2,500 (MM-Mix); with images, half of the samples have one. N: samples of an optimizer "
        "step. What no cut can exceed, of optimizer steps as they are: a rank has at least the longest sample, and the "
        "mean load of all ranks; a micro-step is filled up to the token budget at most. odb reaches (and, in brackets, "
        "no cut can exceed) the figures of the second table.",
        ("planning.py", "--processes", "8", "--ranks", "1", "8", "64"),
        ("planning.py", "--profiles", "MM-Mix", *SHORT_PLAN),
        rivals=True,
    ),
    Part(
        *("planning_real", "The plan of real lengths", 8),
        "As before, of the built-in MM-Mix as a tiny Qwen3-VL's tokenizer and image processor see it: read pages, "
        "help topics, questions about pictures and videos. Once as text of these lengths, once with its media. "
        "`--data CONFIG.yaml` takes the data of a LLaMA-Factory YAML.",
        ("planning.py", "--data", "--processes", "8", "--ranks", "1", "8", "64"),
        ("planning.py", "--data", *SHORT_PLAN),
        rivals=True,
    ),
    Part(
        *("planning_many", "The plan of many ranks", 60, "As before, of 512 and 1,024 ranks."),
        ("planning.py", "--ranks", "512", "1024"),
        rivals=True,
    ),
    training("train_text_1", "text", 1, 14, is_first=True),
    training("train_text_2", "text", 2, 16),
    training("train_mm_mix_1", "MM-Mix", 1, 14),
    training("train_mm_mix_2", "MM-Mix", 2, 14),
    training("overhead", "all alike", 1, 6, seeds=5),
    Part(
        *("stages", "Preference pairs, rewards, KTO, a model with mixers, a large vocabulary", 30),
        "LLaMA-Factory on a CPU, one rank, CPU seconds (medians): stock in fixed batches of 4, 2 and 1 rows, odb with "
        "the memory of 4 rows. rm cannot be compared between launches: its value head is drawn anew in each process. "
        "Of kto one optimizer step of one seed magnifies rounding: stock with weights in float64 is as far from stock.",
        ("stages.py",),
        ("stages.py", "--trainings", "dpo", "--seeds", "1", "--samples", "64"),
    ),
    Part(
        *("evaluation", "Evaluation, and the vision tower of two ranks", 20),
        "Evaluation: one rank, the training samples as validation data, stock's batches of 4, 2 and 1 rows beside odb "
        "with `eval_token_budget` at the memory of 4 rows; medians of two evaluations in each of three trainings. The "
        "tower: a Qwen3-VL that spends most of its time there, fully trained, from the second optimizer step on; "
        "medians, and the median of the seeds' ratios. Uneven images stay with the rank that reads them "
        "(`balance: false`), as where a rank reads a data set of its own; of even ones nothing can be won.",
        ("stages.py", "--trainings", "evaluation", "encoder"),
        ("stages.py", "--trainings", "evaluation", "encoder", "--seeds", "1", "--samples", "32"),
    ),
    Part(
        *("head", "The loss without logits", 8),
        "Forward and backward of an output embedding of width 2,048 and 151,936 entries, on a CPU: by stock's logits, "
        "and as odb does. Peak: memory beyond what the process had; the share is without the gradient of a trained "
        "head, which both have. Time, and the time of the products that no exact gradient can do without: shares of "
        "stock's. odb computes the logits of a trained head twice, so that nothing of tokens x entries is kept (but "
        "for up to 64 MiB).",
        ("head.py",),
        ("head.py", "--tokens", "16"),
    ),
    Part(
        *("gradient", "The same gradient", 8),
        "Kept batches beside real stock trainings of the same configuration, in float32, float64 and bf16; and `fill` "
        "with `loss_scaling: exact` against one plain process that takes the samples of each optimizer step as one "
        "batch. Relative deviations.",
        ("pytest", "-s", "-q", *(f"tests/{name}.py" for name in GRADIENT_TESTS)),
    ),
    Part(
        *("loader", "The loader alone", 11),
        "The same rows through a plain torch DataLoader (batches of 8), odb_factory (`fill`) and "
        "online-dynamic-batching: lists of token ids, and picture files through Qwen-VL's image processor. "
        '"1 + 1": one worker observes and one collates (of online-dynamic-batching: one reads, one collates). '
        '"light items": with the items that odb gets, instead of the finished samples that its README asks for. '
        '"blocked": the share of its time that a consumer that takes 1.25 times as long spends in `next()`. CPU: a '
        'sample. Memory: MiB of all processes at their peak. Medians of three rounds; "of plain": of their ratios.',
        ("loader.py",),
        ("loader.py", "--short"),
        rivals=True,
    ),
    Part(
        *("start", "The start", 7),
        "Seconds from the start of the process to the first optimizer step, a tiny random Qwen2, raw alpaca rows "
        "(JSON, 1 KB each), an empty cache each time, the median of three runs. Start-up is imports, arguments and "
        "tokenizer; the rest is preprocessing before the first optimizer step, and loading the model. Streaming knows "
        "no length and shuffles within a buffer.",
        ("start.py",),
        ("start.py", "--rows", "40", "--repeats", "1", "--runs", "stock", "odb"),
    ),
    Part(
        *("scale", "The cost of planning", 4),
        "One optimizer step, CPU time on one core. In a training a process of its own plans, ahead of the optimizer "
        "steps. Second table: all that ranks in groups of 256 (`balance_group_size`) tell each other in an optimizer "
        "step of 61 samples a rank, run rank by rank in one process with queues for gloo: messages sent and KiB "
        "received by the rank with most, beside the samples; sockets of a group's leader; seconds by a model (10 us "
        "a message within a node of 8, 50 us between nodes, 1 GB/s a process; second figure: four times as slow); "
        "planning and reading messages, CPU time, of the slowest group. With more groups the one with most tokens "
        "sets the pace, and that is the whole gap to the bound: at 16,384 ranks the fullest of 64 groups has 1.0% "
        "more tokens than the mean, all groups need the same K, and cutting costs 4 tokens of 67,100. Groups of 512 "
        "ranks would reach .9588 (a plan takes 72 to 90 ms), of 1,024 .9605 (150 to 206 ms, more sockets than 600). "
        "Even groups would reach .964, but samples would have to travel between groups before plans are made; that "
        "is not built. Real processes agree more slowly where two cores run them all (`scale.py --gloo 2 4 8 16 64`, "
        "load 8 to 10: 8, 11, 19, 37 and 249 ms; with the 0.94 ms that a message takes here the model says 6, 12, 14, "
        "19 and 30); 64 were connected after 19 s, and each needs 13 MiB beyond the imported packages.",
        ("scale.py",),
        ("scale.py", "--ranks", "2", "8", "--steps", "1", "--exchange", "8", "12", "--group-size", "4", "--held", "8"),
    ),
    Part(
        *("partitions", "The planner beside other partitions", 2),
        "`plan_micro_batches` and the partitions that verl and slime publish for reinforcement learning, written anew "
        "from their descriptions, of the same lengths; the token budget is the longest sample, 8,192. Each cell: K, "
        "step efficiency (as above), and the fullest micro-batch by the token budget. Time: CPU time of a plan, the "
        "mean of all columns.",
        ("scale.py", "--beside", "--ranks", "8", "64", "--samples-a-rank", "64", "--token-budget", "8192"),
        ("scale.py", "--beside", "--ranks", "2", "--samples-a-rank", "16", "--steps", "1"),
    ),
)


def environment() -> dict[str, str]:
    """The machine, the versions, and the commit of odb_factory that are measured."""
    import torch

    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    memory = psutil.virtual_memory().total / 2**30
    installed = {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    name = cpu[1] if cpu else platform.machine()
    return {
        "machine": f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; {device}",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "commit": commit or "no commit",
    }


def run(part: Part, folder: Path, is_short: bool, environments: Path) -> bool:
    """Run it in its folder and write into `done.json` how that went; whether it went well."""
    command, output = part.short if is_short else part.command, folder / part.name
    output.mkdir(parents=True, exist_ok=True)
    beside = rivals.python_of(rivals.BESIDE, environments) if part.rivals else None
    python = str(beside or sys.executable)
    is_script = command[0].endswith(".py")
    if is_script:
        line = [python, str(FOLDER / command[0]), *command[1:], "--output-dir", str(output)]
    else:
        line = [str(Path(python).with_name(command[0])), *(one.format(output=output) for one in command[1:])]
    newer = rivals.python_of(rivals.NEWER, environments)
    if command[0] == "planning.py" and newer is not None:
        line += ["--newer-transformers", str(newer)]
    shown = ("python", f"examples/benchmark/{command[0]}", *command[1:]) if is_script else command
    shown = tuple(one for one in shown if one not in ("--output", "{output}"))
    ended: dict[str, Any] = {"command": shlex.join(shown), "began": f"{datetime.datetime.now():%Y-%m-%d %H:%M}"}
    ended |= {"load": os.getloadavg()[0], **environment()}
    started, last = time.monotonic(), ""
    with (output / "printed.txt").open("w", encoding="utf-8") as printed, (output / "log.txt").open("w") as log:
        process = subprocess.Popen(
            line,
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            for text in process.stderr:
                log.write(text)
                if text.strip() and "%|" not in text:  # no progress bars
                    last = text.strip()
                    print(f"  {time.monotonic() - started:6.0f} s  {last[:LINE]}", flush=True)
            process.wait()
        finally:
            if process.poll() is None:  # this script is ended
                os.killpg(process.pid, signal.SIGTERM)
    if not is_script and process.returncode == 0:
        tables = ["The largest deviation of each training stands in the other tables."]
        tables += [page.MORE, printed_tables(output / "printed.txt")]
        page.write(output, {}, tables)
    ended |= {"returncode": process.returncode, "seconds": time.monotonic() - started}
    (output / page.DONE).write_text(json.dumps(ended, indent=1), encoding="utf-8")
    if process.returncode:
        print(f"{part.name}: exit code {process.returncode}: {last[:LINE]} (all of it: {output / 'log.txt'})")
    return process.returncode == 0


def printed_tables(path: Path) -> str:
    """The tables that tests have printed, and the other lines with figures."""
    lines = [line.lstrip(".") for line in path.read_text(encoding="utf-8").splitlines() if not LOG_LINE.match(line)]
    found: list[str] = []
    for is_table, group in itertools.groupby(lines, lambda line: line.startswith("|")):
        kept = [line for line in group if is_table or MEASURED.match(line)]
        if is_table and not "".join(kept[1:2]).startswith("|--"):
            kept.insert(1, "|---" * (kept[0].count("|") - 1) + "|")
        if kept and not is_table:
            kept = ["```", *kept, "```"]
        found += [*kept, ""] if kept else []
    return "\n".join(found).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also run the parts that are done")
    parser.add_argument("--rivals", action="store_true", help="make environments for rivals first (pip, 0.2 GB)")
    parser.add_argument("--publish", action="store_true", help="put the parts that are done into docs/")
    parser.add_argument("--short", action="store_true", help="the shortest form: shows that all of it works")
    parser.add_argument("--output-dir", type=Path, help="(saves/benchmark; with --short saves/benchmark_short)")
    given = parser.parse_args(arguments)
    if given.short and given.publish:
        parser.error("--short measures nothing that could be published")
    folder = (given.output_dir or ROOT / "saves" / f"benchmark{'_short' * given.short}").resolve()
    environments = folder / "environments"
    for name, requirements in rivals.REQUIREMENTS.items() if given.rivals else ():
        print(f"an environment for {', '.join(requirements)}", flush=True)
        rivals.make(name, environments)
    chosen = [part for part in PARTS if part.name in given.parts and (part.short or not given.short)]
    failed = 0
    for number, part in enumerate(chosen, 1):
        if given.again:
            shutil.rmtree(folder / part.name, ignore_errors=True)
        is_done = page.done(folder, part.name)
        state = "done before" if is_done else f"{datetime.datetime.now():%H:%M}, about {part.minutes} minutes"
        print(f"[{number}/{len(chosen)}] {part.name}: {state}", flush=True)
        failed += not is_done and not run(part, folder, given.short, environments)
    found = page.collect(folder, names)
    for name, one in found.items():
        one["in_short"] = page.in_short(name, one["figures"])
    (folder / "benchmarks.md").write_text(page.make(found, PARTS), encoding="utf-8")
    print(f"The page: {folder / 'benchmarks.md'}")
    if given.publish:
        page.publish(ROOT / "docs", folder, PARTS)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")
