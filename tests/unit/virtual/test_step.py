"""An operator trace, told chunk by chunk, is what an engine records of the same micro-batch."""

import dataclasses

import pytest
import torch
from models import make_batch, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from trainers import smallest_budget

from hf_patrickstar.engine import PatrickStarEngine
from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.step import Places, StepRules, traces_of
from hf_patrickstar.virtual.driver import VirtualDriver
from hf_patrickstar.virtual.listening import listen
from hf_patrickstar.virtual.recording import _train
from hf_patrickstar.virtual.training import Training, make_adamw

H100 = dataclasses.replace(MACHINES["h100"], num_devices=8, link_bandwidth=1e11)
CASES = {
    "gpt2": {},
    "gpt2 recomputed": {"checkpointing": True},
    "llama": {"name": "llama"},
    "t5": {"name": "t5"},
    "bert": {"name": "bert"},
    "mixtral": {"name": "mixtral"},
    "fp32": {"dtype": "fp32"},
    "two micro-batches": {"num_micro_batches": 2},
    "two processes": {"world_size": 2},
    "four processes, recomputed": {"world_size": 4, "checkpointing": True},
    "two processes and micro-batches": {"world_size": 2, "num_micro_batches": 2},
}


def record(name="gpt2", checkpointing=False, num_micro_batches=1, world_size=1, **settings):
    """What an engine recorded in its first step, and the traces of the operators that its model called."""

    def make():
        model = make_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def make_inputs():
        return {key: torch.zeros_like(value) for key, value in make_batch(name, seed=0).items()}

    # Small enough for chunks to move. With several processes it is large: where room is scarce, an engine gives the
    # buffer of a group back before the next group is reduced, which costs time.
    budget = (
        10**8
        if world_size > 1
        else int(2 * smallest_budget(make_model(name), settings.get("dtype", "bf16"), checkpointing=True))
    )
    config = {"dtype": "bf16", "chunk_numel": 700, "chunk_budget": budget, "placement": "host", **settings}
    training = Training(make, make_inputs, make_adamw, lambda model, inputs: model(**inputs).loss, config, 1)
    training = dataclasses.replace(training, num_micro_batches=num_micro_batches)
    ops = listen(training, H100)
    assert ops is not None
    driver = VirtualDriver(H100)
    with FakeTensorMode(), driver.watching():
        engine = training.make_engine(PatrickStarEngine, driver, world_size)
        driver.begin(engine.manager.chunks)
        _train(engine, training, driver, None)
        recorded = dict(engine.manager.tracer.traces)
        engine.manager.phases.unwind()
    streams, overlaps = engine.resources.streams, engine.collectives.is_asynchronous
    rules = StepRules(num_micro_batches, streams._most_nbytes, overlaps)
    return recorded, {trace.key: trace for trace in traces_of(ops, Places.of(engine._membership.layout), rules)}


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_traces_are_those_of_an_engine(how):
    recorded, told = record(**how)
    assert told.keys() == recorded.keys()
    assert how.get("name", "gpt2") != "gpt2" or any(visit.pinned for t in told.values() for visit in t.visits)
    for key, trace in recorded.items():
        assert told[key] == trace


def test_batches_of_earlier_micro_batches_are_still_there():
    recorded, told = record(num_micro_batches=4)
    nbytes = sum(value.nbytes for value in make_batch("gpt2", seed=0).values())
    for key, num in (("training first", 0), ("training middle", 1), ("training last", 1)):
        (mine,), (theirs,) = (
            [trace for trace in found.values() if trace.key.startswith(key)] for found in (told, recorded)
        )
        # The engine measures the first three alone: later ones of a kind follow its trace.
        gap = {
            visit.non_model_nbytes - other.non_model_nbytes
            for visit, other in zip(mine.visits, theirs.visits, strict=True)
        }
        assert gap == {num * nbytes}
