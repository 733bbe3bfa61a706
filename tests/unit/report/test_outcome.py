"""What is said of a run at its end: shares of measured seconds, and the setting that they speak for."""

import dataclasses
import re

import pytest

from hf_patrickstar.report.outcome import Outcome, describe_outcome, describe_step
from hf_patrickstar.units import GIB

STATS = {
    "waiting_seconds": 1.0,
    "loading_seconds": 2.0,
    "computing_seconds": 80.0,
    "settling_seconds": 4.0,
    "updating_seconds": 10.0,
    "retries": 0,
    "device_total_peak_nbytes": 7 * GIB,
    "host_peak_nbytes": 30 * GIB,
    "device_peak_nbytes": 2 * GIB,
    "device_budget_nbytes": 8 * GIB,
    "chunk_budget_nbytes": 8 * GIB,
    "host_budget_nbytes": 120 * GIB,
}
QUIET = Outcome(
    seconds=100.0,
    num_steps=50,
    stats=STATS,
    has_lanes=False,
    is_metered=True,
    num_chunks=20,
    num_on_device=5,
    batch_size=4,
    num_micro_batches=2,
    settings={"chunk_budget": "auto", "device_budget": "8GiB"},
)


def changed(settings=None, **others):
    """The quiet run with other statistics, settings or fields."""
    fields = {field.name for field in dataclasses.fields(Outcome)}
    stats = {**STATS, **{name: value for name, value in others.items() if name not in fields}}
    rest = {name: value for name, value in others.items() if name in fields}
    return dataclasses.replace(QUIET, stats=stats, settings={**QUIET.settings, **(settings or {})}, **rest)


def test_three_lines():
    memory, time, advice = describe_outcome(QUIET)
    assert memory == "at most 7.00 GiB of 8.00 GiB (88%) on the device and 30.00 GiB of 120.00 GiB (25%) on the host"
    assert time == (
        "50 steps took 100 s, 2 s each: 77% forward and backward, 3% waiting for copies, 14% optimizer, 6% others, "
        "such as data and logs"
    )
    assert advice == "nothing to change: no part of a step stands out"


def test_chunks_that_have_a_budget_of_their_own():
    memory, _, _ = describe_outcome(changed(chunk_budget_nbytes=4 * GIB))
    assert memory == (
        "at most 7.00 GiB of 8.00 GiB (88%) on the device, chunks 2.00 GiB of 4.00 GiB (50%), and 30.00 GiB of 120.00 "
        "GiB (25%) on the host"
    )


def test_shares_add_up():
    assert sum(QUIET.shares.values()) == pytest.approx(1)
    late = changed(waiting_seconds=200.0)
    assert late.shares["compute"] == 0, "waits are a part of what was measured around them"
    assert min(late.shares.values()) >= 0


def test_beside_a_device_the_host_sees_no_wait_of_the_device():
    outcome = changed(has_lanes=True)
    assert outcome.shares["compute"] == pytest.approx(0.81), "what comes before the update is the device's work"
    assert outcome.shares["optimizer"] == pytest.approx(0.10)
    assert "81% forward and backward with the waits of the device, 3% the host waiting" in describe_outcome(outcome)[1]
    estimated = dataclasses.replace(outcome, machine="h100", copying=0.22, updating=0.41)
    _, time, advice = describe_outcome(estimated)
    assert time.endswith(
        "; by the rates of 'h100' a step waits 22% of its time for copies and 41% for the update on the host"
    )
    assert advice.startswith("most worth changing: a larger device_budget, since by the rates of 'h100' 22% of a step")
    _, _, advice = describe_outcome(dataclasses.replace(estimated, copying=0.0))
    assert advice.startswith(
        "most worth changing: --gradient_accumulation_steps 8, since by the rates of 'h100' 41% of"
    )


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (changed(retries=2), "--per_device_train_batch_size below 4, since memory did not suffice 2 times"),
        (changed(retries=1, batch_size=1), "a larger device_budget, since memory"),
        (changed(computing_seconds=20.0), "--dataloader_num_workers, .* 66% of the time went neither"),
        (changed(loading_seconds=20.0), "a larger device_budget, since 21% of the time"),
        (changed({"chunk_budget": "1GiB"}, loading_seconds=20.0), "a larger chunk_budget, since 21%"),
        (
            changed(loading_seconds=20.0, device_total_peak_nbytes=2 * GIB),
            "--per_device_train_batch_size above 4, since 21% .* computes more with each copy",
        ),
        (
            changed(computing_seconds=50.0, updating_seconds=40.0),
            "--gradient_accumulation_steps 8, since 44% of the time went to the optimizer",
        ),
        (
            changed(device_total_peak_nbytes=2 * GIB),
            "--per_device_train_batch_size above 4, since 75% of the device budget was never used",
        ),
    ],
)
def test_the_one_change_that_is_named(outcome, words):
    advice = describe_outcome(outcome)[2]
    assert re.match(f"most worth changing: {words}", advice), advice


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (changed(device_total_peak_nbytes=2 * GIB, is_metered=False), "no part of a step stands out"),
        (changed(num_on_device=20), "everything lives on the device"),
        (changed(num_on_device=20, computing_seconds=50.0, updating_seconds=40.0), "everything lives on the device"),
    ],
    ids=["unmetered", "all", "accumulation moves no chunk of a device"],
)
def test_nothing_to_change(outcome, reason):
    assert describe_outcome(outcome)[2] == f"nothing to change: {reason}"


def test_the_first_step_that_was_not_recorded():
    stats = {**STATS, "device_total_step_peak_nbytes": 6 * GIB, "host_step_peak_nbytes": 12 * GIB}
    assert describe_step(2, 0.5, stats) == (
        "step 2, the first one by a plan, took 0.5 s, and at most 6.00 GiB of 8.00 GiB (75%) on the "
        "device and 12.00 GiB of 120.00 GiB (10%) on the host"
    )
