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


def record(
    name="gpt2",
    chunk_nbytes=10**9,
    machine=H100,
    checkpointing=False,
    max_norm=1.0,
    num_micro_batches=1,
    **settings,
):
    def make():
        model = make_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def make_inputs():
        return {key: torch.zeros_like(value) for key, value in make_batch(name, seed=0).items()}

    config = {**SMALL, "device_budget": "1GiB", "chunk_budget": chunk_nbytes, **settings}
    return record_step(
        make, make_inputs, machine, config=config, max_norm=max_norm, num_micro_batches=num_micro_batches
    )


def check(found, budget, machine=H100):
    """The replay of a recording is what the engine did, also by plans that are made anew for the same budget."""
    again = replay(found.script, found.plans, found.traces[0].chunk_nbytes, machine)
    assert again.duration_ns == found.timeline.duration_ns
    assert again.busy_ns() == found.timeline.busy_ns()
    assert again.waits_by_place() == found.timeline.waits_by_place()
    assert all(plan.num_loads > 0 for plan in found.plans)
    assert found.on(machine, 2**30, budget).duration_ns == found.timeline.duration_ns, "the same plans"


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
    "slow bus": {"machine": dataclasses.replace(H100, to_device_bandwidth=1e7, to_host_bandwidth=3e7)},
    "slow host": {"machine": dataclasses.replace(H100, host_bandwidth=1e7, operator_s=1e-4)},
    "two micro-batches": {"num_micro_batches": 2},
    "four micro-batches": {"num_micro_batches": 4},
    "accumulation without clipping": {"num_micro_batches": 2, "max_norm": None},
    "accumulation with recomputation": {"num_micro_batches": 2, "checkpointing": True},
    "accumulation by age": {"num_micro_batches": 4, "eviction": "lru", "prefetch_depth": 0},
}


@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_the_simulator_takes_as_long_as_the_engine(how, factor):
    how = {"placement": "host", **how}
    smallest = smallest_budget(make_model(how.get("name", "gpt2")), "bf16", checkpointing=True)
    check(record(**how, chunk_nbytes=int(factor * smallest)), int(factor * smallest), how.get("machine", H100))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_simulator_takes_as_long_where_chunks_live_in_the_margin(num_micro_batches):
    budget = 6 * smallest_budget(make_model("gpt2"), "bf16", checkpointing=True)
    found = record(chunk_nbytes=budget, placement="auto", num_micro_batches=num_micro_batches)
    assert found.static
    check(found, budget)


def test_a_step_of_several_micro_batches_has_a_plan_for_each():
    smallest = smallest_budget(make_model("gpt2"), "bf16", checkpointing=True)
    found = record(placement="host", chunk_nbytes=int(1.5 * smallest), num_micro_batches=4)
    assert [trace.kind for trace in found.traces] == ["training first", *["training middle"] * 2, "training last"]
    parts = [part for part, _ in device_ns(found.script, H100)]
    assert parts == [Part.FORWARD, Part.BACKWARD] * 4 + [Part.UPDATE]
    first, second, *_ = found.plans
    assert first.num_loads > second.num_loads, "chunks that stay from one micro-batch are there in the next"
    single = record(placement="host", chunk_nbytes=int(1.5 * smallest))
    assert 3 < found.timeline.busy_ns()[Lane.COMPUTE] / single.timeline.busy_ns()[Lane.COMPUTE] < 5


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
    assert sum(isinstance(entry, Reach) for entry in found.script) == len(found.traces[0].visits)
    assert not any(entry.to_device for entry in found.script if isinstance(entry, Send)), "these are the plan's"


def test_the_host_holds_no_gradients_of_its_own(recording):
    found, _ = recording
    per_parameter = found.host_nbytes / found.num_parameters
    assert 14 <= per_parameter < 17, "value, master and two states, some parameters in fp32, and the workspace"


def test_the_parts_of_a_step_add_up(recording):
    found, _ = recording
    (*_, forward), (*_, backward), (*_, update) = device_ns(found.script, H100)
    assert forward + backward + update == found.timeline.busy_ns()[Lane.COMPUTE]
    assert backward > forward > 0


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
