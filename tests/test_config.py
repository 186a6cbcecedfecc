"""Every way to get the `odb:` block wrong ends in one line that names key, value and way out."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import int64

from odb_factory.config import AUTO, BUDGETS, ELSEWHERE, ODBConfig
from odb_factory.errors import ConfigError

MIGRATION = Path(__file__).parents[1] / "docs" / "migration.md"
KEYS = [item.name for item in dataclasses.fields(ODBConfig)]
OPTIONAL_NUMBERS = ["max_patches", "pad_to_multiple_of", "collate_workers", "lr_reference_samples", "seed"]
OPTIONAL = [*OPTIONAL_NUMBERS, "balance", "length_buckets"]
WHOLE_NUMBERS = ["token_budget", "row_multiple", *OPTIONAL_NUMBERS, "buffer_size", "balance_group_size"]
WHOLE_NUMBERS += ["exchange_timeout_s"]
WORDS = {
    "loss_scaling": ["stock", "exact", "sample", "square", "approx", "none"],
    "lr_scale": ["none", "sqrt", "linear"],
    "layout": ["auto", "flat", "padded"],
    "cost_model": ["tokens", "time"],
    "overlong": ["singleton", "drop", "error"],
    "on_error": ["raise", "skip"],
    "oom": ["raise", "split"],
    "resume": ["strict", "ignore_data"],
}
SWITCHES = ["join", "audit", "balance"]
MINIMUM = dict.fromkeys(WHOLE_NUMBERS, 1) | {"collate_workers": 0, "seed": 0}

yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def block(**keys: Any) -> dict[str, Any]:
    """A right block with these keys: some are right with `fill` only, and lr_reference_samples beside lr_scale only."""
    needed: dict[str, Any] = {"lr_scale": "none"} if "lr_reference_samples" in keys else {}
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


def test_defaults() -> None:
    """A block with nothing but `token_budget` means what the documentation says."""
    assert ODBConfig.from_block(block()).to_dict() == {
        "token_budget": 8192,
        "max_patches": None,
        "memory_fraction": 0.9,
        "global_batch_size": "keep",
        "layout": "auto",
        "pad_to_multiple_of": None,
        "length_buckets": None,
        "row_multiple": 1,
        "buffer_size": 1024,
        "collate_workers": None,
        "loss_scaling": "stock",
        "lr_scale": "none",
        "lr_reference_samples": None,
        "join": True,
        "balance": True,
        "balance_group_size": 256,
        "cost_model": "tokens",
        "overlong": "singleton",
        "on_error": "raise",
        "oom": "raise",
        "resume": "strict",
        "exchange_timeout_s": 600,
        "audit": False,
        "seed": None,
    }


@pytest.mark.parametrize("scale", ["sqrt", "linear"])
def test_a_scaled_learning_rate_needs_a_reference(scale: str) -> None:
    assert "lr_reference_samples" in refusal(block(lr_scale=scale))
    assert ODBConfig.from_block(block(lr_scale=scale, lr_reference_samples=16)).lr_scale == scale


def test_balance_needs_join() -> None:
    assert "join: true" in refusal(block(balance=True, join=False))


@pytest.mark.parametrize(
    ("keys", "resolved"),
    [
        ({}, ("keep", True, "stock", True)),
        ({"global_batch_size": 64}, (64, True, "stock", True)),
        ({"global_batch_size": "fill"}, ("fill", False, "exact", True)),
        ({"global_batch_size": "fill", "join": False}, ("fill", False, "exact", False)),
        ({"global_batch_size": "fill", "loss_scaling": "none", "balance": False}, ("fill", False, "none", False)),
        ({"balance": False, "loss_scaling": "exact"}, ("keep", True, "exact", False)),
        ({"balance": "none"}, ("keep", True, "stock", True)),
    ],
)
def test_what_follows_from_the_optimizer_steps(keys: dict[str, Any], resolved: tuple[Any, ...]) -> None:
    """Whether they are kept, the loss and the balance that go with that, unless something else is said."""
    config = ODBConfig.from_block(block(**keys))
    assert (config.global_batch_size, config.keeps, config.loss_scaling, config.balance) == resolved
    assert ODBConfig.from_block(config.to_dict()) == config


@pytest.mark.parametrize("value", ["kept", "fill ", "", "16", None, "none", True, False, 1.5, [8]])
def test_what_is_no_size_of_an_optimizer_step_is_refused(value: Any) -> None:
    message = refusal(block(global_batch_size=value))
    assert message.startswith(f"odb.global_batch_size: {value!r} is not one of keep, fill or a whole number")


def test_an_optimizer_step_has_a_sample() -> None:
    assert "the least is 1" in refusal(block(global_batch_size=0))
    assert ODBConfig(token_budget=1, global_batch_size=int64(8)).to_dict()["global_batch_size"] == 8


@pytest.mark.parametrize("size", ["keep", 64])
@pytest.mark.parametrize("keys", [{"join": False}, {"lr_scale": "sqrt", "lr_reference_samples": 16}])
def test_what_only_filled_optimizer_steps_have_is_refused(keys: dict[str, Any], size: Any) -> None:
    message = refusal(block(**keys, global_batch_size=size))
    assert message.startswith(f"odb.{next(iter(keys))}: ") and "set `global_batch_size: fill`" in message


def test_padded_rows_are_not_filled_up() -> None:
    assert "is more than token_budget" in refusal(block(token_budget=8, pad_to_multiple_of=16))
    message = refusal(block(layout="padded", pad_to_multiple_of=16))
    assert message.startswith("odb.pad_to_multiple_of: 16 has no effect") and "layout: flat" in message


def test_sizes_that_micro_batches_are_filled_up_to() -> None:
    assert ODBConfig.from_block(block(length_buckets=[int64(512), 128, 512])).length_buckets == (128, 512)
    for wrong in (512, [], "512", [0], [True], [1.5], ["512"], {}):
        assert "is not a list of whole numbers of at least 1" in refusal(block(length_buckets=wrong))
    assert "9000 is more than token_budget (8192)" in refusal(block(length_buckets=[9000]))
    assert "100 is no multiple of pad_to_multiple_of (16)" in refusal(
        block(length_buckets=[64, 100], pad_to_multiple_of=16)
    )
    assert "has no effect with `layout: flat`" in refusal(block(layout="flat", row_multiple=4))
    assert "leave one of both out" in refusal(block(oom="split", row_multiple=4))


def test_the_weights_of_stock_need_its_optimizer_steps() -> None:
    message = refusal(block(loss_scaling="stock", global_batch_size="fill"))
    assert message.startswith("odb.loss_scaling: 'stock' ") and "exact" in message


def test_every_key_is_explained() -> None:
    assert all(item.metadata["meaning"] for item in dataclasses.fields(ODBConfig))
    assert sorted(KEYS) == sorted(
        [*WHOLE_NUMBERS, *WORDS, *SWITCHES, "global_batch_size", "length_buckets", "memory_fraction"]
    )


@pytest.mark.parametrize("content", [None, 8192, "token_budget: 8192", True, [], ["token_budget"], [("a", 1)]])
def test_what_is_not_a_block_of_keys_is_refused(content: Any) -> None:
    message = refusal(content)
    assert repr(content) in message
    assert "token_budget: 8192" in message


@pytest.mark.parametrize("content", [{}, {"max_patches": 100}])
def test_a_missing_token_budget_is_refused(content: dict[str, Any]) -> None:
    message = refusal(content)
    assert message.startswith("odb.token_budget: missing")
    assert "`token_budget: 8192`" in message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("token_buget", "token_budget"),
        ("tokens_budget", "token_budget"),
        ("maxpatches", "max_patches"),
        ("buffersize", "buffer_size"),
        ("collate_worker", "collate_workers"),
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


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_a_setting_of_online_dynamic_batching_is_answered_with_ours(name: str) -> None:
    """Never with a key that has another meaning; docs/migration.md has the name, too."""
    message = refusal(block(**{name: 17}))
    assert message == f"odb.{name}: 17 is a setting of online-dynamic-batching; here {ELSEWHERE[name]}."
    page = MIGRATION.read_text(encoding="utf-8")
    assert f"`{name}`" in page or f"{name}=" in page


def test_max_input_length_is_the_token_budget() -> None:
    message = refusal({"max_input_length": 8192})
    assert "`token_budget`" in message and "max_patches" not in message


@pytest.mark.parametrize("name", ["zzz", "nonsense", "max_tokens", "", 1, ("x", "y"), 2.5])
def test_a_key_like_no_other_is_answered_with_all_keys(name: Any) -> None:
    message = refusal(block() | {name: 17})
    assert message.startswith(f"odb.{name}: 17 ")
    assert all(key in message for key in KEYS)


def test_an_unknown_key_is_named_before_a_missing_token_budget() -> None:
    """`tokenbudget: 8192` is one mistake, and it is the one that is named."""
    assert refusal({"tokenbudget": 8192}).startswith("odb.tokenbudget: 8192 ")


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [True, False, "8192", "1e4", "auto", "", 8192.0, 0.5, float("nan"), [8], {"a": 1}])
def test_what_is_not_a_whole_number_is_refused(key: str, value: Any) -> None:
    if value == AUTO and key in BUDGETS:
        assert getattr(ODBConfig.from_block(block(**{key: value})), key) == AUTO
        return
    message = refusal(block(**{key: value}))
    assert ("or auto" in message) is (key in BUDGETS)
    assert message.startswith(f"odb.{key}: {value!r} is not a whole number; ")
    assert f"at least {MINIMUM[key]}" in message
    assert ("or none" in message) is (key in OPTIONAL)


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
@pytest.mark.parametrize("below", [1, 2, 10**30])
def test_what_is_too_small_is_refused(key: str, below: int) -> None:
    value = MINIMUM[key] - below
    message = refusal(block(**{key: value}))
    assert message.startswith(f"odb.{key}: {value} is too small; the least is {MINIMUM[key]}")
    assert ("leave the key out" in message) is (key in OPTIONAL)


@pytest.mark.parametrize("key", WHOLE_NUMBERS)
def test_the_least_is_allowed(key: str) -> None:
    assert getattr(ODBConfig.from_block(block(**{key: MINIMUM[key]})), key) == MINIMUM[key]


@pytest.mark.parametrize("key", WORDS)
@pytest.mark.parametrize("value", ["Exact", "", "exact ", True, False, None, 0, 1.5, ["drop"], {"a": 1}])
def test_a_word_that_is_no_choice_is_refused(key: str, value: Any) -> None:
    message = refusal(block(**{key: value}))
    assert message.startswith(f"odb.{key}: {value!r} is not one of ")
    assert all(word in message for word in WORDS[key])


@pytest.mark.parametrize(("key", "word"), [(key, word) for key, words in WORDS.items() for word in words])
def test_every_choice_is_allowed(key: str, word: str) -> None:
    """`loss_scaling: none` is a choice, not an absent value."""
    assert getattr(ODBConfig.from_block(block(lr_reference_samples=8, **{key: word})), key) == word


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", ["true", "yes", "", 0, 1, 1.0, [True]])
def test_what_is_not_true_or_false_is_refused(key: str, value: Any) -> None:
    assert refusal(block(**{key: value})).startswith(f"odb.{key}: {value!r} is not true or false")


@pytest.mark.parametrize("key", SWITCHES)
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_allowed(key: str, value: bool) -> None:
    assert getattr(ODBConfig.from_block(block(**{key: value})), key) is value


@pytest.mark.parametrize("nothing", [None, "none", "None"])
@pytest.mark.parametrize("key", OPTIONAL)
def test_none_is_understood_where_a_key_may_be_absent(key: str, nothing: Any) -> None:
    """YAML's own word is null, people write none; both mean the default."""
    default = True if key == "balance" else None
    assert getattr(ODBConfig.from_block(block(**{key: nothing})), key) is default


