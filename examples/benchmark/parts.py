"""What `all.py` runs: the parts of the benchmark, in the order in which the page shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """command: a script of this folder with its options, or pytest. short: that of the shortest form, if it has one.

    about: what the page says before the tables. minutes: on two quiet cores. rivals: run in the environment that has
    them, if there is one. cuda: it needs such a device.
    """

    name: str
    heading: str
    about: str
    command: tuple[str, ...]
    minutes: int
    short: tuple[str, ...] | None = None
    rivals: bool = False
    cuda: bool = False


TRAIN_ABOUT = """The real LLaMA-Factory on a CPU, one epoch of the same samples at the same learning rate, 32 samples \
an optimizer step (packing and `fill` cannot have that, so their losses are not comparable): {what}. All at most at \
the same peak of memory, in padded tokens of the largest micro-batch. Whatever was computed beyond each sample's own \
tokens, once, counts as padding. Balance: the mean load of the ranks, in padded tokens, by that of the busiest. "CPU \
seconds" are of the busiest training process; the clock's also hold what worker processes take on the same cores. \
glibc's malloc keeps freed memory, for all contestants. Best of a column in bold, losses among those with as many \
optimizer steps as odb. Figures are means of all seeds; "in so much of the time" is the median of the seeds' ratios."""
GRADIENT_TESTS = (
    "tests/data/test_layout_models.py",
    "tests/training/test_same_training.py",
    "tests/training/test_exact_gradient.py",
    "tests/training/test_exact_gradient_llamafactory.py",
)


def _training(
    name: str, workload: str, ranks: int, what: str, minutes: int, short: bool = False, seeds: int = 3
) -> Part:
    return Part(
        name,
        f"Training: {workload}, {ranks} rank{'s' * (ranks > 1)}",
        TRAIN_ABOUT.format(what=what),
        ("train.py", "--workloads", workload, "--ranks", str(ranks), "--seeds", str(seeds)),
        minutes,
        ("train.py", "--short") if short else None,
    )


TEXTS, MIX = (
    "a tiny Qwen2 on 1,280 made-up texts of uneven length (1 row at a time was trained last, after all other parts)",
    "a tiny Qwen3-VL on 320 samples of the built-in MM-Mix (1 row at a time was trained last, after all other parts)",
)
PARTS = (
    Part(
        "demo",
        "The demo",
        "What `odb-factory demo` runs: LLaMA-Factory trains a tiny Qwen3-VL on the built-in MM-Mix on two processes, "
        "each contestant once, all at about the same peak of padded tokens. The picture shows `fill` (another N), too.",
        ("demo.py",),
        3,
    ),
    Part(
        "planning",
        "The plan",
        "In simulation, everybody on the same samples, with the code that a training runs. Step efficiency = real "
        "tokens / (ranks x sum over micro-steps of (largest padded tokens of any rank + the fixed cost)): a model, "
        "linear in tokens, with an assumed 500 for each micro-step; patches are limited, not counted. Lengths are "
        "lognormal with mean and CV 1100/0.48 (UltraChat), 700/0.29 (LLaVA), 900/1.00 (ShareGPT4o), and 80 % around "
        "150 with 20 % around 2,500 (MM-Mix); with images, half of the samples have one. N: samples of an optimizer "
        "step. What no cut can exceed, of optimizer steps as they are: a rank has at least the longest sample, and the "
        "mean load of all; whoever puts other samples together may. Balance: what all ranks compute by what they would "
        "if each had as much as the busiest. Samples moved: to another rank than the one that read them. Peak: the "
        "largest micro-batch, mean of the draws. Fixed and "
        "length-grouped batches know no budget; length grouping, packing and dynabatch need all lengths before "
        "training. Fixed batches, batch_rebalance, odb and the bound get the same first optimizer steps, others the "
        "whole epoch: hundredths may be chance. Figures of all ranks and N are of `odb, keep, flat`, the bound in "
        "brackets.",
        ("planning.py", "--processes", "8", "--ranks", "1", "8", "64"),
        30,
        (
            "planning.py",
            "--ranks",
            "2",
            "--batch-sizes",
            "64",
            "--profiles",
            "MM-Mix",
            "--seeds",
            "1",
            "--samples",
            "512",
        ),
        rivals=True,
    ),
    Part(
        "planning_real",
        "The plan of real lengths",
        "As before, of the built-in MM-Mix as a tiny Qwen3-VL's tokenizer and image processor see it: read pages, "
        "help topics, questions about pictures and videos. Once as text of these lengths, once with its media. "
        "`--data CONFIG.yaml` takes the data of a LLaMA-Factory YAML.",
        ("planning.py", "--data", "--processes", "8", "--ranks", "1", "8", "64"),
        8,
        (
            *("planning.py", "--data", "--ranks", "2", "--batch-sizes", "64"),
            *("--seeds", "1", "--samples", "512"),
        ),
        rivals=True,
    ),
    Part(
        "planning_many",
        "The plan of many ranks",
        "As before, of 512 and 1,024 ranks.",
        ("planning.py", "--ranks", "512", "1024"),
        60,
        rivals=True,
    ),
    _training("train_text_1", "text", 1, TEXTS, 14, short=True),
    _training("train_text_2", "text", 2, TEXTS, 16),
    _training("train_mm_mix_1", "MM-Mix", 1, MIX, 14),
    _training("train_mm_mix_2", "MM-Mix", 2, MIX, 14),
    _training("overhead", "all alike", 1, "all samples are of one length, so that nothing can be won", 14, seeds=9),
    Part(
        "learning",
        "What is learnt",
        "A tiny random Qwen2 on real text with transformers' Trainer, AdamW, linear schedule, batches of 8 samples "
        "(odb: `token_budget` 4,096). Kept batches have the losses of fixed batches, seed by seed. With `fill` an "
        "epoch has fewer, larger optimizer steps here, which changes what is learnt: from random weights, at equal "
        "epochs it learns less, at equal optimizer steps it sees more data. If you use `fill`, lower `token_budget` "
        "until an optimizer step has about the samples it had, or raise the learning rate with `lr_scale: sqrt`, and "
        "compare validation losses.",
        ("learning.py",),
        20,
        ("learning.py", "--seeds", "1", "--samples", "32"),
    ),
    Part(
        "gradient",
        "The same gradient",
        "Kept batches beside real stock trainings of the same configuration; flat micro-batches beside padded ones on "
        "tiny random models in float64 (relative deviation of the loss / of the worst gradient); and `fill` with "
        "`loss_scaling: exact` against one plain process that takes the samples of each optimizer step as one batch.",
        ("pytest", "-s", "-q", *GRADIENT_TESTS),
        8,
    ),
    Part(
        "loader",
        "The loader alone",
        "The same rows through a plain torch DataLoader (batches of 8), odb_factory (`fill`) and "
        "online-dynamic-batching: lists of token ids, and picture files through Qwen-VL's image processor. "
        '"1 + 1": one worker observes and one collates (of online-dynamic-batching: one reads, one collates). '
        '"light items": with the items that ours gets, instead of the finished samples that its README asks for. '
        '"blocked": the share of its time that a consumer that takes 1.25 times as long spends in `next()`. CPU: a '
        "sample. Memory: MiB of all processes at their peak, and what a buffer of 1,024 samples adds to that of 32 "
        '(below 0: chance). Medians of three rounds; "of plain": of the rounds\' ratios.',
        ("loader.py",),
        11,
        ("loader.py", "--short"),
        rivals=True,
    ),
    Part(
        "start",
        "The start",
        "Seconds from the start of the process to the first optimizer step, a tiny random Qwen2, raw alpaca rows "
        "(JSON, 1 KB each), an empty cache each time, the middle one of three runs. Start-up is imports, arguments and "
        "tokenizer; the rest is what is done to rows before the first optimizer step, and loading the model. Streaming "
        "knows no length and shuffles within a buffer.",
        ("start.py",),
        7,
        ("start.py", "--rows", "40", "--repeats", "1", "--runs", "stock", "odb"),
    ),
    Part(
        "scale",
        "The cost of planning",
        "In simulation on one core, CPU time. In a training a process of its own does it, ahead of the optimizer steps "
        '(without worker processes a thread). Metadata go to all ranks ("received"): 25 bytes a sample, and in groups '
        "an outline of each group's plan. Of more than `balance_group_size` ranks (default 256), samples travel "
        'within groups only; "network" is a model of 1 GB/s a rank and 50 us an exchange, not a measurement.',
        ("scale.py",),
        8,
        (
            *("scale.py", "--ranks", "2", "8", "--window", "32", "--token-budget", "2048", "--rounds", "2"),
            *("--grouped", "8", "--group-sizes", "4", "8"),
        ),
    ),
    Part(
        "beside",
        "Beside the training thread",
        "What one plan of a kept optimizer step costs a thread of pure Python, the worst case for Python's interpreter "
        "lock: if a thread of the same process planned, and as it is, with a process that plans. With messages of all "
        "ranks read; flat steps of more than 256 ranks are planned in groups of so many.",
        ("beside.py",),
        3,
        ("beside.py", "--steps", "2x16", "--rounds", "1", "--plans", "2"),
    ),
    Part(
        "gpu",
        "On a GPU",
        "One CUDA device; Qwen3-VL-2B and a 0.5B text model built from their configs with random weights, each "
        "contestant at the largest setting that fits the same memory. Model FLOPs utilisation (MFU), and the share of "
        "the padding-free limit.",
        ("gpu.py",),
        10,
        ("gpu.py", "--device", "cpu", "--short"),
        rivals=True,
        cuda=True,
    ),
)
