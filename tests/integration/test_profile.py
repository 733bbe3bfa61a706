"""What the engine does can be seen in a profile, and costs nothing without one."""

import re

import pytest
import torch
from models import make_batch, make_model
from torch.profiler import ProfilerActivity, profile
from trainers import smallest_budget

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.runtime.ranges import named

PREFIX = "patrickstar: "


def step(engine):
    engine.model(**make_batch("gpt2")).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


@pytest.mark.own_streams  # others have smaller tiles
def test_ranges_are_what_the_statistics_count():
    model = make_model("gpt2")
    config = {"chunk_budget": smallest_budget(make_model("gpt2"))}
    engine = PatrickStarEngine(model, config, torch.optim.AdamW(model.parameters(), fused=True))
    step(engine)
    before = engine.stats()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step(engine)
    after = engine.stats()
    updated = [chunk.spec.index for chunk in engine.manager.chunks if chunk.spec.is_updated]
    names = [event.name.removeprefix(PREFIX) for event in found.events() if event.name.startswith(PREFIX)]
    counts = {}
    for name in names:
        what = re.sub(r" chunks? [\d, ]+$", "", name)
        counts[what] = counts.get(what, 0) + 1
    assert counts["load"] + counts.get("bring in ahead", 0) == after["chunk_loads"] - before["chunk_loads"] > 0
    assert counts["evict"] == after["chunk_evictions"] - before["chunk_evictions"] > 0
    assert counts["update"] == 1, "they are small, and updated together"
    assert counts["plan"] == 1
    once = ("before_forward", "after_forward", "backward_begin", "backward_end", "update_begin", "update_end")
    assert [counts[phase] for phase in once] == [1] * 6
    assert counts["after_module"] >= counts["before_module"] > 10
    assert counts["operand_needed"] > 10
    assert counts["store_gradient"] == len(list(model.parameters()))
    assert counts["before_update"] == counts["chunks_updated"] == 1
    assert f"update chunks {', '.join(map(str, updated))}" in names


def test_nothing_is_made_without_a_profiler():
    assert named("load", 3) is named("evict", 4)
