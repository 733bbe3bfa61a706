"""Messages of any length and on any subject meet, with threads for processes."""

import concurrent.futures

import pytest
import torch
from unit.dist.ranks import Exchange

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.dist.messages import ROW_NBYTES, swap_messages


def talk(*messages):
    """Sends a message of each rank: a value, its subject, and what the rank is about to do.

    Returns:
        What each rank got or raised, and the lengths of the rows that it sent.
    """
    exchange = Exchange(len(messages))

    def send(rank):
        lengths = []

        def gather(rows, own):
            lengths.append(own.numel())
            sent = exchange.swap(rank, own)
            assert len({row.numel() for row in sent}) == 1, "gloo ends a process that gets more than it expects"
            for row, found in zip(rows, sent, strict=True):
                row.copy_(found)

        try:
            return swap_messages(*messages[rank], len(messages), gather), lengths
        except CollectiveError as error:
            return error, lengths

    with concurrent.futures.ThreadPoolExecutor(len(messages)) as pool:
        return list(pool.map(send, range(len(messages))))


@pytest.mark.parametrize("long", [ROW_NBYTES, 10 * ROW_NBYTES])
def test_messages_of_different_lengths(long):
    values = [[], "x" * long, {"a": torch.float32, "b": [-(2**63), 2**62]}]
    for found, lengths in talk(*((value, "trace", f"is {rank}") for rank, value in enumerate(values))):
        assert found == values
        assert lengths[0] == ROW_NBYTES
        assert len(lengths) == 2
        assert long <= sum(lengths) < long + 100, "no longer than the longest"


def test_short_messages_take_one_row():
    values = [list(range(2**62, 2**62 + 170)), None]
    for found, lengths in talk(*((value, "order", "is here") for value in values)):
        assert found == values
        assert lengths == [ROW_NBYTES]


@pytest.mark.parametrize("value", [7, "x" * 10 * ROW_NBYTES], ids=["short", "long"])
def test_different_subjects(value):
    found = talk((value, "trace", "agrees on a trace"), ([1], "order", "reads"), (None, "order", "x" * ROW_NBYTES))
    texts = {str(error) for error, _ in found}
    (text,) = texts
    doings = f"rank 0 agrees on a trace; rank 1 reads; rank 2 {'x' * ROW_NBYTES}"
    assert text.startswith(f"the processes do not do the same: {doings}. Forward, backward")
    assert len({tuple(lengths) for _, lengths in found}) == 1
