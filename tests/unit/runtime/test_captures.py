"""torch's entry points for tracing and exporting, while somebody has live models."""

import copy

import pytest
import torch

from hf_patrickstar.layout.specs import TensorSpec
from hf_patrickstar.runtime import captures
from hf_patrickstar.runtime.captures import Capture
from hf_patrickstar.runtime.chunk import ManagedParameter
from hf_patrickstar.runtime.live_parameter import LiveMixin

ENTRY_POINTS = [
    *((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.jit, "script")),
    *((torch.export, "export"), (torch.export, "draft_export"), (torch.onnx, "export")),
]
OWN = [getattr(owner, name) for owner, name in ENTRY_POINTS]


def present():
    return [getattr(owner, name) for owner, name in ENTRY_POINTS]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    for (owner, name), function in zip(ENTRY_POINTS, OWN, strict=True):
        setattr(owner, name, function)


class User:
    """Whoever has live models."""


class Live:
    """Answers for a parameter."""

    def __init__(self, value):
        self.value = value

    def value_for(self, parameter):
        return None

    def host_value(self):
        return self.value

    def copied_value(self):
        return self.value.clone()


def make_live(model):
    """Makes the parameters of a model answer, as an engine does; their values are the ones that they had."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        value = parameter.detach().clone()
        placeholder = torch.full((), float("nan")).expand(parameter.shape)
        tensor = ManagedParameter(TensorSpec(index, name, tuple(parameter.shape), True), parameter, 0, placeholder)
        tensor.bind(Live(value))
        tensor.dematerialize()
    return model


@pytest.fixture
def model():
    made = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(made.weight, 3.0)
    return make_live(made)


def collect(*args, **kwargs):
    """An entry point that tells what it was given."""
    return args, kwargs


def test_a_live_module_is_captured_as_an_ordinary_copy(model):
    (module, example), named = Capture(collect)(model, 5, mod=model)
    for found in (module, named["mod"]):
        assert found is not model
        assert not isinstance(found.weight, LiveMixin)
        assert found.weight.tolist() == [[3.0, 3.0]]
        assert type(found.weight) is torch.nn.Parameter
    assert example == 5
    assert isinstance(model.weight, LiveMixin)


def test_a_method_of_a_live_module_is_that_of_a_copy(model):
    ((method,), _) = Capture(collect)(model.forward)
    assert method.__self__ is not model
    assert method.__name__ == "forward"
    assert method(torch.ones(1, 2)).tolist() == [[6.0]]


@pytest.mark.parametrize("value", [None, 5, "text", torch.ones(1), [].append, len])
def test_what_is_no_module_passes(value):
    assert Capture(collect)(value, value=value) == ((value,), {"value": value})


def test_models_that_are_not_live_pass():
    model = torch.nn.Linear(2, 1)
    args, kwargs = Capture(collect)(model, model.forward, mod=model)
    assert args[0] is model
    assert args[1].__self__ is model
    assert kwargs["mod"] is model


def test_one_live_parameter_is_enough():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), make_live(torch.nn.Linear(1, 1)))
    ((module,), _) = Capture(collect)(model)
    assert module is not model
    assert not any(isinstance(parameter, LiveMixin) for parameter in module.parameters())


def test_a_capture_looks_like_what_it_stands_for():
    capture = Capture(copy.deepcopy)
    assert (capture.__name__, capture.__doc__) == ("deepcopy", copy.deepcopy.__doc__)


def test_entry_points_are_replaced_until_nobody_needs_that():
    first, second = User(), User()
    captures.attach(first)
    replaced = present()
    assert [capture.function for capture in replaced] == OWN
    captures.attach(second)
    captures.attach(first)
    assert present() == replaced, "once"
    captures.detach(first)
    assert present() == replaced
    captures.detach(first)
    assert present() == replaced, "a user that has ended before does not count"
    captures.detach(second)
    assert present() == OWN
    captures.detach(second)
    assert present() == OWN


def test_a_user_that_is_gone_keeps_nothing_attached():
    first, second = User(), User()
    captures.attach(first)
    captures.attach(second)
    del first
    captures.detach(second)
    assert present() == OWN


def test_what_somebody_else_put_in_place_meanwhile_stays():
    user = User()
    captures.attach(user)
    torch.jit.trace = collect
    captures.detach(user)
    assert torch.jit.trace is collect
    assert present()[1:] == OWN[1:]
