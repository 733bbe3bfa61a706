"""A plan for a machine without an accelerator, beside the engine's own run there: the same bytes, to the last one."""

import pytest
import torch
from support import inside

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.units import MIB

MODELS = {
    "gpt2": "gpt2:n_layer=3,n_embd=64,n_head=2,vocab_size=200,resid_pdrop=0.0,embd_pdrop=0.0",
    # Modules of these read parameters of others.
    "mamba": "mamba:num_hidden_layers=3,hidden_size=64,state_size=8,vocab_size=200",
    "deberta": "deberta-v2:num_hidden_layers=3,hidden_size=64,num_attention_heads=2,intermediate_size=128,"
    "vocab_size=200,relative_attention=True,pos_att_type=p2c|c2p,hidden_dropout_prob=0.0",
}
MOVED = ("host_to_device_nbytes", "device_to_host_nbytes")


def plan_within(name, budget, batch_size=1, num_micro_batches=1):
    subject, given = arrange(
        MODELS[name],
        CPU_TIER,
        **{"batch_size": batch_size, "length": 32, "num_micro_batches": num_micro_batches, "dtype": "fp32"},
        **{"device_memory": budget, "host_memory": "1GiB", "settings": {"cpu_embedding": False, "chunk_numel": 9000}},
    )
    return subject, given, *plan_and_simulate(subject, given)


def run_within(subject, given):
    """The engine after four steps, and what it moved in the last one."""
    torch.manual_seed(0)
    model = subject.make_model()
    budgets = {"device_budget": given.machine.device_nbytes, "host_budget": given.machine.host_nbytes}
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    num = given.num_micro_batches
    engine = PatrickStarEngine(
        model, {**given.settings, **budgets}, made, device=torch.device("cpu"), gradient_accumulation_steps=num
    )
    engine.optimizer.zero_grad()
    for _ in range(4):
        before = engine.stats()
        batches = [subject.make_inputs() for _ in range(num)]  # as the Trainer reads them
        for inputs in batches:
            engine.attempt(lambda inputs=inputs: train(model, inputs, num))
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    after = engine.stats()
    return engine, after, tuple(after[key] - before[key] for key in MOVED)


def train(model, inputs, num):
    loss = model(**inputs).loss
    (loss / num if num > 1 else loss).backward()


CASES = [("gpt2", 0.5), ("gpt2", 0.8), ("mamba", 0.6), ("deberta", 0.8)]  # half has no room for their activations


@pytest.mark.own_rest
@pytest.mark.parametrize(("name", "share"), CASES)
def test_a_plan_has_the_bytes_of_a_run(name, share):
    everything = plan_within(name, 64 * MIB)[2].tier(Tier.DEVICE)
    budget = int(share * (everything.need_nbytes - everything.owners["gradients"]))
    assert_exact(*plan_within(name, budget))


@pytest.mark.own_rest
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_plan_has_the_gradients_of_a_run_that_rests(name, num_micro_batches):
    subject, given, plan, recording = plan_within(name, 64 * MIB, num_micro_batches=num_micro_batches)
    engine, stats, _ = run_within(subject, given)
    assert plan.tier(Tier.DEVICE).owners["gradients"] > 0
    assert any("nothing has to move" in reason for reason in plan.chunks.reasons)
    assert plan.tier(Tier.DEVICE).need_nbytes == stats["device_total_step_peak_nbytes"]
    assert recording.survey.tides == engine.survey().tides
    # Without room for gradients a run does not rest, and needs less.
    fewer = plan_within(name, plan.tier(Tier.DEVICE).need_nbytes - 1, num_micro_batches=num_micro_batches)
    _, stats, _ = run_within(*fewer[:2])
    assert fewer[2].tier(Tier.DEVICE).owners["gradients"] == 0
    assert fewer[2].tier(Tier.DEVICE).need_nbytes == stats["device_total_step_peak_nbytes"]


def test_a_plan_has_the_bytes_of_a_run_of_several_micro_batches():
    _, _, everything, _ = plan_within("gpt2", 64 * MIB, num_micro_batches=3)
    budget = int(0.6 * everything.tier(Tier.DEVICE).need_nbytes)
    subject, given, plan, recording = plan_within("gpt2", budget, num_micro_batches=3)
    _, stats, moved = run_within(subject, given)
    assert recording.moved_nbytes == moved
    assert plan.tier(Tier.HOST).need_nbytes == stats["host_step_peak_nbytes"]
    # A program may keep a batch for longer than the planned one does.
    assert plan.tier(Tier.DEVICE).need_nbytes == pytest.approx(stats["device_total_step_peak_nbytes"], rel=0.01)


def test_what_a_step_repeats_fits_as_it_does_in_a_run():
    """All model data fits half of the device, where it lives until activations of the first step find no room."""
    subject, given, plan, recording = plan_within("gpt2", 8_000_000, batch_size=8)
    assert any("left the device" in reason for reason in recording.survey.reasons)
    assert_exact(subject, given, plan, recording)


@pytest.mark.parametrize("budget", [6_000_000, 3_000_000])
def test_activations_leave_as_planned(budget):
    subject, given, plan, recording = plan_within("gpt2", budget, batch_size=8)
    assert all(trace.num_offloaded for trace in recording.traces)
    assert plan.tier(Tier.HOST).owners["activations"] > 0
    assert_exact(subject, given, plan, recording)


def assert_exact(subject, given, plan, recording):
    assert plan.fits
    engine, stats, moved = run_within(subject, given)
    for planned in recording.traces:
        known = inside.traces(engine)[planned.key]
        assert (known.activations, known.num_offloaded) == (planned.activations, planned.num_offloaded)
        if planned.num_offloaded:  # a plan has one on the device for the whole of the moment in which it leaves
            pairs = zip(known.visits, planned.visits, strict=True)
            assert all(there.non_model_nbytes <= most.non_model_nbytes for there, most in pairs)
        else:
            assert known == planned
    assert recording.static == {chunk.spec.index for chunk in inside.chunks(engine) if chunk.is_static}
    assert recording.moved_nbytes == moved
    assert sum(moved) > 0
    assert plan.tier(Tier.DEVICE).need_nbytes == stats["device_total_step_peak_nbytes"]
    assert plan.tier(Tier.HOST).need_nbytes == stats["host_step_peak_nbytes"]
