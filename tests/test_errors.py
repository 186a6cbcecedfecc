"""Classes of errors, and errors in one line."""

from __future__ import annotations

from odb_factory.errors import CollectiveError, ConfigError, DataError, ODBError, one_line


def test_errors_a_caller_may_catch() -> None:
    """A bad setting is a ValueError, a bad row a RuntimeError, and one name catches both."""
    assert issubclass(ConfigError, ODBError) and issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ODBError) and issubclass(DataError, RuntimeError)


def test_an_error_of_ours_is_its_message_and_another_has_its_type() -> None:
    assert one_line(CollectiveError("rank 1\nstopped")) == "rank 1 stopped"
    assert one_line(ValueError("bad\nrow")) == "ValueError: bad row"
    assert one_line(KeyboardInterrupt()) == "interrupted from the keyboard"
    assert len(one_line(ValueError("x" * 1000))) < 400


def test_the_first_cause_is_named() -> None:
    """The outermost error of a library often has no details."""
    try:
        try:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        except UnicodeEncodeError as error:
            raise RuntimeError("an error occurred while generating the dataset") from error
    except RuntimeError as error:
        line = one_line(error)
    assert line.startswith("RuntimeError: an error occurred while generating the dataset (caused by UnicodeEncodeError")
    assert "surrogates not allowed" in line


def test_no_file_name_commands_a_terminal() -> None:
    name = "img/\x1b]0;title\x07\x1b[31m.png"
    shown = "img/\\x1b]0;title\\x07\\x1b[31m.png"
    assert one_line(FileNotFoundError(name)) == f"FileNotFoundError: {shown}"
    assert str(DataError(f"row 7, no such file: {name}")) == f"row 7, no such file: {shown}"
    assert str(DataError("a\nb: é 日本 🎉")) == "a\nb: é 日本 🎉"
