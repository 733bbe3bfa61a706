"""A rank that waits long warns, ends, and tells the others: threads for processes, and stores of torch."""

import json
import logging
import pathlib
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from support.threads import in_threads

from hf_patrickstar.dist import watchdog as module
from hf_patrickstar.dist.watchdog import Process, Watchdog, started_s
from hf_patrickstar.errors import CollectiveError

WAIT_S = 0.6
CALLER = "train.py:12 in main: model.state_dict()"
ELSEWHERE = Process("another system", "far", 1, 0.0, [0])
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Work:
    """A collective of gloo: over when somebody says so; one that failed raises whenever it is waited for."""

    def __init__(self, error=None, is_over=False):
        self.event, self.error = threading.Event(), error
        if is_over:
            self.event.set()

    def wait(self, timeout=None):
        assert timeout is None or timeout >= timedelta(milliseconds=1), "none is no time limit at all"
        if not self.event.wait(timeout and timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.event.is_set()


def in_a_while(seconds, error=None):
    """Work that is over after so many seconds."""
    work = Work(error)
    threading.Timer(seconds, work.event.set).start()
    return work


@pytest.fixture
def store(monkeypatch):
    """Where the ranks of a test meet."""
    made = dist.HashStore()
    monkeypatch.setattr(module, "_find_store", lambda: dist.PrefixStore("test", made))
    monkeypatch.setattr(module, "announce", lambda: None)
    monkeypatch.setattr(module, "find_caller", lambda: CALLER)
    return made


@pytest.fixture
def heard(caplog):
    """The warnings so far."""
    caplog.set_level(logging.WARNING, logger="hf_patrickstar")
    return lambda: [record.getMessage() for record in caplog.records]


def make(rank, world_size=3, wait_s=WAIT_S, processes=None, timeout_s=60.0):
    dog = Watchdog(rank, range(world_size), wait_s, timeout_s)
    dog.processes = dict.fromkeys(range(world_size), ELSEWHERE) if processes is None else processes
    return dog


def fails(function, *args, **settings):
    with pytest.raises(CollectiveError) as caught:
        function(*args, **settings)
    return str(caught.value)


# Waits


def test_one_that_waits_alone_warns_once_and_ends_and_the_others_are_told(store, heard):
    first, second, third = map(make, range(3))
    first.wait(Work(is_over=True), "reads", is_message=True, is_prompt=True)
    assert heard() == [], "a short wait leaves no trace"
    begin = time.monotonic()
    text = fails(first.wait, Work(), "reads", is_message=True, is_prompt=True)
    assert WAIT_S <= time.monotonic() - begin < WAIT_S + 3
    told = f"it reads (called at {CALLER}), and ranks 1, 2 have not come. This must be called by all processes together"
    assert re.match(rf"rank 0 gave up after \d+ s: {re.escape(told)}", text)
    for word in ("process_wait_s", "Trainer.save_model", "last checkpoint"):
        assert word in text
    (warning,) = heard()
    assert warning.startswith(f"patrickstar: rank 0 reads (called at {CALLER}) and has waited for 0.2")
    assert "ranks 1, 2 have not come. All processes must call it together" in warning
    assert f"gives up after {WAIT_S:g} s (process_wait_s)" in warning
    # One that waits for somebody else looks into the store; one whose connection was closed finds it there at once.
    assert fails(second.wait, Work(), "begins 'training'") == f"begins 'training': {text}"
    assert str(third.explain("gathers", RuntimeError("closed"))) == f"gathers: {text}"


@pytest.mark.parametrize(("wait_s", "is_prompt"), [(WAIT_S, False), (0, True)])
def test_data_and_ranks_that_have_said_that_they_come_are_waited_for(store, monkeypatch, heard, wait_s, is_prompt):
    """So are all where there is no limit."""
    monkeypatch.setattr(module, "_WARN_S", 0.1)
    dog = make(0, 2, wait_s=wait_s)
    dog.wait(in_a_while(2 * WAIT_S), "reads", is_message=True, is_prompt=is_prompt)
    (warning,) = heard()
    assert "rank 1 has not come. It goes on waiting, until the timeout of the process group (ddp_timeout)" in warning
    with dog.watched("reduces"):
        time.sleep(WAIT_S)
        dog.look()
    assert heard()[1].startswith(f"patrickstar: rank 0 reduces (called at {CALLER}) and has waited for ")
    assert not dog.verdict
    failed = in_a_while(0.2, RuntimeError("closed"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            dog.wait(failed, "reads")


# Failures


def sleeper():
    process = subprocess.Popen(SLEEPER)
    return process, Process.own()._replace(pid=process.pid, started=started_s(process.pid))


def test_a_process_runs_on_when_the_clock_is_set(tmp_path, monkeypatch):
    own, before, stat = Process.own(), psutil.Process().create_time(), pathlib.Path("/proc/stat").read_text()
    (tmp_path / str(own.pid)).symlink_to(f"/proc/{own.pid}")
    (tmp_path / "stat").write_text(re.sub(r"btime (\d+)", lambda found: f"btime {int(found[1]) + 3600}", stat))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert own.is_running
    assert psutil.Process().create_time() - before == pytest.approx(3600, abs=2), "the clock is another one"


def test_a_process_that_has_ended_is_named_at_once(store):
    process, member = sleeper()
    assert member.is_running
    assert member._replace(started=0.0).is_running is False, "another one has its number now"
    assert ELSEWHERE.is_running is None
    process.kill()
    deadline = time.monotonic() + 10
    while member.is_running and time.monotonic() < deadline:  # a zombie has ended, too
        time.sleep(0.01)
    dog = make(0, 3, 60, {0: Process.own(), 1: member, 2: ELSEWHERE})
    begin = time.monotonic()
    text = str(dog.explain("gathers group 3", RuntimeError("Connection closed by peer")))
    assert time.monotonic() - begin < 2
    process.wait()
    assert text.startswith(
        "gathers group 3: a collective failed on rank 0 of 3: "
        f"rank 1 has ended (process {process.pid} on {member.host})"
    )
    assert "; rank 2 has not come. Look first at the error of a rank that is missing" in text
    assert text.endswith("torch.distributed says: Connection closed by peer")


@pytest.mark.parametrize("is_hanging", [False, True])
def test_a_store_that_is_gone_keeps_nobody(store, monkeypatch, is_hanging):
    """That of a host without power does not even fail."""
    monkeypatch.setattr(module, "_STORE_S", 0.2)
    dog = make(0, 2)

    class Gone:
        def __getattr__(self, name):
            if is_hanging:
                threading.Event().wait(60)
            raise RuntimeError("Broken pipe")

    dog._store = Gone()
    begin = time.monotonic()
    text = fails(dog.wait, Work(), "reads", is_message=True, is_prompt=True)
    assert "and the store where the ranks met is gone" in text
    assert str(dog.explain("reads", RuntimeError("closed"))) == f"reads: {text}"
    assert time.monotonic() - begin < 3


# The start


def write_processes(store, *processes):
    for rank, process in enumerate(processes):
        dist.PrefixStore("test", store).set(f"process {rank}", json.dumps(process))


def test_one_that_does_not_come_is_named_and_one_that_is_late_is_told(store, heard):
    write_processes(store, ELSEWHERE)
    text = fails(make(0, 2, processes={}).meet)
    assert f"it makes an engine (called at {CALLER}), and rank 1 has not come" in text
    assert any("rank 1 has not come" in warning for warning in heard())
    write_processes(store, ELSEWHERE, ELSEWHERE)
    assert fails(make(1, 2, processes={}).meet) == f"makes an engine: {text}"
