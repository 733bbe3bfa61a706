"""torch's entry points for tracing and exporting, while somebody has live models."""

import pytest
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.model import captures
from hf_patrickstar.model.captures import Capture
from hf_patrickstar.model.live_parameter import LiveMixin

ENTRY_POINTS = [
    *((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.jit, "script")),
    *((torch.export, "export"), (torch.export, "draft_export"), (torch.onnx, "export")),
]


def present():
    return [getattr(owner, name) for owner, name in ENTRY_POINTS]


OWN = present()


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch):
    """Engines that other tests keep do not count, and the entry points are theirs again afterwards."""
    for (owner, name), function in zip(ENTRY_POINTS, OWN, strict=True):
        monkeypatch.setattr(owner, name, function)


class User:
    """Whoever has live models."""


def collect(*args, **kwargs):
    """An entry point that returns what it was given."""
    return args, kwargs


def test_live_modules_and_their_methods_are_captured_as_ordinary_copies():
    """One live parameter is enough; what is no module, or not live, passes."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    engine = PatrickStarEngine(model, {"chunk_numel": 64}, device="cpu")
    mixed, other = torch.nn.Sequential(torch.nn.Linear(1, 1), model), torch.nn.Linear(2, 1)
    values = [None, 5, "text", torch.ones(1), len, [].append, other, other.forward]
    (found, method, whole, *rest), named = Capture(collect)(model, model.forward, mixed, *values, mod=model)
    for module in (found, whole[1], named["mod"], method.__self__):
        assert module is not model
        assert type(module.weight) is torch.nn.Parameter
        assert module.weight.tolist() == [[3.0, 3.0]]
    assert (method.__name__, method(torch.ones(1, 2)).tolist()) == ("forward", [[6.0]])
    assert all(left is right for left, right in zip(rest[:-1], values[:-1], strict=True))
    assert rest[-1].__self__ is other
    assert isinstance(model.weight, LiveMixin)
    engine.detach()


def test_entry_points_are_replaced_until_nobody_needs_that():
    first, second, gone = User(), User(), User()
    for user in (first, second, first, gone):
        captures.attach(user)
    replaced = present()
    assert [capture.function for capture in replaced] == OWN, "once"
    del gone, user
    for _ in range(2):  # a user that has ended before does not count
        captures.detach(first)
        assert present() == replaced
    torch.jit.trace = collect  # what somebody else puts in place meanwhile stays
    captures.detach(second)
    captures.detach(second)
    assert present() == [collect, *OWN[1:]]
