"""`ODBConfig`: every key of the `odb:` block, its default, its check and its meaning.

Standard library only: the block is checked before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from odb_factory.errors import ConfigError, quoted

# ----------------------------------------------------------------------------------------------------------------------
# Check one key of the `odb:` block by its declared type, range and choices. Standard library only.

AUTO = "auto"
"""What stands for a budget that is chosen before training."""

NEAR = 0.7
"""Similarity (of difflib, 0 to 1) from which an unknown key is taken for a misspelt one."""
ELSEWHERE = {
    "max_input_length": "it is called `token_budget`",
    "join_mode": "it is called `join`, and has an effect with `global_batch_size: fill` only",
    "loss_scaling_approx": "set `loss_scaling: approx`",
    "no_sync": "leave it out; `balance: false` keeps samples on the rank that read them",
    "no_warmup": "leave it out: the buffer is full from the first plan on",
    "group_order_flip": "leave it out: the planner decides about the order",
    "version": "leave it out: there is one planner",
    "train_dataloader": "leave it out: the trainer is enough",
    "train_dataset": "leave it out: the trainer is enough",
    "training_args": "leave it out: the trainer is enough",
}
"""Names of the package online-dynamic-batching that are no keys here, and what to do (docs/migration.md)."""


def unknown_key(name: Any, value: Any, known: Mapping[str, Any]) -> str:
    """What is said of a key that does not exist: the nearest one, or what it seems to be instead."""
    shown = " ".join(str(name).split())
    key, colon, given = shown.partition(":")
    if colon and value is None and key in known:
        return f"odb.{shown}: YAML takes this for a key; put a space behind the colon, `{key}: {given or 8192}`."
    if name in ELSEWHERE:
        return f"odb.{shown}: {value!r} is a setting of online-dynamic-batching; here {ELSEWHERE[name]}."
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR) if isinstance(name, str) else []
    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}."
    return f"odb.{shown}: {quoted(value)} is set, but there is no such key; {hint}"


def is_optional(item: dataclasses.Field[Any]) -> bool:
    return str(item.type).endswith("| None")


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_value(item: dataclasses.Field[Any], value: Any) -> None:
    """Check one key by its declared type, range and choices; raise a one-line `ConfigError`."""
    choices, minimum, maximum = (item.metadata[name] for name in ("choices", "minimum", "maximum"))
    optional = is_optional(item)
    if value is None and optional:
        return
    if choices == (AUTO,) and value == AUTO:
        return
    if item.type == "float":
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
            raise ConfigError(
                f"odb.{item.name}: {quoted(value)} is not a share; write a number above 0 and at most 1, such as "
                f"{item.default}."
            )
    elif choices and choices != (AUTO,) and not (minimum is not None and is_whole(value)):
        if value not in choices:
            hint = ""
            if "none" in choices and value in (None, "None"):
                hint = "; write the word none (YAML's null is no value), or leave the key out"
            number = " or a whole number" if minimum is not None else ""
            raise ConfigError(f"odb.{item.name}: {quoted(value)} is not one of {', '.join(choices)}{number}{hint}.")
    elif item.type in ("bool", "bool | None"):
        if not isinstance(value, bool):
            raise ConfigError(f"odb.{item.name}: {quoted(value)} is not true or false.")
    elif str(item.type).startswith("Sequence"):
        numbers = isinstance(value, Sequence) and not isinstance(value, str) and len(value)
        if not numbers or not all(is_whole(one) and minimum <= one <= maximum for one in value):
            raise ConfigError(
                f"odb.{item.name}: {quoted(value)} is not a list of whole numbers of at least {minimum}; write one, "
                "for example [512, 1024, 2048], or none."
            )
    elif not is_whole(value):
        also = "".join(f", or {word}" for word in (*choices, *(["none"] if optional else [])))
        quotes = ", without quotes" if isinstance(value, str) and value.strip().isdecimal() else ""
        raise ConfigError(
            f"odb.{item.name}: {quoted(value)} is not a whole number; write one of at least {minimum}{also}{quotes}."
        )
    elif int(value) < minimum:
        also = ", or leave the key out" if optional else ""
        raise ConfigError(f"odb.{item.name}: {quoted(value)} is too small; the least is {minimum}{also}.")
    elif int(value) > maximum:
        raise ConfigError(f"odb.{item.name}: {quoted(value)} is too large; the most is {maximum}.")


# ----------------------------------------------------------------------------------------------------------------------
# Check what keys of the `odb:` block say together. Standard library only.


def check_together(config: ODBConfig) -> None:
    """Raise a one-line `ConfigError` for keys that speak against each other. Each of them alone has been checked."""
    _check_sizes(config)
    if config.oom == "split" and config.row_multiple > 1:
        raise ConfigError(
            f"odb.oom: 'split' cuts micro-batches to save memory, and `row_multiple: {config.row_multiple}` would fill "
            "up the rows of their parts; leave one of both out."
        )
    if config.keeps:
        _check_kept(config)
    elif config.loss_scaling == "stock":
        raise ConfigError(
            "odb.loss_scaling: 'stock' weighs tokens as in the optimizer steps of stock training, which "
            "`global_batch_size: fill` does not keep; choose exact, or keep them."
        )
    if config.balance and not config.join:
        raise ConfigError(
            "odb.balance: with `join: false` the epoch ends when one rank runs short, and balanced ranks run short "
            "together; set `join: true`, or leave balance out."
        )
    if config.lr_scale != "none" and config.lr_reference_samples is None:
        raise ConfigError(
            f"odb.lr_scale: {config.lr_scale!r} needs a batch to scale from; set `lr_reference_samples` to the "
            "samples of an optimizer step for which learning_rate was chosen, or leave lr_scale out."
        )


def _check_sizes(config: ODBConfig) -> None:
    """The sizes that micro-batches are filled up to fit the budget, the layout and each other."""
    if config.layout == "padded" and config.pad_to_multiple_of is not None:
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} has no effect with `layout: padded`, whose rows "
            "are padded as the data collator says; leave it out, or set `layout: flat`."
        )
    if isinstance(config.token_budget, int) and (config.pad_to_multiple_of or 1) > config.token_budget:
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} is more than token_budget ({config.token_budget}), "
            "which every flat micro-batch would break; choose a smaller multiple, or raise token_budget."
        )
    if config.row_multiple > 1 and config.layout == "flat":
        raise ConfigError(
            f"odb.row_multiple: {config.row_multiple} has no effect with `layout: flat`, whose micro-batches are one "
            "row; leave it out, or set length_buckets."
        )
    if config.length_buckets is None:
        return
    multiple, largest = config.pad_to_multiple_of or 1, config.length_buckets[-1]
    if isinstance(config.token_budget, int) and largest > config.token_budget:
        raise ConfigError(
            f"odb.length_buckets: {largest} is more than token_budget ({config.token_budget}), which nothing that is "
            "filled up to it would keep; leave it out, or raise token_budget."
        )
    if wrong := [size for size in config.length_buckets if size % multiple]:
        raise ConfigError(
            f"odb.length_buckets: {wrong[0]} is no multiple of pad_to_multiple_of ({multiple}); choose multiples, "
            "or leave one of the keys out."
        )


def _check_kept(config: ODBConfig) -> None:
    """What has a meaning with `fill` only."""
    if not config.join:
        raise ConfigError(
            "odb.join: false ends an epoch when one rank runs short, and kept optimizer steps have all samples; "
            "leave it out, or set `global_batch_size: fill`."
        )
    if config.lr_scale != "none":
        raise ConfigError(
            f"odb.lr_scale: {config.lr_scale!r} has no effect on kept optimizer steps, which have the samples that "
            "learning_rate was chosen for; leave it out, or set `global_batch_size: fill`."
        )


# ----------------------------------------------------------------------------------------------------------------------

LARGEST = 2**32 - 1
"""The largest number a key takes; what random number generators accept as a seed."""
MOST_WORKERS = 1024
BUDGETS = ("token_budget", "max_patches")
"""Keys that may be `auto`: what the memory of the accelerator allows."""

LAYOUTS = ("auto", "flat", "padded")
LOSS_SCALINGS = ("stock", "exact", "sample", "square", "approx", "none")


def _key(
    meaning: str, *, choices: tuple[str, ...] = (), minimum: int | None = None, maximum: int = LARGEST, **kwargs: Any
) -> Any:
    """A dataclass field with what the checks and the docs need to know about it."""
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum}
    return field(metadata={"meaning": meaning} | limits, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ODBConfig:
    """The `odb:` block of a training YAML.

    Tokens are counted after expansion, truncation and padding; patches are vision-tower input
    patches. Raises `ConfigError` (a `ValueError`) with a one-line message for a bad value.
    """

    token_budget: int | str = _key(
        "tokens of one micro-batch on one rank, at most: rows x padded row length (padded), or the sum of the samples' "
        "(flat); larger fills the accelerator better and needs more memory. auto: the most that memory_fraction of the "
        "accelerator holds, tried before training",
        choices=(AUTO,),
        minimum=1,
    )
    max_patches: int | str | None = _key(
        "vision patches of one micro-batch on one rank, at most; none: not limited; auto: as many as the data bring "
        "with such a token_budget, and the memory holds",
        choices=(AUTO,),
        minimum=1,
        default=None,
    )
    memory_fraction: float = _key(
        "share of the accelerator's memory that a budget of auto may fill, above 0 and at most 1",
        default=0.9,
    )
    global_batch_size: int | str = _key(
        "samples of an optimizer step on all ranks: keep (those of stock training: per_device_train_batch_size x "
        "gradient_accumulation_steps x ranks), a number, or fill (as many as gradient_accumulation_steps micro-batches "
        "of the budget hold, which changes what is learnt)",
        choices=("keep", "fill"),
        minimum=1,
        default="keep",
    )
    layout: str = _key(
        "flat: the samples of a micro-batch follow each other in one row, each with its own positions and attention, "
        "without padding; padded: one row a sample; auto: flat where the model, its attention kernel and a check "
        "before training allow it, else padded (in a loop of your own: padded)",
        choices=LAYOUTS,
        default="auto",
    )
    pad_to_multiple_of: int | None = _key(
        "flat micro-batches are filled up to a multiple of so many tokens (FP8, torch.compile); none: not at all. "
        "Padded rows are padded as the data collator says",
        minimum=1,
        default=None,
    )
    length_buckets: Sequence[int] | None = _key(
        "lengths in tokens to which padded rows, or flat micro-batches as a whole, are filled up, so that kernels "
        "which are compiled or tuned by shape see few, for example [512, 1024, 2048]; what is longer than the last, "
        "up to a multiple of it, or to token_budget. none: not at all",
        minimum=1,
        default=None,
    )
    row_multiple: int = _key(
        "padded micro-batches are filled up to a multiple of so many rows, with rows without labels, as far as "
        "token_budget allows; of no effect where the layout is flat",
        minimum=1,
        default=1,
    )
    buffer_size: int = _key(
        "samples a rank may hold before they are collated, beside the optimizer step that is under way; grows to an "
        "optimizer step where it is smaller. With `fill` a larger one wastes less; with kept optimizer steps it is how "
        "far ahead of the training is planned",
        minimum=1,
        default=1024,
    )
    collate_workers: int | None = _key(
        "worker processes that collate micro-batches (pixels are processed there); "
        "none: as many as dataloader_num_workers, 0: in the training process (slow)",
        minimum=0,
        maximum=MOST_WORKERS,
        default=None,
    )
    loss_scaling: str = _key(
        "stock: every unit (supervised token, pair or example) weighs what it does in stock training (default with "
        "kept optimizer steps); exact: every unit of an optimizer step weighs the same (default with fill); sample: "
        "every sample does; square: the square root of its units; approx: every input token weighs the same; "
        "none: every micro-batch does",
        choices=LOSS_SCALINGS,
        default="",
    )
    lr_scale: str = _key(
        "none: the learning rate as it is; linear or sqrt: times (samples of an optimizer step / lr_reference_samples)"
        ", or the square root of that, for filled batches are larger than those it was chosen for",
        choices=("none", "sqrt", "linear"),
        default="none",
    )
    lr_reference_samples: int | None = _key(
        "samples of an optimizer step, on all ranks, for which learning_rate was chosen (batch size x "
        "gradient_accumulation_steps x ranks of the run before)",
        minimum=1,
        default=None,
    )
    join: bool = _key(
        "true: ranks that have run out of samples take idle micro-batches until all samples are done; "
        "false (with `fill`): the epoch ends for all when one rank runs short",
        default=True,
    )
    balance: bool | None = _key(
        "true: a sample may be computed by another rank than the one that read it, so that none waits for another; ids "
        "and references to media travel, pixels do not. none: true, unless `join: false`",
        default=None,
    )
    balance_group_size: int = _key(
        "ranks among which samples travel, where the layout is flat and optimizer steps are kept: groups of so many "
        "ranks that follow each other (best whole nodes) are planned by themselves, so that planning does not grow "
        "with the number of ranks",
        minimum=1,
        default=256,
    )
    cost_model: str = _key(
        "by what micro-batches of like cost meet in a micro-step: tokens, or time: predicted by a model of tokens, "
        "patches and row lengths that is fitted to this run (its plan then depends on what was measured)",
        choices=("tokens", "time"),
        default="tokens",
    )
    overlong: str = _key(
        "a sample that breaks a budget alone: singleton (a micro-batch of its own), drop or error",
        choices=("singleton", "drop", "error"),
        default="singleton",
    )
    on_error: str = _key(
        "a row that cannot be read: raise, or skip (counted; media are then decoded once more, "
        "at observation, so that a bad one is known before the plan is made)",
        choices=("raise", "skip"),
        default="raise",
    )
    oom: str = _key(
        "a micro-batch that the accelerator's memory does not hold: raise (the training ends and says what to lower), "
        "or split (it is cut in two, its optimizer step is begun anew with the same weights of all samples, and plans "
        "to come have a lower budget; one process or DDP)",
        choices=("raise", "split"),
        default="raise",
    )
    resume: str = _key(
        "going on from a checkpoint: strict takes up its epoch where it stood, and refuses other data; ignore_data "
        "takes the model alone and begins the epoch anew",
        choices=("strict", "ignore_data"),
        default="strict",
    )
    exchange_timeout_s: int = _key(
        "seconds a rank may give no sign of life (stopped, its network gone, not started) before the others end; a "
        "rank that is alive is waited for as long as ddp_timeout says",
        minimum=1,
        default=600,
    )
    audit: bool = _key(
        "write odb_audit_rank{r}.jsonl to output_dir, one line per step",
        default=False,
    )
    seed: int | None = _key(
        "seed of the sample order and of the plan; none: data_seed or seed of the training arguments",
        minimum=0,
        default=None,
    )

    def __post_init__(self) -> None:
        if self.loss_scaling == "":
            object.__setattr__(self, "loss_scaling", "stock" if self.keeps else "exact")
        if self.balance is None:
            object.__setattr__(self, "balance", self.join)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            check_value(item, value)
            if is_whole(value):
                object.__setattr__(self, item.name, int(value))  # numpy's integers are no JSON
        if self.length_buckets is not None:
            object.__setattr__(self, "length_buckets", tuple(sorted(set(map(int, self.length_buckets)))))
        check_together(self)

    @property
    def keeps(self) -> bool:
        """Whether optimizer steps are kept (`global_batch_size` is keep or a number)."""
        return self.global_batch_size != "fill"

    @property
    def has_auto(self) -> bool:
        """Whether a budget is still to be chosen."""
        return bool(self.auto_keys)

    @property
    def auto_keys(self) -> list[str]:
        """The budgets that are still to be chosen."""
        return [key for key in BUDGETS if getattr(self, key) == AUTO]

    def resolved(self, **budgets: int | None) -> ResolvedConfig:
        """The same with these budgets in the place of `auto`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return ResolvedConfig(**values | budgets)

    @classmethod
    def from_block(cls, block: Any) -> ODBConfig:
        """Make a config from what stands under `odb:` in the YAML (a mapping of keys to values)."""
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"odb: {quoted(block)} is not a block of keys; write `odb:` with at least `token_budget: 8192` under "
                "it, or take it out to train without odb_factory."
            )
        known = {item.name: item for item in dataclasses.fields(cls)}
        for name in block:
            if name not in known:
                raise ConfigError(unknown_key(name, block[name], known))
        if "token_budget" not in block:
            raise ConfigError(
                "odb.token_budget: missing; set it to the tokens one micro-batch may hold, padding included, "
                "for example `token_budget: 8192`."
            )
        if block.get("lr_reference_samples") not in (None, "none", "None") and "lr_scale" not in block:
            raise ConfigError(
                f"odb.lr_reference_samples: {quoted(block['lr_reference_samples'])} has no effect without lr_scale; "
                "set `lr_scale: sqrt` or `linear`, or leave the key out."
            )
        fraction = block.get("memory_fraction", cls.memory_fraction)
        if fraction != cls.memory_fraction and AUTO not in [block.get(name) for name in BUDGETS]:
            raise ConfigError(
                f"odb.memory_fraction: {quoted(fraction)} has no effect without a budget of auto; set "
                "`token_budget: auto` or `max_patches: auto`, or leave the key out."
            )
        if block.get("loss_scaling") == "":  # the default's own way to say that nothing was given
            check_value(known["loss_scaling"], "")
        # YAML's own word for nothing is `null`; people write the word, as YAML or as Python spells it.
        values: dict[str, Any] = {
            name: None if value in ("none", "None") and is_optional(known[name]) else value
            for name, value in block.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class ResolvedConfig(ODBConfig):
    """A config whose budgets are numbers: what a run, its loader and its plans are made from."""

    if TYPE_CHECKING:
        token_budget: int
        max_patches: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.has_auto, "a budget has not been chosen yet"
