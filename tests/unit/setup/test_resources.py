"""What an engine runs on: what is decided from the budgets before anything is allocated."""

import dataclasses
import logging
import types
import zlib

import pytest
import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.counts import Counts
from hf_patrickstar.machine import ACCELERATOR, MACHINES
from hf_patrickstar.memory.streams import Streams
from hf_patrickstar.setup import resources as module
from hf_patrickstar.setup.resources import Resources
from hf_patrickstar.units import KIB, MIB


@pytest.mark.parametrize(("budget", "held"), [("64MiB", MIB), ("1MiB", 16 * KIB)])
def test_gradients_in_flight_take_a_64th_of_the_device_budget(monkeypatch, budget, held):
    asked = []
    monkeypatch.setattr(Streams, "hold_at_most", lambda self, nbytes: asked.append(nbytes))
    config = PatrickStarConfig(device_budget=budget)
    resources = Resources.find(config, torch.device("cpu"), None, lambda: None, Counts())
    resources.streams.close()
    assert asked == [held]


# The machine


def choose(monkeypatch, num_cores, *others, machine="auto", name="NVIDIA H100 80GB HBM3"):
    """The machine that is chosen beside others, which say the name of a machine and their cores."""
    monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(module, "device_name", lambda device: name)
    monkeypatch.setattr(module, "own_cores", lambda num_sharers: num_cores // num_sharers)
    rows = [[zlib.crc32(other.encode()), cores] for other, cores in others]
    size = 1 + len(rows)
    peers = types.SimpleNamespace(
        world_size=size, num_core_sharers=size, exchange=lambda message, what: [list(message), *rows]
    )
    return module._choose_machine(PatrickStarConfig(machine=machine), torch.device("cpu"), peers)


@pytest.mark.parametrize(
    ("num_cores", "machine", "said"),
    [
        (16, MACHINES["h100"].with_cores(16), "(NVIDIA H100 80GB HBM3), bounded by 16 cores of 48"),
        (64, MACHINES["h100"], ""),
    ],
)
def test_the_cores_of_this_process_bound_the_machine(monkeypatch, caplog, num_cores, machine, said):
    with caplog.at_level(logging.INFO, "hf_patrickstar"):
        assert choose(monkeypatch, num_cores) == machine
    (message,) = caplog.messages
    assert "'h100'" in message
    assert message.endswith(said or "(NVIDIA H100 80GB HBM3)")


def test_the_fewest_cores_of_all_processes_bound_the_machine_of_each(monkeypatch):
    """The host of two has 24 cores of 'h100' for each."""
    half = MACHINES["h100"].shared_by(2)
    assert choose(monkeypatch, 24, ("h100", 6)) == half.with_cores(6)
    assert choose(monkeypatch, 24, ("h100", 12)) == half.with_cores(12)
    assert choose(monkeypatch, 24, ("h100", 18)) == half.with_cores(12)
    assert choose(monkeypatch, 8, ("a100-40", 18)) == ACCELERATOR.shared_by(2).with_cores(4)


def test_a_machine_that_is_named_is_as_its_owner_says(monkeypatch):
    assert choose(monkeypatch, 2, machine="h100") == MACHINES["h100"]
    named = dataclasses.asdict(MACHINES["rtx4090"])
    assert choose(monkeypatch, 2, ("h100", 1), machine=named) == MACHINES["rtx4090"].shared_by(2)
