"""Check one key of the `odb:` block by its declared type, range and choices. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from odb_factory.errors import ConfigError, quoted

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
