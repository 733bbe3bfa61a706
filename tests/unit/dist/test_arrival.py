"""Who is missing before there is a group of processes."""

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time

import psutil
import pytest

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar.dist import liveness
from hf_patrickstar.dist.arrival import Arrival, announce
from hf_patrickstar.dist.vigil import Patience

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
PATIENCE = Patience(0.3, 0.9)


class Keys:
    """A store in memory."""

    def __init__(self):
        self.values, self.numbers, self.lock = {}, {}, threading.Lock()

    def set(self, key, value):
        self.values[key] = value.encode()

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.lock:
            self.numbers[key] = self.numbers.get(key, 0) + amount
            return self.numbers[key]


@contextlib.contextmanager
def announced(store, rank):
    """Another process that has told who it is, and never comes."""
    with subprocess.Popen(SLEEPER) as process:
        started = psutil.Process(process.pid).create_time()
        told = [liveness.describe_system(), "a host", process.pid, started]
        store.set(f"member {rank}", json.dumps(told))
        yield process
        process.kill()


def arrive(store, rank=0, ranks=(0, 1), patience=PATIENCE, timeout_s=60.0):
    Arrival(rank, ranks, store, patience, timeout_s).wait()


def test_all_come_again_and_again():
    store = Keys()
    for _ in range(3):
        threads = [threading.Thread(target=arrive, args=(store, rank, (0, 1, 2))) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        arrive(store, 0, (0, 1, 2))
        for thread in threads:
            thread.join()
    assert store.numbers["0,1,2 came"] == 9


def test_groups_do_not_meet_each_other():
    store = Keys()
    arrive(store, 0, (0,))
    arrive(store, 1, (1,))
    with pytest.raises(CollectiveError, match="rank 1 has not come"):
        arrive(store, 0, (0, 1), timeout_s=0.3)


def test_one_that_has_ended_is_named_at_once():
    store = Keys()
    with announced(store, 1) as process:
        process.kill()
    begin = time.monotonic()
    with pytest.raises(CollectiveError, match=rf"rank 1 has ended \(process {process.pid} on a host\)"):
        arrive(store, patience=Patience(100, 100))
    assert time.monotonic() - begin < 30


def test_one_that_ends_while_it_is_waited_for():
    store = Keys()
    with announced(store, 1) as process:
        threading.Timer(0.5, process.kill).start()
        with pytest.raises(CollectiveError, match="rank 1 has ended"):
            arrive(store, patience=Patience(100, 100))


def test_one_that_nobody_knows_is_named_and_given_up(caplog):
    store = Keys()
    with caplog.at_level(logging.WARNING), pytest.raises(CollectiveError, match="rank 1 has not come within") as caught:
        arrive(store)
    assert "raise process_wait_s" in str(caught.value)
    (record, *_) = caplog.records
    assert "rank 0 makes an engine" in record.getMessage()
    assert "rank 1 has not come" in record.getMessage()
    # One that comes later is told, and does not wait for a group that is never made.
    with pytest.raises(CollectiveError, match="rank 0 waited for the others to make the engine, and rank 1 has not"):
        arrive(store, 1)


def test_one_that_runs_is_waited_for_as_long_as_a_group_is():
    store = Keys()
    with announced(store, 1):
        thread = threading.Timer(1.5, arrive, (store, 1))
        thread.start()
        arrive(store, patience=Patience(0.1, 0.2))
        thread.join()
    with announced(store, 1), pytest.raises(CollectiveError, match="rank 1 has not come"):
        arrive(store, patience=Patience(0.1, 0.2), timeout_s=0.8)


def test_a_process_of_another_system_is_not_looked_for(monkeypatch):
    """A number that is of nobody here says nothing about a container beside."""
    store = Keys()
    monkeypatch.setattr(liveness, "describe_system", lambda: "another")
    store.set("member 1", json.dumps(["another", "a host", 2**22 + 1, 0.0]))
    with pytest.raises(CollectiveError, match="rank 1 has not come"):
        arrive(store)


def test_what_is_announced():
    store = Keys()
    announce(3, store)
    system, *member = json.loads(store.get("member 3"))
    assert system == liveness.describe_system()
    assert not liveness.has_ended(liveness.Member(*member))
    assert liveness.has_ended(liveness.Member(member[0], member[1], member[2] - 100)), "the number is another's now"
