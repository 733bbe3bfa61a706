import pytest
from engine.small import BUDGETS


@pytest.fixture(params=BUDGETS)
def budget(request):
    """Everything stays on the device, chunks move, or every chunk leaves as soon as it can and NaN is in its place."""
    return request.param


@pytest.fixture
def short_waits(monkeypatch):
    """A thread waits a moment for another one, and not a minute: the one place that knows where the limit stands."""
    from hf_patrickstar.runtime.gate import Gate
    from hf_patrickstar.runtime.turns import Turns

    for function in (Turns.__init__, Gate.wait):
        defaults = tuple(0.3 if value == 60.0 else value for value in function.__defaults__ or ())
        monkeypatch.setattr(function, "__defaults__", defaults)
