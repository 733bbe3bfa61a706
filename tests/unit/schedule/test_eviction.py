"""Which chunk leaves; tests/property compares Belady's choice with brute force."""

import pytest

from hf_patrickstar.schedule.eviction import Chooser
from hf_patrickstar.schedule.trace import Cursor, Trace, Visit

CHUNKS = [(4, 10), (2, 30), (7, 5), (3, 5)]
"""Chunks, and when each was used last."""


def cursor_of(*chunks):
    return Cursor(Trace("t", (1,) * 10, tuple(Visit(chunk) for chunk in chunks)))


NEXT = cursor_of(0, 4, 3, 2)


@pytest.mark.parametrize(
    ("policy", "chunks", "cursor", "is_diverged", "order"),
    [
        ("lru", CHUNKS, NEXT, False, [3, 7, 4, 2]),
        ("lru", CHUNKS, None, True, [3, 7, 4, 2]),
        ("lru", [], None, False, []),
        ("list_order", CHUNKS, NEXT, False, [2, 3, 4, 7]),
        ("list_order", CHUNKS, None, True, [2, 3, 4, 7]),
        ("belady", CHUNKS, NEXT, False, [7, 2, 3, 4]),
        ("belady", [(4, 1), (2, 2), (9, 4), (8, 5)], NEXT, False, [8, 9, 2, 4]),
        ("belady", CHUNKS, None, False, [2, 3, 4, 7]),
        ("belady", CHUNKS, None, True, [3, 7, 4, 2]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chunks_leave_in_the_order_of_the_policy(policy, chunks, cursor, is_diverged, order):
    """Belady needs a trace: while one is recorded it is list order, after the step has differed from it lru."""
    for given in (chunks, chunks[::-1]):
        assert list(Chooser(policy).in_order(given, cursor, is_diverged=is_diverged)) == order
