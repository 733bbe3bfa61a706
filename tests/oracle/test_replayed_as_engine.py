"""A step is simulated as it ran: with homes, lookups and activations of a run, whatever would have been chosen."""

import pytest
from support.models import make_model
from support.oracle import make_training, record_step
from support.trainers import smallest_budget
from test_offload_as_engine import llama, training_of
from test_same_as_engine import NODE, SLOW_BUS, check

from hf_patrickstar.planner.simulation import Ran


def ran_of(done):
    num_offloaded = max(sum(nbytes > 0 for nbytes in plan.offloaded) for plan in done.plans)
    return Ran(done.at_home, done.lookups, num_offloaded)


def homes(told):
    return {index for index, load in enumerate(told.loads) if load.is_here}


@pytest.mark.parametrize(("name", "world_size"), [("gpt2", 1), ("llama", 1), ("gpt2", 2)])
def test_homes_of_a_run_take_the_place_of_those_that_would_be_chosen(name, world_size):
    settings = {"chunk_budget": 8 * smallest_budget(make_model(name), "bf16", checkpointing=True), "prefetch_depth": 2}
    training, ran = (
        make_training(name, world_size=world_size, placement=placement, **settings) for placement in ("auto", "host")
    )
    done = record_step(ran, SLOW_BUS)
    assert homes(training.simulate(SLOW_BUS)) != done.at_home
    told = training.simulate(SLOW_BUS, ran_of(done))
    check(told, done)
    elsewhere = training.simulate(NODE, ran_of(done))
    assert list(elsewhere.plans) == done.plans
    assert elsewhere.timeline.duration_ns < told.timeline.duration_ns, "the bus is faster there"


def test_lookups_of_a_run_take_the_place_of_those_that_would_be_chosen(monkeypatch):
    monkeypatch.setattr("hf_patrickstar.layout.embedding.MIN_ROWS", 8)
    training = make_training("llama", chunk_budget=20_000, prefetch_depth=2, placement="host")
    chosen = training.simulate(NODE)
    on_device = dict.fromkeys(chosen.known.lookups, "device")
    known = training.simulate(NODE, Ran(frozenset(), on_device, 0)).known
    done = record_step(training, NODE, known)
    assert set(chosen.known.lookups.values()) == {"home"}
    assert done.lookups == on_device
    check(training.simulate(NODE, ran_of(done)), done)


def test_activations_leave_as_they_did():
    asked, others = (training_of(llama, 1, 2, activation_offload=setting) for setting in (True, "auto"))
    done = record_step(asked, NODE, asked.simulate(NODE).known)
    told = others.simulate(NODE, ran_of(done))
    assert [plan.offloaded for plan in told.plans] == [plan.offloaded for plan in done.plans]
    assert sum(done.plans[0].offloaded) > 0
