"""Processes that call an operator while it is timed."""

import gc
import logging
import os
import signal
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_patrickstar.planner import planning
from hf_patrickstar.tracing import companions
from hf_patrickstar.tracing.calls import Operand, OperatorCall, as_they_are
from hf_patrickstar.tracing.companions import Companions
from hf_patrickstar.tracing.timing import OperatorTimes

aten = torch.ops.aten
CPU = torch.device("cpu")


def fake(*shape, **kwargs):
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def product():
    return OperatorCall.of(aten.mm.default, (fake(64, 64), fake(64, 64)), {})


def cpu_seconds(pid):
    """Seconds for which a process has had a core."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def has_ended(pid):
    return not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def processes(monkeypatch):
    """The processes that are started."""
    found, begin = [], companions.subprocess.Popen

    def start(*args, **kwargs):
        found.append(begin(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(companions.subprocess, "Popen", start)
    return found


@pytest.fixture
def started(processes):
    """Companions that have started, and their processes."""
    made = Companions(2, 1)
    with made.calling(product()):
        pass
    return made, [process.pid for process in processes]


def test_companions_work_inside_of_the_block_and_end_with_it(started):
    made, pids = started
    assert len(pids) == 2
    before = [cpu_seconds(pid) for pid in pids]
    with made.calling(product()):
        time.sleep(1.0)
    inside = [cpu_seconds(pid) for pid in pids]
    time.sleep(0.3)
    after = [cpu_seconds(pid) for pid in pids]
    assert all(here - there > 0.1 for here, there in zip(inside, before, strict=True))
    assert all(here - there < 0.1 for here, there in zip(after, inside, strict=True))
    del made
    gc.collect()


def test_an_operator_that_refuses_its_operands_is_left_out(started, caplog):
    made, _ = started
    refused = OperatorCall.of(aten.mm.default, (fake(2, 3), fake(2, 3)), {})
    with made.calling(refused):
        pass
    with made.calling(product()):
        pass
    assert not caplog.records


def test_where_one_companion_ends_the_others_do_not_go_on(started):
    made, (first, second) = started
    os.kill(second, signal.SIGKILL)
    with made.calling(product()):
        assert has_ended(first)
    del made
    gc.collect()


def test_where_one_companion_refuses_the_others_do_not_go_on(processes, monkeypatch):
    """Each has memory of its own to find operands in."""
    made, told = Companions(2, 1), []
    answer = companions._answer
    monkeypatch.setattr(companions, "_answer", lambda connection: (told.append(answer(connection)), len(told) != 2)[1])
    with made.calling(product()):
        before = [cpu_seconds(process.pid) for process in processes]
        time.sleep(0.5)
        assert [cpu_seconds(process.pid) for process in processes] == pytest.approx(before, abs=0.05)
    assert told == [True] * 4, "both have begun, and have ended when they were told to"
    del made
    gc.collect()


def test_a_companion_that_has_ended_is_said_once(started, caplog):
    made, pids = started
    os.kill(pids[0], signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "hf_patrickstar.tracing.companions"):
        for _ in range(3):
            with made.calling(product()):
                pass
    (record,) = caplog.records
    assert "timed as if this process were alone" in record.getMessage()


def test_companions_end_with_who_has_them(processes):
    times = OperatorTimes(num_threads=1, num_companions=1)
    assert not processes, "none is started before an operator is timed"
    assert times.find_ns(aten.mm.default, (fake(64, 64), fake(64, 64)), {}) is not None
    (process,) = processes
    assert not has_ended(process.pid)
    del times
    gc.collect()
    assert process.returncode is not None


def test_planning_for_this_machine_has_one_for_every_other_process(monkeypatch):
    made = []
    monkeypatch.setattr(planning, "OperatorTimes", lambda **kwargs: made.append(kwargs))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    planning.time_operators(1)
    planning.time_operators(3)
    assert made == [{}, {"num_threads": 1, "num_companions": 2}]


def test_a_call_is_the_same_in_another_process():
    call = OperatorCall.of(aten.add.Tensor, (fake(3, 4, dtype=torch.bfloat16).t(), fake(4, 1)), {"alpha": 2})
    assert call.name == "aten.add.Tensor"
    assert call.args == (Operand(torch.bfloat16, (4, 3), (1, 4)), Operand(torch.float32, (4, 1), (1, 1)))
    with as_they_are(CPU):
        found = call.make(CPU)()
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (4, 3))


def test_an_expanded_operand_takes_what_it_spans():
    operand = Operand.of(fake(3, 1).expand(3, 4))
    assert operand.nbytes == 12
    assert Operand.of(fake(0, 4)).nbytes == 0
    assert operand.make(CPU).stride() == (1, 0)
