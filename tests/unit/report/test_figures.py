"""What a log has of what is counted, and what a run says at its end."""

import dataclasses
import re

import pytest

from hf_patrickstar.report.outcome import (
    PER_STEP,
    PREFIX,
    STANDING,
    Outcome,
    brief,
    describe_outcome,
    describe_step,
    figures_between,
)
from hf_patrickstar.units import GIB


def test_figures_are_means_over_the_steps_between_two_moments_and_a_reader_gets_two():
    first = dict.fromkeys((*PER_STEP, *STANDING, "steps"), 0) | {"steps": 2, "skipped_steps": 1, "chunk_loads": 6}
    assert figures_between({}, first)[f"{PREFIX}chunk_loads"] == 2, "a skipped step moves chunks, too"
    later = first | {"steps": 4, "chunk_loads": 9, "device_peak_nbytes": 5}
    found = figures_between(first, later)
    assert (found[f"{PREFIX}chunk_loads"], found[f"{PREFIX}device_peak_nbytes"]) == (1.5, 5)
    assert figures_between(later, later)[f"{PREFIX}chunk_loads"] == 0, "a log without a step"
    few = {"device_total_step_peak_nbytes": 2**20, "host_to_device_nbytes": 1000, "device_to_host_nbytes": 24}
    told = brief({f"{PREFIX}{name}": value for name, value in {**few, "waiting_seconds": 0.25}.items()})
    assert list(told.values()) == ["1.00 MiB", "1.00 KiB"]


STATS = {
    **{"waiting_seconds": 1.0, "loading_seconds": 2.0, "computing_seconds": 80.0},
    **{"settling_seconds": 4.0, "updating_seconds": 10.0, "retries": 0},
    **{"device_total_peak_nbytes": 7 * GIB, "host_peak_nbytes": 30 * GIB, "device_peak_nbytes": 2 * GIB},
    **{"device_budget_nbytes": 8 * GIB, "chunk_budget_nbytes": 8 * GIB, "host_budget_nbytes": 120 * GIB},
}
QUIET = Outcome(
    **{"seconds": 100.0, "num_steps": 50, "stats": STATS, "has_lanes": False, "is_metered": True},
    **{"num_chunks": 20, "num_on_device": 5, "batch_size": 4, "num_micro_batches": 2},
    settings={"chunk_budget": "auto", "device_budget": "8GiB"},
)


def changed(settings=None, **others):
    fields = {field.name for field in dataclasses.fields(Outcome)}
    stats = {**STATS, **{name: value for name, value in others.items() if name not in fields}}
    rest = {name: value for name, value in others.items() if name in fields}
    return dataclasses.replace(QUIET, stats=stats, settings={**QUIET.settings, **(settings or {})}, **rest)


def test_a_line_has_time_and_peaks_and_shares_add_up():
    assert describe_outcome(QUIET) == (
        "50 steps, 2 s each: 77% forward and backward, 3% waiting for copies, 14% optimizer, 6% other (data, logs); "
        "peak 7.00 GiB of 8.00 GiB on the device, 30.00 GiB of 120.00 GiB on the host"
    )
    assert describe_outcome(changed(num_steps=1)).startswith("1 step, 100 s each: ")
    assert "2.00 GiB of 4.00 GiB for chunks" in describe_outcome(changed(chunk_budget_nbytes=4 * GIB))
    assert sum(QUIET.shares.values()) == pytest.approx(1)
    late = changed(waiting_seconds=200.0)
    assert late.shares["forward and backward"] == 0, "waits are a part of what was measured around them"
    assert min(late.shares.values()) >= 0
    stats = {**STATS, "device_total_step_peak_nbytes": 6 * GIB, "host_step_peak_nbytes": 12 * GIB}
    assert re.match(r"first planned step \(step 2\): 0.5 s; peak 6.00 GiB .*, 12.00 GiB", describe_step(2, 0.5, stats))
    assert "2): 0.5 s (2.25 s estimated); peak " in describe_step(2, 0.5, stats, 2.25)


def test_beside_a_device_the_host_sees_no_wait_of_the_device():
    estimated = changed(has_lanes=True, machine="h100", copying=0.22, updating=0.41)
    assert estimated.shares["forward and backward"] == pytest.approx(0.81), "before the update the device works"
    line = describe_outcome(estimated)
    assert re.search("estimated for 'h100': 22% waiting .* 41% .* change first: a larger device_budget: 22%", line)
    line = describe_outcome(dataclasses.replace(estimated, copying=0.0))
    assert re.search("change first: --gradient_accumulation_steps 8: .* 41%", line)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (changed(retries=2), "--per_device_train_batch_size below 4, .* 2 times"),
        (changed(computing_seconds=20.0), "--dataloader_num_workers.* 66%"),
        (changed(loading_seconds=20.0), "a larger device_budget: 21%"),
        (changed({"chunk_budget": "1GiB"}, loading_seconds=20.0), "a larger chunk_budget: 21%"),
        (changed(computing_seconds=50.0, updating_seconds=40.0), "--gradient_accumulation_steps 8: .* 44%"),
        (changed(device_total_peak_nbytes=2 * GIB), "--per_device_train_batch_size above 4: 75% of the device budget"),
        (changed(num_on_device=20, computing_seconds=50.0, updating_seconds=40.0), None),
    ],
)
def test_the_one_change_that_is_named(outcome, words):
    line = describe_outcome(outcome)
    assert re.search(f"; to change first: {words}", line) if words else "to change" not in line, line
