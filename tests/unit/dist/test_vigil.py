"""Who waits long warns, gives up, and tells the others; with threads for processes and a dictionary for the store."""

import concurrent.futures
import gc
import json
import logging
import math
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import psutil
import pytest

from hf_patrickstar.errors import CollectiveError
from hf_patrickstar import callers
from hf_patrickstar.dist import vigil as module
from hf_patrickstar.dist.liveness import Liveness, Member, describe_self
from hf_patrickstar.dist.vigil import Patience, Vigil

ELSEWHERE = Member("another host", 1, 0.0)
SHORT = Patience(0.05, 60)
BRIEF = Patience(0.05, 0.2)
CALLER = "train.py:12 in main: model.state_dict()"
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Work:
    """What is over when somebody says so; like torch's, one that fails raises whenever it is waited for."""

    def __init__(self, error=None):
        self.event, self.error, self.num_waits = threading.Event(), error, 0

    def wait(self, timeout=None):
        self.num_waits += 1
        assert timeout is None or timeout >= timedelta(milliseconds=1), "none is no timeout at all"
        if not self.event.wait(timeout and timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.event.is_set()


class Store:
    """Some keys; the ranks of one test share it."""

    def __init__(self):
        self.keys = {}

    def set(self, key, value):
        self.keys[key] = value

    def check(self, keys):
        return all(key in self.keys for key in keys)

    def get(self, key):
        return self.keys[key].encode()


class Gone(Store):
    def set(self, key, value):
        raise RuntimeError("Broken pipe")

    def check(self, keys):
        raise RuntimeError("Broken pipe")


class Hanging(Store):
    """Answers nothing until ``answers`` is set."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def set(self, key, value):
        self.answers.wait()
        super().set(key, value)

    def check(self, keys):
        self.answers.wait()
        return super().check(keys)


class Rank:
    """A rank of three, on a host of its own."""

    def __init__(self, store, rank=0, patience=SHORT, members=(ELSEWHERE,) * 3, hang_up=None):
        self.store, self.hung_up = store, []
        liveness = Liveness(rank, [*members[:rank], describe_self(), *members[rank + 1 :]], store)
        self.vigil = Vigil(rank, liveness, store, patience, hang_up or self.hung_up.append)

    def say(self, what="reads", work=None, **settings):
        self.vigil.wait(Work() if work is None else work, what, is_message=True, **settings)

    def fails(self, what="reads", **settings):
        with pytest.raises(CollectiveError) as caught:
            self.say(what, **{"is_patient": False, **settings})
        return str(caught.value)


@pytest.fixture(autouse=True)
def _caller(monkeypatch):
    monkeypatch.setattr(module, "find_caller", lambda *_: CALLER)


_threads, _has_ended = [], threading.Event()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Other tests would wait for it, and engines would keep values from it."""
    yield
    _has_ended.set()
    for thread in _threads:
        thread.join(30)
    _threads.clear()
    _has_ended.clear()


@pytest.fixture
def heard(caplog):
    """The warnings so far."""
    caplog.set_level(logging.WARNING, logger="hf_patrickstar")
    return lambda: [record.getMessage() for record in caplog.records]


def done(error=None):
    work = Work(error)
    work.event.set()
    return work


def until(condition, error=None):
    """Work that is over some time after a condition holds."""
    work = Work(error)

    def watch():
        while not (condition() or _has_ended.is_set()):
            time.sleep(0.01)
        time.sleep(0.1)
        work.event.set()

    in_thread(watch)
    return work


def in_thread(function, *args, **kwargs):
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    _threads.append(thread)
    return thread


# How long


@pytest.mark.parametrize(
    ("seconds", "patience"),
    [(60, (10, 60)), (20.0, (20 / 3, 20)), (0.3, (0.1, 0.3)), (0, (10, math.inf)), (None, (10, math.inf))],
)
def test_the_patience_of_a_setting(seconds, patience):
    assert Patience.of(seconds)[:2] == pytest.approx(patience)


def test_what_is_soon_over_touches_nothing(heard):
    rank, work = Rank(None), done()
    rank.say(work=work)
    assert (work.num_waits, heard(), rank.hung_up) == (1, [], [])


def test_a_short_wait_leaves_nothing(heard):
    rank = Rank(Store(), patience=Patience(5, 60))
    rank.say(work=until(lambda: rank.store.keys.get("0 waits")))
    assert rank.store.keys == {"0 waits": ""}
    assert (heard(), rank.hung_up) == ([], [])


def test_what_fails_raises_its_own_error(heard):
    rank = Rank(Store())
    for work in (done(RuntimeError("lost")), until(heard, RuntimeError("lost"))):
        with pytest.raises(RuntimeError, match="lost") as caught:
            rank.say(work=work, is_patient=False)
        assert caught.value is work.error
    assert rank.vigil.verdict == ""
    assert rank.hung_up == [False], "after a long wait others may wait for this rank alone"


def test_what_is_over_just_after_a_timeout_is_over():
    class Late(Work):
        def wait(self, timeout=None):
            try:
                super().wait(timeout)
            finally:
                self.event.set()

    work = Late()
    Rank(Store()).say(work=work)
    assert work.num_waits == 2


# Warnings


def test_a_warning_names_the_call_the_line_and_who_is_missing(heard):
    rank = Rank(Store())
    rank.say("reads parameter 'x'", work=until(heard), is_patient=False)
    assert heard() == [
        f"patrickstar: rank 0 reads parameter 'x' (called at {CALLER}) and has waited for 0.05 s: ranks 1, 2 have not "
        "come. All processes must call it together; where they do not, this one gives up after 60 s (process_wait_s)"
    ]


def test_without_a_line_of_the_users(heard, monkeypatch):
    monkeypatch.setattr(module, "find_caller", lambda: "")
    Rank(Store()).say("reads", work=until(heard))
    assert heard()[0].startswith("patrickstar: rank 0 reads and has waited for 0.05 s: ")


def test_a_patient_rank_warns_less_and_less(heard):
    """It does not give up; a run in which one rank is always late is not flooded."""
    rank = Rank(Store())
    for number, seconds in enumerate((0.05, 0.1, 0.2)):
        rank.say("begins 'training'", work=until(lambda: heard()[number:]))  # noqa: B023
        assert f"has waited for {seconds:g} s: " in heard()[number]
    ending = "have not come. It goes on waiting, until the timeout of the process group (ddp_timeout)"
    assert all(warning.endswith(ending) for warning in heard())
    rank.say("reads", work=until(lambda: heard()[3:]), is_patient=False)
    assert "has waited for 0.05 s: " in heard()[3], "the other kind is not less of a mistake"


def test_those_that_wait_for_the_same_message_are_not_missed(heard):
    store = Store()
    first, second = Rank(store, 0, Patience(1, 3)), Rank(store, 2, Patience(1, 3))
    work = Work()
    threads = [in_thread(rank.say, work=work, is_patient=False) for rank in (first, second)]
    while len(heard()) < 2:
        time.sleep(0.01)
    work.event.set()
    for thread in threads:
        thread.join(5)
    assert all("1 s: rank 1 has not come. " in text for text in heard())


def test_all_have_come(heard):
    rank = Rank(Store(), members=(ELSEWHERE,) * 2)
    rank.store.set("1 waits", f'[1, "reads", "{CALLER}"]')
    rank.say(work=until(heard))
    assert "0.05 s: all others have come. " in heard()[0]


def test_what_others_do_meanwhile_is_named(heard):
    rank = Rank(Store())
    rank.store.set("1 waits", f'[1, "begins \'training\'", "{CALLER}"]')
    rank.store.set("2 waits", '[0, "gathers group 3", ""]')
    rank.say(work=until(heard))
    assert (
        f"0.05 s: rank 1 begins 'training' (called at {CALLER}) meanwhile; rank 2 gathers group 3 meanwhile. "
        in heard()[0]
    )


def test_one_that_has_ended_is_not_waited_for_as_if_it_were_late(heard):
    with subprocess.Popen(SLEEPER) as process:
        neighbour = describe_self()._replace(pid=process.pid, started=psutil.Process(process.pid).create_time())
        rank = Rank(Store(), members=(ELSEWHERE, neighbour, ELSEWHERE))
        rank.store.set("1 waits", '[1, "reads", ""]')  # long ago
        process.kill()
    rank.say(work=until(heard))
    end = f"rank 1 has ended (process {process.pid} on {neighbour.host})"
    assert f"0.05 s: {end}; rank 2 has not come. " in heard()[0]


@pytest.mark.parametrize("store", [Gone, Hanging])
def test_without_the_store_nothing_is_known(heard, monkeypatch, store):
    monkeypatch.setattr(module, "STORE_PATIENCE_S", 0.1)
    text = Rank(store(), patience=BRIEF).fails()
    for message in (text, heard()[0]):
        assert "the store where the ranks met is gone, so that nothing is known of the others" in message


@pytest.mark.parametrize("is_asked_first", [False, True])
def test_a_store_that_answers_again_gets_what_was_not_said(heard, monkeypatch, is_asked_first):
    monkeypatch.setattr(module, "STORE_PATIENCE_S", 0.1)
    rank = Rank(Hanging())
    if is_asked_first:
        assert rank.vigil.ask() == ""
    rank.say(work=until(heard))
    assert "the store where the ranks met is gone" in heard()[0]
    rank.store.answers.set()
    rank.vigil._stuck.join(5)
    assert rank.store.keys == {"0 waits": ""}, "the rank does not wait any more"
    rank.store.keys["gave up"] = "rank 1 gave up"
    assert rank.vigil.ask() == "rank 1 gave up"


# Giving up


def test_who_gives_up_says_why_and_hangs_up(heard):
    rank = Rank(Store(), patience=BRIEF)
    text = rank.fails("reads parameter 'x'")
    assert text == (
        f"rank 0 gave up after 0.2 s: it reads parameter 'x' (called at {CALLER}), and ranks 1, 2 have not come. This "
        "must be called by all processes together (Trainer.save_model and engine.full_parameters too); where the "
        "others were only busy, raise process_wait_s. The processes are not in the same place any more: restart from "
        "the last checkpoint"
    )
    assert rank.store.keys == {"0 waits": "", "gave up": text}
    assert rank.vigil.verdict == text
    assert rank.hung_up == [False]
    assert len(heard()) == 1


def test_the_reason_is_in_the_store_before_the_others_notice():
    store, found = Store(), []
    rank = Rank(store, patience=BRIEF, hang_up=lambda with_data: found.append(store.keys.get("gave up")))
    assert [rank.fails()] == found


@pytest.mark.parametrize("is_patient", [False, True])
def test_one_that_waits_for_somebody_else_is_told(is_patient):
    store = Store()
    first, second = Rank(store, 0, BRIEF), Rank(store, 1)
    text = first.fails("reads")
    assert second.fails("begins 'training'", is_patient=is_patient) == f"begins 'training': {text}"
    assert second.vigil.verdict == text
    assert second.hung_up == [False]


def test_who_asks_is_told_once_and_for_all():
    store = Store()
    rank = Rank(store, 1)
    assert rank.vigil.ask() == ""
    text = Rank(store, 0, BRIEF).fails()
    assert rank.vigil.ask() == text
    store.keys.clear()
    assert rank.vigil.ask() == text


def test_data_that_is_given_up_closes_the_connections_for_data():
    rank = Rank(Store())
    rank.store.set("gave up", "rank 1 gave up")
    with pytest.raises(CollectiveError, match="gathers group 3: rank 1 gave up"):
        rank.vigil.wait(Work(), "gathers group 3")
    assert rank.hung_up == [True]


def test_an_interrupt_hangs_up_too():
    class Interrupted(Work):
        def wait(self, timeout=None):
            if self.num_waits == 1:
                raise KeyboardInterrupt
            super().wait(timeout)

    rank = Rank(Store())
    with pytest.raises(KeyboardInterrupt):
        rank.say(work=Interrupted())
    assert rank.hung_up == [False]
    assert rank.store.keys == {"0 waits": ""}


# Waiting in vain


class Repeating(Store):
    """Others say again and again that they wait; each goes on by so many milliseconds from look to look."""

    def __init__(self, waits, steps):
        super().__init__()
        self.steps = {f"{rank} waits": step for rank, step in enumerate(steps, 1)}
        for rank, wait in enumerate(waits, 1):
            self.keys[f"{rank} waits"] = "" if wait is None else json.dumps([*wait, CALLER, 0])
        self.num_looks = 0

    def get(self, key):
        if self.steps.get(key) and self.keys[key]:
            *wait, waited_ms = json.loads(self.keys[key])
            self.keys[key] = json.dumps([*wait, waited_ms + self.steps[key]])
        self.num_looks += key == "2 waits"
        return super().get(key)


SAME, NEXT, DATA, OTHER_DATA = (1, "reads"), (2, "ends"), (0, "gathers group 3"), (0, "gathers group 4")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (SAME, (SAME, DATA)),
        (SAME, (DATA, DATA)),
        (SAME, (NEXT, NEXT)),
        (DATA, (DATA, SAME)),
        (DATA, (DATA, OTHER_DATA)),
    ],
)
def test_all_wait_for_different_things(own, others):
    rank = Rank(Repeating(others, (60, 70)), patience=BRIEF)
    work = until(lambda: rank.store.num_looks > 40, RuntimeError("it did not give up"))
    with pytest.raises(CollectiveError) as caught:
        rank.vigil.wait(work, own[1], is_message=own is SAME)
    text = str(caught.value)
    assert text.startswith(f"rank 0 gave up after 0.25 s: it {own[1]} (called at {CALLER}), and ")
    assert f"rank 2 {others[1][1]} (called at {CALLER}) meanwhile. Each waits for the other. Forward, backward" in text
    assert rank.store.keys["gave up"] == text
    assert rank.hung_up[0] is True, "what is under way on the connections for data never ends"


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        (SAME, (SAME, SAME), (60, 60)),
        (DATA, (DATA, DATA), (60, 60)),
        (SAME, (DATA, None), (60, 60)),
        (SAME, (DATA, DATA), (60, 0)),
        (SAME, (DATA, DATA), (60, 1)),
    ],
    ids=["one message", "the same data", "one computes", "one has not said it again", "one began just now"],
)
def test_what_may_only_be_slow_is_waited_for(own, others, steps):
    rank = Rank(Repeating(others, steps), patience=BRIEF)
    rank.vigil.wait(until(lambda: rank.store.num_looks > 9), own[1], is_message=own is SAME)
    assert (rank.vigil.verdict, rank.hung_up) == ("", [])


