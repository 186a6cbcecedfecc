"""The messages that ranks exchange: nothing is lost on the way, and they stay small."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.comm.codec import Failure, decode, encode
from odb_factory.comm.coordinator import RankMetadata
from odb_factory.planning import ROW, BufferMetadata, Cost, CostModel, make_metadata

INT32 = 2**31 - 1
ROW_BYTES, HEADER_BYTES = 19, 240

reasons = st.dictionaries(st.text(max_size=20), st.integers(1, 2**40), max_size=5).map(Counter)
a_row = st.tuples(*[st.integers(0, INT32)] * 4, st.integers(0, 255), st.integers(0, 1), st.booleans())
rows = st.lists(a_row, max_size=50)
windows = st.builds(BufferMetadata, rows.map(lambda rows: np.array(rows, dtype=ROW)), st.booleans())
models = st.builds(CostModel, *[st.integers(0, 2**62)] * 4)
reports = st.builds(
    RankMetadata, windows, reasons, overlong=st.integers(0, INT32), order=st.integers(0, 2**32), model=models
)


@given(reports)
def test_a_report_arrives_as_it_was_sent(report: RankMetadata) -> None:
    arrived = decode(encode(report))
    assert arrived.window.rows.tolist() == report.window.rows.tolist()
    assert dataclasses.replace(arrived, window=report.window) == report
    assert arrived.window.exhausted is report.window.exhausted
    assert isinstance(arrived.rejected, Counter), "it is added up over the ranks"


@given(st.text(max_size=200))
def test_a_reason_to_stop_arrives_as_it_was_sent(message: str) -> None:
    """In any language, empty, or looking like a report."""
    assert decode(encode(Failure(message))) == Failure(message)


@given(reports)
def test_a_report_has_19_bytes_a_sample_and_a_small_header(report: RankMetadata) -> None:
    empty = dataclasses.replace(report, window=make_metadata([], [], True), rejected=Counter())
    assert len(encode(report)) <= ROW_BYTES * len(report.window.rows) + HEADER_BYTES + 200 * len(report.rejected)
    assert len(encode(empty)) <= HEADER_BYTES


@given(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10**6))
def test_messages_do_not_grow_with_tokens_patches_or_pixels(count: int, tokens: int, patches: int) -> None:
    """Two windows of as many samples: one line of text each, or a film."""
    sizes = []
    for cost in (Cost(1), Cost(tokens, patches, tokens, True)):
        window = make_metadata([cost] * count, [0] * count, exhausted=True, sizes=[patches] * count)
        sizes.append(len(encode(RankMetadata(window, Counter()))))
    assert sizes[0] == sizes[1] <= ROW_BYTES * count + HEADER_BYTES
