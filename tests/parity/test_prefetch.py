"""Copies that are started ahead: late ones are waited for, never raced, whatever the policy, depth and placement."""

import contextlib
import functools
import random
import time
from unittest import mock

import pytest
import torch
from support.models import make_model
from support.streams import HandingStreams
from support.trainers import smallest_budget, train_with_engine

from hf_patrickstar.memory.streams import copy_bytes


class SlowCopy:
    """Spoils the target first and takes its time: whoever does not wait reads garbage."""

    def __init__(self, longest_s):
        self.longest_s, self.random, self.count = longest_s, random.Random(0), 0

    def __call__(self, arrays):
        arrays[0].fill(0xFF)
        time.sleep(self.random.uniform(0, self.longest_s))
        self.count += 1
        copy_bytes(arrays)


def handing_to_thread(copy):
    """Inside, engines are made whose copy thread makes all copies that are started ahead, small ones too."""
    if copy is None:
        return contextlib.nullcontext()
    make = functools.partial(HandingStreams, copy=copy)
    return mock.patch("hf_patrickstar.setup.resources.make_streams", make)


def losses_of(name, config, copy=None, accumulation=1, checkpointing=False, steps=4):
    how = {"accumulation": accumulation, "checkpointing": checkpointing, "steps": steps}
    return train_with_engine(name, config, making=handing_to_thread(copy), **how)


WAYS = [(1.3, "belady", 1, "host"), (3.0, "list_order", 3, "auto"), (2.5, "lru", 4, "host")]


def test_delays_change_nothing():
    smallest = smallest_budget(make_model("gpt2"), checkpointing=True)
    expected = losses_of("gpt2", {"device_budget": "1GiB"}, None, 2, True)
    late = 0
    for factor, eviction, depth, placement in WAYS:
        config = {
            "chunk_budget": int(factor * smallest),
            "chunk_numel": 700,
            "eviction": eviction,
            "prefetch_depth": depth,
            "placement": placement,
        }
        copy = SlowCopy(0.002)
        losses, weights, stats = losses_of("gpt2", config, copy, 2, True)
        assert losses == expected[0], config
        for key, value in expected[1].items():
            assert torch.equal(value, weights[key]), (config, key)
        assert copy.count == stats["prefetches"]
        assert stats["device_peak_nbytes"] <= config["chunk_budget"]
        late += stats["late_prefetches"]
        assert stats["waiting_seconds"] > 0 or not stats["late_prefetches"]
    assert late > 0, "nothing was late: the test tests nothing"


def test_a_copy_that_fails_is_an_error_where_the_chunk_is_needed():
    calls = []

    def broken(arrays):
        calls.append(1)
        arrays.clear()
        raise OSError("the copy thread met an error")

    with pytest.raises(OSError, match="the copy thread met an error"):
        losses_of("gpt2", {"chunk_budget": 2 * smallest_budget(make_model("gpt2"))}, broken)
    assert calls
