"""The simulator decides, plans and moves what an engine in virtual time does: in bytes, loads and order.

Seconds differ a little: the host of an engine also launches small operators of the engine itself, which the simulator
leaves out. The models are tiny, so a launch takes longer than most of their operators.
"""

import dataclasses

import pytest
import torch
from support.models import make_batch, make_model
from support.oracle import make_training, record_step
from support.trainers import smallest_budget

from hf_patrickstar.machine import CPU_TIER, find_machine
from hf_patrickstar.schedule.clock import Lane
from hf_patrickstar.schedule.replay import Player
from hf_patrickstar.schedule.script import BlockingCopy, DeviceOp, Reduce

NODE = find_machine("8xh100")
SLOW_BUS = dataclasses.replace(NODE, to_device_bandwidth=1e7)
OVER_BUS = {
    **{"factor": 18, "placement": "host"},
    "make_optimizer": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
FEW_CORES = dataclasses.replace(NODE, host_bandwidth=1e8, memory_bandwidth=1e12)
MOVES = (Lane.TO_DEVICE, Lane.TO_HOST, Lane.GATHERS, Lane.REDUCTIONS)


def freeze(model):
    model.transformer.h[0].requires_grad_(False)
    model.enable_input_require_grads()


CASES = {
    "gpt2, little room, on demand, by age": {"factor": 1.3, "eviction": "lru", "prefetch_depth": 0},
    "gpt2, little room, in the order of chunks": {"factor": 1.3, "eviction": "list_order", "prefetch_depth": 2},
    "gpt2, at home on the host, far ahead": {"placement": "host", "prefetch_depth": 6},
    "llama, recomputed": {"name": "llama", "checkpointing": True},
    "t5": {"name": "t5"},
    "mixtral": {"name": "mixtral"},
    "bert, lookups on the CPU": {"name": "bert", "cpu_embedding": True, "checkpointing": True},
    "two micro-batches, recomputed, no clipping": {"num_micro_batches": 2, "checkpointing": True, "max_norm": None},
    "two processes that reshard, fp32 sums": {
        **{"world_size": 2, "factor": 8, "reshard_after_forward": True, "reduce_dtype": "fp32"}
    },
    "four processes, two micro-batches": {"world_size": 4, "num_micro_batches": 2, "factor": 8},
    "a slow bus, in the margin": {"max_norm": None, "machine": SLOW_BUS, "factor": 8},
    "frozen parameters": {"change": freeze},
    "updates over the bus": {**OVER_BUS, "updates": "device", "prefetch_depth": 2},
    "updates over the bus, two micro-batches": {**OVER_BUS, "updates": "device", "num_micro_batches": 2},
    "updates over the bus of two processes": {**OVER_BUS, "updates": "device", "factor": 14, "world_size": 2},
    "updates where they are done first": {**OVER_BUS, "machine": FEW_CORES},
    "fp32 and SGD": {"dtype": "fp32", "make_optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "Adagrad and two micro-batches": {"make_optimizer": torch.optim.Adagrad, "num_micro_batches": 2},
}


def both(name="gpt2", factor=2, machine=NODE, **how):
    """The step of a training by the simulator, and as an engine in virtual time does it.

    ``factor`` says how much room chunks have: so many times what those need that are in use at one moment.
    """
    smallest = smallest_budget(make_model(name), how.get("dtype", "bf16"), checkpointing=True)
    training = make_training(name, **{"chunk_budget": int(factor * smallest), **how})
    return training.simulate(machine), record_step(training, machine)


def moves(timeline):
    """The bytes of each copy and collective, in order, by lane, without copies that the host stops for."""
    spans = [span for span in timeline.own_spans if span.lane in MOVES]
    spans = [span for span in spans if not span.what.startswith(("a blocking copy", "update"))]
    return {lane: [span.what.rpartition(", ")[2] for span in spans if span.lane is lane] for lane in MOVES}


def check(told, done, in_order=lambda found: found, most_more=0.05, seconds=0.13):
    """All is the same but what traces say of non-model data; ``in_order`` puts what moves into an order.

    With several processes the simulator has a part of at most ``most_more`` more on the device. ``seconds`` is the part
    by which seconds may differ.
    """
    layout = told.layout
    assert (len(layout.chunks) * told.world_size, layout.chunk_numel, layout.utilisation) == done.layout
    assert {index for index, load in enumerate(told.loads) if load.is_here} == done.at_home
    assert {index for index, load in enumerate(told.loads) if load.states_nbytes} == done.streamed
    assert told.static == done.static
    assert told.num_on_host == done.num_on_host
    assert told.known.lookups == done.lookups
    assert [plan.moments for plan in told.plans] == [plan.moments for plan in done.plans]
    assert in_order(moves(told.timeline)) == in_order(moves(done.timeline))
    assert told.moved_nbytes == done.moved_nbytes
    assert told.sent_nbytes == done.sent_nbytes
    # Numbers of steps of an optimizer that torch computes are left out.
    assert told.host_owners == pytest.approx(done.on_host, rel=1e-3)
    # The engine still has the batch of the step before. With several processes it gives buffers back earlier.
    told_nbytes = sum(told.device_owners.values())
    assert 0.99 <= told_nbytes / done.device_nbytes <= (1.01 if told.world_size == 1 else 1 + most_more)
    assert told.timeline.duration_ns == pytest.approx(done.timeline.duration_ns, rel=seconds)


def without_activations(made):
    """A trace as an engine records it, which does not see how long autograd keeps what is no parameter."""
    return dataclasses.replace(made, activations=())


def gaps(told, done):
    """What the simulator has more of non-model data at the visits of each micro-batch."""
    found = []
    for mine, theirs in zip(told.traces, done.traces, strict=True):
        numbers = set()
        for visit, other in zip(mine.visits, theirs.visits, strict=True):
            assert dataclasses.replace(other, non_model_nbytes=visit.non_model_nbytes) == visit
            numbers.add(visit.non_model_nbytes - other.non_model_nbytes)
        found.append(numbers)
    return found


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_simulator_does_what_an_engine_does(how, request):
    told, done = both(**how)
    assert bool(done.streamed) == ("over the bus" in request.node.name or "done first" in request.node.name)
    check(told, done, seconds=0.2 if done.streamed else 0.13)  # tensors are so small that each crosses by itself
    assert [without_activations(made) for made in told.traces] == done.traces
    assert list(told.plans) == done.plans
    assert how.get("factor", 2) > 4 or any(plan.num_loads for plan in told.plans)


def test_batches_of_earlier_micro_batches_are_still_there():
    """The engine measures the first three micro-batches alone, of which each has a trace: later ones follow these."""
    told, done = both(num_micro_batches=4)
    check(told, done)
    nbytes = sum(value.nbytes for value in make_batch("gpt2", seed=0).values())
    assert gaps(told, done) == [{0}, {nbytes}, {nbytes}, {nbytes}]


def test_gradients_that_stay_on_the_device_are_counted_as_if_they_left_it():
    """Where all chunks are at home on the device from the beginning, the simulator counts a little more in backward."""
    told, done = both(factor=40)
    check(told, done)
    assert len(done.static) == len(told.loads)
    gradients = [visit.gradient_nbytes for visit in told.traces[0].visits]
    assert gradients[0] == 0
    assert 2 * told.num_parameters < gradients[-1] < 4 * told.num_parameters, "embeddings have 32 bits"
    assert min(gaps(told, done)[0]) == 0
    assert max(visit.non_model_nbytes for visit in told.traces[0].visits) == max(
        visit.non_model_nbytes for visit in done.traces[0].visits
    )


def test_gradients_of_a_tied_embedding_that_is_looked_up_at_home_leave_in_another_order():
    """The engine sends the gradient of the head at the end of backward; the simulator does as soon as it is there."""
    told, done = both(cpu_embedding=True)
    check(told, done, lambda found: {lane: sorted(moved) for lane, moved in found.items()})
    assert [without_activations(made) for made in told.traces] == done.traces


def test_so_it_is_without_an_accelerator():
    """There the host stops for copies of gradients, which the simulator puts into a lane."""
    told, done = both(machine=CPU_TIER, num_micro_batches=2)
    check(told, done, lambda found: found[Lane.TO_DEVICE])
    assert [without_activations(made) for made in told.traces] == done.traces


def test_the_host_waits_for_updates_alone():
    """Forward waits until a chunk's own update has ended. Nothing else stops the host of an engine in a step."""
    training = make_training(chunk_budget=20_000, num_micro_batches=3, placement="host")
    timeline = record_step(training, NODE).timeline
    additions = [span.begin_ns for span in timeline.own_spans if span.what == "add gradients"]
    assert len(additions) > 10, "backward has begun when the first gradients are added"
    updates = [span for span in timeline.own_spans if span.what.startswith("update chunks")]
    ends = {span.begin_ns + span.duration_ns for span in updates}
    assert {wait.begin_ns + wait.duration_ns for wait in timeline.waits} <= ends
    assert updates[-1].begin_ns < min(additions), "a recorded step begins with its update"


def test_the_host_of_a_device_with_room_waits_for_nothing():
    assert not record_step(make_training(num_micro_batches=3), NODE).timeline.waits


def test_copies_and_collectives_begin_when_what_they_need_is_there():
    """Both sides put their work on the clock in the same way, so no difference would show this."""
    player = Player(NODE)
    player.kernel(DeviceOp("long", 0, 10**9, "float32"))
    for begin, lane in ((lambda: player.reduce(Reduce(1)), Lane.COMPUTE), (lambda: player.gather(1), Lane.TO_DEVICE)):
        player.send(10**9, "a load", to_device=True)
        assert begin().time_ns > player.clock.end_of(lane).time_ns
    player.kernel(DeviceOp("long", 0, 10**9, "float32"))
    computed = player.clock.end_of(Lane.COMPUTE).time_ns
    player.blocking_copy(BlockingCopy(4, False, False, "here"))
    assert player.clock.end_of(Lane.HOST).time_ns > computed


def test_the_norm_of_a_gradient_that_is_computed_on_the_host_takes_time_there():
    for max_norm, num in ((1.0, 2), (None, 0)):
        timeline = make_training(cpu_embedding=True, max_norm=max_norm).simulate(NODE).timeline
        norms = [span for span in timeline.own_spans if span.what == "norm" and span.lane is Lane.HOST]
        assert len(norms) == num, "of the embeddings of tokens and of positions"
