"""Plans in which activations leave the device between forward and backward."""

import dataclasses
import itertools

import pytest

from hf_patrickstar.machine import MACHINES
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.planner.planning import arrange, plan_and_simulate
from hf_patrickstar.schedule.script import Send
from hf_patrickstar.units import MIB

MODEL = "gpt2:n_layer=8,n_embd=128,n_head=4,vocab_size=512,n_positions=64"


# Launches of operators, which bind in models as small as this one, take hardly any time here.
MACHINE = dataclasses.replace(MACHINES["rtx4090"], operator_s=1e-7, kernel_s=1e-7, visit_s=1e-7)


def plan_of(device_mib, asked="auto", **changes):
    given = {"batch_size": 32, "host_memory": "256MiB", "checkpointing": True, **changes}
    settings = {} if asked == "auto" else {"activation_offload": asked}
    return plan_and_simulate(*arrange(MODEL, MACHINE, device_memory=int(device_mib * MIB), settings=settings, **given))


CASES = {
    "recomputed": (24, {}),
    "all activations are kept": (24, {"checkpointing": False}),
    "two micro-batches": (24, {"num_micro_batches": 2}),
}


@pytest.mark.parametrize(("device_mib", "changes"), CASES.values(), ids=CASES)
def test_a_plan_fits_because_activations_leave(device_mib, changes):
    assert not plan_of(device_mib, asked=False, **changes)[0].fits
    plan, simulation = plan_of(device_mib, **changes)
    assert plan.fits
    num_micro_batches = changes.get("num_micro_batches", 1)
    (leaving,) = {trace.offloaded_nbytes for trace in simulation.traces}
    # The host has a buffer for each, which all micro-batches use.
    assert plan.tier(Tier.HOST).owners["activations"] == leaving > 0
    # They cross once in each direction, beside chunks and gradients.
    loaded = sum(
        simulation.loads[index].nbytes
        for micro_batch in simulation.plans
        for actions in micro_batch.moments
        for index in actions.load
        if not simulation.loads[index].is_here
    )
    sent = sum(entry.nbytes for entry in simulation.script if isinstance(entry, Send))
    moved = num_micro_batches * leaving
    assert (plan.speed.to_device_nbytes, plan.speed.to_host_nbytes) == (loaded + moved, sent + moved)
    crossed = [span.what for span in simulation.timeline.own_spans if span.what.startswith("activation ")]
    assert len(crossed) == 2 * sum(trace.num_offloaded for trace in simulation.traces)
    (said,) = [reason for reason in plan.chunks.reasons if reason.startswith("activation_offload=auto: ")]
    assert f": {simulation.traces[0].num_offloaded} of {len(simulation.traces[0].activations)} activations" in said


def test_where_all_fits_none_leaves():
    plan, simulation = plan_of(256)
    assert "activations" not in plan.tier(Tier.HOST).owners
    assert all(trace.activations and not trace.num_offloaded for trace in simulation.traces)
    assert (plan.speed.to_device_nbytes, plan.speed.to_host_nbytes) == (0, 0)
    assert plan.speed.seconds == plan_of(256, asked=False)[0].speed.seconds


def test_more_memory_is_never_slower():
    """Steps that differ by 1 % are equally fast where homes are chosen, and where activations are."""
    seconds = []
    for device_mib in (22, 25, 34, 60, 256):
        plan, _ = plan_of(device_mib)
        if plan.fits:
            seconds.append(plan.speed.seconds)
    assert len(seconds) > 3
    assert all(more <= 1.02 * less for less, more in itertools.pairwise(seconds)), seconds


def test_what_is_short_counts_what_can_leave():
    refused, _ = plan_of(12)
    need = refused.tier(Tier.DEVICE).need_nbytes / MIB
    assert plan_of(need)[0].fits
    assert not plan_of(0.98 * need)[0].fits
    assert not plan_of(need, asked=False)[0].fits
