"""Several processes over simulated streams: the bits of one process, no race, and waits that are missed."""

from unittest import mock

import pytest
from support import mutations
from support.race_detector import RaceError, SimulatedStream
from test_training import train_like_one

from hf_patrickstar.memory.streams import Copy

CASES = {
    "kept": ({}, {}),
    "accumulation, recomputation": (
        {"reshard_after_forward": True},
        {"accumulation": 2, "max_norm": 0.3, "checkpointing": True},
    ),
    "large tensors are spread": ({"chunk_numel": 320}, {}),
    "updates over the bus": ({"updates": "device", "placement": "host", "chunk_budget": 600_000}, {"max_norm": 0.3}),
}


@pytest.mark.parametrize(("settings", "how"), CASES.values(), ids=CASES)
def test_copies_at_any_legal_moment_change_nothing(pair, settings, how):
    with pair.over("simulated" if settings else "simulated:1"):
        for stats, _ in pair.run(train_like_one, "gpt2", settings, "updates" not in settings, how):
            assert stats["chunk_loads"] > 0


def train_without(rank, owner, name):
    with mock.patch.object(owner, name, return_value=None):
        train_like_one(rank, "gpt2", {"reshard_after_forward": True}, True, {})


@pytest.mark.parametrize(("owner", "name"), [(Copy, "wait"), (SimulatedStream, "wait_stream")])
def test_a_wait_that_is_missing_is_found(pair, owner, name):
    with pair.over("simulated"), pytest.raises(RaceError):
        pair.run(train_without, owner, name)


def train_without_site(rank, key):
    site = next(site for site in mutations.find_sites(key.split()[0]) if site.key == key)
    with mutations.without(site):
        train_like_one(rank, "gpt2", {"reshard_after_forward": True}, True, {"max_norm": 0.3})


def test_averages_on_their_way_home_are_waited_for(pair):
    key = "runtime/groups.py Groups._release_leaving: self._streams.release_in_flight()"
    with pair.over("simulated"), pytest.raises(RaceError, match="gradients on the device"):
        pair.run(train_without_site, key)
