"""Engines in virtual time: the pure simulator replays what the engine did, to the nanosecond."""

import contextlib
import dataclasses
import types
from unittest import mock

import pytest
import torch
import torch._dynamo
from models import make_batch, make_model
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from trainers import smallest_budget

from hf_patrickstar.errors import BudgetError, ConfigError, EngineError
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.replay import device_ns, replay
from hf_patrickstar.schedule.script import Kernel, Message, Part, Reach, Reduce, Send, ThreadWork
from hf_patrickstar.tracing.costs import HostCache
from hf_patrickstar.virtual import driver
from hf_patrickstar.virtual.recording import record_step

H100 = MACHINES["h100"]
SLOW_BUS = dataclasses.replace(H100, to_device_bandwidth=1e7)
SMALL = {"dtype": "bf16", "chunk_numel": 700}


def record(
    name="gpt2",
    chunk_nbytes=10**9,
    machine=H100,
    checkpointing=False,
    max_norm=1.0,
    num_micro_batches=1,
    world_size=1,
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
        make,
        make_inputs,
        machine,
        config=config,
        max_norm=max_norm,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
    )


def check(found, budget, machine=H100):
    """The replay of a recording is what the engine did, also by plans that are made anew for the same budget."""
    again = replay(found.script, found.plans, found.loads, machine)
    assert again.duration_ns == found.timeline.duration_ns
    assert again.busy_ns() == found.timeline.busy_ns()
    assert again.waits_by_place() == found.timeline.waits_by_place()
    assert any(plan.num_loads > 0 for plan in found.plans)
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


AHEAD = {
    "gpt2": {},
    "recomputation": {"checkpointing": True},
    "llama": {"name": "llama"},
    "far ahead": {"prefetch_depth": 4},
    "two micro-batches": {"num_micro_batches": 2},
}


@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("how", AHEAD.values(), ids=AHEAD)
def test_so_it_does_with_chunks_that_are_carried_over(how, factor):
    how = {"placement": "host", "max_norm": None, "overlap_optimizer": "backward", "machine": SLOW_BUS, **how}
    smallest = smallest_budget(make_model(how.get("name", "gpt2")), "bf16", checkpointing=True)
    found = record(**how, chunk_nbytes=int(factor * smallest))
    check(found, int(factor * smallest), SLOW_BUS)
    plan = found.plans[-1]
    assert plan.ahead.carried
    first = {index for actions in found.plans[0].moments for index in actions.load}
    assert set(plan.ahead.carried) - first, "they were there when the step began"
    assert found.moved_nbytes[0] == sum(
        found.loads[index].nbytes
        for plan in found.plans
        for actions in plan.moments
        for index in (*actions.load, *actions.carry)
    )


NODE = MACHINES["8xh100"]
TOGETHER = {
    "two": {"world_size": 2},
    "eight": {"world_size": 8},
    "two that reshard": {"world_size": 2, "reshard_after_forward": True},
    "eight that reshard": {"world_size": 8, "reshard_after_forward": True},
    "two micro-batches": {"world_size": 2, "num_micro_batches": 2},
    "two micro-batches that reshard": {"world_size": 8, "num_micro_batches": 2, "reshard_after_forward": True},
    "recomputation, no clipping": {"world_size": 2, "checkpointing": True, "max_norm": None},
    "sums in fp32": {"world_size": 8, "reduce_dtype": "fp32"},
    "on demand": {"world_size": 8, "prefetch_depth": 0},
    "slow links": {"world_size": 8, "machine": dataclasses.replace(NODE, link_bandwidth=1e7, message_s=0.01)},
    "slow bus": {"world_size": 2, "machine": dataclasses.replace(NODE, to_device_bandwidth=1e7)},
}


@pytest.mark.parametrize("how", TOGETHER.values(), ids=TOGETHER)
def test_one_of_several_processes_takes_as_long_in_the_simulator(how):
    how = {"placement": "host", "machine": NODE, **how}
    found = record(**how, chunk_nbytes=80_000)
    check(found, 80_000, how["machine"])
    num_gathers = sum(plan.num_loads for plan in found.plans)
    lanes = [span.lane for span in found.timeline.own_spans]
    assert lanes.count(Lane.GATHERS) == num_gathers
    assert lanes.count(Lane.REDUCTIONS) == len(found.loads) * len(found.plans), "each group once in a backward"


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_parts_of_groups_that_live_in_the_margin_do_not_cross_the_bus(num_micro_batches):
    found = record(
        machine=NODE, world_size=2, chunk_nbytes=240_000, placement="auto", num_micro_batches=num_micro_batches
    )
    is_here = [load.is_here for load in found.loads]
    assert set(is_here) == {True, False}
    assert 0 < found.num_on_host < found.num_parameters / 2, "the margin is updated on the device"
    assert not found.static
    check(found, 240_000, NODE)


def test_what_the_host_updates_beside_is_begun_before_the_device_is_told_to_update_the_margin():
    """To launch the update of the device takes the host time, in which its workers can compute."""
    found = record(chunk_nbytes=6 * smallest_budget(make_model("gpt2"), "bf16", checkpointing=True), placement="auto")
    begun = [n for n, entry in enumerate(found.script) if isinstance(entry, ThreadWork) and entry.chunk_indices]
    launched = [n for n, entry in enumerate(found.script) if isinstance(entry, Kernel) and "fused_adam" in entry.name]
    assert begun
    assert launched
    assert max(begun) < min(launched)


