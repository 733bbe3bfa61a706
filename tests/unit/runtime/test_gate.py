import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_patrickstar.errors import EngineError
from hf_patrickstar.runtime.gate import FORWARD, STATE_DICT, Gate


class Slow(nn.Linear):
    """A layer that stops in its forward, or in its ``state_dict``."""

    def __init__(self):
        super().__init__(2, 2)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def stop(self):
        self.begun.set()
        assert self.may_end.wait(30)

    def forward(self, x):
        self.stop()
        return super().forward(x)

    def _save_to_state_dict(self, *args):
        self.stop()
        super()._save_to_state_dict(*args)


@pytest.fixture
def model():
    return nn.Sequential(Slow(), nn.Linear(2, 2))


@pytest.fixture
def start():
    threads = []

    def start(function):
        thread = threading.Thread(target=function, name="demo", daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


USES = {
    "a forward": lambda model: model(torch.ones(1, 2)),
    "forward itself": lambda model: model.forward(torch.ones(1, 2)),
    "a forward with hooks": lambda model: nn.Sequential(model)(torch.ones(1, 2)),
    "a state_dict": lambda model: model.state_dict(),
}


def wait_until_at(gate):
    """Waits until another thread waits at the gate."""
    deadline = time.monotonic() + 30
    while not gate._opened._cond._waiters:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_has_begun_goes_on_and_is_waited_for(model, start, use):
    ends = []
    thread = start(lambda: ends.append(use(model)))
    assert model[0].begun.wait(30)
    with Gate(model.modules(), FORWARD + STATE_DICT) as gate:
        with pytest.raises(
            EngineError, match=r"thread 'MainThread' cannot train: thread 'demo' has been inside .* for 0.05 s; wait"
        ):
            gate.wait("train", limit_s=0.05)
        threading.Timer(0.05, model[0].may_end.set).start()
        gate.wait("train")
        assert ends
        thread.join(30)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_begins_waits_until_the_gate_is_open(model, start, use):
    model[0].may_end.set()
    with Gate(model.modules(), FORWARD + STATE_DICT) as gate:
        start(lambda: use(model))
        wait_until_at(gate)
        gate.wait("train")
        assert not model[0].begun.is_set()
        use(model)  # this thread has the model
        assert model[0].begun.is_set()


def test_what_waits_finds_the_hooks_that_were_registered_meanwhile(model, start):
    model[0].may_end.set()
    told = []
    with Gate(model.modules(), FORWARD) as gate:
        thread = start(lambda: model(torch.ones(1, 2)))
        wait_until_at(gate)
        gate.wait("train")
        model.register_forward_pre_hook(lambda *args: told.append("hook"))
    thread.join(30)
    assert told == ["hook"]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_has_waited_at_one_gate_waits_at_the_next(model, start, use, monkeypatch):
    """The thread is scheduled late: it goes on when the second gate is closed."""
    may_go, wait = threading.Event(), Gate._has_waited

    def wait_and_dawdle(gate, caller):
        has_waited = wait(gate, caller)
        assert not has_waited or gate is not first or may_go.wait(30)
        return has_waited

    monkeypatch.setattr(Gate, "_has_waited", wait_and_dawdle)
    with Gate(model.modules(), FORWARD + STATE_DICT) as first:
        first.wait("train")
        thread = start(lambda: use(model))
        wait_until_at(first)
    with Gate(model.modules(), FORWARD + STATE_DICT) as second:
        with pytest.raises(EngineError, match="thread 'demo' has been inside"):
            second.wait("train", limit_s=0.05)
        may_go.set()
        wait_until_at(second)
        second.wait("train")
        assert not model[0].begun.is_set()
    model[0].may_end.set()
    thread.join(30)
    assert model[0].begun.is_set()


def test_a_forward_that_is_called_past_the_gate_waits_at_the_next_module(model, start):
    with Gate(model.modules(), FORWARD) as gate:
        gate.wait("train")
        thread = start(lambda: nn.Sequential.forward(model, torch.ones(1, 2)))
        wait_until_at(gate)
        assert not model[0].begun.is_set()
    model[0].may_end.set()
    thread.join(30)
    assert model[0].begun.is_set()


def test_a_gate_for_one_way_does_not_wait_for_the_other(model, start):
    start(lambda: model(torch.ones(1, 2)))
    assert model[0].begun.wait(30)
    with Gate(model.modules(), STATE_DICT) as gate:
        gate.wait("train", limit_s=0)
    model[0].may_end.set()


def test_modules_are_as_before(model):
    model.state_dict = own = lambda *args, **kwargs: {"own": 1}
    before = [dict(module.__dict__) for module in model.modules()]
    with Gate(model.modules(), FORWARD + STATE_DICT):
        assert model.state_dict() == {"own": 1}
        assert model.state_dict is not own
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_copy_that_begins_waits_until_the_gate_is_open(start):
    model, copies = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    with Gate(model.modules(), FORWARD + STATE_DICT) as gate:
        thread = start(lambda: copies.append(copy.deepcopy(model)))
        wait_until_at(gate)
    thread.join(30)
    assert_is_copy(copies[0], model)


def assert_is_copy(copied, model):
    for part, original in zip(copied.modules(), model.modules(), strict=True):
        assert part is not original
        assert part.__dict__.keys() == original.__dict__.keys()
    with torch.no_grad():
        copied[1].bias += 1
        assert not torch.equal(copied[1](torch.ones(1, 2)), model[1](torch.ones(1, 2)))


def test_a_copy_in_what_has_begun_has_no_gate(model, start):
    class Copying(Slow):
        def forward(self, x):
            super().forward(x)
            copies.append(copy.deepcopy(model[1:]))

    copies, ends = [], []
    model[1] = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].own = None
    copying = Copying()
    whole = nn.Sequential(copying, model)
    thread = start(lambda: ends.append(copying(torch.ones(1, 2))))
    assert copying.begun.wait(30)
    with Gate(whole.modules(), FORWARD + STATE_DICT) as gate:
        copying.may_end.set()
        gate.wait("train")
        thread.join(30)
    assert ends
    assert_is_copy(copies[0][0], model[1])


