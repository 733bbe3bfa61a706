"""Who is found missing, from answers in a store and from the processes of this host."""

import concurrent.futures
import subprocess
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from hf_patrickstar.dist.liveness import Liveness, Member, describe_self, own_client

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Answers:
    """A store of a few keys."""

    def __init__(self, *ranks):
        self.keys = {str(rank): "here" for rank in ranks}

    def set(self, key, value):
        self.keys[key] = value

    def check(self, keys):
        return all(key in self.keys for key in keys)


class Gone:
    def set(self, key, value):
        raise RuntimeError("Broken pipe")

    check = set


class Hanging:
    def set(self, key, value):
        threading.Event().wait()


@pytest.fixture
def process():
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def member_of(process):
    return describe_self()._replace(pid=process.pid, started=psutil.Process(process.pid).create_time())


def elsewhere():
    return Member("another host", 1, 0.0)


def hold(liveness):
    begin = time.monotonic()
    return liveness.hold(), time.monotonic() - begin


def test_all_are_there(process):
    store = Answers(0, 2)
    found, seconds = hold(Liveness(1, [elsewhere(), describe_self(), member_of(process)], store))
    assert found == "All other ranks are still there, and a collective failed on them too."
    assert seconds < 10
    assert store.keys["1"] == "here"


def test_an_ended_neighbour_is_seen_at_once(process):
    liveness = Liveness(0, [describe_self(), member_of(process), elsewhere()], Answers())
    process.kill()  # nobody has asked for its exit code yet: it is a zombie
    found, seconds = hold(liveness)
    assert found == f"Rank 1 has ended (process {process.pid} on {describe_self().host})."
    assert seconds < 10


def test_the_answer_stays(process):
    liveness = Liveness(0, [describe_self(), member_of(process)], Answers(1))
    found = liveness.hold()
    process.kill()
    process.wait()
    assert liveness.hold() == found


def test_one_that_has_answered_and_left_is_not_missed(process):
    liveness = Liveness(0, [describe_self(), member_of(process), elsewhere()], Answers(1), patience_s=0.2)
    process.kill()
    process.wait()
    found, seconds = hold(liveness)
    assert found == "No answer within 0.2 s from rank 2: stuck, busy elsewhere, or gone with the host."
    assert 0.2 <= seconds < 1


def test_silent_ranks_are_listed(process):
    members = [describe_self(), member_of(process), elsewhere(), elsewhere()]
    found, _ = hold(Liveness(0, members, Answers(2), patience_s=0.2))
    assert found.startswith("No answer within 0.2 s from ranks 1, 3: ")


def test_an_answer_that_comes_late_counts():
    store = Answers()
    timer = threading.Timer(0.3, store.set, ("1", "here"))
    timer.start()
    found, seconds = hold(Liveness(0, [describe_self(), elsewhere()], store))
    assert found.startswith("All other ranks are still there")
    assert 0.2 < seconds < 2


def test_processes_that_cannot_be_told_apart_are_not_watched(process):
    stranger = member_of(process)._replace(started=1.0)
    nobody = describe_self()._replace(pid=2**22 + 1)
    found, _ = hold(Liveness(0, [describe_self(), stranger, nobody], Answers(1, 2)))
    assert found.startswith("All other ranks are still there")


def test_a_store_that_is_gone(process):
    liveness = Liveness(1, [member_of(process), describe_self()], Gone(), patience_s=0.2)
    found, seconds = hold(liveness)
    assert found.startswith("The store where the ranks met is gone, and so is the process that hosts it (rank 0 ")
    assert seconds < 1.5


def test_a_store_that_hangs(process):
    liveness = Liveness(1, [member_of(process), describe_self()], Hanging(), patience_s=0.2)
    process.kill()
    process.wait()
    found, seconds = hold(liveness)
    assert found.startswith(f"Rank 0 has ended (process {process.pid} ")
    assert "The store where the ranks met is gone" in found
    assert seconds < 2


# The store


def test_a_client_of_its_own_works_while_another_one_waits():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5))
    prefixed = dist.PrefixStore("group", store)
    own = own_client(prefixed)
    waiting = concurrent.futures.ThreadPoolExecutor(1).submit(prefixed.get, "key")
    while not waiting.running():
        time.sleep(0.01)
    time.sleep(0.1)
    own.set("key", "value")
    assert waiting.result() == b"value", "it was set before the wait timed out"


@pytest.mark.parametrize("error", [AttributeError, NotImplementedError])
def test_a_store_that_has_only_one_client(error):
    class Store:
        def clone(self):
            raise error

    store = Store()
    assert own_client(store) is store
