"""Every way to get the `odb:` block wrong ends in one line that names key, value and way out."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import int64

from odb_factory.config import AUTO, BUDGETS, ELSEWHERE, ODBConfig
from odb_factory.errors import ConfigError

MIGRATION = Path(__file__).parents[1] / "docs" / "migration.md"
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
    "seed": None,
}
"""What a block with nothing but `token_budget` means."""
OPTIONAL_NUMBERS = [
    "max_patches",
    "eval_token_budget",
    "pad_to_multiple_of",
    "seed",
]
OPTIONAL = [*OPTIONAL_NUMBERS, "balance"]
WHOLE_NUMBERS = ["token_budget", "row_multiple", *OPTIONAL_NUMBERS, "buffer_size"]
WHOLE_NUMBERS += ["exchange_timeout_s"]
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
MAY_BE_AUTO = (*BUDGETS, "eval_token_budget")
MINIMUM = dict.fromkeys(WHOLE_NUMBERS, 1) | {"seed": 0}
FILL = {"global_batch_size": "fill"}

yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def block(**keys: Any) -> dict[str, Any]:
    """A right block with these keys: some are right with `fill` only."""
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


def test_defaults_and_kinds() -> None:
    """The tables of this file name every key."""
    assert ODBConfig.from_block(block()).to_dict() == DEFAULTS
    others = ["global_batch_size", "memory_fraction", "balance_encoder"]
    assert sorted(DEFAULTS) == sorted([*WHOLE_NUMBERS, *WORDS, *SWITCHES, *others])


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
    """Whether they are kept, and the loss and the balance that go with that by default."""
    config = ODBConfig.from_block(block(**keys))
    assert (config.global_batch_size, config.keeps, config.loss_scaling, config.balance) == resolved
    assert ODBConfig.from_block(config.to_dict()) == config


def test_values_are_normalised() -> None:
    config = ODBConfig(token_budget=int64(4096), seed=int64(3), global_batch_size=int64(8))
    assert {type(config.token_budget), type(config.seed), type(config.global_batch_size)} == {int}
    assert (config.token_budget, config.seed, config.global_batch_size) == (4096, 3, 8)


WRONG = [
    # Keys that contradict each other.
    ({"balance": True, "join": False}, "odb.balance: with `join: false` the epoch ends * set `join: true`"),
    ({"join": False, "global_batch_size": "keep"}, "odb.join: false * set `global_batch_size: fill`"),
    ({"join": False, "global_batch_size": 64}, "odb.join: false * set `global_batch_size: fill`"),
    (
        {"lr_scale": "sqrt", "global_batch_size": 64},
        "odb.lr_scale: 'sqrt' has no effect on kept optimizer steps* set `global_batch_size: fill`",
    ),
    (FILL | {"loss_scaling": "stock"}, "odb.loss_scaling: 'stock' * choose exact"),
    (
        {"token_budget": 8, "pad_to_multiple_of": 16},
        "odb.pad_to_multiple_of: 16 is more than token_budget (8)* raise token_budget",
    ),
    ({"layout": "padded", "pad_to_multiple_of": 16}, "odb.pad_to_multiple_of: 16 has no effect * `layout: flat`"),
    (
        {"pad_to_multiple_of": 512, "eval_token_budget": 256},
        "odb.pad_to_multiple_of: 512 is more than eval_token_budget (256)* raise eval_token_budget",
    ),
    ({"layout": "flat", "row_multiple": 4}, "odb.row_multiple: 4 has no effect with `layout: flat`"),
    ({"oom": "split", "balance_encoder": "auto"}, "odb.oom: 'split' * `balance_encoder` * leave one of both out"),
    ({"balance_encoder": "yes"}, "odb.balance_encoder: 'yes' is not true or false (or auto)*"),
    # Keys without an effect.
    (
        {"memory_fraction": 0.5, "token_budget": 64},
        "odb.memory_fraction: 0.5 has no effect without a budget of auto",
    ),
    # Values of one key.
    ({"global_batch_size": 0}, "odb.global_batch_size: 0 is too small; the least is 1"),
    ({"seed": 2**64}, f"odb.seed: {2**64} is too large"),
    ({"loss_scaling": None}, "odb.loss_scaling: None is not one of * write the word none"),
    ({"lr_scale": "None"}, "odb.lr_scale: 'None' is not one of * write the word none"),
    # Keys that do not exist.
    ({"two\nlines": 1}, "odb.two lines: 1 is set, but there is no such key"),
    ({"token_budget:100": None}, "odb.token_budget:100: YAML takes this for a key* `token_budget: 100`."),
    ({"token_budget": ..., "tokenbudget": 8192}, "odb.tokenbudget: 8192 is set, * `token_budget`?"),
    ({"token_budget": ..., "max_input_length": 8192}, "odb.max_input_length: 8192 * it is called `token_budget`."),
    # A budget is missing.
    ({"token_budget": ...}, "odb.token_budget: missing; * `token_budget: 8192`."),
    ({"token_budget": ..., "max_patches": 100}, "odb.token_budget: missing; * `token_budget: 8192`."),
]


@pytest.mark.parametrize(("keys", "expected"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_blocks_are_refused(keys: dict[str, Any], expected: str) -> None:
    """`...` leaves a key out, `*` is any text."""
    message = refusal({key: value for key, value in block(**keys).items() if value is not ...})
    for part in expected.split("*"):
        assert part in message
    assert message.startswith(expected.split("*")[0])


def test_all_mistakes_of_a_block_are_named() -> None:
    message = refusal(block(token_budget=-1, max_patches="many", balanc=True))
    assert (
        all(name in message for name in ("odb.token_budget", "odb.max_patches", "odb.balanc:")) and "\n" not in message
    )


@pytest.mark.parametrize("content", [None, 8192, "token_budget: 8192", True, [], ["token_budget"], [("a", 1)]])
def test_what_is_not_a_block_of_keys_is_refused(content: Any) -> None:
    message = refusal(content)
    assert repr(content) in message
    assert "token_budget: 8192" in message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("token_buget", "token_budget"),
        ("tokens_budget", "token_budget"),
        ("maxpatches", "max_patches"),
        ("buffersize", "buffer_size"),
        ("loss-scaling", "loss_scaling"),
        ("Join", "join"),
        ("overlength", "overlong"),
        ("on_errors", "on_error"),
        ("audits", "audit"),
        ("seeds", "seed"),
        ("TOKEN_BUDGET", "token_budget"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_key(typo: str, meant: str) -> None:
    message = refusal(block(**{typo: 17}))
    assert message.startswith(f"odb.{typo}: 17 ")
    assert f"did you mean `{meant}`?" in message


def test_a_setting_of_online_dynamic_batching_is_answered_with_ours() -> None:
    """Never with a key that has another meaning; docs/migration.md has the name, too."""
    page = MIGRATION.read_text(encoding="utf-8")
    for name, advice in ELSEWHERE.items():
        message = refusal(block(**{name: 17}))
        assert message == f"odb.{name}: 17 is a setting of online-dynamic-batching; here {advice}."
        assert f"`{name}`" in page or f"{name}=" in page


@pytest.mark.parametrize("name", ["zzz", "nonsense", "max_tokens", "", 1, ("x", "y"), 2.5, None])
def test_a_key_like_no_other_is_answered_with_all_keys(name: Any) -> None:
    message = refusal(block() | {name: 17})
    assert message.startswith(f"odb.{name}: 17 ") and "did you mean" not in message
    assert all(key in message for key in DEFAULTS)


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_whole_numbers(key: str) -> None:
    least = MINIMUM[key]
    assert getattr(ODBConfig.from_block(block(**{key: least})), key) == least
    for value in (True, False, "8192", "1e4", "auto", "", 8192.0, 0.5, float("nan"), [8], {"a": 1}):
        if value == AUTO and key in MAY_BE_AUTO:
            assert getattr(ODBConfig.from_block(block(**{key: value})), key) == AUTO
            continue
        message = refusal(block(**{key: value}))
        assert message.startswith(f"odb.{key}: {value!r} is not a whole number; ") and f"at least {least}" in message
        assert ("or auto" in message, "or none" in message) == (key in MAY_BE_AUTO, key in OPTIONAL)
    for value in (least - 1, least - 2, least - 10**30):
        message = refusal(block(**{key: value}))
        assert message.startswith(f"odb.{key}: {value} is too small; the least is {least}")
        assert ("leave the key out" in message) is (key in OPTIONAL)


@pytest.mark.parametrize("key", WORDS)
def test_words(key: str) -> None:
    """`loss_scaling: none` is a choice, not an absent value."""
    for word in WORDS[key]:
        assert getattr(ODBConfig.from_block(block(**{key: word})), key) == word
    for value in ("Exact", "", "exact ", True, False, None, 0, 1.5, ["drop"], {"a": 1}):
        message = refusal(block(**{key: value}))
        assert message.startswith(f"odb.{key}: {value!r} is not one of ")
        assert all(word in message for word in WORDS[key])


@pytest.mark.parametrize("key", SWITCHES)
def test_switches(key: str) -> None:
    for value in (True, False):
        assert getattr(ODBConfig.from_block(block(**{key: value})), key) is value
    for value in ("true", "yes", "", 0, 1, 1.0, [True]):
        assert refusal(block(**{key: value})).startswith(f"odb.{key}: {value!r} is not true or false")


@pytest.mark.parametrize(
    ("key", "expected", "values"),
    [
        (
            "global_batch_size",
            "is not one of keep, fill or a whole number",
            ["kept", "fill ", "", "16", None, "none", True, False, 1.5, [8]],
        ),
        ("memory_fraction", "is not a share", [0, -0.5, 1.01, 90, float("nan"), True, "0.9", None]),
    ],
)
def test_other_values(key: str, expected: str, values: list[Any]) -> None:
    for value in values:
        assert refusal(block(**{key: value})).startswith(f"odb.{key}: {value!r} {expected}")


def test_none_is_understood_where_a_key_may_be_absent() -> None:
    """YAML's own word is null, people write none; both mean the default."""
    for nothing in (None, "none", "None"):
        for key in OPTIONAL:
            found = ODBConfig.from_block(block() | {key: nothing})
            assert getattr(found, key) is DEFAULTS[key]
    for nothing in (None, "none"):
        for key in ("token_budget", "buffer_size", "join", "audit", "overlong", "on_error"):
            assert f"odb.{key}: {nothing!r} is not " in refusal(block(**{key: nothing}))


