"""Processes that call an operator while it is timed."""

import gc
import logging
import os
import signal
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.tracing import contention
from hf_patrickstar.tracing.calls import Operand, OperatorCall, as_they_are
from hf_patrickstar.tracing.contention import CompetingProcesses
from hf_patrickstar.tracing.timing import OperatorTimes

aten = torch.ops.aten
CPU = torch.device("cpu")


def fake(*shape, **kwargs):
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def product(rows=64):
    return OperatorCall.of(aten.mm.default, (fake(64, rows), fake(64, 64)), {})


def cpu_seconds(pids):
    """Seconds for which processes have had a core."""
    found = []
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


@pytest.fixture
def pids(monkeypatch):
    """The processes that are started."""
    found, begin = [], contention.subprocess.Popen

    class Noted(begin):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self.pid)

    monkeypatch.setattr(contention.subprocess, "Popen", Noted)
    yield found
    gc.collect()


def test_competing_processes_work_inside_of_the_block_and_end_with_it(pids, caplog, monkeypatch):
    made = CompetingProcesses(2, 1)
    for refused in (product(rows=3), product()):  # a product of operands that do not fit is left out
        with made.calling(refused):
            pass
    before = cpu_seconds(pids)
    with made.calling(product()):
        time.sleep(1.0)
    inside = cpu_seconds(pids)
    time.sleep(0.3)
    after = cpu_seconds(pids)
    assert len(pids) == 2
    assert all(here - there > 0.1 for here, there in zip(inside, before, strict=True))
    assert all(here - there < 0.1 for here, there in zip(after, inside, strict=True))
    assert not caplog.records
    # One refuses, because it has memory of its own to find operands in: the other one does not go on.
    answers, answer = [], contention._answer
    with monkeypatch.context() as patched:
        patched.setattr(
            contention, "_answer", lambda connection: (answers.append(answer(connection)), len(answers) != 2)[1]
        )
        with made.calling(product()):
            before = cpu_seconds(pids)
            time.sleep(0.5)
            assert cpu_seconds(pids) == pytest.approx(before, abs=0.05)
    assert answers == [True] * 4, "both have begun, and have ended when they were told to"
    # One has ended: all end, and it is said once.
    os.kill(pids[1], signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "hf_patrickstar.tracing.contention"):
        for _ in range(3):
            with made.calling(product()):
                assert not os.path.exists(f"/proc/{pids[0]}")
    (record,) = caplog.records
    assert "timed as if this process were alone" in record.getMessage()


def test_competing_processes_begin_with_the_first_operator_and_end_with_who_has_them(pids):
    times = OperatorTimes(num_threads=1, num_competing=1)
    assert not pids, "none is started before an operator is timed"
    assert times.find_ns(aten.mm.default, (fake(64, 64), fake(64, 64)), {}) is not None
    (pid,) = pids
    assert os.path.exists(f"/proc/{pid}")
    del times
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_call_is_the_same_in_another_process():
    call = OperatorCall.of(aten.add.Tensor, (fake(3, 4, dtype=torch.bfloat16).t(), fake(4, 1)), {"alpha": 2})
    assert call.name == "aten.add.Tensor"
    assert call.args == (Operand(torch.bfloat16, (4, 3), (1, 4)), Operand(torch.float32, (4, 1), (1, 1)))
    with as_they_are(CPU):
        found = call.make(CPU)()
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (4, 3))
    expanded = Operand.of(fake(3, 1).expand(3, 4))
    assert (expanded.nbytes, expanded.make(CPU).stride(), Operand.of(fake(0, 4)).nbytes) == (12, (1, 0), 0)
