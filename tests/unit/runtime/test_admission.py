"""Which models can be managed, and what is said to the others."""

import functools

import pytest
import torch

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.runtime.admission import check_model, check_shapes, check_values, is_left_out, is_recomputed


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def checkpointed(use_reentrant):
    model = make_model()
    model[1]._gradient_checkpointing_func = functools.partial(len, use_reentrant=use_reentrant)
    return model


def checkpointed_by_diffusers():
    model = checkpointed(True)
    model.activation_checkpointing_enable = lambda: None
    return model


def typed(class_name):
    """A model of which one parameter has a class of this name."""
    model = make_model()
    made = type(class_name, (torch.nn.Parameter,), {})(model[1].weight.detach())
    model[1].register_parameter("weight", made)
    return model


def with_integers():
    model = make_model()
    model[0].register_parameter("scale", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    return model


def compiled():
    model = make_model()
    model._orig_mod = None
    return model


class DTensor(torch.Tensor):
    pass


class Sharded(torch.nn.Parameter):
    """A parameter that is spread over devices."""

    @property
    def data(self):
        return torch.zeros(2, 1).as_subclass(DTensor)


def sharded():
    model = make_model()
    model[1].register_parameter("weight", Sharded(torch.zeros(1, 2)))
    return model


@pytest.mark.parametrize(
    "make",
    [make_model, functools.partial(checkpointed, False), lambda: torch.nn.Sequential(torch.nn.LazyLinear(2))],
    ids=["plain", "checkpointed", "lazy"],
)
def test_models_that_can_be_managed(make):
    check_model(make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.DataParallel(make_model()), r"wrapped in nn\.DataParallel; pass .* \(model\.module\)"),
        (compiled, r"the model is compiled as a whole, .*; pass the model itself, and compile its blocks"),
        (functools.partial(checkpointed, True), r"module '1' uses .* model\.gradient_checkpointing_enable\(gradient_"),
        (checkpointed_by_diffusers, r"module '1' uses .* model\.activation_checkpointing_enable\(activation_"),
        (functools.partial(typed, "Params4bit"), r"parameter '1\.weight' is quantized by bitsandbytes \(Params4bit\)"),
        (functools.partial(typed, "Int8Params"), r"parameter '1\.weight' is quantized by bitsandbytes \(Int8Params\)"),
        (with_integers, r"parameter '0\.scale' has type torch\.int8, .* make it a buffer"),
        (sharded, r"parameter '1\.weight' is a DTensor"),
    ],
)
def test_models_that_cannot(make, message):
    with pytest.raises(ConfigError, match=message):
        check_model(make())


def test_a_parameter_without_a_shape_is_left_out_and_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(1))
    assert [is_left_out(parameter) for parameter in model.parameters()] == [False, False, True, True]
    with pytest.raises(ConfigError, match=r"parameter '1\.weight' is lazy and has no shape yet; run one forward"):
        check_shapes(model)
    model(torch.ones(1, 2))
    check_shapes(model)
    assert not any(map(is_left_out, model.parameters()))


# Values


def check(**parameters):
    check_values(list(parameters), list(parameters.values()))


def parameter(value):
    return torch.nn.Parameter(value)


def test_parameters_that_have_values_of_their_own():
    memory, nothing = torch.zeros(4), torch.zeros(0)
    check(
        left=parameter(memory[:2]),
        right=parameter(memory[2:]),  # beside each other in one memory
        other=parameter(torch.zeros(2)),
        empty=parameter(nothing),
        also_empty=parameter(nothing),
    )


def test_one_parameter_under_one_name_twice_is_itself():
    tied = parameter(torch.zeros(2))
    check_values(["weight", "weight"], [tied, tied])


def test_two_parameters_over_the_same_memory_are_refused():
    memory = torch.zeros(4)
    with pytest.raises(ConfigError, match="parameters 'left' and 'right' are two parameters over the same memory; tie"):
        check(other=parameter(torch.zeros(4)), left=parameter(memory), right=parameter(memory[:2]))


def test_a_parameter_without_a_value_is_refused():
    with pytest.raises(EngineError, match="parameter 'weight' is on the meta device and has no value; load weights"):
        check(bias=parameter(torch.zeros(2)), weight=parameter(torch.zeros(2, device="meta")))


# Recomputed modules


class GradientCheckpointingLayer(torch.nn.Module):
    gradient_checkpointing = False


class Layer(GradientCheckpointingLayer):
    pass


@pytest.mark.parametrize("kind", [GradientCheckpointingLayer, Layer])
def test_a_layer_is_recomputed_while_that_is_switched_on(kind):
    layer = kind()
    assert not is_recomputed(layer)
    layer.gradient_checkpointing = True
    assert is_recomputed(layer)


def test_other_modules_are_not_recomputed():
    module = torch.nn.Linear(1, 1)
    module.gradient_checkpointing = True
    assert not is_recomputed(module)
