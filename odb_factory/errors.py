"""The errors a user can meet. Each message says what, where, and what to do, in one line."""


class ODBError(Exception):
    """Base of every error odb_factory raises on purpose."""


class ConfigError(ODBError, ValueError):
    """A key of the `odb:` block, or its combination with another setting, cannot work."""


class DataError(ODBError, RuntimeError):
    """A row of the dataset cannot be used and the policy says to stop."""


class OutOfMemoryError(ODBError, RuntimeError):
    """The accelerator's memory does not hold a micro-batch; the error of the framework is its cause."""


LONGEST = 300
LONGEST_VALUE = 200


def quoted(value: object) -> str:
    """The `repr` of a value for a message, its middle left out if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return f"a number of type {type(value).__name__} with too many digits"
    return _shortened(text, LONGEST_VALUE)


def one_line(error: BaseException) -> str:
    """The type and message of any error on one line, its middle left out if it is long; of ours the message alone.

    Messages of tokenizers, PIL and torch often have several lines; LLaMA-Factory's quote whole conversations.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    if isinstance(error, ODBError):
        return " ".join(str(error).split())
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _shortened(text, LONGEST)


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