@pytest.mark.parametrize("nothing", [None, "none"])
@pytest.mark.parametrize("key", ["token_budget", "buffer_size", "join", "audit", "overlong", "on_error"])
def test_none_is_refused_where_a_key_needs_a_value(key: str, nothing: Any) -> None:
    assert f"odb.{key}: {nothing!r} is not " in refusal(block(**{key: nothing}))


@given(key=st.sampled_from(KEYS), value=yaml_values)
def test_any_value_is_taken_as_it_is_or_refused_in_one_line(key: str, value: Any) -> None:
    """No value ends in another exception, and none is bent into shape silently."""
    content = block(**{key: value})
    try:
        config = ODBConfig.from_block(content)
    except ConfigError as error:
        shown, whole = repr(value), f"odb.{key}: {value!r} is "
        assert str(error).startswith(whole if len(shown) <= 200 else whole[:100]), "long values are cut in the middle"
        assert len(str(error).splitlines()) == 1
    else:
        taken = getattr(config, key)
        if isinstance(value, list):
            assert key == "length_buckets" and taken == tuple(sorted(set(value)))
            return
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


def test_an_unknown_key_of_two_lines_is_refused_in_one() -> None:
    refusal(block(**{"two\nlines": 1}))


def test_a_seed_beyond_64_bits_is_refused() -> None:
    """Such a seed would end in an error of torch, far from the YAML."""
    refusal(block(seed=2**64))


