"""Errors on one line."""

from __future__ import annotations

from odb_factory.comm.coordinator import CollectiveError
from odb_factory.errors import one_line


def test_an_error_of_ours_is_its_message_and_another_has_its_type() -> None:
    assert one_line(CollectiveError("rank 1\nstopped")) == "rank 1 stopped"
    assert one_line(ValueError("bad\nrow")) == "ValueError: bad row"
    assert one_line(KeyboardInterrupt()) == "interrupted from the keyboard"
    assert len(one_line(ValueError("x" * 1000))) < 400
