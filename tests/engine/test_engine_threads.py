"""Other threads: one computes at a time, readers get values and never NaN, and whoever is stuck is named."""

import contextlib
import threading
import time

import pytest
import torch
from support.pairs import Pair, alike
from support.same import gradients_of
from support.small import Stack, Tied, batch, loss_of
from support.threads import beside, in_threads, read_parameters, read_state

from hf_patrickstar import EngineError

SITUATIONS = ("resident", "moving")


@torch.no_grad()
def compute(model):
    assert not model(batch()).isnan().any()


def look_at_gradients(model):
    for parameter in model.parameters():
        gradient = parameter.grad
        with contextlib.suppress(EngineError):  # consumed by the step
            assert gradient is None or not gradient.clone().isnan().any()


@pytest.mark.parametrize("reader", [read_parameters, read_state, compute, look_at_gradients])
def test_a_thread_that_reads_or_computes_gets_values_while_another_trains(reader, budget):
    pair = Pair(Stack, budget)
    with beside(reader, pair.ours):
        for step in range(4):
            pair.both(lambda model, optimizer, step=step: loss_of(model, step).backward())
            pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.check()


def test_forwards_of_two_threads_do_not_meet():
    """Chunks of two forwards at once would not fit; each waits for the other, and both are right."""
    pair = Pair(lambda: Stack(6), "moving")
    expected = pair.plain(batch()).detach()

    @torch.no_grad()
    def work():
        for _ in range(15):
            assert torch.equal(pair.ours(batch()), expected)

    in_threads(work, work, work)
    assert pair.engine.stats()["device_peak_nbytes"] <= 3 * 320 * 4


class Waiting(Stack):
    """Its forward waits for an event that a test sets."""

    def __init__(self, depth=5):
        super().__init__(depth)
        self.is_inside, self.may_go_on, self.waits = threading.Event(), threading.Event(), False

    def forward(self, x):
        if self.waits:
            self.is_inside.set()
            assert self.may_go_on.wait(30)
        return super().forward(x)


def inside_of_a_forward(model):
    """A thread that is inside of a forward until ``may_go_on`` is set, and where its result comes."""
    results = []

    def work():
        with torch.no_grad():
            results.append(model(batch()).clone())

    model.waits = True
    thread = threading.Thread(target=work, name="slow")
    thread.start()
    assert model.is_inside.wait(30)
    model.waits = False
    return thread, results


@pytest.mark.parametrize("what", ["forward", "step", "zero_grad", "detach"])
def test_whoever_waits_too_long_is_told_for_whom(what, short_waits):
    pair = Pair(Waiting, "moving")
    pair.train(1)
    pair.backward(1)
    thread, _ = inside_of_a_forward(pair.ours)
    calls = {
        "forward": lambda: pair.ours(batch()),
        "step": lambda: pair.optimizer.step(),
        "zero_grad": lambda: pair.optimizer.zero_grad(),
        "detach": lambda: pair.engine.detach(),
    }
    with pytest.raises(
        EngineError, match=r"thread '(slow|MainThread)' .*thread 'slow' has been inside.*copy of the model"
    ):
        calls[what]()
    pair.ours.may_go_on.set()
    thread.join(30)
    pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    pair.train(2, first=2)


def test_a_backward_that_raised_in_another_thread_gives_its_turn_up(budget):
    pair = Pair(Stack, budget)

    def fail(gradient):
        raise LookupError("in backward")

    handle = pair.ours.layers[2].weight.register_hook(fail)
    with pytest.raises(LookupError, match="in backward"):
        in_threads(lambda: loss_of(pair.ours, 3).backward())
    handle.remove()
    pair.optimizer.zero_grad()
    pair.train(2)


@alike
def test_forward_in_one_thread_and_backward_in_another(model, optimizer):
    for step in range(3):
        in_threads(loss_of(model, step).backward)
        found = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_thread_that_computes_all_the_time_does_not_keep_others_out():
    pair = Pair(Tied, "moving")

    @torch.no_grad()
    def compute():
        pair.ours(torch.arange(6)[None])

    begin = time.monotonic()
    with beside(compute), beside(compute):
        for step in range(3):
            pair.both(lambda model, optimizer, step=step: loss_of(model, step).backward())
            pair.both(lambda model, optimizer: (optimizer.step(), optimizer.zero_grad()))
    assert time.monotonic() - begin < 30
    pair.check()


def test_a_backward_that_raised_gives_its_turn_up_while_its_thread_goes_on(short_waits):
    """A waiting thread would give up after a moment, and get an error."""
    pair = Pair(Stack, "moving")
    has_failed, may_end = threading.Event(), threading.Event()

    def fail(gradient):
        raise LookupError("in backward")

    def work():
        loss = loss_of(pair.ours, 3)
        with contextlib.suppress(LookupError):
            loss.backward()
        has_failed.set()
        assert may_end.wait(30)

    handle = pair.ours.layers[2].weight.register_hook(fail)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert has_failed.wait(30)
    handle.remove()
    try:
        pair.optimizer.zero_grad()
        pair.train(2)
    finally:
        may_end.set()
        thread.join(30)
