"""Collectives over one to four processes: values bit for bit, counters, and what is said when a rank is missing."""

import contextlib
import os
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import GROUP_TIMEOUT_S, Workers

from hf_patrickstar.counts import Counts
from hf_patrickstar.dist.collectives import Collectives
from hf_patrickstar.errors import CollectiveError, ConfigError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TRIO = [0, 1, 3]
"""Ranks of a group of three among four processes."""
GUARD = 64


@contextlib.contextmanager
def connected(group=None):
    """Collectives, with ``counts`` of what they did."""
    counts = Counts()
    collectives = Collectives.connect(group, CPU, counts=counts)
    collectives.counts = counts
    try:
        yield collectives
    finally:
        collectives.close()


def counted(counts, *names):
    return tuple(getattr(counts, name) for name in names)


def make_contributions(world_size, numel, dtype):
    """What every rank contributes, the same in every process; values whose sum depends on the order."""
    generator = torch.Generator().manual_seed(world_size)
    scale = torch.rand(world_size, numel, generator=generator) * 8 - 4
    return (torch.randn(world_size, numel, generator=generator) * 2**scale).to(dtype)


def add_in_order(terms):
    """What one process does with the gradients of one micro-batch after the other."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return (total / len(terms)).to(terms.dtype)


def make_guarded(numel, dtype):
    whole = torch.full((numel + 2 * GUARD,), float("nan"), dtype=dtype)
    whole[:GUARD], whole[-GUARD:] = 7, 7
    return whole, whole[GUARD : GUARD + numel]


def check_guards(whole):
    assert torch.equal(whole[:GUARD], torch.full((GUARD,), 7.0, dtype=whole.dtype))
    assert torch.equal(whole[-GUARD:], torch.full((GUARD,), 7.0, dtype=whole.dtype))


# All gather


def gather(rank, numel, dtype, group_ranks=None):
    group = dist.new_group(group_ranks) if group_ranks else None
    if group_ranks and rank not in group_ranks:
        return None
    with connected(group) as collectives:
        world_size, rank = collectives.world_size, collectives.rank
        values = make_contributions(world_size, numel, dtype)
        whole, buffer = make_guarded(world_size * numel, dtype)
        buffer.view(world_size, numel)[rank] = values[rank]
        ticket = collectives.all_gather(buffer, "parameters")
        ticket.wait()
        assert ticket.is_done
        ticket.join()
        ticket.wait()
        reference = [torch.full((numel,), 5, dtype=dtype) for _ in range(world_size)]
        dist.all_gather(reference, values[rank].clone(), group=group)
        assert torch.equal(buffer, torch.cat(reference))
        assert torch.equal(buffer, values.flatten())
        check_guards(whole)
        return counted(collectives.counts, "all_gathers", "reduce_scatters", "sent_nbytes")


@pytest.mark.parametrize(("numel", "dtype"), [(64, torch.float16), (100_003, torch.bfloat16)], ids=str)
def test_slices_of_all_arrive(pair, numel, dtype):
    assert pair.run(gather, numel, dtype) == [(1, 0, numel * dtype.itemsize)] * 2


def test_slices_of_three_and_four_arrive(four):
    numel, dtype = 10_001, torch.float32
    assert four.run(gather, numel, dtype) == [(1, 0, 3 * numel * dtype.itemsize)] * 4
    told = (1, 0, 2 * numel * dtype.itemsize)
    assert four.run(gather, numel, dtype, TRIO) == [told, told, None, told]


# Reduce scatter


def reduce(rank, numel, dtype, group_ranks=None):
    group = dist.new_group(group_ranks) if group_ranks else None
    if group_ranks and rank not in group_ranks:
        return None
    with connected(group) as collectives:
        world_size, rank = collectives.world_size, collectives.rank
        values = make_contributions(world_size, world_size * numel, dtype)
        whole, buffer = make_guarded(world_size * numel, dtype)
        buffer.copy_(values[rank])
        sizes = collectives.staging_numel(numel, dtype)
        spaces = [make_guarded(size, kind) for size, kind in zip(sizes, (dtype, torch.float32), strict=True)]
        staging = tuple(space if space.numel() else None for _, space in spaces)
        ticket = collectives.reduce_scatter(buffer, staging, "gradients")
        ticket.join()
        ticket.wait()
        assert ticket.is_done
        mine = slice(rank * numel, (rank + 1) * numel)
        expected = add_in_order(values[:, mine])
        assert torch.equal(buffer[mine], expected)
        for guarded in (whole, *(space for space, _ in spaces)):
            check_guards(guarded)
        exact = values[:, mine].double().mean(0)
        torch.testing.assert_close(buffer[mine].double(), exact, rtol=2**-7, atol=2**-7)
        # Without these the comparison above would show nothing.
        is_order_visible = not torch.equal(expected, add_in_order(values[:, mine].flip(0)))
        rounded_often = (sum(values[1:, mine], values[0, mine]) / world_size).to(dtype)
        is_rounding_visible = not torch.equal(expected, rounded_often)
        counters = counted(collectives.counts, "all_gathers", "reduce_scatters", "sent_nbytes")
        return counters, sizes, is_order_visible, is_rounding_visible


def reduce_short(rank):
    with connected() as collectives:
        buffer = torch.ones(128, dtype=torch.bfloat16)
        with pytest.raises(CollectiveError, match="scratch space"):
            collectives.reduce_scatter(buffer, (None, None), "gradients")
        with pytest.raises(CollectiveError, match="2 equal slices"):
            collectives.all_gather(buffer[:127], "parameters")
        with pytest.raises(CollectiveError, match="2 equal slices"):
            collectives.all_gather(buffer.view(2, 64), "parameters")


@pytest.mark.parametrize(
    ("numel", "staged", "dtype"), [(64, 64, torch.float16), (600_037, 2 * 299_968, torch.float32)], ids=str
)
def test_slices_of_two_are_averaged(pair, numel, staged, dtype):
    """The larger is cut into three pieces, the first two of more than one tile each."""
    widened = 2 * min(numel, 65_536) if dtype.itemsize == 2 else 0
    for counters, told, _, _ in pair.run(reduce, numel, dtype):
        assert counters == (0, 1, numel * dtype.itemsize)
        assert told == (staged, widened)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_of_four_are_added_by_rank(four, dtype):
    numel = 100_037
    for counters, _, is_order_visible, is_rounding_visible in four.run(reduce, numel, dtype):
        assert counters == (0, 1, 3 * numel * dtype.itemsize)
        assert is_rounding_visible == (dtype.itemsize == 2)
        assert is_order_visible or dtype != torch.float32


# Messages and tensors


def talk(rank):
    with connected() as collectives:
        ranks = list(range(collectives.world_size))
        big = 2**62
        numbers = collectives.exchange([rank, -big, big + rank], "sizes")
        assert numbers == [[other, -big, big + other] for other in ranks]
        assert collectives.exchange([], "nothing") == [[] for _ in ranks]
        assert collectives.exchange({"rank": rank, "x": [rank]}, "config") == [
            {"rank": other, "x": [other]} for other in ranks
        ]
        for source in ranks:
            for dtype in (*DTYPES, torch.int64, torch.bool):
                tensor = torch.full((3, 5), rank == source, dtype=dtype)
                collectives.begin_broadcast(tensor, source, "weights")()
                assert torch.equal(tensor, torch.ones(3, 5, dtype=dtype))
        square = torch.zeros(4, 4)
        square.t()[1:3] = rank + 1.0
        collectives.begin_broadcast(square.t()[1:3], ranks[-1], "columns")()
        assert torch.equal(square.sum(0), torch.tensor([0.0, 4, 4, 0]) * len(ranks))
        collectives.all_reduce(square[:, 1], "a column")
        assert torch.equal(square.sum(0), torch.tensor([0.0, 4 * len(ranks), 4, 0]) * len(ranks))
        weight = torch.nn.Parameter(torch.full((2,), rank + 1.0))
        collectives.all_reduce(weight, "norm")
        assert torch.equal(weight.detach(), torch.full((2,), float(sum(ranks) + len(ranks))))
        collectives.begin_broadcast(torch.ones(0), 0, "nothing")()
        dist.barrier()
        return (
            (collectives.rank, collectives.world_size, collectives.local_world_size),
            counted(collectives.counts, "messages", "all_gathers", "sent_nbytes"),
        )


def connect_again(rank):
    for group, seconds in ((None, GROUP_TIMEOUT_S), (dist.new_group([0, 1], timeout=timedelta(seconds=17)), 17)) * 2:
        collectives = Collectives.connect(group, CPU)
        control = collectives.control
        assert control._get_backend(CPU).options._timeout == timedelta(seconds=seconds)
        assert (control is dist.group.WORLD, control is group) == (False, group is not None)
        assert collectives.exchange([rank], "sizes") == [[0], [1]]
        collectives.close()
        collectives.close()
        with pytest.raises(CollectiveError, match=f"sizes: the collectives of rank {rank} are closed"):
            collectives.exchange([rank], "sizes")


def connect_at_once(rank):
    """A rank that has connected may close at once: that must not break connections that the other one is making."""
    made, new_group = [], dist.new_group

    def make(*args, **settings):
        group = new_group(*args, **settings)
        time.sleep(0.2 * rank)
        made.append(time.monotonic())
        return group

    with mock.patch.object(dist, "new_group", make):
        collectives = Collectives.connect(None, CPU)
    has_connected = time.monotonic()
    assert has_connected > max(collectives.exchange(made[-1], "times"))
    collectives.close()


def connect_outside(rank):
    group = dist.new_group([1])
    if rank == 1:
        assert Collectives.connect(group, CPU).world_size == 1
        return
    with pytest.raises(ConfigError, match="not in the group"):
        Collectives.connect(group, CPU)


def connect_wrong_device(rank):
    with pytest.raises(ConfigError, match="meta"):
        Collectives.connect(None, torch.device("meta"))


def share_cores(rank, has_own):
    before = os.sched_getaffinity(0)
    if has_own:
        os.sched_setaffinity(0, {sorted(before)[rank]})
    try:
        with connected() as collectives:
            return collectives.num_core_sharers, collectives.local_world_size
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each process")
def test_processes_that_have_cores_of_their_own_share_none(pair):
    assert pair.run(share_cores, False) == [(2, 2)] * 2
    assert pair.run(share_cores, True) == [(1, 2)] * 2


def test_two_talk(pair):
    assert pair.run(talk) == [((rank, 2, 2), (3, 0, 0)) for rank in range(2)]


@pytest.mark.parametrize(
    "connect", [connect_again, connect_at_once, connect_outside, connect_wrong_device, reduce_short]
)
def test_groups_are_left_and_joined_again_and_what_is_wrong_is_refused(pair, connect):
    pair.run(connect)


# Somebody is missing


def lose(rank, lost, path, call):
    collectives = Collectives.connect(None, CPU)
    if rank == lost:
        path.touch()
        time.sleep(60)
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        call(collectives)
    text, seconds = str(caught.value), time.monotonic() - begin
    with pytest.raises(CollectiveError) as again:  # and quickly: nobody is asked twice
        collectives.exchange([1], "afterwards")
    collectives.close()
    return text, seconds, str(again.value), time.monotonic() - begin - seconds


def gather_chunk(collectives):
    collectives.all_gather(torch.ones(256), "parameters of chunk 3").wait()


def exchange(collectives):
    collectives.exchange([1], "sizes")


def lose_one(workers, lost, path, call):
    """Runs ``lose``, kills a rank when it has come, and returns what another one says; all others end as well."""
    workers.start(lose, lost, path, call)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    workers.kill(lost)
    results = workers.collect(30)
    assert results[lost] is None
    return results[lost - 1]


def test_a_killed_rank_is_named(tmp_path):
    with Workers(2) as workers:
        text, seconds, again, _ = lose_one(workers, 1, tmp_path / "here", gather_chunk)
    assert text.startswith("parameters of chunk 3: a collective failed on rank 0 of 2: rank 1 has ended (process ")
    for part in ("ddp_timeout", "last checkpoint", "torch.distributed says: "):
        assert part in text
    assert "the store" not in text.partition("torch.distributed says")[0]
    assert seconds < 10
    assert again.startswith("afterwards: a collective failed on rank 0 of 2: rank 1 has ended (process ")


def test_all_others_end_when_one_is_killed(tmp_path):
    with Workers(4) as workers:
        text, seconds, _, _ = lose_one(workers, 2, tmp_path / "here", exchange)
    assert "rank 2 has ended (process " in text
    assert seconds < 10


def reduce_chunk(collectives):
    space = torch.ones(collectives.staging_numel(128, torch.float32)[0])
    collectives.reduce_scatter(torch.ones(256), (space, None), "gradients of chunk 3")


def be_late(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    collectives = Collectives.connect(group, CPU)
    if rank == 1:
        time.sleep(6)
        return None
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        collectives.exchange([1], "sizes of the inputs")
    collectives.close()
    return str(caught.value), time.monotonic() - begin


def test_a_killed_host_of_the_store_is_named(tmp_path):
    with Workers(2, store="tcp") as workers:
        text, seconds, _, more = lose_one(workers, 0, tmp_path / "here", reduce_chunk)
    assert text.startswith("gradients of chunk 3: a collective failed on rank 1 of 2: rank 0 has ended (process ")
    assert "the store where the ranks met is gone" in text
    assert seconds < 10
    assert more < 10


def test_a_rank_that_does_not_come_is_named(pair):
    text, seconds = pair.run(be_late)[0]
    assert text.startswith("sizes of the inputs: a collective failed on rank 0 of 2: rank 1 has not come; ")
    assert re.search(r"rank 1 is at .* in be_late: time\.sleep\(6\)\. Look first", text)
    assert 1 < seconds < 5.9
