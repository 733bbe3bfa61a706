"""What the engine's own work costs where a module uses a chunk."""

import itertools

import pytest
import torch

from hf_patrickstar.planner import visits
from hf_patrickstar.planner.visits import seconds_of_a_visit
from hf_patrickstar.report.measure import Effort, Sweeps, measure_machine

TINY = Effort(nbytes=2**12, most_rows=128, calls=5, repetitions=1, seconds=0.0)


@pytest.mark.long
def test_it_is_the_difference_by_the_number_of_visits(monkeypatch):
    """Each look at the clock is a second later: both take a second, so nothing is left; three, and two are."""
    now = itertools.count()
    monkeypatch.setattr(visits.time, "perf_counter", lambda: float(next(now)))
    numbers = iter([1.0, 3.0] * 100)
    monkeypatch.setattr(
        visits, "_seconds", lambda device, model, swept, end_step: _step(model, end_step, next(numbers))
    )
    found = seconds_of_a_visit()
    assert 2.0 / (4 * visits._NUM_LAYERS) < found < 2.0 / (2 * visits._NUM_LAYERS), "forward and backward of each layer"


def test_sweeps_of_the_caches_are_left_out(monkeypatch):
    """Each look at the clock is a second later: a sweep takes one, and so does all that is before and after one."""
    now = itertools.count()
    swept = Sweeps(torch.device("cpu"), nbytes=64)
    model = visits._make_model(swept)
    monkeypatch.setattr(visits.time, "perf_counter", lambda: float(next(now)))
    num_sweeps = 2 * visits._NUM_LAYERS
    for _ in range(2):
        assert visits._seconds(torch.device("cpu"), model, swept, lambda: None) == num_sweeps + 1
        assert swept.seconds == num_sweeps


def _step(model, end_step, seconds):
    model(torch.ones(1, visits._WIDTH)).sum().backward()
    end_step()
    return seconds


def test_a_machine_that_is_measured_has_what_its_visits_take():
    told = []
    machine = measure_machine(TINY, lambda names: told.extend(names) or names, visit=lambda: 0.125)
    assert machine.visit_s == 0.125
    assert told[-1] == "visit_s"
    assert measure_machine(TINY).visit_s == pytest.approx(25e-6)