class SlowCopy(dict):
    """Stops when it is copied."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        self.begun.set()
        assert self.may_end.wait(30)
        return self


def test_a_copy_that_has_begun_ends_before_the_gate_is_closed(start):
    model, copies = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[1].slow = SlowCopy()
    start(lambda: copies.append(copy.deepcopy(model)))
    assert model[1].slow.begun.wait(30)
    threading.Timer(0.05, model[1].slow.may_end.set).start()
    with Gate(model.modules(), STATE_DICT):
        pass
    assert copies


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_backward_that_has_begun_goes_on_and_is_waited_for(start, is_recomputed):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            begun.set()
            assert may_end.wait(30)
            return gradient

    begun, may_end, ends = threading.Event(), threading.Event(), []
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False) if is_recomputed else model(x)
    loss = Stop.apply(y).sum()
    start(lambda: ends.append(loss.backward()))
    assert begun.wait(30)
    with Gate(model.modules(), STATE_DICT) as gate:
        gate.wait("train", limit_s=0)
    with Gate(model.modules(), FORWARD) as gate:
        with pytest.raises(EngineError, match="thread 'demo' has been inside"):
            gate.wait("train", limit_s=0.05)
        threading.Timer(0.05, may_end.set).start()
        gate.wait("train")
    assert model.weight.grad is not None


@pytest.mark.parametrize("how", ["in place", "wrapped", "by forward"])
def test_a_forward_that_has_begun_calls_compiled_parts(start, how):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

        def forward(self, x):
            return self.inner(x) + 1

    torch._dynamo.reset()
    block, errors, ends = Block(), [], []
    options = {"backend": "eager", "fullgraph": True}
    if how == "in place":
        block.compile(**options)
    elif how == "wrapped":
        block = torch.compile(block, **options)
    else:
        block.forward = torch.compile(block.forward, **options)
    model = nn.Sequential(Slow(), block)

    def run():
        try:
            ends.append(model(torch.ones(1, 2)))
        except Exception as error:
            errors.append(error)

    start(run)
    assert model[0].begun.wait(30)
    with Gate(model.modules(), FORWARD + STATE_DICT) as gate:
        model[0].may_end.set()
        gate.wait("train")
    assert not errors, errors
    assert ends
    torch._dynamo.reset()
