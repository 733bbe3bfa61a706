"""Steps that are estimated from their traces, and how near they come to steps whose operators are known."""

import dataclasses

import pytest
import torch
from support.oracle import Training
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.schedule.replay import replay
from hf_patrickstar.schedule.script import Begin, DeviceOp, HostWork, Part, Reach, Send, ThreadWork
from hf_patrickstar.schedule.step_estimate import ChunkWork, estimate_script, num_rows, steps_of
from hf_patrickstar.schedule.trace import Trace, Visit

SIZES = (20, 20)
HOST = ChunkWork(6, 8, 20, 0, "bfloat16")


def make_trace(key="training", *, reduced=()):
    """Forward visits chunks 0, 1, 0; backward 1, 0. Micro-batches have 2 x 5 tokens."""
    visits = [Visit(index) for index in (0, 1, 0, 1)]
    return Trace(key, SIZES, (*visits, Visit(0, reduced=reduced)), (((2, 5),),), (3,))


def update(index):
    return ThreadWork((HostWork("update", 0, 28 * 8),), frozenset({index}), ())


def compute(flops):
    return DeviceOp("compute", flops, 0, "bfloat16")


def test_a_step():
    """Each matrix is multiplied with ten rows; the work of a chunk is spread over its visits."""
    assert estimate_script([make_trace()], [HOST, HOST], frozenset(), overlaps_update=True) == [
        *(Begin(Part.UPDATE), update(0), update(1)),
        Begin(Part.FORWARD),
        *(Reach(0), compute(60), Reach(1), compute(120), Reach(0), compute(60)),
        Begin(Part.BACKWARD),
        *(Reach(1), compute(240), Send(1, 20)),
        *(Reach(0), compute(240), Send(0, 20)),
    ]


def test_gradients_of_micro_batches_are_added_when_they_have_left():
    """Numbers count all that may be waited for: two updates come first."""
    traces = [make_trace("training first"), make_trace("training last")]
    script = estimate_script(traces, [HOST, HOST], frozenset(), overlaps_update=True)
    adding = [entry for entry in script if isinstance(entry, ThreadWork) and not entry.chunk_indices]
    assert [entry.after for entry in adding] == [(2,), (4,), (6,), (8,)]
    assert adding[0].operators == (HostWork("add gradients", 0, 20 + 64),)


ROWS = {(): 1, ((4,),): 4, ((2, 5), (2,)): 10, ((2, 5, 64),): 10, ((2, 3, 224, 224),): 2 * 196, ((2, 3, 8, 8),): 2}


def test_rows_of_a_micro_batch():
    assert {shapes: num_rows(shapes) for shapes in ROWS} == ROWS


def test_steps_that_micro_batches_make():
    short, long = make_trace("training/2x4"), make_trace("training/2x8")
    assert steps_of([short, long], 1) == [[short], [long]]
    first, middle, last = (make_trace(f"training {name}/2x4") for name in ("first", "middle", "last"))
    assert steps_of([last, first, middle], 4) == [[first, middle, middle, last]]
    assert steps_of([first, last], 2) == [[first, last]]
    assert steps_of([last, middle], 4) == [], "a step that is known in parts alone"


@pytest.mark.long
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_an_estimate_takes_about_as_long_as_what_was_simulated(num_micro_batches):
    """Attention, norms and dropout are left out; with few tokens, where copies and updates bind, they are hidden.

    Launches of operators, which bind in models as small as this one, take hardly any time here.
    """

    def make_model():
        sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "num_attention_heads": 16}
        return LlamaForCausalLM(LlamaConfig(vocab_size=2048, use_cache=False, **sizes)).train()

    def make_inputs():
        tokens = torch.zeros((4, 128), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    config = {"dtype": "bf16", "placement": "host", "chunk_budget": 2**26}
    training = Training(make_model, make_inputs, config, num_micro_batches=num_micro_batches)
    told = training.simulate(MACHINES["rtx4090"])
    works = [ChunkWork(load.nbytes // 2, load.nbytes // 2, load.nbytes, 0, "bfloat16") for load in told.loads]
    script = estimate_script(told.traces, works, frozenset(), overlaps_update=True)
    for name in ("rtx4090", "h100", "v100"):
        machine = dataclasses.replace(MACHINES[name], operator_s=1e-7, kernel_s=1e-7)
        estimated, simulated = (replay(each, told.plans, told.loads, machine) for each in (script, told.script))
        assert 0.7 < estimated.duration_ns / simulated.duration_ns < 1.1
