from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Log messages, without the line of the first step."""
    monkeypatch.setattr("odb_factory.loader.log_first_step", lambda *_, **__: None)
    return caplog


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """All Accelerators of a process share their state: this test gets a new one, and leaves none."""
    _forget_state()
    yield
    _forget_state()


def _forget_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