def test_a_rank_says_again_that_it_waits():
    rank, said = Rank(Repeating((SAME, SAME), (60, 60))), []
    rank.store.set = lambda key, value: value and said.append(json.loads(value))
    rank.say("reads", work=until(lambda: rank.store.num_looks > 4))
    assert [wait[:3] for wait in said[:4]] == [[1, "reads", CALLER]] * 4
    assert said[0][3] < said[1][3] < said[2][3] < said[3][3]


# Looks at other threads


def test_a_look_keeps_no_variables_of_other_threads_alive(monkeypatch):
    """Neither while it talks to the store, nor afterwards until garbage is collected."""

    class Activations:
        pass

    class Watching(Store):
        def set(self, key, value):
            leave.set()
            thread.join(5)
            alive.append(found[0]() is not None)
            super().set(key, value)

    def compute():
        activations = Activations()
        found.append(weakref.ref(activations))
        with rank.vigil.watched("gathers group 3"):
            entered.set()
            leave.wait(5)

    rank, found, alive = Rank(Watching(), patience=Patience(0.001, 60)), [], []
    entered, leave = threading.Event(), threading.Event()
    thread = in_thread(compute)
    assert entered.wait(5)
    time.sleep(0.01)
    monkeypatch.setattr(module, "find_caller", callers.find_caller)
    gc.disable()
    try:
        rank.vigil.look()
    finally:
        gc.enable()
    assert alive[0] is False
    assert found[0]() is None