@given(key=st.sampled_from(list(DEFAULTS)), value=yaml_values)
def test_any_value_is_taken_as_it_is_or_refused_in_one_line(key: str, value: Any) -> None:
    """No value ends in another exception, and none is changed silently."""
    content = block(**{key: value})
    try:
        config = ODBConfig.from_block(content)
    except ConfigError as error:
        shown, whole = repr(value), f"odb.{key}: {value!r} is "
        assert str(error).startswith(whole if len(shown) <= 200 else whole[:100]), "long values are cut in the middle"
        assert len(str(error).splitlines()) == 1
    else:
        taken = getattr(config, key)
        is_nothing = value in ("none", "None", None) and key in OPTIONAL
        assert taken is value or (is_nothing and taken is (True if key == "balance" else None))


@given(st.dictionaries(st.text(st.characters(min_codepoint=32, max_codepoint=126)), yaml_values, max_size=4))
def test_any_block_of_keys_is_taken_or_refused_in_one_line(content: dict[str, Any]) -> None:
    try:
        config = ODBConfig.from_block(content)
    except ConfigError as error:
        assert str(error).startswith("odb.")
        assert len(str(error).splitlines()) == 1
    else:
        assert set(content) <= set(config.to_dict())


@pytest.mark.parametrize("value", ["9" * 5000, 10**5000, ["x"] * 5000, {"x": "y" * 5000}], ids=type)
def test_a_long_value_makes_no_long_line(value: Any) -> None:
    for key in ("token_budget", "overlong", "audit", "memory_fraction", "unknown"):
        message = refusal({"token_budget": 1} | {key: value})
        assert key in message and len(message) < 1200


