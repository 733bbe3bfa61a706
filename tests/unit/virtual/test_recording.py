"""Engines in virtual time: the pure simulator replays what the engine did, to the nanosecond."""

import dataclasses
import types

import pytest
import torch
from models import make_batch, make_model
from trainers import smallest_budget

from hf_patrickstar.errors import BudgetError, EngineError
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.machine import MACHINES
from hf_patrickstar.schedule.replay import device_ns, replay
from hf_patrickstar.schedule.script import Part, Reach, Send
from hf_patrickstar.virtual.recording import record_step

H100 = MACHINES["h100"]
SMALL = {"dtype": "bf16", "chunk_numel": 700}


def record(name="gpt2", chunk_nbytes=10**9, machine=H100, checkpointing=False, max_norm=1.0, **settings):
    def make():
        model = make_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def make_inputs():
        return {key: torch.zeros_like(value) for key, value in make_batch(name, seed=0).items()}

    config = {**SMALL, "device_budget": "1GiB", "chunk_budget": chunk_nbytes, **settings}
    return record_step(make, make_inputs, machine, config=config, max_norm=max_norm)


CASES = {
    "gpt2": {},
    "llama": {"name": "llama"},
    "t5": {"name": "t5"},
    "bert": {"name": "bert"},
    "recomputation": {"checkpointing": True},
    "no clipping": {"max_norm": None},
    "fp32": {"dtype": "fp32"},
    "on demand": {"prefetch_depth": 0},
    "far ahead": {"prefetch_depth": 6},
    "by age": {"eviction": "lru"},
    "on the CPU": {"cpu_embedding": True},
    "margin": {"placement": "auto"},
    "slow bus": {"machine": dataclasses.replace(H100, to_device_bandwidth=1e7, to_host_bandwidth=3e7)},
    "slow host": {"machine": dataclasses.replace(H100, host_bandwidth=1e7, operator_s=1e-4)},
}


@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_the_simulator_takes_as_long_as_the_engine(how, factor):
    how = {"placement": "host", **how}
    smallest = smallest_budget(make_model(how.get("name", "gpt2")), "bf16", checkpointing=True)
    budget = int(factor * smallest)
    found = record(**how, chunk_nbytes=budget)
    machine = how.get("machine", H100)
    again = replay(found.script, found.plan, found.trace.chunk_nbytes, machine)
    assert again.duration_ns == found.timeline.duration_ns
    assert again.busy_ns() == found.timeline.busy_ns()
    assert again.waits_by_place() == found.timeline.waits_by_place()
    assert found.plan.num_loads > 0
    if not found.static:  # else a part of the budget is theirs
        assert found.on(machine, 2**30, budget).duration_ns == found.timeline.duration_ns, "the same plan"


@pytest.fixture(scope="module")
def recording():
    smallest = smallest_budget(make_model("gpt2"), "bf16", checkpointing=True)
    return record(placement="host", chunk_nbytes=int(1.5 * smallest)), int(1.5 * smallest)


@pytest.mark.parametrize(
    ("field", "lane"),
    [
        ("to_device_bandwidth", Lane.TO_DEVICE),
        ("to_host_bandwidth", Lane.TO_HOST),
        ("device_bandwidth", Lane.COMPUTE),
        ("host_bandwidth", Lane.HOST),
    ],
)
def test_each_rate_slows_its_lane_alone(recording, field, lane):
    found, budget = recording
    slow = dataclasses.replace(H100, **{field: getattr(H100, field) / 1e5})
    fast, slowed = (found.on(machine, 2**30, budget) for machine in (H100, slow))
    assert slowed.duration_ns > fast.duration_ns
    changed = {lane for lane in Lane if slowed.busy_ns()[lane] != fast.busy_ns()[lane]}
    assert changed == {lane}


def test_less_memory_takes_more_copies_and_never_less_time(recording):
    found, budget = recording
    slow = dataclasses.replace(H100, to_device_bandwidth=1e7)
    timelines = [found.on(slow, 2**30, int(budget * factor)) for factor in (0.9, 1.0, 1.5, 3.0)]
    for figures in (
        [timeline.duration_ns for timeline in timelines],
        [timeline.busy_ns()[Lane.TO_DEVICE] for timeline in timelines],
    ):
        assert figures == sorted(figures, reverse=True)
        assert figures[0] > figures[-1]
    with pytest.raises(BudgetError, match="moment"):
        found.on(slow, 2**30, budget // 8)


def test_gradients_and_chunks_cross_as_often_as_the_engine_counts():
    smallest = smallest_budget(make_model("gpt2"), checkpointing=True)
    found = record(dtype="fp32", placement="host", chunk_nbytes=int(1.5 * smallest))
    stored = sum(entry.nbytes for entry in found.script if isinstance(entry, Send) and not entry.to_device)
    assert stored == 4 * found.num_parameters, "each gradient once"
    assert sum(isinstance(entry, Reach) for entry in found.script) == len(found.trace.visits)
    assert not any(entry.to_device for entry in found.script if isinstance(entry, Send)), "these are the plan's"


def test_the_host_holds_no_gradients_of_its_own(recording):
    found, _ = recording
    per_parameter = found.host_nbytes / found.num_parameters
    assert 14 <= per_parameter < 17, "value, master and two states, some parameters in fp32, and the workspace"


def test_the_parts_of_a_step_add_up(recording):
    found, _ = recording
    parts = device_ns(found.script, H100)
    assert sum(parts.values()) == found.timeline.busy_ns()[Lane.COMPUTE]
    assert parts[Part.BACKWARD] > parts[Part.FORWARD] > 0


def test_data_that_decides_is_no_step_to_record():
    class Fickle(torch.nn.Module):
        """It visits its layers in another order each time."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))
            self.count = 0

        def forward(self, x):
            self.count += 1
            for place in range(6):
                x = self.layers[(place * self.count) % 6](x) + x
            return types.SimpleNamespace(loss=x.sum())

    with pytest.raises(EngineError, match="none of 8 steps"):
        record_step(
            Fickle, lambda: {"x": torch.zeros(2, 64)}, H100, config={"chunk_budget": 50_000, "placement": "host"}
        )
