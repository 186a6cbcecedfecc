"""Every mistake in the `odb:` block ends in one line that names key and value, and its correction works."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import UserDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import int64

from odb_factory.config import BUDGETS, INSTEAD, ODBConfig
from odb_factory.errors import ConfigError

DEFAULTS = {
    "token_budget": 8192,
    "max_patches": None,
    "memory_fraction": 0.9,
    "eval_token_budget": None,
    "global_batch_size": "keep",
    "layout": "auto",
    "pad_to_multiple_of": None,
    "row_multiple": 1,
    "buffer_size": 1024,
    "loss_scaling": "stock",
    "lr_scale": "none",
    "join": True,
    "balance": True,
    "balance_encoder": False,
    "overlong": "singleton",
    "on_error": "raise",
    "oom": "raise",
    "recompute": "auto",
    "exchange_timeout_s": 600,
    "audit": False,
}
"""The config of a block with `token_budget` only."""
OPTIONAL = ["max_patches", "eval_token_budget", "pad_to_multiple_of", "balance"]
WHOLE_NUMBERS = ["token_budget", "row_multiple", *OPTIONAL[:3], "buffer_size", "exchange_timeout_s"]
WORDS = {
    "loss_scaling": ["stock", "exact", "approx", "none"],
    "lr_scale": ["none", "sqrt", "linear"],
    "layout": ["auto", "flat", "padded"],
    "overlong": ["singleton", "drop", "error"],
    "on_error": ["raise", "skip"],
    "oom": ["raise", "split", "skip"],
    "recompute": ["auto", "always"],
}
SWITCHES = ["join", "audit", "balance"]
NO_NUMBERS = [True, False, "8192", "1e4", "", 8192.0, 0.5, float("nan"), [8], {"a": 1}]
VALUES: list[tuple[str, list[Any], list[Any]]] = [
    *((key, [1, 4096], [0, -1, -(10**30), 2**64, *NO_NUMBERS]) for key in WHOLE_NUMBERS),
    *((key, ["auto"], []) for key in (*BUDGETS, "eval_token_budget", "balance_encoder")),
    *((key, [], ["auto"]) for key in ("row_multiple", "pad_to_multiple_of", "buffer_size", "exchange_timeout_s")),
    *((key, words, ["Exact", "", "exact ", True, False, None, 0, 1.5, ["drop"]]) for key, words in WORDS.items()),
    *((key, [True, False], ["true", "yes", "", 0, 1, 1.0, [True]]) for key in SWITCHES),
    ("global_batch_size", ["keep", "fill", 16], ["kept", "fill ", "", "16", 0, None, "none", True, False, 1.5, [8]]),
    ("memory_fraction", [0.5, 1], [0, -0.5, 1.01, 90, float("nan"), True, "0.9", None]),
    *((key, [], [None, "none"]) for key in ("token_budget", "buffer_size", "join", "audit", "overlong", "on_error")),
]
"""Values that a key accepts, and values that it refuses."""
FILL = {"global_batch_size": "fill"}

yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def block(**keys: Any) -> dict[str, Any]:
    """A valid block with these keys, of which some need `fill`."""
    needed: dict[str, Any] = {}
    if "memory_fraction" in keys:
        needed["token_budget"] = "auto"
    if keys.get("join") is False or keys.get("lr_scale") in ("sqrt", "linear"):
        needed["global_batch_size"] = "fill"
    return {"token_budget": 8192} | needed | keys


def refusal(content: Any) -> str:
    """The message `content` is refused with; one line."""
    with pytest.raises(ConfigError) as caught:
        ODBConfig.from_block(content)
    message = str(caught.value)
    assert message.startswith("odb")
    assert len(message.splitlines()) == 1, message
    return message


@pytest.mark.parametrize(
    ("keys", "resolved"),
    [
        ({}, ("keep", True, "stock", True)),
        ({"global_batch_size": 64}, (64, True, "stock", True)),
        (FILL, ("fill", False, "exact", True)),
        (FILL | {"join": False}, ("fill", False, "exact", False)),
        (FILL | {"loss_scaling": "none", "balance": False}, ("fill", False, "none", False)),
        ({"balance": False, "loss_scaling": "exact"}, ("keep", True, "exact", False)),
        ({"balance": "none"}, ("keep", True, "stock", True)),
    ],
)
def test_what_follows_from_the_optimizer_steps(keys: dict[str, Any], resolved: tuple[Any, ...]) -> None:
    """Whether optimizer steps are kept, and the default loss and balance. The tables of this file name every key."""
    assert ODBConfig.from_block(block()).to_dict() == DEFAULTS and {key for key, *_ in VALUES} == DEFAULTS.keys()
    config = ODBConfig.from_block(block(**keys))
    assert (config.global_batch_size, config.keeps, config.loss_scaling, config.balance) == resolved
    assert ODBConfig.from_block(config.to_dict()) == config


MISTAKES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    # Words for others
    ({"pad_to_multiple_of": "auto"}, "pad_to_multiple_of", {"pad_to_multiple_of": "none"}),
    ({"global_batch_size": "stock"}, "global_batch_size", {"global_batch_size": "keep"}),
    ({"loss_scaling": None}, "loss_scaling", {"loss_scaling": "none"}),
    ({"token_budget": 1e4}, "token_budget", {"token_budget": 10000}),
    # Spelling
    ({"token_budget": ..., "tokenbudget": 8192}, "tokenbudget", {"tokenbudget": ..., "token_budget": 8192}),
    ({"token_budget:100": None}, "token_budget:100", {"token_budget:100": ..., "token_budget": 100}),
    ({"loss-scaling": "exact"}, "loss-scaling", {"loss-scaling": ..., "loss_scaling": "exact"}),
    ({"Join": True}, "Join", {"Join": ..., "join": True}),
    ({"overlength": "drop"}, "overlength", {"overlength": ..., "overlong": "drop"}),
    ({"two\nlines": 1}, "two lines", {"two\nlines": ...}),
    # Missing
    ({"token_budget": ...}, "token_budget", {"token_budget": 8192}),
    # Contradictions
    ({"balance": True, "join": False}, "balance", {"balance": ...}),
    ({"join": False, "global_batch_size": 64}, "join", {"global_batch_size": "fill"}),
    ({"lr_scale": "sqrt", "global_batch_size": 64}, "lr_scale", {"global_batch_size": "fill"}),
    (FILL | {"loss_scaling": "stock"}, "loss_scaling", {"loss_scaling": ...}),
    (FILL | {"loss_scaling": "stock"}, "loss_scaling", {"global_batch_size": ...}),
    ({"token_budget": 8, "pad_to_multiple_of": 16}, "pad_to_multiple_of", {"token_budget": 16}),
    ({"pad_to_multiple_of": 16, "eval_token_budget": 8}, "pad_to_multiple_of", {"eval_token_budget": 16}),
    ({"layout": "padded", "pad_to_multiple_of": 16}, "pad_to_multiple_of", {"layout": "flat"}),
    ({"layout": "flat", "row_multiple": 4}, "row_multiple", {"row_multiple": ...}),
    ({"oom": "split", "balance_encoder": "auto"}, "oom", {"oom": ...}),
    ({"memory_fraction": 0.5, "token_budget": 64}, "memory_fraction", {"token_budget": "auto"}),
    # Keys of the training
    ({"micro_batch_size": 4}, "micro_batch_size", {"micro_batch_size": ...}),
    ({"cutoff_len": 4}, "cutoff_len", {"cutoff_len": ...}),
    # Keys and values of online-dynamic-batching
    ({"token_budget": ..., "max_input_length": 64}, "max_input_length", {"max_input_length": ..., "token_budget": 64}),
    ({"join_mode": False}, "join_mode", {"join_mode": ..., "join": False} | FILL),
    ({"loss_scaling": "token_exact"}, "loss_scaling", {"loss_scaling": "exact"}),
    ({"loss_scaling_approx": True}, "loss_scaling_approx", {"loss_scaling_approx": ..., "loss_scaling": "approx"}),
    ({"no_sync": True}, "no_sync", {"no_sync": ..., "balance": False}),
    ({"prefetch_factor": 256}, "prefetch_factor", {"prefetch_factor": ..., "buffer_size": 256}),
]
"""Mistakes, the key that the message names first, and the correction: keys to change. `...` leaves a key out."""


def without_ellipses(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not ...}


@pytest.mark.parametrize(("keys", "named", "cure"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named_and_its_cure_works(keys: dict[str, Any], named: str, cure: dict[str, Any]) -> None:
    message = refusal(without_ellipses(block(**keys)))
    assert message.startswith(f"odb.{named}: ") and all(key in message for key in cure if key.isprintable())
    names_what_is_meant = any(value is not ... for value in cure.values())
    assert not (names_what_is_meant and all(key in message for key in DEFAULTS)), "not by a list of all keys"
    ODBConfig.from_block(without_ellipses(block(**keys) | cure))


def test_each_fault_is_told_once() -> None:
    """A misspelt `token_budget` is not also missing, and several unknown keys are answered with one list."""
    assert refusal({"tokenbudget": 8192}).count("odb.") == 1
    assert refusal(block(zzz=1, yyy=2)).count("recompute") == 1


LONG = ["9" * 5000, 10**5000, ["x"] * 5000, {"x": "y" * 5000}]
WRONG = {"token_budget": -1, "max_patches": "many", "balanc": True}
CONTRADICTORY = {"join": False, "lr_scale": "sqrt", "row_multiple": 2, "global_batch_size": 8, "layout": "flat"}
REFUSED: list[tuple[Any, list[str]]] = [
    *((content, [repr(content), "token_budget: 8192"]) for content in (None, 8192, "token_budget: 8192", [("a", 1)])),
    *((block() | {key: 17}, [f"odb.{key}: 17 ", *DEFAULTS]) for key in ("zzz", "max_tokens", "", 1, ("x", "y"), None)),
    *((block(**{key: value}), [key]) for key in ("token_budget", "audit", "unknown") for value in LONG),
    # All mistakes are named.
    (block(**WRONG), [f"odb.{key}:" for key in WRONG]),
    (block(**CONTRADICTORY), [f"odb.{key}:" for key in ("join", "lr_scale", "row_multiple")]),
    # Keys from elsewhere are answered with advice, never with a key of another meaning.
    *((block(**{name: 17}), [f"odb.{name}: ", f"{advice}."]) for name, advice in INSTEAD.items()),
]


@pytest.mark.parametrize(("content", "words"), REFUSED)
def test_a_refusal_is_short_and_has_what_is_needed(content: Any, words: list[str]) -> None:
    message = refusal(content)
    assert all(word in message for word in words) and len(message) < 1200


@pytest.mark.parametrize(("key", "right", "wrong"), VALUES, ids=lambda value: value if isinstance(value, str) else "")
def test_values(key: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(ODBConfig.from_block(block(**{key: value})), key) == value
    for value in wrong:
        assert refusal(block(**{key: value})).startswith(f"odb.{key}: {value!r} is ")
    for nothing in (None, "none", "None") if key in OPTIONAL else ():  # YAML's word is null, people write none
        assert getattr(ODBConfig.from_block(block(**{key: nothing})), key) is DEFAULTS[key]


@given(st.dictionaries(st.sampled_from(list(DEFAULTS)) | st.text(max_size=5), yaml_values, max_size=3))
def test_any_block_of_keys_is_taken_as_it_is_or_refused_in_one_line(keys: dict[str, Any]) -> None:
    """No value ends in another exception, and none is changed silently."""
    content = block(**keys)
    try:
        config = ODBConfig.from_block(content)
    except ConfigError as error:
        assert str(error).startswith("odb.") and len(str(error).splitlines()) == 1
        return
    for key, value in content.items():
        is_nothing = key in OPTIONAL and value in ("none", "None", None)
        assert getattr(config, key) is (DEFAULTS[key] if is_nothing else value)


def test_a_config_made_in_python_is_checked_as_well_and_cannot_change() -> None:
    config = ODBConfig(token_budget=int64(4096), overlong="drop", buffer_size=int64(3), global_batch_size=int64(8))
    assert {type(config.token_budget), type(config.buffer_size), type(config.global_batch_size)} == {int}
    assert ODBConfig.from_block(UserDict(config.to_dict())) == config
    with pytest.raises(ConfigError, match=r"^odb\.overlong: 'keep'"):
        dataclasses.replace(config, overlong="keep")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.token_budget = 2


def test_nothing_heavy_is_imported_to_check_a_block_or_to_start_a_command() -> None:
    """A typo is reported at once."""
    code = (
        "import sys, odb_factory; from odb_factory.cli.main import main;"
        "odb_factory.ODBConfig.from_block({'token_budget': 1}); main(['compare', 'nowhere']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "transformers", "llamafactory", "rich", "matplotlib"} & {*done.stdout.split()}
    assert done.stderr.startswith("odb-factory compare: nowhere")
