"""Activations that leave the devices of two processes: the bits of one process, and the same traffic on both."""

import pytest
import torch
from support import inside
from support.together import alone, engaged, hf_loss, on_one_rank, prepared, train_as_alone

from hf_patrickstar.memory.tiers import Tier

SMALL = {"chunk_numel": 2048, "chunk_budget": 2**18, "device_budget": "1GiB", "debug_collectives": True}


def train(rank, name, checkpointing, accumulation, sizes):
    """Trains without, with, and at a budget that needs it; returns peaks and bytes that left.

    Args:
        sizes: Rows and tokens of a micro-batch, by rank.
    """
    losses = [hf_loss(name, *size) for size in sizes]

    def loss_of(model, step, micro, rank):
        return losses[rank](model, step, micro, rank)

    how = {"accumulation": accumulation}
    expected = on_one_rank(lambda: alone(lambda: prepared(name, checkpointing), loss_of, **how))
    found = []
    for asked in (False, True, "auto"):
        settings = {**SMALL, "activation_offload": asked}
        if asked == "auto":
            room = found[1][0]
            settings["device_budget"] = on_one_rank(lambda room=room: room)
        with engaged(prepared(name, checkpointing), settings, accumulation=accumulation) as engine:
            train_as_alone(engine, expected, loss_of, **how)
            stats = engine.stats()
        found.append((stats["device_total_peak_nbytes"], stats["offloaded_nbytes"], stats["recorded_steps"]))
    assert found[2][0] <= room
    return found


@pytest.mark.parametrize(
    ("name", "checkpointing", "accumulation", "sizes"),
    [
        ("llama", False, 1, ((8, 32), (8, 32))),
        ("gpt2", False, 2, ((8, 32), (8, 32))),
        ("gpt2", False, 1, ((8, 32), (8, 24))),
        ("t5", True, 1, ((32, 32), (32, 32))),
    ],
)
def test_two_processes_train_like_one(pair, name, checkpointing, accumulation, sizes):
    found = pair.run(train, name, checkpointing, accumulation, sizes)
    for without, with_all, as_needed in found:
        assert without[1] == 0 < with_all[1] >= as_needed[1]
        # Of two recomputed layers the memory is mostly that of one; there nothing need leave.
        assert checkpointing or (as_needed[1] > 0 and with_all[0] < without[0])
        assert with_all[2] == as_needed[2] == 0
    if sizes[0] == sizes[1]:
        assert [part[1:] for part in found[0]] == [part[1:] for part in found[1]]


def train_where_a_host_is_small(rank, host_nbytes):
    """Trains, evaluates and trains longer batches; returns how many activations leave, after each step."""
    name, nums = "llama", []
    small = host_nbytes is not None and rank == 1
    settings = {**SMALL, "activation_offload": True, "placement": "host"}
    with engaged(prepared(name, False), {**settings, **({"host_budget": host_nbytes} if small else {})}) as engine:
        for step, tokens in enumerate((24, 24, 40)):
            loss = hf_loss(name, 8, tokens)(engine.model, step, 0, rank)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if not step:
                with torch.no_grad():
                    hf_loss(name, 4, 24)(engine.model, step, 0, rank)
            traces = inside.traces(engine).values()
            nums.append(sorted(trace.num_offloaded for trace in traces if trace.activations))
        return nums, inside.activations(engine).nbytes, engine.ledger.used(Tier.HOST)


def test_a_process_with_little_memory_of_the_host_lets_fewer_leave_on_all(pair):
    """Processes that follow different plans would wait for each other for ever."""
    with_room = pair.run(train_where_a_host_is_small, None)
    assert with_room[0][0] == with_room[1][0]
    nums, nbytes, used = with_room[1]
    assert nbytes > 0
    little = pair.run(train_where_a_host_is_small, used - nbytes // 2)
    assert little[0][0] == little[1][0], "the same on both"
    assert 0 < little[0][0][-1][0] < nums[-1][0]
