"""The messages that ranks exchange: nothing is lost on the way, and they stay small."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.comm.ranks import RankMetadata, decode, encode
from odb_factory.planning import ROW, BufferMetadata, Cost, make_metadata

INT32 = 2**31 - 1
ROW_BYTES, HEADER_BYTES = ROW.itemsize, 240

reasons = st.dictionaries(st.text(max_size=20), st.integers(1, 2**40), max_size=5).map(Counter)
a_row = st.tuples(
    *[st.integers(0, INT32)] * 6,
    st.integers(0, 255),
    st.integers(0, 1),
    *[st.booleans()] * 3,
    *[st.integers(0, INT32)] * 3,
)
rows = st.lists(a_row, max_size=50)
buffers = st.builds(BufferMetadata, rows.map(lambda rows: np.array(rows, dtype=ROW)), st.booleans())
messages = st.builds(RankMetadata, buffers, reasons, overlong=st.integers(0, INT32), order=st.integers(0, 2**32))


@given(messages)
def test_metadata_arrive_as_they_were_sent(metadata: RankMetadata) -> None:
    arrived = decode(encode(metadata))
    assert arrived.buffer.rows.tolist() == metadata.buffer.rows.tolist()
    assert dataclasses.replace(arrived, buffer=metadata.buffer) == metadata
    assert arrived.buffer.exhausted is metadata.buffer.exhausted
    assert isinstance(arrived.rejected, Counter), "it is added up over the ranks"


@given(st.text(max_size=200))
def test_a_reason_to_stop_arrives_as_it_was_sent(message: str) -> None:
    """In any language, empty, or looking like metadata."""
    assert decode(encode(RankMetadata(failure=message))).failure == message


@given(messages)
def test_metadata_have_41_bytes_a_sample_and_a_small_header(metadata: RankMetadata) -> None:
    empty = dataclasses.replace(metadata, buffer=make_metadata([], [], True), rejected=Counter())
    assert ROW_BYTES == 41
    assert len(encode(metadata)) <= ROW_BYTES * len(metadata.buffer.rows) + HEADER_BYTES + 200 * len(metadata.rejected)
    assert len(encode(empty)) <= HEADER_BYTES


@given(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10**6))
def test_messages_hardly_grow_with_tokens_patches_or_pixels(count: int, tokens: int, patches: int) -> None:
    """Two buffers of as many samples: one line of text each, or a film."""
    sizes = []
    for cost in (Cost(1), Cost(tokens, patches, tokens, True)):
        buffer = make_metadata([cost] * count, [0] * count, exhausted=True, sizes=[patches] * count)
        sizes.append(len(encode(RankMetadata(buffer, Counter()))))
    assert sizes[0] <= sizes[1] <= ROW_BYTES * count + HEADER_BYTES