def test_processes_have_parts_of_model_data_and_gather_the_rest():
    alone, together = (
        record(machine=NODE, world_size=world_size, placement="host", chunk_nbytes=80_000) for world_size in (1, 8)
    )
    assert together.num_parameters == alone.num_parameters == alone.num_on_host
    assert together.num_on_host < alone.num_parameters / 4
    assert together.host_nbytes < alone.host_nbytes / 4, "an eighth, and padding"
    crossing = [
        sum(entry.nbytes for entry in found.script if isinstance(entry, Send) and not entry.to_device)
        for found in (alone, together)
    ]
    assert crossing[1] < crossing[0] / 4
    sent = sum(entry.nbytes for entry in together.script if isinstance(entry, Reduce))
    assert sent == sum(load.sent_nbytes for load in together.loads), "what is gathered is reduced"
    assert sent == 7 * sum(load.nbytes for load in together.loads)


def test_resharding_gathers_more_often():
    kept, resharded = (
        record(machine=NODE, world_size=2, placement="host", chunk_nbytes=10**6, reshard_after_forward=setting)
        for setting in (False, True)
    )
    assert kept.plans[0].num_loads == len(kept.loads)
    assert resharded.plans[0].num_loads > 1.5 * len(kept.loads), "once in forward, and most of them in backward"


def test_messages_take_the_host_its_time():
    found = record(machine=NODE, world_size=2, placement="host", chunk_nbytes=80_000)
    num_messages = sum(isinstance(entry, Message) for entry in found.script)
    assert num_messages > 3, "a step begins, forward and backward end, and norms are put together"
    slow = dataclasses.replace(NODE, message_s=1.0)
    duration = found.on(slow, 2**30, 80_000).duration_ns
    assert 0.99 * num_messages * 10**9 < duration < 1.01 * num_messages * 10**9


def test_a_machine_needs_a_device_for_every_process():
    with pytest.raises(ConfigError, match="'h100': 2 processes need as many devices, num_devices is 1"):
        record(world_size=2)
    found = record(machine=NODE, world_size=2, placement="host", chunk_nbytes=80_000)
    with pytest.raises(ConfigError, match="2 processes"):
        found.on(H100)


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
    assert parts == [Part.UPDATE] + [Part.FORWARD, Part.BACKWARD] * 4
    first, second, *_ = found.plans
    assert first.num_loads > second.num_loads, "chunks that stay from one micro-batch are there in the next"
    single = record(placement="host", chunk_nbytes=int(1.5 * smallest))
    assert 3 < found.timeline.busy_ns()[Lane.COMPUTE] / single.timeline.busy_ns()[Lane.COMPUTE] < 5


@pytest.fixture(scope="module")
def recording():
    smallest = smallest_budget(make_model("gpt2"), "bf16", checkpointing=True)
    with mock.patch.object(driver, "HostCache", return_value=HostCache(0)):  # all would stay in it
        return record(placement="host", chunk_nbytes=int(1.5 * smallest)), int(1.5 * smallest)


@pytest.mark.parametrize(
    ("field", "lane"),
    [
        ("to_device_bandwidth", Lane.TO_DEVICE),
        ("to_host_bandwidth", Lane.TO_HOST),
        ("device_bandwidth", Lane.COMPUTE),
        ("host_bandwidth", Lane.HOST_WORK),
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
    assert not _get_current_dispatch_mode_stack(), "no mode of operators stays"


def test_dynamo_sees_nothing_of_a_model_with_a_compiled_part():
    """It would compile what the engine and the modes of operators do in it."""

    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
            self.part = torch.compile(self.compute, backend="eager")

        def compute(self, layer, x):
            with contextlib.suppress(ZeroDivisionError):  # where dynamo gives up on a frame, it looks at those below
                x = layer(x) + x
            return torch.nn.functional.gelu(x)

        def forward(self, x):
            for layer in self.layers:
                x = self.part(layer, x)
            return types.SimpleNamespace(loss=x.sum())

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = record_step(
        Compiled, lambda: {"x": torch.zeros(2, 64)}, H100, config={"chunk_budget": 50_000, "placement": "host"}
    )
    assert found.timeline.duration_ns
    assert not counters["frames"]


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_the_host_waits_for_updates_alone(max_norm):
    """Forward waits until a chunk's own update has ended. Nothing else stops the host in a step."""
    timeline = record("gpt2", 20_000, max_norm=max_norm, num_micro_batches=3, placement="host").timeline
    additions = [span.begin_ns for span in timeline.own_spans if span.what == "add gradients"]
    assert len(additions) > 10, "backward has begun when the first gradients are added"
    updates = [span for span in timeline.own_spans if span.what.startswith("update chunks")]
    assert [wait.begin_ns + wait.duration_ns for wait in timeline.waits] == [
        span.begin_ns + span.duration_ns for span in updates
    ]
    assert updates[-1].begin_ns < min(additions), "a recorded step begins with its update"
    assert {wait.place.rpartition(".")[2] for wait in timeline.waits} <= {"load", "wait"}


def test_the_host_of_a_device_with_room_waits_for_nothing():
    assert not record("gpt2", 2**30, num_micro_batches=3, placement="auto").timeline.waits