def look_from_a_barrier(vigil):
    """Looks twice while the main thread is inside of a collective."""
    scope = {"__name__": "torch.distributed.distributed_c10d", "look": vigil.look}
    exec("def barrier():\n    look()\n    look()", scope)
    scope["barrier"]()


def places(rank):
    return [json.loads(text)[1] for key, text in rank.store.keys.items() if key.endswith("is inside") and text]


def test_the_main_thread_is_looked_at_where_another_one_has_ended_or_is_idle():
    rank = Rank(Store())
    in_thread(rank.say, work=done()).join(5)
    look_from_a_barrier(rank.vigil)
    assert places(rank) == ["is inside torch.distributed.barrier"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(rank.say, work=done()).result(5)
        while not callers.is_idle(sys._current_frames()[rank.vigil._thread]):
            time.sleep(0.01)
        look_from_a_barrier(rank.vigil)
    assert places(rank) == ["is inside torch.distributed.barrier"]


def test_the_main_thread_is_not_looked_at_while_another_one_computes():
    def train():
        rank.say(work=done())
        has_begun.set()
        is_over.wait(5)

    rank, has_begun, is_over = Rank(Store()), threading.Event(), threading.Event()
    thread = in_thread(train)
    assert has_begun.wait(5)
    look_from_a_barrier(rank.vigil)
    is_over.set()
    thread.join(5)
    assert places(rank) == []
