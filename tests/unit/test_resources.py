"""What an engine runs on: what is decided from the budgets before anything is allocated."""

import pytest
import torch

from hf_patrickstar.config import PatrickStarConfig
from hf_patrickstar.memory.threads import ThreadStreams
from hf_patrickstar.resources import Resources
from hf_patrickstar.units import KIB, MIB


@pytest.mark.parametrize(("budget", "held"), [("64MiB", MIB), ("1MiB", 16 * KIB)])
def test_gradients_in_flight_take_a_64th_of_the_device_budget(monkeypatch, budget, held):
    asked = []
    monkeypatch.setattr(ThreadStreams, "hold_at_most", lambda self, nbytes: asked.append(nbytes))
    config = PatrickStarConfig(device_budget=budget)
    resources = Resources.find(config, torch.device("cpu"), None, lambda: None, lambda event: None)
    resources.streams.close()
    assert asked == [held]
