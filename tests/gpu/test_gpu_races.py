"""Races on a GPU: copies that are slow, and homes that change while copies out of them wait.

``scripts/gpu_check.py`` runs some of these under torch's stream sanitizer, too.
"""

import random

import pytest
import torch
from support.models import make_model
from support.on_gpu import (
    DEVICE,
    adamw,
    assert_same,
    batch_of,
    capped,
    free,
    occupy,
    repeats_itself,
    run_engine,
    run_reference,
)

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.memory.driver import Driver

pytestmark = pytest.mark.gpu


def test_loads_in_flight_survive_a_change_on_the_host(at_home_on_host, exact):
    """The host must not overwrite a chunk's home while an asynchronous copy out of it is still waiting its turn."""
    config = capped("gpt2", 4)
    batch = batch_of("gpt2", 0)
    del batch["labels"]
    outputs = []
    for busy in (False, True):
        model = make_model("gpt2").eval()
        engine = PatrickStarEngine(model, config, adamw(model.parameters()), device=DEVICE)
        other = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
        with torch.no_grad():
            if busy:
                occupy(200_000_000)
            logits = model(**batch).logits
            model.load_state_dict(other)
        outputs.append(logits.cpu())
        engine.detach()
        free()
    assert torch.equal(*outputs)


def slow_copies(monkeypatch):
    """Copies spoil their target and take their time: whoever does not wait reads NaN."""
    chance = random.Random(0)

    def copy(self, source, target, stream):
        with self.inside(stream):
            if not target.is_cpu:
                target.fill_(float("nan"))
            occupy(chance.randrange(5_000_000))
            target.copy_(source, non_blocking=True)

    monkeypatch.setattr(Driver, "copy", copy)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_slow_copies_change_nothing(name, checkpointing, at_home_on_host, monkeypatch, exact):
    is_exact = repeats_itself(run_reference, name, torch.float32, checkpointing)
    config = {**capped(name, 4), "prefetch_depth": 2}
    expected, values, stats = run_engine(name, config, checkpointing=checkpointing)
    slow_copies(monkeypatch)
    ours, other, _ = run_engine(name, config, checkpointing=checkpointing)
    assert stats["prefetches"] > 0
    assert_same((ours, other), (expected, values), is_exact)
