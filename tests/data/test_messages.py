"""The messages that ranks exchange: nothing is lost on the way, and they stay small."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from odb_factory.batching import Budget, Cost, GroupCost, Offer, make_offer
from odb_factory.data.agreement import Report
from odb_factory.data.exchange import decode, encode

INT32 = 2**31 - 1
GROUP_BYTES, HEADER_BYTES = 16, 120

group_costs = st.builds(GroupCost, *[st.integers(0, INT32)] * 4)
reasons = st.dictionaries(st.text(max_size=20), st.integers(1, 2**40), max_size=5).map(Counter)
fields = {"groups": st.lists(group_costs, max_size=50), "dry": st.booleans()}
others = {item.name: st.integers(0, INT32) for item in dataclasses.fields(Offer) if item.name not in fields}
reports = st.builds(Report, st.builds(Offer, **fields, **others), reasons, overlong=st.integers(0, INT32))


@given(reports)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    arrived = decode(encode(report))
    assert arrived == report
    assert isinstance(arrived.rejected, Counter), "it is added up over the ranks"


@given(st.text(max_size=200))
def test_a_reason_to_stop_arrives_as_it_was_sent(message: str) -> None:
    """In any language, empty, or looking like a report."""
    assert decode(encode(message)) == message


@given(reports)
def test_a_report_has_16_bytes_a_group_and_a_small_header(report: Report) -> None:
    empty = dataclasses.replace(report, offer=dataclasses.replace(report.offer, groups=[]), rejected=Counter())
    assert len(encode(report)) <= GROUP_BYTES * len(report.offer.groups) + HEADER_BYTES + 200 * len(report.rejected)
    assert len(encode(empty)) <= HEADER_BYTES


@given(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10**6))
def test_messages_do_not_grow_with_tokens_patches_or_pixels(rows: int, tokens: int, patches: int) -> None:
    """Two windows of as many groups of as many rows: one line of text each, or a film."""
    short = [Cost(1)] * rows
    films = [Cost(tokens, patches, tokens, True)] * rows
    sizes = []
    for costs in (short, films):
        groups, offer = make_offer(costs, [0] * rows, dry=True, budget=Budget(1))
        assert len(groups) == rows
        sizes.append(len(encode(Report(offer, Counter()))))
    assert sizes[0] == sizes[1] <= GROUP_BYTES * rows + HEADER_BYTES
