"""The errors that users can meet. Each message says what, where, and what to do, in one line."""


class ODBError(Exception):
    """Base of the errors that odb_factory raises. Messages have no control characters."""

    def __init__(self, message: str = ""):
        super().__init__(printable(message))


class ConfigError(ODBError, ValueError):
    """A key of the `odb:` block, alone or together with another setting, cannot work."""


class LayoutError(ConfigError):
    """A model, trainer or batch cannot use flat rows; `layout: auto` takes padded rows then.

    reason: why, in a few words. row: number of the row in the collated batch that is the reason, or None.
    """

    def __init__(self, reason: str, row: int | None = None):
        super().__init__(f"odb.layout: 'flat' is not right here: {reason}; set `layout: padded`, or auto.")
        self.reason, self.row = reason, row


class DataError(ODBError, RuntimeError):
    """A row of the dataset cannot be used and the policy says to stop."""


class CollectiveError(DataError):
    """An error that every rank raises, so that no rank waits and none has to be informed."""


class OutOfMemoryError(ODBError, RuntimeError):
    """A micro-batch does not fit into the memory of the accelerator. `__cause__`: the error of the framework."""


LONGEST = 300
LONGEST_VALUE = 200


def quoted(value: object) -> str:
    """The `repr` of a value for a message, shortened in the middle to 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than some thousand digits
        return f"a number of type {type(value).__name__} with too many digits"
    return _shortened(text, LONGEST_VALUE)


def printable(text: str) -> str:
    """Text with control characters as escapes, so that a file name cannot command a terminal; line breaks stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(error: BaseException) -> str:
    """One line: the message of an `ODBError`, else "Type: message", shortened in the middle to 300 characters.

    The first cause of an error, if any, follows, because the outermost error often has no details. Messages of
    tokenizers, PIL and torch often have several lines; messages of LLaMA-Factory quote whole conversations.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, ODBError):
        return " ".join(str(error).split())
    root_cause: BaseException = error
    while root_cause.__cause__ is not None:
        root_cause = root_cause.__cause__
    text = _named(error)
    return text if root_cause is error else f"{text} (caused by {_named(root_cause)})"


def _named(error: BaseException) -> str:
    return _shortened(printable(" ".join(f"{type(error).__name__}: {error}".split())), LONGEST)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
