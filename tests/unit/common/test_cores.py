"""Which cores a process may use."""

import math
import os

import pytest

from hf_patrickstar.common import cores
from hf_patrickstar.common.cores import cpu_quota, own_cores, usable_cores


def test_cores_are_those_that_the_process_may_run_on(monkeypatch):
    assert 1 <= len(usable_cores()) <= os.cpu_count()
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores() == {3, 5}
    monkeypatch.delattr(cores.os, "sched_getaffinity")
    assert usable_cores() == set(range(os.cpu_count()))


@pytest.mark.parametrize(("text", "num"), [("650000 100000\n", 6.5), ("max 100000\n", math.inf), ("", math.inf)])
def test_the_quota_is_read(monkeypatch, tmp_path, text, num):
    monkeypatch.setattr(cores, "CPU_QUOTA_FILE", str(tmp_path / "cpu.max"))
    assert cpu_quota() == math.inf
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota() == num


@pytest.mark.parametrize(("quota", "sharers", "num"), [(math.inf, 1, 16), (math.inf, 3, 5), (6.5, 2, 3), (0.5, 1, 1)])
def test_processes_share_cores_and_the_quota(monkeypatch, quota, sharers, num):
    monkeypatch.setattr(cores, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert own_cores(sharers) == num