def test_more_workers_than_any_machine_has_are_refused() -> None:
    assert "the most is 1024" in refusal(block(collate_workers=100_000))


@pytest.mark.parametrize("nothing", [None, "none", "None"])
def test_no_reference_needs_no_scale(nothing: Any) -> None:
    block = {"token_budget": 1, "lr_reference_samples": nothing}
    assert ODBConfig.from_block(block).lr_reference_samples is None


@pytest.mark.parametrize("value", ["9" * 5000, 10**5000, ["x"] * 5000, {"x": "y" * 5000}], ids=type)
@pytest.mark.parametrize("key", ["token_budget", "overlong", "audit", "memory_fraction", "unknown"])
def test_a_long_value_makes_no_long_line(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ODBConfig.from_block({"token_budget": 1} | {key: value})
    assert key in str(caught.value) and len(str(caught.value)) < 1200 and "\n" not in str(caught.value)


def test_a_reference_without_a_scale_is_refused() -> None:
    assert "lr_scale" in refusal({"token_budget": 1, "lr_reference_samples": 8})


@pytest.mark.parametrize("key", ["loss_scaling", "lr_scale"])
@pytest.mark.parametrize("nothing", [None, "None"])
def test_null_is_told_from_the_choice_none(key: str, nothing: Any) -> None:
    assert "write the word none" in refusal(block(**{key: nothing}))


def test_a_key_without_a_space_behind_its_colon_is_understood() -> None:
    """`odb={token_budget:100}` on the command line is one key to YAML."""
    message = refusal({"token_budget:100": None})
    assert (
        message == "odb.token_budget:100: YAML takes this for a key; put a space behind the colon, `token_budget: 100`."
    )


def test_a_key_that_is_no_word_is_like_no_other() -> None:
    assert "did you mean" not in refusal({None: 1})


def test_integers_of_numpy_are_integers() -> None:
    config = ODBConfig(token_budget=int64(4096), seed=int64(3))
    assert (type(config.token_budget), config.token_budget, type(config.seed)) == (int, 4096, int)


def test_a_block_may_be_any_mapping_and_is_not_changed() -> None:
    class Block(Mapping):
        def __getitem__(self, key: str) -> Any:
            return {"token_budget": 4, "seed": "none"}[key]

        def __iter__(self) -> Any:
            return iter(("token_budget", "seed"))

        def __len__(self) -> int:
            return 2

    assert ODBConfig.from_block(Block()) == ODBConfig(token_budget=4)
    content = block(max_patches="none")
    ODBConfig.from_block(content)
    assert content == {"token_budget": 8192, "max_patches": "none"}


def test_to_dict_makes_the_same_config_again() -> None:
    config = ODBConfig.from_block(block(max_patches=7, collate_workers=0, overlong="drop", audit=True, seed=3))
    assert ODBConfig.from_block(config.to_dict()) == config


def test_a_config_made_in_python_is_checked_as_well_and_cannot_change() -> None:
    with pytest.raises(ConfigError, match=r"^odb\.buffer_size: 0 is too small"):
        ODBConfig(token_budget=1, buffer_size=0)
    with pytest.raises(ConfigError):
        dataclasses.replace(ODBConfig(token_budget=1), overlong="keep")
    with pytest.raises(dataclasses.FrozenInstanceError):
        ODBConfig(token_budget=1).token_budget = 2
    with pytest.raises(ValueError):
        ODBConfig(token_budget="many")


@pytest.mark.parametrize("value", [0, -0.5, 1.01, 90, float("nan"), True, "0.9", None])
def test_what_is_no_share_is_refused(value: Any) -> None:
    assert f"odb.memory_fraction: {value!r} is not a share" in refusal(block(memory_fraction=value))


def test_budgets_of_auto_are_resolved() -> None:
    """With the other keys; a share of the memory is nobody's business where no budget is chosen by it."""
    asked = ODBConfig.from_block({"token_budget": "auto", "max_patches": "auto", "memory_fraction": 0.5, "seed": 3})
    found = asked.resolved(token_budget=64, max_patches=None)
    assert (asked.has_auto, found.has_auto) == (True, False)
    assert (found.token_budget, found.max_patches, found.seed) == (64, None, 3)
    with pytest.raises(AssertionError):
        asked.resolved(max_patches=8)
    message = refusal({"token_budget": 64, "memory_fraction": 0.5})
    assert message.startswith("odb.memory_fraction: 0.5 has no effect without a budget of auto")


def test_the_block_is_checked_before_anything_heavy_is_imported() -> None:
    """A typo is answered at once: neither the package nor the config brings in torch or numpy."""
    code = (
        "import sys, odb_factory; odb_factory.ODBConfig.from_block({'token_budget': 1});"
        "print(sorted({'torch', 'numpy', 'transformers', 'llamafactory'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
