import threading

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_has_begun_goes_on_and_is_waited_for(model, start, use):
    ends = []
    thread = start(lambda: ends.append(use(model)))
    assert model[0].begun.wait(30)
    with Gate(model.modules(), FORWARD + STATE_DICT) as gate:
        with pytest.raises(
            EngineError, match=r"thread 'MainThread' cannot train: thread 'demo' has been inside .* for 0.05 s; begin"
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
        gate.wait("train")
        assert not model[0].begun.wait(0.05)
        use(model)  # this thread has the model
        assert model[0].begun.is_set()


def test_what_waits_finds_the_hooks_that_were_registered_meanwhile(model, start):
    model[0].may_end.set()
    told = []
    with Gate(model.modules(), FORWARD) as gate:
        thread = start(lambda: model(torch.ones(1, 2)))
        gate.wait("train")
        model.register_forward_pre_hook(lambda *args: told.append("hook"))
    thread.join(30)
    assert told == ["hook"]


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
