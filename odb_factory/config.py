"""`ODBConfig`: every key of the `odb:` block, its default, its check and its meaning.

Standard library only: the block is checked before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from odb_factory.config_rules import check_together
from odb_factory.config_values import AUTO, check_value, is_optional, is_whole, unknown_key
from odb_factory.errors import ConfigError, quoted

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
