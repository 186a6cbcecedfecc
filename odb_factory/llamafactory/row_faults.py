"""What in a row, or in its description in dataset_info.json, keeps LLaMA-Factory from using the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from odb_factory.errors import quoted

# What a column may hold, and how a message names it.
TEXT = str, "text"
OPTIONAL_TEXT = str | None, "text or nothing"
FLAG = bool, "true or false"
MESSAGE = Mapping, "one message"
MESSAGES = list, "a list of messages"


def wrong_column(attr: Any, row: Mapping[str, Any], stage: str) -> str | None:
    """The first column whose value LLaMA-Factory's converter does not take, and the value; None if it takes all.

    attr: LLaMA-Factory's `DatasetAttr`. row: as stored. stage: as in the YAML, with `rm` for all stages of pairs.

    Example::

        wrong_column(attr, {"instruction": "2 + 2", "output": 4}, "sft")
        # "column 'output' (columns.response) holds 4 (int), not text"
    """
    is_alpaca = attr.formatting == "alpaca"
    kinds: dict[str, tuple[Any, str]] = {} if is_alpaca else {"messages": MESSAGES}
    if stage == "rm":
        kinds |= dict.fromkeys(("chosen", "rejected"), TEXT if is_alpaca else MESSAGE)
    elif is_alpaca and stage != "pt":
        kinds["response"] = TEXT
    if stage == "kto":
        kinds["kto_tag"] = FLAG
    if is_alpaca:
        kinds |= {key: OPTIONAL_TEXT for key in ("prompt", "query") if getattr(attr, key) is not None}
    for key, (kind, expected) in kinds.items():
        column = getattr(attr, key)
        if column is None:
            return f"dataset_info.json gives no columns.{key}, which stage {stage} needs"
        if not isinstance(value := row.get(column), kind):
            content = "nothing (null)" if value is None else f"{quoted(value)} ({type(value).__name__})"
            return f"column {column!r} (columns.{key}) holds {content}, not {expected}"
    return None if is_alpaca else _wrong_message(attr, row[attr.messages])


def _wrong_message(attr: Any, messages: list[Any]) -> str | None:
    """The first message that is out of turn: without a system prompt, a question and an answer take turns."""
    where = f"column {attr.messages!r} (columns.messages)"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return f"message {number} of {where} is {quoted(message)} ({type(message).__name__}), not {MESSAGE[1]}"
        for key in ("role_tag", "content_tag"):
            if (name := getattr(attr, key)) not in message:
                return f"message {number} of {where} has no {name!r} (tags.{key}), only {', '.join(map(str, message))}"
    roles = [message[attr.role_tag] for message in messages]
    if attr.formatting == "openai":  # answers of tools that follow each other are one turn
        tool = attr.observation_tag
        roles = [role for before, role in zip([None, *roles], roles) if not before == role == tool]
    if attr.system_tag and roles[:1] == [attr.system_tag]:
        del roles[0]
    turns = (("user_tag", "observation_tag"), ("assistant_tag", "function_tag"))
    for number, role in enumerate(roles):
        expected = {getattr(attr, key): f"tags.{key}" for key in turns[number % 2]}
        if role not in expected:
            names = " or ".join(f"{tag!r} ({key})" for tag, key in expected.items())
            return f"turn {number} of {where} has the role {quoted(role)}, not {names}"
    if len(roles) % 2 != attr.ranking:
        last = "a question, which `chosen` and `rejected` answer" if attr.ranking else "an answer"
        return f"{where} has {len(roles)} turns, and the last one must be {last}"
    return None
