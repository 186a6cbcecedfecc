from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged beside the line of the first step."""
    monkeypatch.setattr("odb_factory.loop.dataloader.log_first_step", lambda *_, **__: None)
    return caplog


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Its state is shared by all Accelerators of a process, and of other tests."""
    _forget_state()
    yield
    _forget_state()


def _forget_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
