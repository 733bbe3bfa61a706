"""Which models can be managed, and what is said to the others."""

import functools
import types

import pytest
import torch

from hf_patrickstar.errors import ConfigError, EngineError
from hf_patrickstar.model.admission import check_model, check_shapes, check_values, is_left_out, is_recomputed


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def checkpointed(use_reentrant, is_of_diffusers=False):
    model = make_model()
    model[1]._gradient_checkpointing_func = functools.partial(len, use_reentrant=use_reentrant)
    if is_of_diffusers:
        model.activation_checkpointing_enable = lambda: None
    return model


def with_parameter(make, name="weight"):
    """A model with a parameter of its own."""
    model = make_model()
    model[1].register_parameter(name, make(model[1].weight.detach()))
    return model


def typed(class_name, requires_grad=False, **attributes):
    """A model with a weight of a class of this name, which may have attributes."""
    cls = type(class_name, (torch.nn.Parameter,), attributes)
    return with_parameter(lambda value: cls(value, requires_grad=requires_grad))


def with_packed_embedding():
    cls = type("Params4bit", (torch.nn.Parameter,), {"quant_state": "some"})
    model = torch.nn.Embedding(2, 2)
    model.weight = cls(torch.zeros(2, 1, dtype=torch.uint8), requires_grad=False)
    return model


def with_integers():
    return with_parameter(lambda _: torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), "scale")


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


@pytest.mark.parametrize(
    "make",
    [make_model, lambda: checkpointed(False), lambda: torch.nn.Sequential(torch.nn.LazyLinear(2))],
    ids=["plain", "checkpointed", "lazy"],
)
def test_models_that_can_be_managed(make):
    check_model(make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.DataParallel(make_model()), r"wrapped in nn\.DataParallel; pass .* \(model\.module\)"),
        (compiled, r"what torch\.compile\(\) has returned; pass the model itself, .* model\.compile\(\) if .* fits"),
        (lambda: checkpointed(True), r"module '1' uses .* model\.gradient_checkpointing_enable\(gradient_"),
        (lambda: checkpointed(True, True), r"module '1' uses .* model\.activation_checkpointing_enable\(activation_"),
        (lambda: typed("Params4bit", True), r"parameter '1\.weight' is .* \(Params4bit\) and trained; .* an adapter"),
        (lambda: typed("Int8Params", has_fp16_weights=True), r"parameter '1\.weight' is .* \(Int8Params\) and trained"),
        (lambda: typed("Params4bit"), r"parameter '1\.weight' is .* not packed yet; move the model to a device"),
        (with_packed_embedding, r"parameter 'weight' is .* class Embedding; .* linear layers .*llm_int8_skip_modules"),
        (
            lambda: typed("Params4bit", quant_state=types.SimpleNamespace(packing_format_for_cpu=True)),
            r"parameter '1\.weight' is .* an evaluation has packed it .*: load the model again",
        ),
        (with_integers, r"parameter '1\.scale' has type torch\.int8, .* make it a buffer"),
        (lambda: with_parameter(Sharded), r"parameter '1\.weight' is a DTensor"),
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

MEMORY, NOTHING, TIED = torch.zeros(4), torch.zeros(0), torch.nn.Parameter(torch.zeros(2))


def check(**values):
    check_values(list(values), [torch.nn.Parameter(value) for value in values.values()])


def test_parameters_that_have_values_of_their_own():
    check(left=MEMORY[:2], right=MEMORY[2:], other=torch.zeros(2), empty=NOTHING, also_empty=NOTHING)
    check_values(["weight", "weight"], [TIED, TIED])


def test_parameters_over_the_same_memory_or_without_a_value_are_refused():
    with pytest.raises(ConfigError, match="parameters 'left' and 'right' are two parameters over the same memory; tie"):
        check(other=torch.zeros(4), left=MEMORY, right=MEMORY[:2])
    with pytest.raises(EngineError, match="parameter 'weight' is on the meta device and has no value; load weights"):
        check(bias=torch.zeros(2), weight=torch.zeros(2, device="meta"))


# Recomputed modules


class GradientCheckpointingLayer(torch.nn.Module):
    gradient_checkpointing = False


class Layer(GradientCheckpointingLayer):
    pass


@pytest.mark.parametrize(
    ("make", "can_be"), [(GradientCheckpointingLayer, True), (Layer, True), (lambda: torch.nn.Linear(1, 1), False)]
)
def test_a_layer_is_recomputed_while_that_is_switched_on(make, can_be):
    layer = make()
    assert not is_recomputed(layer)
    layer.gradient_checkpointing = True
    assert is_recomputed(layer) is can_be
