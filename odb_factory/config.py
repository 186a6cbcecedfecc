"""`ODBConfig`: every key of the `odb:` block, its type, default and rules. docs/keys.md explains the keys.

Standard library only: the block is checked before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from odb_factory.errors import ConfigError, quoted
from odb_factory.refusals import Refusal, Settings, refuse

AUTO = "auto"
"""The value of a budget that is chosen before training."""
BUDGETS = ("token_budget", "max_patches")
"""Keys that may be `auto`: as large as the memory of the accelerator allows."""
LARGEST = 2**32 - 1
"""The largest number a key takes."""

LossScaling = Literal["stock", "exact", "approx", "none"]
LOSS_SCALINGS: tuple[str, ...] = get_args(LossScaling)
_UNSET: Any = ""

NEAR = 0.7
"""Similarity (difflib, 0 to 1) from which the message suggests a key for an unknown key."""
INSTEAD = {
    # Keys of the package online-dynamic-batching (docs/migration.md).
    "max_input_length": "it is called `token_budget`",
    "prefetch_factor": "it is called `buffer_size`",
    "join_mode": "it is called `join`, and has an effect with `global_batch_size: fill` only",
    "loss_scaling_approx": "set `loss_scaling: approx`",
    "no_sync": "leave it out; `balance: false` keeps samples on the rank that read them",
    "no_warmup": "leave it out: the buffer is full from the first plan on",
    "group_order_flip": "leave it out: the planner decides about the order",
    "version": "leave it out: there is one planner",
    **dict.fromkeys(("train_dataloader", "train_dataset", "training_args"), "leave it out: the trainer is enough"),
    # Keys of the training.
    "micro_batch_size": "set `per_device_train_batch_size` beside the odb: block",
    **dict.fromkeys(
        ("cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_num_workers"),
        "it is one of the training's arguments, which stand beside the odb: block",
    ),
}
"""What to do instead of keys that the block does not have."""


@dataclass(frozen=True, kw_only=True)
class ODBConfig:
    """The `odb:` block of a training YAML; docs/keys.md explains the keys.

    Tokens are counted after expansion, truncation and padding; patches are vision-tower input patches.
    Raises `ConfigError` (a `ValueError`) with a one-line message for a bad value.
    """

    token_budget: int | Literal["auto"]
    max_patches: int | Literal["auto"] | None = None
    memory_fraction: float = 0.9
    eval_token_budget: int | Literal["auto"] | None = None
    global_batch_size: int | Literal["keep", "fill"] = "keep"
    layout: Literal["auto", "flat", "padded"] = "auto"
    pad_to_multiple_of: int | None = None
    row_multiple: int = 1
    buffer_size: int = 1024
    loss_scaling: LossScaling = _UNSET  # stock, or exact with fill
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    join: bool = True
    balance: bool | None = None
    balance_encoder: bool | Literal["auto"] = False
    overlong: Literal["singleton", "drop", "error"] = "singleton"
    on_error: Literal["raise", "skip"] = "raise"
    oom: Literal["raise", "split", "skip"] = "raise"
    recompute: Literal["auto", "always"] = "auto"
    exchange_timeout_s: int = 600
    audit: bool = False

    def __post_init__(self) -> None:
        if self.loss_scaling == _UNSET:
            object.__setattr__(self, "loss_scaling", "stock" if self.keeps else "exact")
        if self.balance is None:
            object.__setattr__(self, "balance", self.join)
        if problems := _problems({name: getattr(self, name) for name in _keys()}):
            raise ConfigError(" ".join(problems))
        for name in _keys():
            if _is_whole(value := getattr(self, name)):
                object.__setattr__(self, name, int(value))  # numpy's integers are not JSON
        refuse(CONTRADICTIONS, {"odb": self})

    @property
    def keeps(self) -> bool:
        """Whether optimizer steps are kept (`global_batch_size` is keep or a number)."""
        return self.global_batch_size != "fill"

    @property
    def auto_keys(self) -> list[str]:
        """The budgets that are `auto`, so not yet chosen."""
        return [key for key in BUDGETS if getattr(self, key) == AUTO]

    def resolved(self, **budgets: int | None) -> ResolvedConfig:
        """This config with these budgets instead of `auto`."""
        return ResolvedConfig(**{name: getattr(self, name) for name in _keys()} | budgets)

    @classmethod
    def from_block(cls, block: Any) -> ODBConfig:
        """Make a config from the value of `odb:` in the YAML, a mapping of keys to values."""
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"odb: {quoted(block)} is not a block of keys; write `odb:` with at least `token_budget: 8192` under "
                "it, or take it out (as the override `odb=null` does) to train without odb_factory."
            )
        keys = _keys()
        # YAML's word for nothing is `null`, but people write `none` or Python's `None`.
        values: dict[str, Any] = {
            name: None if value in ("none", "None") and keys[name].is_optional else value
            for name, value in block.items()
            if name in keys
        }
        unknown = {name: _similar_key(name) for name in block if name not in keys}
        problems = [_unknown_key(name, block[name], similar) for name, similar in unknown.items()]
        if any(name not in INSTEAD and similar is None for name, similar in unknown.items()):
            problems.append(f"The keys of the block are {', '.join(keys)}.")
        if "token_budget" not in {*block, *unknown.values()}:
            problems.append(
                "odb.token_budget: missing; set it to the tokens one micro-batch may hold, padding included, "
                "for example `token_budget: 8192`."
            )
        if problems := problems + _problems(values):
            raise ConfigError(" ".join(problems))
        config = cls(**values)
        refuse([NO_AUTO], {"odb": config})
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _budgets_below_multiple(s: Settings) -> str:
    """The flat budgets that `pad_to_multiple_of` exceeds, with their values."""
    multiple = s.odb.pad_to_multiple_of or 0
    limits = {key: getattr(s.odb, key) for key in ("token_budget", "eval_token_budget")}
    return " and ".join(f"{key} ({n})" for key, n in limits.items() if isinstance(n, int) and n < multiple)


KEPT = "leave it out, or set `global_batch_size: fill`"
CONTRADICTIONS = (
    Refusal("odb.pad_to_multiple_of", lambda s: s.odb.pad_to_multiple_of is not None and s.odb.layout == "padded",
        "has no effect with `layout: padded`, whose rows are padded as the data collator says",
        "leave it out, or set `layout: flat`"),
    Refusal("odb.pad_to_multiple_of", _budgets_below_multiple,
        "is more than {found}, which every flat micro-batch would break",
        "choose a smaller multiple, or raise {found}"),
    Refusal("odb.row_multiple", lambda s: s.odb.row_multiple > 1 and s.odb.layout == "flat",
        "has no effect with `layout: flat`, whose micro-batches are one row", "leave it out"),
    Refusal("odb.oom", lambda s: s.odb.oom != "raise" and s.odb.balance_encoder,
        "computes micro-batches again on one rank, and with `balance_encoder` each needs the others",
        "leave oom out (raise), or set `balance_encoder: false`"),
    Refusal("odb.join", lambda s: s.odb.keeps and not s.odb.join,
        "ends an epoch when one rank runs short, and kept optimizer steps have all samples", KEPT),
    Refusal("odb.lr_scale", lambda s: s.odb.keeps and s.odb.lr_scale != "none",
        "has no effect on kept optimizer steps, which have the samples that learning_rate was chosen for", KEPT),
    Refusal("odb.loss_scaling", lambda s: s.odb.loss_scaling == "stock" and not s.odb.keeps,
        "weighs tokens as in the optimizer steps of stock training, which `global_batch_size: fill` does not keep",
        "leave it out (exact), or leave global_batch_size out (keep)"),
    Refusal("odb.balance", lambda s: s.odb.balance and not s.odb.join,
        "lets ranks run short together, and with `join: false` the epoch ends when one does",
        "set `join: true`, or leave balance out"),
)  # fmt: skip
"""Keys that contradict each other. Each key alone has been checked before."""
NO_AUTO = Refusal(
    "odb.memory_fraction",
    lambda s: s.odb.memory_fraction != ODBConfig.memory_fraction and not s.odb.auto_keys,
    "has no effect without a budget of auto",
    "set `token_budget: auto` or `max_patches: auto`, or leave the key out",
)


def refusals_of_auto(applies: Callable[[Any], Any], why: str, way_out: str) -> list[Refusal]:
    """Refusals of each budget that is `auto` while `applies` is true, because nothing can measure a budget then."""

    def of_budget(key: str) -> Refusal:
        return Refusal(f"odb.{key}", lambda s: getattr(s.odb, key) == AUTO and applies(s), why, way_out)

    return [of_budget(key) for key in BUDGETS]


class ODBKeys(TypedDict, total=False):
    """The keys of `ODBConfig` as typed keyword arguments, for type checkers and completion."""

    token_budget: int | Literal["auto"]
    max_patches: int | Literal["auto"] | None
    memory_fraction: float
    eval_token_budget: int | Literal["auto"] | None
    global_batch_size: int | Literal["keep", "fill"]
    layout: Literal["auto", "flat", "padded"]
    pad_to_multiple_of: int | None
    row_multiple: int
    buffer_size: int
    loss_scaling: LossScaling
    lr_scale: Literal["none", "sqrt", "linear"]
    join: bool
    balance: bool | None
    balance_encoder: bool | Literal["auto"]
    overlong: Literal["singleton", "drop", "error"]
    on_error: Literal["raise", "skip"]
    oom: Literal["raise", "split", "skip"]
    recompute: Literal["auto", "always"]
    exchange_timeout_s: int
    audit: bool


class ResolvedConfig(ODBConfig):
    """A config whose budgets are numbers. Runs, loaders and plans take this config."""

    if TYPE_CHECKING:
        token_budget: int
        max_patches: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.auto_keys, "a budget has not been chosen yet"


def make_config(config: ODBConfig | None, block: Mapping[str, Any]) -> ODBConfig:
    """`config`, or a config made of the keys in `block`."""
    if not isinstance(config, ODBConfig | None):
        raise ConfigError(f"config: {quoted(config)} is not an ODBConfig; give its keys, such as token_budget=8192.")
    if config is None:
        return ODBConfig.from_block(block)
    if block:
        raise ConfigError(f"odb: give config= or its keys ({', '.join(block)}), not both.")
    return config


# ----------------------------------------------------------------------------------------------------------------------
# The rules of a key, derived from its type.


class _Key(NamedTuple):
    """kind: bool, int (at least 1) or float; None if only `choices` are allowed."""

    kind: type | None
    choices: tuple[str, ...]
    is_optional: bool
    default: Any

    def problem(self, value: Any) -> str | None:
        """The fault of a value and its correction, without key and value; None if the value is right."""
        if (value is None and self.is_optional) or (isinstance(value, str) and value in self.choices):
            return None
        if self.kind is float:
            is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
            example = f"is not a share; write a number above 0 and at most 1, such as {self.default}"
            return None if is_share else example
        if self.kind is bool:
            alternatives = f" (or {', '.join(self.choices)})" if self.choices else ""
            return None if isinstance(value, bool) else f"is not true or false{alternatives}"
        if self.kind is int and _is_whole(value):
            if value < 1:
                also = ", or leave the key out" if self.is_optional else ""
                return f"is too small; the least is 1{also}"
            return f"is too large; the most is {LARGEST}" if value > LARGEST else None
        if self.kind is None or self.choices not in ((), (AUTO,)):
            hint = ""
            if "none" in self.choices and value in (None, "None"):
                hint = "; write the word none (YAML's null is not a value), or leave the key out"
            number = "" if self.kind is None else " or a whole number"
            return f"is not one of {', '.join(self.choices)}{number}{hint}"
        also = "".join(f", or {word}" for word in (*self.choices, *(["none"] if self.is_optional else [])))
        quotes = ", without quotes" if isinstance(value, str) and value.strip().isdecimal() else ""
        example = f", such as {value:.0f}" if isinstance(value, float) and 1 <= value <= LARGEST else ""
        return f"is not a whole number; write one of at least 1{example}{also}{quotes}"


@functools.cache
def _keys() -> dict[str, _Key]:
    """The keys of the block and their rules, read from the types of `ODBConfig`."""
    hints, keys = get_type_hints(ODBConfig), {}
    for item in dataclasses.fields(ODBConfig):
        hint = hints[item.name]
        kinds = (hint,) if get_origin(hint) in (Literal, None) else get_args(hint)
        words = [kind for kind in kinds if get_origin(kind) is Literal]
        plain_types = [get_origin(kind) or kind for kind in kinds if kind not in (*words, NoneType)]
        keys[item.name] = _Key(
            plain_types[0] if plain_types else None,
            get_args(words[0]) if words else (),
            NoneType in kinds,
            item.default,
        )
    return keys


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _problems(values: Mapping[str, Any]) -> list[str]:
    """The faults of the values of existing keys, one sentence each."""
    keys = _keys()
    faults = {name: keys[name].problem(value) for name, value in values.items()}
    return [f"odb.{name}: {quoted(values[name])} {problem}." for name, problem in faults.items() if problem is not None]


def _similar_key(name: Any) -> str | None:
    near = difflib.get_close_matches(name.lower(), _keys(), n=1, cutoff=NEAR) if isinstance(name, str) else []
    return near[0] if near else None


def _unknown_key(name: Any, value: Any, similar: str | None) -> str:
    """The message for a key that does not exist, with advice or the most similar key if there is one."""
    shown = " ".join(str(name).split())
    key, colon, value_text = shown.partition(":")
    if colon and value is None and key in _keys():
        return f"odb.{shown}: YAML takes this for a key; put a space after the colon, `{key}: {value_text or 8192}`."
    hint = f"; did you mean `{similar}`?" if similar else "."
    if (instead := INSTEAD.get(name)) is not None:
        hint = f"; {instead}."
    return f"odb.{shown}: {quoted(value)} is set, but there is no such key{hint}"
