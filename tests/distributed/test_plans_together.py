"""A plan for two processes without accelerators, beside the run of two: the same visits, copies and model data.

Activations differ by some KiB: the run has messages to the other process in memory, too.
"""

import pytest
import torch
from support import inside

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.machine import CPU_TIER
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate

MODEL = "gpt2:n_layer=3,n_embd=64,n_head=2,vocab_size=200,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
MOVED = (
    *("host_to_device_nbytes", "device_to_host_nbytes", "sent_nbytes"),
    *("chunk_loads", "all_gathers", "reduce_scatters"),
)


def plan_within(device_memory, num_micro_batches, settings):
    subject, given = arrange(
        MODEL,
        CPU_TIER.shared_by(2),
        **{"task": None, "batch_size": 1, "length": 32, "num_micro_batches": num_micro_batches, "world_size": 2},
        **{"checkpointing": False, "dtype": "fp32", "optimizer": "adamw", "max_norm": 1.0, "host_memory": "1GiB"},
        device_memory=device_memory,
        settings={"cpu_embedding": False, **settings},
    )
    return subject, given, *plan_and_simulate(subject, given)


def train(model, inputs, num):
    loss = model(**inputs).loss
    (loss / num if num > 1 else loss).backward()


def visits_of(trace):
    return [(visit.chunk_index, visit.pinned, visit.gradient_nbytes, visit.reduced) for visit in trace.visits]


def run_as_planned(rank, share, num_micro_batches, settings):
    """Plans and trains on each rank; compares what the first one has planned with what it did."""
    everything = plan_within("64MiB", num_micro_batches, settings)[2]
    budget = int(share * everything.tier(Tier.DEVICE).need_nbytes)
    if settings:  # chunks differ in size, and a run with room to spare keeps free memory for each size
        budget = plan_within(budget, num_micro_batches, settings)[2].tier(Tier.DEVICE).need_nbytes
    subject, given, plan, recording = plan_within(budget, num_micro_batches, settings)
    assert plan.fits
    torch.manual_seed(0)
    model = subject.make_model()
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    budgets = {"device_budget": budget, "host_budget": given.machine.host_nbytes}
    engine = PatrickStarEngine(
        model,
        {**given.settings, **budgets},
        made,
        device=torch.device("cpu"),
        gradient_accumulation_steps=num_micro_batches,
    )
    engine.optimizer.zero_grad()
    for _ in range(4):
        before = engine.stats()
        batches = [subject.make_inputs() for _ in range(num_micro_batches)]  # as the Trainer reads them
        for inputs in batches:
            engine.attempt(lambda inputs=inputs: train(model, inputs, num_micro_batches))
        engine.optimizer.clip_grad_norm_(None, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    after = engine.stats()
    moved = {key: after[key] - before[key] for key in MOVED}
    if rank == 0:
        for trace in recording.traces:
            assert visits_of(trace) == visits_of(inside.traces(engine)[trace.key])
        assert recording.moved_nbytes == (moved[MOVED[0]], moved[MOVED[1]])
        assert plan.speed.sent_nbytes == moved["sent_nbytes"] > 0
        assert sum(made.num_loads for made in recording.plans) == moved["chunk_loads"]
        assert plan.tier(Tier.DEVICE).need_nbytes == pytest.approx(after["device_total_step_peak_nbytes"], rel=0.02)
        assert plan.tier(Tier.HOST).need_nbytes == after["host_step_peak_nbytes"]
    engine.detach()
    return moved


LEAVING = {"reshard_after_forward": True, "chunk_numel": 5000}


@pytest.mark.parametrize(("share", "num_micro_batches", "settings"), [(0.6, 1, {}), (0.6, 2, LEAVING)])
def test_a_plan_has_the_bytes_of_two_processes(pair, share, num_micro_batches, settings):
    first, second = pair.run(run_as_planned, share, num_micro_batches, settings)
    assert first["all_gathers"] == second["all_gathers"] > 0
