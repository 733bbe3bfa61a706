"""What the engine's own work costs where a module uses a chunk."""

import pytest

from hf_patrickstar.planner import local_machine
from hf_patrickstar.planner.local_machine import seconds_of_a_visit
from hf_patrickstar.report.measure import Effort, Sweeps, measure_machine

TINY = Effort(nbytes=2**12, most_rows=128, calls=5, repetitions=1, seconds=0.0)


@pytest.mark.long
def test_it_is_the_difference_by_the_number_of_visits(monkeypatch):
    """A step takes a second without the engine, and three with it."""
    numbers = iter([1.0, 3.0] * 100)
    monkeypatch.setattr(Sweeps, "host_seconds", lambda sweeps, work: (work(), next(numbers))[1])
    found = seconds_of_a_visit()
    num = local_machine._NUM_LAYERS
    assert 2.0 / (4 * num) < found < 2.0 / (2 * num), "forward and backward of each layer"


def test_a_machine_that_is_measured_has_what_its_visits_take():
    told = []
    machine = measure_machine(TINY, lambda names: told.extend(names) or names, visit=lambda: 0.125)
    assert machine.visit_s == 0.125
    assert told[-1] == "visit_s"
    assert measure_machine(TINY).visit_s == pytest.approx(25e-6)