def test_a_block_may_be_any_mapping_and_is_not_changed() -> None:
    content = {"token_budget": 4, "seed": "none"}
    assert ODBConfig.from_block(UserDict(content)) == ODBConfig(token_budget=4)
    assert content == {"token_budget": 4, "seed": "none"}


def test_a_config_made_in_python_is_checked_as_well_and_cannot_change() -> None:
    config = ODBConfig.from_block(block(max_patches=7, overlong="drop", audit=True, seed=3))
    assert ODBConfig.from_block(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"^odb\.buffer_size: 0 is too small"):
        ODBConfig(token_budget=1, buffer_size=0)
    with pytest.raises(ConfigError):
        dataclasses.replace(config, overlong="keep")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.token_budget = 2
    with pytest.raises(ValueError):
        ODBConfig(token_budget="many")


def test_budgets_of_auto_are_resolved() -> None:
    """With the other keys; a share of the memory has no effect where no budget is chosen by it."""
    asked = ODBConfig.from_block({"token_budget": "auto", "max_patches": "auto", "memory_fraction": 0.5, "seed": 3})
    found = asked.resolved(token_budget=64, max_patches=None)
    assert asked.auto_keys and not found.auto_keys
    assert (found.token_budget, found.max_patches, found.seed) == (64, None, 3)
    with pytest.raises(AssertionError):
        asked.resolved(max_patches=8)


def test_the_block_is_checked_before_anything_heavy_is_imported() -> None:
    """A typo is answered at once: neither the package nor the config brings in torch or numpy."""
    code = (
        "import sys, odb_factory; odb_factory.ODBConfig.from_block({'token_budget': 1});"
        "print(sorted({'torch', 'numpy', 'transformers', 'llamafactory'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
