"""Measuring in two processes at once: the links between them, and the machine as each has it."""

import dataclasses
import os
import pathlib
import sys

import pytest

from hf_patrickstar.common import cores
from hf_patrickstar.errors import ConfigError
from hf_patrickstar.machine import find_machine
from hf_patrickstar.memory.tiers import total_host_nbytes
from hf_patrickstar.planner import local_machine
from hf_patrickstar.planner.local_machine import measure_launched, threads_of_each
from hf_patrickstar.report import measure as measuring
from hf_patrickstar.report.measure import Effort, measure_together

TESTS = pathlib.Path(__file__).parents[1]
TINY = Effort(nbytes=2**16, most_rows=128, calls=5, repetitions=3, seconds=0.02)


def measure(rank):
    told = []

    def progress(names):
        told.extend(names)
        return names

    return measure_together(TINY, progress), told


def measure_by_hand(rank, seconds):
    """Each thing that is timed takes so many seconds, and a sweep of the caches a hundredth of one of them."""
    measuring.seconds_of = lambda device, work, before=None: (work(), seconds[rank])[1]
    measuring.Sweeps.sweep = lambda sweeps: setattr(sweeps, "seconds", sweeps.seconds + 0.01)
    return measure_together(TINY)


def test_two_processes_measure_their_links_and_agree(pair):
    (machine, told), (other, _) = pair.run(measure)
    assert machine == other
    assert machine.num_devices == 2
    assert machine.host_nbytes == total_host_nbytes() // 2
    assert told[-3:] == ["link_bandwidth", "link_latency_s", "message_s"]
    assert {"products in float32", "host_bandwidth"} <= set(told)
    defaults = {field.name: field.default for field in dataclasses.fields(machine)}
    assert all(getattr(machine, name) not in (0, defaults[name]) for name in told[-3:])
    machine.check_processes(2)


def test_links_are_bytes_by_time_in_the_middle_of_both_processes(pair):
    machine, other = pair.run(measure_by_hand, [0.25, 0.75])
    assert machine == other
    sent, sweeps = 2**16 // 2, 0.01 * TINY.repetitions
    both = 2 * sent  # a gather and a reduction
    each = [both / (seconds - sweeps) for seconds in (0.25, 0.75)]
    assert machine.link_bandwidth == pytest.approx(TINY.repetitions * sum(each) / 2)
    assert machine.message_s == pytest.approx(0.5 / TINY.calls - 0.01), "several at a time, without the sweeps between"
    assert machine.link_latency_s == pytest.approx(machine.message_s / 2)


@pytest.mark.long
def test_this_machine_is_measured_by_processes_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = measure_launched(2)
    assert (machine.num_devices, machine.num_cores, machine.has_accelerator) == (2, 1, False)
    assert machine.link_latency_s != find_machine("h100").link_latency_s


@pytest.mark.parametrize(
    ("does", "limit_s", "said"),
    [
        ("echo no such thing >&2; exit 3", 60, r"\(exit status 3\): no such thing"),
        ("exec sleep 60", 0.2, r"\(exit status -9\): killed after 0.2 s"),
    ],
)
def test_processes_that_cannot_measure_are_a_sentence(monkeypatch, tmp_path, does, limit_s, said):
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\n{does}\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setattr(local_machine, "_LIMIT_S", limit_s)
    with pytest.raises(ConfigError, match=f"2 processes cannot measure .* {said}; run 'torchrun"):
        measure_launched(2)


def test_devices_that_are_not_here_are_a_sentence(monkeypatch):
    monkeypatch.setattr(local_machine, "num_accelerators", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes need as many devices, 1 are here; use fewer"):
        measure_launched(2)


@pytest.mark.parametrize(("said", "num_cores", "threads"), [(None, 8, 4), (None, 1, 1), ("3", 8, 3)])
def test_processes_share_cores_unless_the_environment_says_else(monkeypatch, said, num_cores, threads):
    monkeypatch.setattr(cores, "usable_cores", lambda: frozenset(range(num_cores)))
    if said is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads_of_each(2) == threads
